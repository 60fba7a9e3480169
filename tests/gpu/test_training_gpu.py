"""Training steps on a GPU that ranks share: what tests/ranks trains on processors, with the same oracles.

A test of tests/ranks calls a function that runs a step on ranks that are threads. Here that function runs on processes,
each with its models on the GPU, and the test does the rest: the oracle stays on the processor.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import fold
from hdpcomm.models import Llama, adapt
from hdpcomm.offload import PinnedPool
from hdpcomm.plan import ClusterSpec, Planner, SequenceFragment
from hdpcomm.testing import run_threads
from tests.ranks.parallel import test_sharded_mesh
from tests.ranks.train import test_log_prob_losses, test_matrix_owners

transformers = pytest.importorskip("transformers", minversion="5.23")

from tests.harness import pipelines  # noqa: E402
from tests.harness.families import FAMILIES, model_of, unsharded  # noqa: E402
from tests.harness.tiny_huggingface import leave, padded, run  # noqa: E402
from tests.ranks.models import test_adapt, test_tree_models  # noqa: E402
from tests.ranks.parallel import (  # noqa: E402
    test_expert_huggingface,
    test_pipeline_huggingface,
    test_tensor_huggingface,
)

# The clients of MPS share its queues, and the processes of worlds of 1, 2 and 4 ranks stay.
FEW_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "HDPCOMM_DEVICE_LANES": "1"}
TRANSPORT, DEVICE = "cuda", "cuda"
HERE = sys.modules[__name__]
OnGPU = Callable[[ModuleType, str, Callable[..., int]], Callable[..., list[Any]]]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_a_rank(module: str, function: str, transport: str, device: str, args: Any, options: Any) -> Any:
    """A function of tests/ranks, with this rank in place of threads, and models on the device."""
    os.environ["HDPCOMM_TRANSPORT"] = transport
    found = getattr(importlib.import_module(module), function)
    replaced: dict[int, Callable[..., Any]] = {
        id(run_threads): lambda fn, _, *rest, **__: [fn(*rest)],
        id(adapt): lambda model, **given: adapt(model.to(device), **given),
        id(Llama): lambda *given, **named: Llama(*given, **named).to(device),
        id(PinnedPool): lambda size, **_: PinnedPool(size, device=device),
    }
    of_tests = [each for name, each in sys.modules.items() if name.startswith("tests.") and name != __name__]
    for each in [hdp, *of_tests]:
        for name, value in list(vars(each).items()):
            if id(value) in replaced:
                setattr(each, name, replaced[id(value)])
    return on_processor(found(*args, **options)[0])


def on_processor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_processor(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(on_processor, value))
    return value


@pytest.fixture
def on_gpu(ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> OnGPU:
    """``on_gpu(module, function, ranks_of)``: in place of a function that runs a step on threads. ``ranks_of`` tells
    from its arguments how many ranks."""
    for name, value in FEW_QUEUES.items():
        monkeypatch.setenv(name, value)

    def replace(module: ModuleType, function: str, ranks_of: Callable[..., int]) -> Callable[..., list[Any]]:
        def run(*args: Any, **options: Any) -> list[Any]:
            given = (module.__name__, function, TRANSPORT, DEVICE, args, options)
            return ranks(ranks_of(*args, **options), on_a_rank, *given, timeout=40.0)

        return run

    return replace


def ranks_second(_: Any, ranks: int, *__: Any, **___: Any) -> int:
    return ranks


def ranks_of_shape(shape: Any, *_: Any, **__: Any) -> int:
    return shape.ranks


def prepared(family: str, dtype: str) -> Any:
    made = model_of(family)
    if dtype == "float64" and hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the other ways know fp32 and bf16 only
    return made.to(getattr(torch, dtype))


def family_step(family: str, dtype: str) -> list[Any]:
    return test_adapt.step([prepared(family, dtype) for _ in range(2)])


def sliced_step(family: str, options: dict[str, Any]) -> list[Any]:
    batches: list[Any] = [((1, 0), SequenceFragment(2, a, b)) for a, b in pairwise((0, 40, 41, 43, 70, 90))]
    batches += [((1,), SequenceFragment(0, a, b)) for a, b in pairwise((0, 20, 37))]
    ratio = 0.6 if "pool_bytes" in options else 0.0
    planner = pipelines.FixedPlanner(2, 1, [((0,), (1, 3)), *batches, ((1, 0), (4, 5))], ratio=ratio)
    return test_adapt.step([prepared(family, "float64") for _ in range(2)], planner, **options)


def tree_step(family: str) -> list[Any]:
    planner = Planner(None, ClusterSpec(2, 65), "balanced", test_tree_models.COST)
    return test_tree_models.step(family, planner, fold(*test_tree_models.rollouts()))


def pipeline_step(name: str, ranks: int, sizes: dict[str, int], options: dict[str, Any], sliced: bool) -> list[Any]:
    planner = test_pipeline_huggingface.sliced(ranks, sizes) if sliced else None
    return test_pipeline_huggingface.step(name, ranks, sizes, **options, planner=planner)


@functools.cache
def wanted(family: str, dtype: str = "float32") -> Any:
    return unsharded(prepared(family, dtype))


# In fp32 another rounding may let a layer choose other keys.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(on_gpu: OnGPU, family: str, dtype: str) -> None:
    if family == "deepseek-v32" and dtype == "float32":
        pytest.skip("its choices depend on rounding")
    found = on_gpu(HERE, "family_step", lambda *_: 2)(family, dtype)
    test_adapt.check(found, wanted(family, dtype), 1e-5 if dtype == "float64" else 2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek-v3", "qwen3-next", "kimi-linear", "mamba2"])
def test_bfloat16(on_gpu: OnGPU, family: str) -> None:
    test_adapt.check(on_gpu(HERE, "family_step", lambda *_: 2)(family, "bfloat16"), wanted(family), 0.2)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"pool_bytes": 8 << 20}], ids=["plain", "full", "pool"])
@pytest.mark.parametrize("family", ["llama", "deepseek-v32", "qwen3-next", "kimi-linear", "mamba2"])
def test_slices(on_gpu: OnGPU, family: str, options: dict[str, Any]) -> None:
    found = on_gpu(HERE, "sliced_step", lambda *_: 2)(family, options)
    test_adapt.check(found, wanted(family, "float64"), 1e-5)


@pytest.mark.parametrize("family", test_tree_models.FAMILIES)
def test_trees(on_gpu: OnGPU, family: str) -> None:
    found = on_gpu(HERE, "tree_step", lambda *_: 2)(family)
    test_tree_models.compare(found, test_tree_models.alone(family), 2e-4)


@pytest.mark.parametrize(
    ("family", "size", "tensor", "how", "expert"),
    [
        ("llama", 4, 2, "plain", 1),
        ("qwen3", 2, 2, "offload", 1),
        ("deepseek-v32", 2, 2, "recompute", 1),
        ("mixtral", 4, 2, "recompute", 2),
    ],
)
def test_tensor_ranks(
    on_gpu: OnGPU, family: str, size: int, tensor: int, how: str, expert: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_tensor_huggingface, "step", on_gpu(test_tensor_huggingface, "step", ranks_second))
    test_tensor_huggingface.test_gradients_are_those_of_the_whole_model(family, size, tensor, how, expert)


@pytest.mark.parametrize(
    ("family", "size", "expert", "how"),
    [
        ("mixtral", 2, 2, "plain"),
        ("qwen3-moe", 4, 2, "recompute"),
        ("gpt-oss", 2, 2, "plain"),
        ("deepseek-v32", 2, 2, "offload"),
        ("qwen3-next", 2, 2, "slices"),
    ],
)
def test_expert_ranks(
    on_gpu: OnGPU, family: str, size: int, expert: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_expert_huggingface, "step", on_gpu(test_expert_huggingface, "step", ranks_second))
    test_expert_huggingface.test_gradients_are_those_of_the_whole_model(family, size, expert, how)


PP = {"pipeline": 2}


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(
    ("name", "size", "sizes", "options"),
    [
        ("qwen3", 2, PP, {"split": True}),
        ("tied", 4, {"pipeline": 2, "tensor": 2}, {}),
        ("mixtral", 4, {"pipeline": 2, "expert": 2}, {}),
        ("deepseek-v32", 4, PP, {"how": "offload"}),
        ("qwen3-next-no-aux", 2, PP, {"how": "recompute"}),
        ("mamba2", 2, PP, {}),
    ],
)
def test_pipelines(
    on_gpu: OnGPU, name: str, size: int, sizes: dict[str, int], options: dict[str, Any], sliced: bool
) -> None:
    found = on_gpu(HERE, "pipeline_step", ranks_second)(name, size, sizes, options, sliced)
    test_pipeline_huggingface.check(name, found)


MESHES = [(name, zero) for name, zero in test_sharded_mesh.CASES if test_sharded_mesh.SHAPES[name].ranks <= 4]


@pytest.mark.parametrize(("name", "zero"), MESHES)
def test_zero_on_meshes(on_gpu: OnGPU, name: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_sharded_mesh.one_process(test_sharded_mesh.SHAPES[name].config)  # on the processor, kept
    monkeypatch.setattr(test_sharded_mesh, "run", on_gpu(test_sharded_mesh, "run", ranks_of_shape))
    test_sharded_mesh.test_training_is_that_of_one_process(name, zero)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "dpo"])
def test_losses_of_log_probabilities(on_gpu: OnGPU, name: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_log_prob_losses, "step", on_gpu(test_log_prob_losses, "step", ranks_of_shape))
    test_log_prob_losses.check(test_log_prob_losses.Shape(2), name, zero=zero)


@pytest.mark.parametrize("mesh", ["tensor2", "pipeline2xtensor2"])
def test_muon(on_gpu: OnGPU, mesh: str) -> None:
    ranks, sizes = test_matrix_owners.MESHES[mesh]
    trained = on_gpu(test_matrix_owners, "trained", lambda *_: ranks)
    want = test_matrix_owners.by_hand(test_matrix_owners.CONFIG)
    for state in trained(test_matrix_owners.CONFIG, sizes):
        test_matrix_owners.check(state, want, 1e-3)  # torch's Muon orthogonalizes in bf16


def huggingface_on_a_rank(out: str) -> Any:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        found, losses, loss = run(Trainer, Path(out), 6, 2, padded, use_cpu=False)
        return on_processor(found), losses, loss
    finally:
        leave()


# Two ranks would want two GPUs: transformers gives each a device of its own.
def test_transformers_trainer(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ((found, losses, loss),) = ranks(1, huggingface_on_a_rank, str(tmp_path / "a"))
    expected, logged, evaluated = run(transformers.Trainer, tmp_path / "b", 6, 2, padded)
    leave()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)
    assert [entry["loss"] for entry in losses] == pytest.approx([entry["loss"] for entry in logged], abs=5e-4)
    assert loss == pytest.approx(evaluated, abs=1e-4)

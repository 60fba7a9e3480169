"""Compiled layers: one compilation for packs of all lengths on rings of any size, and the gradients of eager layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hdpcomm as hdp
from hdpcomm.attention import positions, shard
from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt, compile_layers, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, MemoryModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST, tokens_of
from tests.ranks.train import test_tree_training as rollouts

transformers = pytest.importorskip("transformers")

from tests.harness.families import VOCABULARY, model_of  # noqa: E402

TYPES = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "qwen3": {"num_hidden_layers": 4},
    "gemma3": TYPES,
    "gpt-oss": {**TYPES, "output_router_logits": False},
}


@pytest.fixture(autouse=True)
def counted() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def new_model(family: str, **changes: Any) -> nn.Module:
    if family == "built-in":
        return Llama(LlamaConfig(vocabulary=VOCABULARY, layers=4, hidden=32, ffn=48))
    return adapt(model_of(family, **FAMILIES[family], **changes)).train()


def packs(count: int) -> list[list[int]]:
    """Lengths of sequences; among them as many tokens as a layer is wide, and a single one."""
    draws = torch.Generator().manual_seed(1)
    drawn = [
        torch.randint(1, 40, (int(torch.randint(1, 6, (), generator=draws)),), generator=draws).tolist()
        for _ in range(count - 3)
    ]
    return [[32], *drawn, [1], [8]]


def gradients(model: nn.Module, lengths: Sequence[int], comm: Any = None) -> list[Tensor]:
    """The loss of a pack whose every token has a label, and the gradients of the parameters."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    place = {"rank": 0, "size": 1} if comm is None else {"rank": comm.rank, "size": comm.size}
    own = shard(tokens, cu_seqlens, **place)
    model.zero_grad()
    loss = model(
        own, positions=positions(cu_seqlens, **place), cu_seqlens=cu_seqlens, comm=comm,
        labels=shard(tokens.flip(0), cu_seqlens, **place),
    )  # fmt: skip
    loss.backward()
    return [loss.detach(), *(p.new_zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())]


def check_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 2e-5 * float(other.norm()) + 1e-6


@pytest.mark.parametrize("family", [*FAMILIES, "built-in"])
def test_one_compilation_for_all_packs(family: str) -> None:
    eager = [new_model(family) for _ in range(2)]
    models = copy.deepcopy(eager)
    for model in models:
        assert compile_layers(model, backend="aot_eager", fullgraph=True) == 4
    drawn = packs(20)
    for model in models:
        gradients(model, drawn[0])
    graphs = counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 4  # a kind of layers each
    for lengths in drawn:
        check_equal(gradients(models[0], lengths), gradients(eager[0], lengths))

    def on_rank() -> Any:
        comm = hdp.init()
        return [[gradients(m[comm.rank], lengths, comm) for m in (models, eager)] for lengths in drawn[:8]]

    for of_rank in run_threads(on_rank, 2):
        for found, wanted in of_rank:
            check_equal(found, wanted)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_passes_without_gradients_and_a_second_model() -> None:
    """Log-probabilities and evaluation have code of their own, once; another model does not take from its limit."""
    for _ in range(9):
        model = Llama(LlamaConfig(vocabulary=VOCABULARY, layers=1, hidden=16))
        compile_layers(model, backend="aot_eager", fullgraph=True)
        before = counters["stats"]["unique_graphs"]
        for lengths in ([5], [9, 2], [3]):
            gradients(model, lengths)
            with torch.no_grad():
                cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
                args = {"positions": positions(cu_seqlens, rank=0, size=1), "cu_seqlens": cu_seqlens, "comm": None}
                model(torch.zeros(sum(lengths), dtype=torch.int64), **args)
        assert counters["stats"]["unique_graphs"] == before + 2


def test_inductor_gives_the_same() -> None:
    eager = new_model("llama")
    model = copy.deepcopy(eager)
    compile_layers(model)
    for lengths in ([20, 3], [7], [1], [33, 2, 2]):
        check_equal(gradients(model, lengths), gradients(eager, lengths))
    assert counters["stats"]["unique_graphs"] == 1


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "masters": {"zero": 1, "dtype": torch.bfloat16},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "recompute": {},
    "recompute before": {"zero": 3},
    "offload": {},
    "slices": {},
    "trees": {},
}


def trained(how: str, compiled: bool) -> Any:
    """On a rank: losses of an evaluation and of some steps, and log-probabilities."""
    comm = hdp.init()
    options = dict(HOW[how])
    wide = torch.float32 if "dtype" in options else torch.float64
    config = rollouts.CONFIG if how == "trees" else LlamaConfig(vocabulary=64, layers=4, hidden=16, ffn=24)
    model = Llama(config, dtype=wide)
    if how == "recompute before":
        set_recompute(model, 3)
    if compiled:
        compile_layers(model, backend="aot_eager", fullgraph=True)
    if how == "recompute":
        set_recompute(model, "full")
    if how == "offload":
        options["offload"] = ActivationOffload(PinnedPool(8 << 20, device="cpu"), model, min_bytes=1, resident_layers=0)
    lengths: Any = {"slices": [200, 1, 60], "offload": [150, 1, 60]}.get(how, [37, 1, 60, 5, 2])
    sequences: Any = tokens_of(lengths, config)
    memory = {
        "offload": MemoryModel(48, offloadable=0.9, copy_s=1e-6, host_tokens=1000),
        "slices": MemoryModel(48, kept=0.1),
    }.get(how)
    cluster = ClusterSpec(comm.size, 48, offload=how == "offload")
    planner = Planner(None, cluster, cost_model=COST, memory=memory, slices=8 if how == "slices" else 1)
    if how == "trees":
        folded = fold(*rollouts.rollouts())
        lengths, sequences = [each.tree for each in folded], [(each.tokens, each.weights) for each in folded]
        planner = Planner(None, ClusterSpec(comm.size, 90), cost_model=COST)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), planner, comm, **options)
    total = trainer.evaluate(lengths, sequences.__getitem__)
    comm.all_reduce(total)
    losses = [trainer.step(lengths, sequences.__getitem__).loss for _ in range(3)]
    scores = [] if how == "trees" else trainer.log_probs(lengths, sequences.__getitem__)[0]
    return [float(total[0]), *losses], scores


@pytest.mark.parametrize("how", HOW)
def test_trainers_give_the_same(how: str) -> None:
    eager, compiled = (run_threads(trained, 2, how, kind, timeout=300)[0] for kind in (False, True))
    limit = 1e-2 if how == "masters" else 1e-9
    assert compiled[0] == pytest.approx(eager[0], rel=limit)
    for one, other in zip(compiled[1], eager[1], strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


def test_activations_on_the_host() -> None:
    eager, model = (new_model("built-in") for _ in range(2))
    compile_layers(model, backend="aot_eager", fullgraph=True)
    offload = ActivationOffload(PinnedPool(8 << 20, device="cpu"), model, min_bytes=1, resident_layers=0)
    with offload.micro_batch(0.5, tokens=25):
        found = gradients(model, [16, 9])
    check_equal(found, gradients(eager, [16, 9]))
    assert offload.stats().stored_bytes > 0


def test_routes_of_experts() -> None:
    """Passes with routes run the layers as they came, whose routers take them; others stay compiled."""

    def on_rank(compiled: bool) -> Any:
        comm = hdp.init()
        model = new_model("gpt-oss")
        if compiled:
            compile_layers(model, backend="aot_eager", fullgraph=True)
        tokens = tokens_of([9, 20], LlamaConfig(vocabulary=VOCABULARY))
        planner = Planner(None, ClusterSpec(1, 48), cost_model=COST)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm)
        routes: list[Tensor] = []
        counters.clear()
        found = trainer.log_probs([9, 20], tokens.__getitem__)[0]
        graphs = counters["stats"]["unique_graphs"]
        kept = trainer.log_probs([9, 20], tokens.__getitem__, routes=routes)[0]
        assert counters["stats"]["unique_graphs"] == graphs == (2 if compiled else 0)
        return found, kept, routes

    for ones, others in zip(*(run_threads(on_rank, 1, kind, timeout=300)[0] for kind in (True, False)), strict=True):
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_copies_run_their_own_layers() -> None:
    model = new_model("built-in")
    compile_layers(model, backend="aot_eager")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    eager = Llama(model.config)
    eager.load_state_dict(copied.state_dict())
    check_equal(gradients(copied, [9, 4]), gradients(eager, [9, 4]))
    assert set(dict(model.named_parameters())) == set(dict(eager.named_parameters()))


def test_what_cannot_be_compiled_is_refused() -> None:
    model = Llama(LlamaConfig(layers=2, experts=2))
    with pytest.raises(InvalidUsage, match="no layer of Llama can be compiled"):
        compile_layers(model)
    with pytest.raises(InvalidUsage, match=r"backend 'fast'; torch has .*inductor"):
        compile_layers(Llama(), backend="fast")
    model = Llama()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    with pytest.raises(InvalidUsage, match="compiled already"):
        compile_layers(model)


def test_layers_that_communicate_are_refused() -> None:
    def on_rank(tensor: int) -> None:
        comm = hdp.init()
        mesh = hdp.Mesh(comm, tensor=tensor, pipeline=2 // tensor)
        model = Llama(LlamaConfig(layers=2))
        parts: Any = tensor_parallel(model, mesh) if tensor > 1 else split_model(model, 2)[mesh.stage]
        compile_layers(parts, backend="aot_eager")
        cluster = ClusterSpec(mesh.hdp, 64, pipeline=mesh.pipeline, tensor=tensor, split_backward=tensor == 1)
        Trainer(parts, torch.optim.SGD(parts.parameters()), Planner(None, cluster, cost_model=COST), mesh)

    for tensor, told in ((2, "with tensor and expert ranks"), (1, "with split_backward=True")):
        with pytest.raises(InvalidUsage, match=told):
            run_threads(on_rank, 2, tensor)

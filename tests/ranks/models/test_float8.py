"""Linear layers in FP8: which they are, what is refused, and losses and gradients beside those without."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, compile_layers, set_recompute, use_float8
from hdpcomm.models.compiled import check_capability
from hdpcomm.parallel import tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import COST, tokens_of
from tests.ranks.models.test_compiled import VOCABULARY, gradients

CONFIG = LlamaConfig(vocabulary=VOCABULARY, layers=3, hidden=32, ffn=48)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUsage, match="fp8 is 'e4m3'; choose from rowwise, tensorwise"):
        use_float8(Llama(CONFIG), "e4m3")
    with pytest.raises(InvalidUsage, match="give a list of parts of names"):
        use_float8(Llama(CONFIG), exclude="out")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InvalidUsage, match="FP8 needs torchao; install it with pip install torchao"):
        use_float8(Llama(CONFIG))


def test_layers_that_are_cut_are_refused() -> None:
    def on_rank() -> None:
        use_float8(tensor_parallel(Llama(), hdp.Mesh(hdp.init(), tensor=2)))

    with pytest.raises(InvalidUsage, match="cut for tensor ranks"):
        run_threads(on_rank, 2)


def test_older_devices_are_refused() -> None:
    check_capability("tensorwise", (8, 9))
    check_capability("rowwise", (10, 0))
    with pytest.raises(InvalidUsage, match=r"fp8='tensorwise' needs .* 8\.9 or more, and this one has 8\.0"):
        check_capability("tensorwise", (8, 0))
    with pytest.raises(InvalidUsage, match=r"fp8='rowwise' needs .* 9\.0 or more, and this one has 8\.9"):
        check_capability("rowwise", (8, 9))


def test_which_layers_are_in_fp8() -> None:
    pytest.importorskip("torchao")
    model = Llama(CONFIG)
    own = {id(p) for p in model.parameters()}
    names = use_float8(model, exclude=["blocks.0.", "attention.k"])
    every = ["attention.q", "attention.v", "attention.out", "ffn.gate", "ffn.up", "ffn.out"]
    assert names == sorted(f"blocks.{layer}.{part}" for layer in (1, 2) for part in every)
    assert {id(p) for p in model.parameters()} == own
    assert model.state_dict().keys() == Llama(CONFIG).state_dict().keys()
    experts = use_float8(Llama(LlamaConfig(layers=1, hidden=64, experts=16)))
    assert experts == [f"blocks.0.attention.{part}" for part in ("k", "out", "q", "v")]  # no router
    with pytest.raises(InvalidUsage, match="exclude has 'o_proj', which is in the name of no linear layer, as blocks"):
        use_float8(Llama(CONFIG), exclude=["o_proj"])
    with pytest.raises(InvalidUsage, match="has no linear layer for FP8"):
        use_float8(Llama(LlamaConfig(hidden=40, ffn=24)))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_gradients_beside_those_without(recipe: str) -> None:
    """Numbers have 4 significant bits: a product of many is closer than each of its factors."""
    pytest.importorskip("torchao")
    eager, model = Llama(CONFIG), Llama(CONFIG)
    use_float8(model, recipe)
    compiled = copy.deepcopy(model)
    compile_layers(compiled, backend="aot_eager", fullgraph=True)
    for lengths in ([20, 9], [50]):
        wanted = gradients(eager, lengths)
        for found in (gradients(model, lengths), gradients(compiled, lengths)):
            assert float((found[0] - wanted[0]).abs() / wanted[0]) < 1e-2
            for one, other in zip(found, wanted, strict=True):
                assert 0 < float((one - other).norm()) < 0.25 * float(other.norm())


@pytest.mark.parametrize("options", [{}, {"zero": 3}, {"zero": 1, "dtype": torch.bfloat16}])
def test_a_trainer_on_two_ranks(options: dict[str, Any]) -> None:
    pytest.importorskip("torchao")
    lengths = [40, 1, 7]

    def trained(float8: bool) -> list[float]:
        comm = hdp.init()
        model = Llama(CONFIG)
        set_recompute(model, 1)
        if float8:
            use_float8(model)
        tokens = tokens_of(lengths, CONFIG)
        planner = Planner(None, ClusterSpec(comm.size, 64), cost_model=COST)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), planner, comm, **options)
        return [trainer.step(lengths, tokens.__getitem__).loss for _ in range(4)]

    wide, narrow = (run_threads(trained, 2, kind)[0] for kind in (False, True))
    assert narrow == pytest.approx(wide, rel=1e-2)
    assert narrow != wide

"""Averages of the weights over steps: by their formula from the weights of each step, however the state is cut."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure import profile_memory
from hdpcomm.models import Llama
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer, average_weights
from tests.harness.small_buckets import make_trainer
from tests.ranks.train.test_sharded import CONFIG, LENGTHS, fetch, optimizer_of

DECAY, STEPS = 0.6, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "masters": {"dtype": torch.bfloat16},
    "zero 1": {"zero": 1},
    "zero 2, bf16": {"zero": 2, "dtype": torch.bfloat16},
    "zero 3": {"zero": 3},
    "on the host": {"zero": 1, "dtype": torch.bfloat16, "optimizer_offload": True},
}


def trainer_of(comm: hdp.Communicator, options: dict[str, Any]) -> Trainer:
    model = Llama(CONFIG, seed=0)
    planner = Planner(None, ClusterSpec(comm.size, 64 // comm.size), cost_model=CostModel(1e-6, 1e-5, 1e-4))
    optimizer = optimizer_of(model, 1e-2)
    average_weights(optimizer, DECAY)
    return make_trainer(model, optimizer, planner, comm, **options)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The weights that the optimizer updates."""
    state = trainer.state_dict()
    return {name: t.clone() for name, t in (state["model"] | state.get("masters", {})).items()}


def expected(weights: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    average = {name: tensor.double() for name, tensor in weights[0].items()}
    for count, each in enumerate(weights[1:], 1):
        share = min(decay, (1 + count) / (10 + count))
        average = {name: share * average[name] + (1 - share) * each[name].double() for name in average}
    return average


def seen(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.whole_tensors()}


def averaged(options: dict[str, Any], given: dict[str, Any] | None = None, first: int = 0) -> Any:
    trainer, weights = trainer_of(hdp.init(), options), []
    if given is not None:
        trainer.load_state_dict(copy.deepcopy(given))
    for step in range(first, STEPS):
        trainer.step(LENGTHS, functools.partial(fetch, step))
        weights.append(weights_of(trainer))
        if step == 2:
            middle = copy.deepcopy(trainer.state_dict())
    before = seen(trainer)
    with trainer.averaged():
        inside = seen(trainer)
    after = seen(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(before[name], inside[name]) for name in before)
    return weights, inside, copy.deepcopy(trainer.state_dict()), middle if first == 0 else None


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_that_of_the_weights_of_each_step(name: str, ranks: int) -> None:
    options = OPTIONS[name]
    for weights, inside, state, _ in run_threads(averaged, ranks, options, timeout=100.0):
        wanted = expected(weights, DECAY)
        for tensor, found in inside.items():
            torch.testing.assert_close(
                found,
                wanted[tensor].to(found.dtype),
                rtol=2e-2 if "dtype" in options else 1e-5,
                atol=1e-4 if "dtype" in options else 1e-6,
            )
            if tensor == "head.weight":  # the embedding's
                continue
            kept = state["optimizer"]["state"][tensor]["average"]
            torch.testing.assert_close(kept.double(), wanted[tensor], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["whole", "zero 2, bf16", "zero 3"])
def test_a_state_goes_on_with_it_on_other_ranks(name: str) -> None:
    _, whole, _, state = run_threads(averaged, 2, OPTIONS[name], timeout=100.0)[0]
    for ranks in (2, 3):
        for _, inside, _, _ in run_threads(averaged, ranks, OPTIONS[name], state, 3, timeout=100.0):
            for tensor, found in inside.items():
                same = torch.equal if ranks == 2 else functools.partial(torch.allclose, rtol=1e-2, atol=1e-3)
                assert same(found, whole[tensor]), tensor


def at_the_start() -> None:
    comm = hdp.init()
    trainer, other = (trainer_of(comm, {"zero": 1}) for _ in range(2))
    before = seen(trainer)
    trainer.state_dict()  # makes the optimizer's state, and no step
    with trainer.averaged():
        assert all(torch.equal(before[name], tensor) for name, tensor in seen(trainer).items())
    for step in range(3):
        for each in (trainer, other):
            each.step(LENGTHS, functools.partial(fetch, step))
    with trainer.averaged(), other.averaged():
        one, two = seen(trainer), seen(other)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_before_the_first_step_it_is_the_weights() -> None:
    run_threads(at_the_start, 2, timeout=100.0)


def test_it_takes_its_memory() -> None:
    def made(parameters: Any, decay: float | None) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        if decay is not None:
            average_weights(optimizer, decay)
        return optimizer

    def states() -> list[float]:
        comm, model = hdp.init(), Llama(CONFIG)
        makers = [functools.partial(made, decay=decay) for decay in (None, 0.9)]
        return [profile_memory(model, comm, maker, tokens=64).states for maker in makers]

    [(without, found)] = run_threads(states, 1, timeout=100.0)
    assert found - without == pytest.approx(4 * sum(p.numel() for p in Llama(CONFIG).parameters()))


def test_what_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    for decay in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(InvalidUsage, match="between 0 and 1"):
            average_weights(torch.optim.SGD([parameter], lr=0.1), decay)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    average_weights(optimizer, 0.9)
    with pytest.raises(InvalidUsage, match="averages already"):
        average_weights(optimizer, 0.9)
    narrow = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([narrow], lr=0.1)
    average_weights(optimizer, 0.9)
    narrow.grad = torch.ones_like(narrow)
    with pytest.raises(InvalidUsage, match=r"bfloat16 does not move; give the trainer dtype="):
        optimizer.step()

"""Ranks that no longer hold the same weights, or update them otherwise, are found and named."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import Mismatch
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel.stages import share_values
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.step.replicas import check_replicas

WEIGHT = "blocks.1.ffn.out.weight"
CONFIG = LlamaConfig(vocabulary=31, layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)
LENGTHS = (30, 4, 9, 1, 12, 3)


def fetch(step: int, i: int) -> torch.Tensor:
    return (torch.arange(LENGTHS[i]) * (i + 3 + step % 5)) % 31


def wrong_weight(trainer: Trainer) -> None:
    with torch.no_grad():
        dict(trainer.model.named_parameters())[WEIGHT][3, 5] += 0.01


def other_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.5


def other_clipping(trainer: Trainer) -> None:
    trainer.max_grad_norm = 2.0


def steps(change: Any, odd: int, first: int, options: dict[str, Any]) -> tuple[str, int]:
    """The error of this rank, and the steps that were done before it; rank ``odd`` changes something at ``first``."""
    torch.set_num_threads(1)
    comm = hdp.init()
    model = Llama(CONFIG)
    planner = Planner(None, ClusterSpec(comm.size, 32), "balanced", COST)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), planner, comm, **options)
    for step in range(7):
        if comm.rank == odd and step == first:
            change(trainer)
        try:
            trainer.step(LENGTHS, functools.partial(fetch, step))
            if step % 3 == 0:
                trainer.check_replicas()
        except hdp.Mismatch as error:
            comm.resync()
            return str(error), trainer.num_steps
    return "", trainer.num_steps


APART = r"of ranks \[1\] are not those of ranks \[0, 2\] "
CASES = {
    "a weight": (wrong_weight, rf"the weights {APART}\({WEIGHT} of rank 1"),
    "the learning rate": (other_rate, rf"the optimizer's settings {APART}\(here AdamW"),
    "clipping": (other_clipping, rf"the optimizer's settings {APART}\(here AdamW"),
}


SHARDED = {"zero": 1, "dtype": torch.bfloat16}  # there a step gathers all weights anew


@pytest.mark.parametrize(
    ("case", "options"),
    [("a weight", {}), ("the learning rate", {}), ("clipping", {}), ("the learning rate", SHARDED)],
)
def test_the_odd_rank_is_named_on_all(case: str, options: dict[str, Any]) -> None:
    change, told = CASES[case]
    for error, done in run_threads(steps, 3, change, 1, 2, options, timeout=60.0):
        assert done == (4 if case == "a weight" else 2)  # weights: after the steps 0, 3 and 6; settings: in each step
        assert re.search(told, error), error


def test_replicas_that_are_alike_are_left_alone() -> None:
    for options in ({}, {"zero": 1}):
        assert run_threads(steps, 4, None, -1, 0, options, timeout=60.0) == [("", 7)] * 4


def quiet(seed: int, count: int) -> int:
    """Steps of a random model, after each of which the ranks are compared."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    comm = hdp.init()
    size = draw.choice([8, 16])
    model = Llama(LlamaConfig(vocabulary=31, layers=draw.randint(1, 2), hidden=size, heads=2, kv_heads=1, ffn=size))
    planner = Planner(None, ClusterSpec(comm.size, 16), "balanced", COST)
    zero, dtype = draw.choice([(0, None), (1, None), (1, torch.bfloat16)])
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), planner, comm, zero=zero, dtype=dtype)
    for step in range(count):
        lengths = [draw.randint(2, 12) for _ in range(draw.randint(2, 4))]
        trainer.step(lengths, lambda i, n=lengths, s=step: (torch.arange(n[i]) * (i + 3 + s % 5)) % 31)
        trainer.check_replicas()
    return trainer.num_steps


def test_no_false_alarm() -> None:
    steps = int(os.environ.get("HDPCOMM_TEST_ALARM_STEPS", "100"))
    for seed in range(10):
        assert run_threads(quiet, 2, seed, steps // 10, timeout=900.0) == [steps // 10] * 2


def compared(change: Any) -> None:
    comm = hdp.init()
    model = torch.nn.Linear(40, 30).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        change(model, comm.rank)
    check_replicas(model.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1), comm)


def rounded(model: Any, rank: int) -> None:
    model.weight.mul_(1 + rank * 2**-40)


def more(model: Any, rank: int) -> None:
    if rank == 1:
        model.register_buffer("extra", torch.zeros(3))


def infinite(model: Any, rank: int) -> None:
    if rank == 1:
        model.bias[7] = float("inf")


def flipped(seed: int) -> tuple[str, str, tuple[int, ...], int]:
    """One bit of one element on one of three ranks, drawn by the seed; (error, tensor, the ranks it names, rank)."""
    torch.set_num_threads(1)
    comm = hdp.init()
    draw = random.Random(seed)
    model = Llama(CONFIG)
    planner = Planner(None, ClusterSpec(comm.size, 32), "balanced", COST)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), planner, comm)
    trainer.step(LENGTHS, functools.partial(fetch, 0))
    odd, name = draw.randrange(3), draw.choice([name for name, _ in model.named_parameters()])
    if comm.rank == odd:
        bits = dict(model.named_parameters())[name].detach().view(torch.int32).view(-1)
        bits[draw.randrange(bits.numel())] ^= [1 << n for n in range(31)][draw.randrange(31)]
    try:
        with contextlib.suppress(hdp.NotFinite, hdp.InvalidUsage):  # no rank takes a step then
            trainer.step(LENGTHS, functools.partial(fetch, 1))
        trainer.check_replicas()
    except hdp.Mismatch as error:
        return str(error), name, error.unlike, odd
    return "", name, (), odd


@pytest.mark.parametrize("first", range(0, int(os.environ.get("HDPCOMM_TEST_FLIPS", "20")), 10))
def test_a_single_bit_is_found(first: int) -> None:
    """Also one of the last of a mantissa, which changes the weights less than rounding does."""
    for seed in range(first, first + 10):
        for error, name, unlike, odd in run_threads(flipped, 3, seed, timeout=60.0):
            assert f"the weights of ranks [{odd}] are not those of ranks" in error, seed
            assert f"{name} of rank {odd} " in error
            assert unlike == (odd,)


def test_rounding_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    run_threads(compared, 2, rounded, timeout=60.0)
    assert "weights of the ranks differ by rounding (9.1e-13)" in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (more, r"names, types and shapes of the tensors of ranks \[1\]"),
        (infinite, r"the weights of .*bias of rank 1 is inf apart"),
    ],
)
def test_other_tensors_and_what_is_no_number(change: Any, told: str) -> None:
    with pytest.raises(hdp.Mismatch, match=told):
        run_threads(compared, 2, change, timeout=60.0)


def shares_wrapped() -> list[float]:
    from torch.testing._internal.two_tensor import TwoTensor

    with hdp.init() as comm:
        mine = torch.full((4,), float(comm.rank))
        tensor = TwoTensor(mine, mine + 7)
        share_values(comm, [tensor], root=1)
        check_replicas({"weight": tensor}, torch.optim.SGD([torch.zeros(1)]), comm)
        tensor.b[0] = comm.rank
        with pytest.raises(Mismatch, match=r"weight \(1\)"):
            check_replicas({"weight": tensor}, torch.optim.SGD([torch.zeros(1)]), comm)
        return [float(tensor.a.sum()), float(tensor.b[1:].sum())]


def test_tensors_that_wrap_others_are_shared_and_compared(ranks: Any) -> None:
    assert ranks(2, shares_wrapped) == [[4.0, 24.0]] * 2

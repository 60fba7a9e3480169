"""Learning rates: the ends of each schedule, and that it never leaves what was asked for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.run import FolderModel, RunConfig, Schedule, learning_rate
from hdpcomm.run.config import SCHEDULES


@given(st.sampled_from(SCHEDULES), st.integers(0, 30), st.floats(0, 1), st.floats(0, 1), st.integers(1, 60))
def test_shares(kind: str, warmup: int, floor: float, decay: float, steps: int) -> None:
    schedule = Schedule(kind, warmup, floor, decay)
    factors = [schedule.factor(step, steps) for step in range(steps)]
    assert all(min(floor, 1 / max(1, warmup)) <= each <= 1 for each in factors)
    rise = factors[:warmup]
    assert rise == [(step + 1) / warmup for step in range(len(rise))]
    falling = factors[warmup:]
    assert all(a >= b for a, b in itertools.pairwise(falling))
    if kind == "constant":
        assert falling == [1.0] * len(falling)


@pytest.mark.parametrize(
    ("kind", "middle", "last"),
    [("constant", 1.0, 1.0), ("cosine", 0.55, 0.1 + 0.45 * (1 + math.cos(math.pi * 0.99))), ("linear", 0.55, 0.109)],
)
def test_middle_and_end(kind: str, middle: float, last: float) -> None:
    schedule = Schedule(kind, warmup=0, floor=0.1)
    assert schedule.factor(0, 100) == pytest.approx(1.0)
    assert schedule.factor(50, 100) == pytest.approx(middle)
    assert schedule.factor(99, 100) == pytest.approx(last)
    assert schedule.factor(100, 100) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_warmup_stable_decay() -> None:
    schedule = Schedule("wsd", warmup=10, floor=0.0, decay=0.2)
    assert [schedule.factor(step, 100) for step in (0, 9, 10, 79, 80, 90)] == pytest.approx([0.1, 1, 1, 1, 1, 0.5])
    assert Schedule("wsd", warmup=95, floor=0.0, decay=0.2).factor(97, 100) == pytest.approx(0.6)
    assert Schedule("wsd", warmup=0, decay=0.0).factor(99, 100) == 1.0


def test_the_default_rises_over_a_tenth_and_falls_to_a_tenth() -> None:
    config = RunConfig(steps=50, lr=2.0)
    rates = [learning_rate(config, step) for step in range(50)]
    assert rates[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert 0.2 < rates[-1] < 0.21


@pytest.mark.parametrize("wrong", [("fast",), ("cosine", -1), ("cosine", 0, 1.5), ("wsd", 0, 0.1, -0.1)])
def test_wrong_schedules(wrong: tuple[object, ...]) -> None:
    with pytest.raises(InvalidUsage, match=r"schedule is|warmup is|floor is"):
        Schedule(*wrong)  # type: ignore[arg-type]


FOLDER = FolderModel(Path("model"), "LlamaForCausalLM", layers=2, vocabulary=64, weights=True, digest="")


@pytest.mark.parametrize(
    ("model", "lr"),
    [
        (LlamaConfig(hidden=32), 0.01),
        (LlamaConfig(hidden=128), 0.01),
        (LlamaConfig(hidden=4096, heads=32, kv_heads=32), 3.125e-4),
        (FOLDER, 2e-5),
    ],
)
def test_the_learning_rate_follows_what_is_trained(model: LlamaConfig | FolderModel, lr: float) -> None:
    assert RunConfig(model=model).highest_lr == pytest.approx(lr)
    assert RunConfig(model=model, lr=0.5).highest_lr == 0.5


def test_adapters_learn_faster_than_whole_weights() -> None:
    assert RunConfig(model=FOLDER, lora="r=4,alpha=8,targets=q_proj").highest_lr == 2e-4

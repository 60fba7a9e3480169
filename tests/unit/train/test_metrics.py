"""Sums over a run."""

from __future__ import annotations

import pytest

from hdpcomm.run import RunConfig, learning_rate
from hdpcomm.train import StepMetrics, totals


def step_of(**values):
    base = {
        "step": 0,
        "loss": 1.0,
        "tokens": 10,
        "seconds": 1.0,
        "bytes_sent": 5,
        "idle_share": 0.0,
        "grad_norm": 1.0,
        "longest": 5,
        "longest_ranks": 1,
        "micro_batches": 1,
        "predicted_s": 1.0,
        "planning_s": 0.5,
        "plan_wait_s": 0.25,
        "processor_s": 0.75,
    }
    return StepMetrics(**{**base, **values})


def test_totals():
    total = totals([step_of(loss=20.0 - i, seconds=1 + i % 2, idle_share=i % 2) for i in range(20)])
    assert (total.steps, total.tokens, total.seconds, total.bytes_sent) == (20, 200, 30, 100)
    assert (total.planning_s, total.plan_wait_s, total.processor_s) == (10, 5, 15)
    assert total.tokens_per_s == pytest.approx(200 / 30)
    assert total.idle_share == pytest.approx(20 / 30)  # weighed by time
    assert (total.first_loss, total.last_loss) == (19.5, 1.5)
    assert total.to_dict()["steps"] == 20


def test_totals_of_one_step():
    assert totals([step_of(loss=3.0)]).last_loss == 3.0


def test_learning_rate_rises_and_falls():
    config = RunConfig(steps=40, lr=1.0)
    rates = [learning_rate(config, step) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 < rates[-1] < 0.12
    assert learning_rate(RunConfig(steps=1, lr=1.0), 0) == 1.0

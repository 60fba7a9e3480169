"""Sums over a run, and the timeline of a step."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from hdpcomm.run import RunConfig, learning_rate
from hdpcomm.train import StepMetrics, totals
from hdpcomm.train.step.metrics import Timeline


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


class DeviceEvent:
    """An event of a device whose clock the test sets; the device is behind the host."""

    clock_ms = 0.0
    waited: ClassVar[list[float]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _stream: object) -> None:
        self.at = DeviceEvent.clock_ms

    def synchronize(self) -> None:
        self.waited.append(self.at)

    def elapsed_time(self, other: DeviceEvent) -> float:
        return other.at - self.at


class Counting:
    """A communicator that only counts."""

    def __init__(self) -> None:
        self.sent = 0

    def stats(self) -> dict[str, int]:
        return {"wait_ns": 0, "bytes_sent": self.sent}

    def tick(self) -> None:
        self.sent += 100


def test_spans_end_when_the_device_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    DeviceEvent.clock_ms, DeviceEvent.waited = 5000.0, []
    timeline = Timeline(Counting(), device=torch.device("cuda"))  # type: ignore[arg-type]
    timeline.begin()
    for place, milliseconds in enumerate((20.0, 50.0)):
        DeviceEvent.clock_ms += milliseconds
        timeline.end("micro-batch", place)
    assert not DeviceEvent.waited
    spans = [(each.phase, each.index, each.start_s, each.end_s, each.bytes_sent) for each in timeline.spans]
    assert spans == [("micro-batch", 0, 0.0, 0.02, 100), ("micro-batch", 1, 0.02, 0.07, 100)]
    assert DeviceEvent.waited == [5020.0, 5070.0]
    timeline.begin()
    assert timeline.spans == []

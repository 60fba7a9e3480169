"""Simulation of many steps that are planned in the background."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hdpcomm.plan import Planner
from hdpcomm.sim.step import StepReport, simulate_step

__all__ = ["StreamReport", "simulate_stream"]


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Result of several simulated steps, each planned while the one before runs.

    Attributes:
        steps: the report of each step.
        waits_s: by step, seconds that it waits for its plan; the first step always waits.
        total_s: seconds of all steps and waits.
    """

    steps: tuple[StepReport, ...]
    waits_s: tuple[float, ...]
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the whole cluster."""
        return sum(step.plan.tokens for step in self.steps) / self.total_s if self.total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python objects."""
        return {
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "waits_s": list(self.waits_s),
            "steps": [step.to_dict() for step in self.steps],
        }


def simulate_stream(planner: Planner, batches: Iterable[Sequence[int]]) -> StreamReport:
    """Plans and simulates a step for each list of lengths; plan n + 1 is made while step n runs."""
    steps: list[StepReport] = []
    waits: list[float] = []
    now = 0.0  # when the previous step ends
    begun = 0.0  # when the previous step began, and with it the planning of this one
    for lengths in batches:
        report = simulate_step(planner, lengths)
        waits.append(max(0.0, begun + report.plan.planning_s - now))
        begun = now + waits[-1]
        now = begun + report.step_s
        steps.append(report)
    return StreamReport(steps=tuple(steps), waits_s=tuple(waits), total_s=now)

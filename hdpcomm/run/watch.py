"""Steps out of the ordinary: why one was slow, and a loss that jumps or rises."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from hdpcomm.data import BatchReader
from hdpcomm.train import StepMetrics

__all__ = ["CAUSES", "GarbageClock", "StepWatch", "TimedReader"]

T = TypeVar("T")
CAUSES = {
    "data": "waited {s} for its data{usual}; look at the disk or the network that they come from",
    "garbage": "collected garbage for {s}{usual}; see what the program makes anew in each step, or call gc.freeze()",
    "plan": "waited {s} for the plan{usual}; the thread of the planner needs a processor",
    "stall": "waited {s} for copies of activations to and from host memory{usual}",
    "compute": "computed for {s}{usual}; look at its clock and its heat",
    "processor": "had no processor for {s}{usual}: something else ran there",
    "optimizer": "took {s} for gradients and the update{usual}",
    "messages": "all waited {s} for messages{usual}; look at the links, by hdpcomm perf or hdpcomm acceptance",
}
"""Causes of slow steps: the name in ``by_rank`` of :func:`hdpcomm.run.step_record.step_costs`, and how a message
says it."""

_STEPS = 32  # that a step is compared with, at most
_FEWEST = 8
_SLOW = 1.5  # times as long as such steps do
_LEAST_S = 0.02  # more than expected
_QUIET_STEPS = 10  # between two messages of the same rank and cause


class GarbageClock(AbstractContextManager["GarbageClock"]):
    """Counts the seconds that Python collects garbage in this process, while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def _collects(self, phase: str, _: object) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._started

    def __enter__(self) -> GarbageClock:
        gc.callbacks.append(self._collects)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collects)


class TimedReader:
    """A reader of sequences that counts the seconds of its reads, without those of ``garbage``."""

    def __init__(self, reader: BatchReader, garbage: GarbageClock) -> None:
        self._reader, self._garbage = reader, garbage
        self.seconds = 0.0

    def __call__(self, place: int) -> Any:
        return self._timed(self._reader, place)

    def part(self, place: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._timed(self._reader.part, place, start, stop)

    def _timed(self, read: Callable[..., T], *places: int) -> T:
        started = time.perf_counter() - self._garbage.seconds
        try:
            return read(*places)
        finally:
            self.seconds += time.perf_counter() - self._garbage.seconds - started


class StepWatch:
    """Compares each step of a policy with those before. Local, and the same on all ranks, as what it is given is.

    Args:
        lr: the highest learning rate, for a message.
    """

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._took: deque[float] = deque(maxlen=_STEPS)  # seconds for one of the plan
        self._by_rank: deque[Tensor] = deque(maxlen=_STEPS)  # [causes, ranks], the same
        self._losses: deque[float] = deque(maxlen=_STEPS)
        self._first: float | None = None
        self._told: dict[tuple[str, int], int] = {}
        self._rises = False

    def slow(self, metrics: StepMetrics, by_rank: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
        """Why the step was slow, if it was: ``told`` (a sentence), ``rank``, ``cause``, ``seconds``, ``expected_s``,
        and whether that is ``new``, not told of a step just before.

        Args:
            by_rank: for each of :data:`CAUSES` the seconds of each rank.
        """
        work = metrics.predicted_s or float(metrics.tokens)
        rows = torch.tensor([by_rank[name] for name in CAUSES], dtype=torch.float64)
        found = None
        if len(self._took) >= _FEWEST and work:
            expected = median(self._took) * work
            more = metrics.seconds - expected
            if metrics.seconds > _SLOW * expected and more > _LEAST_S:
                usual = torch.stack([*self._by_rank]).median(0).values * work
                found = {"expected_s": expected, "seconds": metrics.seconds} | self._cause(rows, usual, more)
                found["told"] = (
                    f"step {metrics.step + 1} took {metrics.seconds:.3g} s, {metrics.seconds / expected:.1f}x as long "
                    f"as such steps do: {found['told']}"
                )
                key = found["cause"], found["rank"]
                found["new"] = metrics.step - self._told.get(key, -_QUIET_STEPS) >= _QUIET_STEPS
                self._told[key] = metrics.step
        if work:
            self._took.append(metrics.seconds / work)
            self._by_rank.append(rows / work)
        return found

    def _cause(self, rows: Tensor, usual: Tensor, more: float) -> dict[str, Any]:
        excess = rows - usual
        place, rank = divmod(int(excess.argmax()), excess.shape[1])
        if excess[place, rank] < 0.25 * more:
            return {"cause": "unknown", "rank": -1, "told": "nothing that is measured on a rank says why"}
        cause = list(CAUSES)[place]
        figures = {"s": f"{rows[place, rank]:.3g} s", "usual": f" (as a rule {usual[place, rank]:.2g} s)"}
        told = CAUSES[cause].format(**figures)
        if cause == "messages":
            return {"cause": cause, "rank": -1, "told": f"the ranks {told}"}
        return {"cause": cause, "rank": rank, "told": f"rank {rank} {told}"}

    def odd_loss(self, metrics: StepMetrics) -> dict[str, Any] | None:
        """Reason to look at the step's loss, if there is one: ``kind`` (``spike`` or ``rise``) and ``told``."""
        found, loss = None, metrics.loss
        if len(self._losses) >= _FEWEST:
            usual = median(self._losses)
            if loss > usual + max(9.0 * _spread(self._losses), 0.05 * abs(usual)):
                told = f"step {metrics.step + 1}: the loss jumped from {usual:.4g} to {loss:.4g}"
                found = {"kind": "spike", "told": told}
        self._losses.append(loss)
        first = self._first = loss if self._first is None else self._first
        last = [*self._losses][-2 * _FEWEST :]
        higher = (
            len(last) == 2 * _FEWEST
            and min(last) > first
            and median(last) > first + max(0.2 * first, min(first, 3.0 * _spread(last)))
        )
        if higher and not self._rises:
            found = {
                "kind": "rise",
                "told": f"step {metrics.step + 1}: for {len(last)} steps the loss has been above that of the first one "
                f"({median(last):.4g}, then {first:.4g}; the gradient has a norm of {metrics.grad_norm:.3g}"
                f"): the learning rate ({self._lr:g}) is probably too high, or the data have changed",
            }
        self._rises = higher
        return found


def _spread(losses: Sequence[float]) -> float:
    """Median of the distances from the median."""
    middle = median(losses)
    return median(abs(each - middle) for each in losses)

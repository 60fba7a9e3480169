"""Timeline of a rank's last step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["PHASES", "Span", "Timeline", "processor_seconds"]

PHASES = ("micro-batch", "wait for others", "gradients", "optimizer")
"""Kinds of spans, in the order of a step: forward and backward of one micro-batch; until all ranks have ended theirs;
reducing and clipping gradients; the optimizer's step with the gathering of what other ranks updated."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step on this rank.

    Attributes:
        phase: one of :data:`PHASES`.
        index: of the micro-batch in the plan; -1 for the other phases.
        start_s, end_s: seconds since the ranks agreed on the plan.
        wait_s: of these, seconds in which this rank waited for messages.
        bytes_sent: by this rank.
        stall_s: seconds in which it waited for copies of offloaded activations; 0 where the device does not tell.
        processor_s: processor time of :func:`processor_seconds`.
    """

    phase: str
    index: int
    start_s: float
    end_s: float
    wait_s: float
    bytes_sent: int
    stall_s: float = 0.0
    processor_s: float = 0.0
    shared_s: float = 0.0
    """The part of ``wait_s`` inside layers, for the ranks that share them (tensor parallelism)."""
    apart_s: float = 0.0
    """The part of ``wait_s`` for other stages of a pipeline and for ranks that share experts."""

    @property
    def idle_s(self) -> float:
        """Seconds without work: until all ranks have ended theirs, and for other stages or ranks that share experts."""
        if self.phase == "wait for others":
            return self.end_s - self.start_s
        return self.apart_s if self.phase == "micro-batch" else 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of waiting for messages that no compute hid: of rings, of ranks that share a layer, of gradients."""
        return 0.0 if self.phase == "wait for others" else max(0.0, self.wait_s - self.idle_s)

    @property
    def busy_s(self) -> float:
        """Seconds of compute, or of the optimizer."""
        return max(0.0, self.end_s - self.start_s - self.idle_s - self.exposed_s - self.stall_s)


def processor_seconds() -> float:
    """Processor time of this rank so far: of its own thread, or of the process where torch computes on several. Local.

    Threads that plan, load or save meanwhile are left out where torch has one thread.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.process_time()


class Timeline:
    """The spans of one step at a time; a span begins where the one before ended. Local.

    Args:
        stalled: seconds of waiting for copies so far.
        waits: seconds of waiting so far that count as ``shared_s`` and as ``apart_s`` of a span.
    """

    def __init__(
        self,
        comm: Communicator,
        stalled: Callable[[], float] = lambda: 0.0,
        waits: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        self._comm = comm
        self._stalled = stalled
        self._waits = waits
        self.origin = 0.0  # of time.perf_counter()
        self._last: tuple[float, ...] = ()
        self.spans: list[Span] = []

    def _read(self) -> tuple[float, ...]:
        """The clock, and what counts up to now, in the order of the attributes of :class:`Span`."""
        now, stats = time.perf_counter(), self._comm.stats()
        counts = stats["wait_ns"] * 1e-9, stats["bytes_sent"], self._stalled(), processor_seconds()
        return (now, *counts, *self._waits())

    def begin(self) -> None:
        """Forgets the step before; called right after a collective, so that all ranks count from the same moment."""
        self.spans = []
        self._last = self._read()
        self.origin = self._last[0]

    def end(self, phase: str, index: int = -1) -> None:
        """Ends a span now, which also tells the others that this rank has got on."""
        self._comm.tick()
        last, self._last = self._last, self._read()
        wait_s, sent, *others = (after - before for before, after in zip(last[1:], self._last[1:], strict=True))
        start_s, end_s = last[0] - self.origin, self._last[0] - self.origin
        self.spans.append(Span(phase, index, start_s, end_s, wait_s, int(sent), *others))

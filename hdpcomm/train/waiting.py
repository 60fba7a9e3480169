"""A communicator that knows how long its rank waited in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["TimedCommunicator"]

_POINT_TO_POINT = ("send", "recv", "exchange")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all")
_OPERATIONS = frozenset((*_POINT_TO_POINT, *_COLLECTIVES, "barrier"))


class _Clock:
    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


class _TimedWork:
    __slots__ = ("_clock", "_work")

    def __init__(self, work: Any, clock: _Clock) -> None:
        self._work = work
        self._clock = clock

    def wait(self, timeout: float | None = None) -> None:
        started = time.perf_counter()
        try:
            self._work.wait(timeout)
        finally:
            self._clock.seconds += time.perf_counter() - started

    def done(self) -> bool:
        return bool(self._work.done())


class TimedCommunicator:
    """Passes everything on to a :class:`hdpcomm.comm.Communicator` and adds up the seconds in which this rank waited.

    Its subsets add to the same clock. What runs in the background (``async_op``) counts from ``wait()`` on, so compute
    that overlaps with communication is not counted.
    """

    __slots__ = ("_clock", "_comm")

    def __init__(self, comm: Communicator, clock: _Clock | None = None) -> None:
        self._comm = comm
        self._clock = clock or _Clock()

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited so far, in this communicator and all its subsets."""
        return self._clock.seconds

    def subset(self, ranks: Sequence[int]) -> TimedCommunicator | None:
        """As :meth:`hdpcomm.comm.Communicator.subset`; local."""
        comm = self._comm.subset(ranks)
        return None if comm is None else TimedCommunicator(comm, self._clock)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in _OPERATIONS:
            return found

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                work = found(*arguments, **options)
            finally:
                self._clock.seconds += time.perf_counter() - started
            return None if work is None else _TimedWork(work, self._clock)

        return timed

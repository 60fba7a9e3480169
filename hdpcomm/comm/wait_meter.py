"""Which of a rank's waiting was for the ranks of one communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hdpcomm.comm.communicator import Communicator

__all__ = ["metered", "waited_s"]

_CALLS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "exchange")


def metered(comm: Communicator) -> Communicator:
    """``comm``, which also counts the seconds that this rank waits in its operations (:func:`waited_s`). Local.

    Counted are all-gather, all-reduce, all-to-all, reduce-scatter and exchange, with the waiting for started ones; not
    those of its subsets. One that is metered already is returned as it is.
    """
    return comm if isinstance(comm, _Metered) else cast("Communicator", _Metered(comm))


def waited_s(comm: Communicator) -> float:
    """Seconds that this rank has waited so far in the operations of a metered communicator; 0 of another one. Local."""
    return comm.waited_ns * 1e-9 if isinstance(comm, _Metered) else 0.0


class _Metered:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.waited_ns = 0
        for name in _CALLS:
            setattr(self, name, self._counted(getattr(comm, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            before = self._comm.stats()["wait_ns"]
            try:
                made = call(*arguments, **options)
            finally:
                self.waited_ns += self._comm.stats()["wait_ns"] - before
            return _MeteredWork(made, self) if options.get("async_op") else made

        return counted


class _MeteredWork:
    def __init__(self, work: Any, meter: _Metered) -> None:
        self._work = work
        self.wait = meter._counted(work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

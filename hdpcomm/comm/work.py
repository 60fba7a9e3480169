"""Handles of started operations, and their events for torch.profiler: in a trace, communication stands beside what it
waits for.

While no profiler runs, an operation reads one flag of torch's and no more. Events are named ``hdpcomm::`` and the
operation; ``record_shapes=True`` of the profiler adds ``bytes`` (of an exchange ``sent`` and ``received``) and
``ranks``. What was started with ``async_op`` has an event of its start, and one of the wait for it: ``hdpcomm::wait
all_reduce``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from hdpcomm import _core
from hdpcomm.arguments import check_seconds
from hdpcomm.comm.tensors import untraced

__all__ = ["ENDED", "Work", "event", "messages", "operands", "peers", "profiler", "recorded", "ring_step"]


@untraced
class Work:
    """An operation that was started; its tensors stay alive until it has ended, also if the Work is let go of.

    One that nobody waits for is given up on all ranks concerned when it has run for the communicator's timeout. If the
    Work was let go of, its error is a RuntimeWarning, at the latest when the next operation is started, unless the
    program has got an error with the same cause from another operation.
    """

    __slots__ = ("_handle",)

    #: Whether it is work of streams: ``wait()`` without a timeout makes the current stream wait, not the host.
    on_stream = False

    def __init__(self, handle: _core.comm.Work | _core.comm.StreamWork | None) -> None:
        self._handle = handle  # owns the buffers; None: it had ended when it was made

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation has ended; then its outputs are valid and its inputs may be changed.

        ``timeout``: seconds; the communicator's by default. Past it the operation is given up on all ranks concerned.
        Raises: CommTimeout, PeerLost, Mismatch, Aborted; InvalidUsage for a timeout that is no number above 0.
        """
        seconds = -1.0 if timeout is None else check_seconds("wait", timeout)
        if self._handle is not None:
            self._handle.wait(seconds)

    def done(self) -> bool:
        """Whether the operation has ended; never blocks. ``wait()`` raises its error if it failed."""
        return self._handle is None or self._handle.done()

    def __repr__(self) -> str:
        return "<Work, ended>" if self._handle is None else repr(self._handle)


ENDED = Work(None)
"""The work of every operation that had ended when its call returned."""


_PREFIX = "hdpcomm::"
_NOTHING = contextlib.nullcontext()
_RANKS_NAMED = 32


def _event(name: str, values: dict[str, Any]) -> AbstractContextManager[None]:
    made: AbstractContextManager[None] = torch._C._profiler._RecordFunctionFast(_PREFIX + name, [], values)
    return made


def _bytes_of(tensor: Any) -> int:
    """Bytes of a tensor of torch or numpy; others, and ``None``, count 0."""
    return int(getattr(tensor, "nbytes", 0))


def _ranks_text(ranks: Sequence[int]) -> str:
    """Global ranks for an event: ``0,1,3``; of many the first, the last and how many."""
    if len(ranks) > _RANKS_NAMED:
        return f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"
    return ",".join(map(str, ranks))


def operands(ranks: Sequence[int], *tensors: Any) -> dict[str, Any]:
    """Event fields of a collective or a message: the bytes of its largest operand."""
    return {"bytes": max(map(_bytes_of, tensors), default=0), "ranks": _ranks_text(ranks)}


def messages(ranks: Sequence[int], sends: Any, recvs: Any) -> dict[str, Any]:
    """Event fields of an exchange of (tensor, peer, ...); what is no such list the core refuses afterwards."""
    values: dict[str, Any] = {"ranks": _ranks_text(ranks)}
    with contextlib.suppress(TypeError, IndexError):
        values |= {"sent": sum(_bytes_of(x[0]) for x in sends), "received": sum(_bytes_of(x[0]) for x in recvs)}
    return values


def peers(ranks: Sequence[int], own: int, peer: Any) -> list[int]:
    """The global ranks of a message between this rank and a position; one that there is not the core refuses."""
    return [own, *([ranks[peer]] if isinstance(peer, int) and 0 <= peer < len(ranks) else [])]


@untraced
class _ProfiledWork(Work):
    """A work whose ``wait()`` has an event."""

    __slots__ = ("_name", "_values")

    def __init__(self, handle: Any, name: str, values: dict[str, Any]) -> None:
        super().__init__(handle)
        self._name = name
        self._values = values

    def wait(self, timeout: float | None = None) -> None:
        with event(f"wait {self._name}", self._values):
            super().wait(timeout)


def event(name: str, values: dict[str, Any]) -> AbstractContextManager[None]:
    """An event of what is done inside; nothing while no profiler runs."""
    return _event(name, values) if profiler._is_profiler_enabled else _NOTHING


def recorded(name: str, values: dict[str, Any], call: Callable[..., Any], *arguments: Any) -> Work:
    """The work of an operation of the core, which ``call`` runs or starts, with events."""
    with _event(name, values):
        handle = call(*arguments)
    return ENDED if handle is None else _ProfiledWork(handle, name, values)


def ring_step(direction: str, step: int, steps: int) -> AbstractContextManager[None]:
    """The event of a ring step of attention, within which are those of its exchange and of its compute."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return _event(f"ring {direction}", {"step": step, "steps": steps})

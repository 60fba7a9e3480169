"""What a started operation returns."""

from __future__ import annotations

import collections
import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hdpcomm import _core
from hdpcomm.arguments import check_seconds
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import Aborted, Error, InvalidUsage

__all__ = ["ENDED", "Work", "retain"]

_dropped: collections.deque[tuple[Any, tuple[Any, ...]]] = collections.deque()
"""Handles and tensors of operations whose Work was dropped before they had ended: the core still uses the memory."""


def _report(handle: Any) -> None:
    """Warns of the error of an operation that has ended and that nobody waits for any more.

    Not where another operation has raised an error with the same cause: the death of that rank, or the same failure of
    this rank or another one. Nor of Aborted, which follows from close() or from an error that was told before, nor for
    device operations, which an error ends for good, so that the next one tells it.
    """
    if not isinstance(handle, _core.comm.Work) or handle.heard():
        return
    try:
        handle.wait(-1.0)
    except (Aborted, InvalidUsage):
        pass
    except Error as error:
        warnings.warn(f"an operation failed whose Work was dropped: {error}", RuntimeWarning, stacklevel=3)


def _sweep() -> None:
    """Forgets what has ended. Other threads may append, and a destructor may come here, meanwhile."""
    with contextlib.suppress(IndexError):
        for _ in range(len(_dropped)):
            each = _dropped.popleft()
            if each[0].done():
                _report(each[0])
            else:
                _dropped.append(each)


def retain(handle: Any, buffers: tuple[Any, ...]) -> None:
    """Keeps the tensors of a started operation until it has ended, for a caller that lets go of it."""
    _sweep()
    _dropped.append((handle, buffers))


@untraced
class Work:
    """An operation that was started; its tensors stay alive until it has ended, also if the Work is let go of.

    One that nobody waits for is given up on all ranks concerned when it has run for the communicator's timeout. If the
    Work was let go of, its error is a RuntimeWarning, at the latest when the next operation is started, unless the
    program has got an error with the same cause from another operation.
    """

    __slots__ = ("_buffers", "_handle")

    #: Whether it is work of streams: ``wait()`` without a timeout makes the current stream wait, not the host.
    on_stream = False

    def __init__(self, handle: _core.comm.Work | _core.comm.StreamWork | None, buffers: tuple[Any, ...]) -> None:
        self._handle = handle  # None: it had ended when it was made
        self._buffers = buffers
        if _dropped:
            _sweep()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            handle, buffers = self._handle, self._buffers
        except AttributeError:  # its __init__ has not run
            return
        if buffers and handle is not None:
            if not handle.done():
                retain(handle, buffers)
            elif not _ending():  # modules are gone by then
                _report(handle)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation has ended; then its outputs are valid and its inputs may be changed.

        ``timeout``: seconds; the communicator's by default. Past it the operation is given up on all ranks concerned.
        Raises: CommTimeout, PeerLost, Mismatch, Aborted; InvalidUsage for a timeout that is no number above 0.
        """
        seconds = -1.0 if timeout is None else check_seconds("wait", timeout)
        if self._handle is not None:
            self._handle.wait(seconds)
        self._buffers = ()

    def done(self) -> bool:
        """Whether the operation has ended; never blocks. ``wait()`` raises its error if it failed."""
        return self._handle is None or self._handle.done()

    def __repr__(self) -> str:
        return "<Work, ended>" if self._handle is None else repr(self._handle)


ENDED = Work(None, ())
"""The work of every operation that had ended when its call returned."""

"""What a started operation returns."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

from hdpcomm import _core

__all__ = ["ENDED", "Work", "retain"]

_dropped: collections.deque[tuple[Any, tuple[Any, ...]]] = collections.deque()
"""Handles and tensors of operations whose Work was dropped before they had ended: the core still uses the memory."""


def _sweep() -> None:
    """Forgets what has ended. Other threads may append, and a destructor may come here, meanwhile."""
    with contextlib.suppress(IndexError):
        for _ in range(len(_dropped)):
            each = _dropped.popleft()
            if not each[0].done():
                _dropped.append(each)


def retain(handle: Any, buffers: tuple[Any, ...]) -> None:
    """Keeps the tensors of a started operation until it has ended, for a caller that lets go of it."""
    _sweep()
    _dropped.append((handle, buffers))


class Work:
    """An operation that was started; its tensors stay alive until it has ended, also if the Work is let go of.

    One that nobody waits for is given up on all ranks concerned when it has run for the communicator's timeout.
    """

    __slots__ = ("_buffers", "_handle")

    def __init__(self, handle: _core.comm.Work | _core.comm.StreamWork | None, buffers: tuple[Any, ...]) -> None:
        self._handle = handle  # None: it had ended when it was made
        self._buffers = buffers
        if _dropped:
            _sweep()

    def __del__(self) -> None:
        if self._buffers and self._handle is not None and not self._handle.done():
            retain(self._handle, self._buffers)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation has ended; then its outputs are valid and its inputs may be changed.

        ``timeout``: seconds; the communicator's by default. Past it the operation is given up on all ranks concerned.
        Raises: CommTimeout, PeerLost, Mismatch, Aborted.
        """
        if self._handle is not None:
            self._handle.wait(-1.0 if timeout is None else timeout)
        self._buffers = ()

    def done(self) -> bool:
        """Whether the operation has ended; never blocks. ``wait()`` raises its error if it failed."""
        return self._handle is None or self._handle.done()

    def __repr__(self) -> str:
        return "<Work, ended>" if self._handle is None else repr(self._handle)


ENDED = Work(None, ())
"""The work of every operation that had ended when its call returned."""

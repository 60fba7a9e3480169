"""Handles of started operations."""

from __future__ import annotations

from hdpcomm import _core
from hdpcomm.arguments import check_seconds
from hdpcomm.comm.untraced import untraced

__all__ = ["ENDED", "Work"]


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

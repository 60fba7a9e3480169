"""Handles of the backend's operations: a torch ``Work`` over hdpcomm's works, with a future on demand."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from hdpcomm import _core
from hdpcomm.comm.device.communicator import DeviceWork
from hdpcomm.comm.device.paths import StreamMark
from hdpcomm.errors import Aborted, CommTimeout, Error, Mismatch, PeerLost

__all__ = [
    *("BackendAborted", "BackendError", "BackendLost", "BackendMismatch", "BackendTimeout"),
    *("BackendWork", "Part", "StreamWork", "seconds_of", "translate"),
]


class BackendError(Error, dist.DistBackendError):
    """A failure inside the library or the operating system."""


class BackendTimeout(CommTimeout, dist.DistBackendError):
    """An operation did not end before its deadline."""


class BackendLost(PeerLost, dist.DistBackendError):
    """Another rank died or left its group while this one depended on it."""


class BackendMismatch(Mismatch, dist.DistBackendError):
    """Ranks called different operations, or the same one with different sizes, types, roots or order."""


class BackendAborted(Aborted, dist.DistBackendError):
    """The group was aborted or destroyed while the operation ran."""


_OUT_OF_STEP_ADVICE = _core.comm.OUT_OF_STEP_ADVICE
_TWINS: dict[type[Error], type[Error]] = {
    Error: BackendError,
    CommTimeout: BackendTimeout,
    PeerLost: BackendLost,
    Mismatch: BackendMismatch,
    Aborted: BackendAborted,
}


def translate(error: Error) -> Error:
    """The error that torch's user sees: the same fields, and a message with advice for that user.

    InvalidUsage stays, it is a ValueError already.
    """
    twin = _TWINS.get(type(error))
    if twin is None:
        return error
    text = str(error).replace(_OUT_OF_STEP_ADVICE, "destroy the process group on all ranks and make a new one")
    return twin(text, rank=error.rank, peer=error.peer, op=error.op, ranks=error.ranks, seq=error.seq).with_traceback(
        error.__traceback__
    )


_new_work = dist.Work.__init__


class Part(Protocol):
    """Part of a BackendWork: a Work of hdpcomm."""

    on_stream: bool

    def wait(self, timeout: float | None = None) -> None: ...

    def done(self) -> bool: ...


def seconds_of(timeout: datetime.timedelta | None, default: float) -> float:
    """Torch's timeouts: not given, zero and below mean the default."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else default


class BackendWork(dist.Work):
    """An operation that was started. It ends in the background; ``wait()`` gives its error, if any.

    ``finish`` runs once, when all parts have ended well, on the thread that notices it first (copies into outputs that
    are not contiguous, for example).
    """

    # One is made for every operation, so what most do not need stands here.
    _finish: Callable[[], None] | None = None
    _error: BaseException | None = None
    _over = False
    _future: Future[list[torch.Tensor]] | None = None
    _ending = threading.Lock()  # shared by all works; held for the copies of the end

    def __init__(
        self,
        parts: Sequence[Part],
        outputs: Sequence[torch.Tensor],
        *,
        timeout: float,
        finish: Callable[[], None] | None = None,
        in_background: Callable[[BackendWork], None] | None = None,
    ) -> None:
        _new_work(self)
        self._parts = parts
        self._outputs = list(outputs)
        self._timeout = timeout
        self._in_background = in_background
        if finish is not None:
            self._finish = finish
        if not parts:
            self._set_ended(None)

    @classmethod
    def ended(cls, outputs: Sequence[torch.Tensor]) -> BackendWork:
        """An operation that has ended, and well."""
        work = cls.__new__(cls)
        _new_work(work)
        work._outputs = list(outputs)
        work._over = True
        return work

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Blocks, without the GIL, until the operation has ended; raises its error. Default: the group's timeout."""
        if not self._over:
            self.join(seconds_of(timeout, self._timeout))
        if self._error is not None:
            raise self._error
        return True

    def join(self, seconds: float) -> None:
        """Waits for the end, keeping an error for ``wait()``; raises only what interrupts the wait itself (Ctrl-C)."""
        deadline = time.monotonic() + seconds
        try:
            for part in self._parts:
                part.wait(max(1e-3, deadline - time.monotonic()))
        except Error as error:
            self._set_ended(translate(error))
        else:
            self._set_ended(None)

    def _set_ended(self, error: BaseException | None) -> None:
        if error is None and self._finish is None:
            self._over = True
            self._parts = ()
            return
        with self._ending:
            if self._over:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as failure:
                    error = failure
            self._error = error
            self._finish = None
            self._parts = ()
            self._over = True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not; then its outputs are valid. Never blocks."""
        if not self._over and all(part.done() for part in self._parts):
            self.join(self._timeout)
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error of an operation that has failed."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """The outputs; valid when the operation has ended."""
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Group rank of the sender of a receive that has ended."""
        raise NotImplementedError("hdpcomm backend: source_rank of a work that is not a receive")

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the outputs, completed in the background."""
        if self._future is None:
            self._future = Future()
            self._complete_later()
        return self._future

    get_future_result = get_future

    def _complete_later(self) -> None:
        if self._over or self._in_background is None:
            self.complete_future()
        else:
            self._in_background(self)

    def complete_future(self) -> None:
        """Waits, then completes the future: on the thread that the engine lends."""
        if not self._over:
            self.join(self._timeout)
        if self._future is None:
            return
        if self._error is None:
            self._future.set_result(self.result())
        else:
            self._future.set_exception(self._error)  # type: ignore[arg-type]


class StreamWork(BackendWork):
    """An operation that streams do: ``wait()`` makes the current stream wait, and the host goes on.

    ``wait(timeout)`` makes the host wait. The future is complete at once, as NCCL's are: who waits for it waits by the
    stream, and its callbacks run on streams that do. An error of the operation is raised by ``wait()`` if it is known
    by then, else by a later operation.
    """

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self._wait(seconds_of(timeout, 0.0))
        return True

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            for part in self._parts:
                if seconds > 0:
                    part.wait(max(1e-3, deadline - time.monotonic()))
                else:
                    part.wait()
        except Error as error:
            raise translate(error) from error.__cause__

    def follow(self) -> None:
        """The current stream waits; the tensors stay alive with this work."""
        for part in self._parts:
            part.follow() if isinstance(part, DeviceWork | StreamMark) else part.wait()

    def is_completed(self) -> bool:
        """Whether the streams have ended it, well or not. Never blocks."""
        return all(part.done() for part in self._parts)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of an operation that has failed."""
        try:
            if self.is_completed():
                self._wait(0.0)
        except Error as error:
            return error
        return None

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the outputs, whose users wait by their streams."""
        if self._future is None:
            device = next((x.device for x in self._outputs if x.is_cuda), None)
            future: Future[list[torch.Tensor]] = Future(devices=None if device is None else [device])
            with contextlib.nullcontext() if device is None else on_side_stream(device):
                try:
                    self.follow()
                except Error as error:
                    future.set_exception(translate(error))  # type: ignore[arg-type]
                else:
                    future.set_result(self._outputs)
            self._future = future
        return self._future

    get_future_result = get_future


_side_streams: dict[tuple[torch.device, int | None], Any] = {}


@contextlib.contextmanager
def on_side_stream(
    device: torch.device, source: int | None = None, uses: Sequence[torch.Tensor] = ()
) -> Iterator[None]:
    """A stream for what follows the messages of a rank, or collectives, is the current one inside: its waits hold
    nothing else up. ``uses``: the tensors of other streams that it reads and writes."""
    stream = _side_streams.get((device, source))
    if stream is None:
        stream = _side_streams[device, source] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    for tensor in uses:
        tensor.record_stream(stream)

"""Operations of the backend, from their tensors to torch's ``Work``: contiguous stand-ins, the parts started, copies at
the end, a future on demand; and the worlds that all groups share.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from hdpcomm import _core
from hdpcomm.comm import bootstrap
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.device.communicator import DeviceWork
from hdpcomm.comm.device.paths import StreamMark
from hdpcomm.errors import Aborted, CommTimeout, Error, InvalidUsage, Mismatch, PeerLost

__all__ = [
    "BackendAborted",
    "BackendError",
    "BackendLost",
    "BackendMismatch",
    "BackendTimeout",
    "BackendWork",
    "Engine",
    "Operation",
    "StreamWork",
    "seconds_of",
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


_describe_torch = _core.comm.describe_torch
_CARRIED = frozenset(getattr(torch, name) for name in _core.DTYPES if hasattr(torch, name))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the core takes it as it is. Cheap; false also where torch cannot describe tensors in C (before 2.10)."""
    return _describe_torch(tensor) is not None


class Operation:
    """Starts the parts of one torch operation; :meth:`work` ends it.

    ``background``: parts are started and go on by themselves; else each has ended when :meth:`start` returns.
    """

    __slots__ = ("_background", "_copied", "_copies", "call", "comm", "parts", "source_rank", "timeout")

    def __init__(self, call: str, comm: Communicator, *, timeout: float, background: bool) -> None:
        self.call = call
        self.comm = comm
        self.timeout = timeout
        self._background = background
        self.parts: list[Part] = []  # started and not ended
        self.source_rank: int | None = None  # of a receive
        self._copies: list[Callable[[], Any]] = []
        self._copied: list[torch.Tensor] = []  # what they read and write

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stand-in of an input: contiguous, without autograd, of a type that the core carries."""
        return tensor if _is_plain(tensor) else self._carrier(self._plain(tensor).contiguous())

    def target(self, tensor: torch.Tensor, *, read: bool = False) -> torch.Tensor:
        """Stand-in of an output, copied there at the end unless it is its memory. ``read``: also an input."""
        if _is_plain(tensor):
            return tensor
        plain = self._plain(tensor)
        if plain.is_contiguous() and plain.data_ptr() == tensor.data_ptr():
            return self._carrier(plain)
        buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
        if read:
            buffer.copy_(plain)
        destination = tensor.detach()
        self._at_end(lambda: destination.copy_(buffer), destination, buffer)
        return self._carrier(buffer)

    def reduced(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in as a tensor to reduce: the core's checks name its type if it cannot."""
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"hdpcomm backend: {self.call} of sparse tensors ({tensor.layout})")
        if tensor.dtype not in _CARRIED and not tensor.dtype.is_complex:
            raise InvalidUsage(f"{self.call}() got a tensor of {tensor.dtype}, which cannot be reduced; convert it")
        return tensor

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"hdpcomm backend: {self.call} of sparse tensors ({tensor.layout})")
        if not tensor.is_cpu and not self.comm._by_streams(tensor):
            raise InvalidUsage(
                f"{self.call}() got a tensor on {tensor.device}; this group moves CPU tensors, since not every rank "
                "sees a CUDA device or HDPCOMM_TRANSPORT names a transport without one: pass x.cpu()"
            )
        return tensor.detach().resolve_conj().resolve_neg()

    @staticmethod
    def _carrier(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in _CARRIED:
            return tensor
        if tensor.is_complex():
            return torch.view_as_real(tensor)
        return tensor.reshape(-1).view(torch.uint8)

    @property
    def over(self) -> bool:
        """Whether nothing is under way, and nothing to be done at the end."""
        return not self.parts and not self._copies

    @property
    def copies(self) -> bool:
        """Whether there is anything to copy at the end."""
        return bool(self._copies)

    def start(self, method: Callable[..., Part], *args: Any) -> None:
        """Starts one part: a method of the communicator."""
        try:
            part = method(*args, async_op=self._background)
        except Error as error:
            raise translate(error) from error.__cause__
        if self._background:
            self.parts.append(part)

    def _at_end(self, action: Callable[[], Any], *copied: torch.Tensor) -> None:
        """Does something when all parts have ended well, after what was given before."""
        self._copies.append(action)
        self._copied += copied

    def copy_parts(self, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """At the end, part i of ``flat`` goes to output i."""
        destinations = [output.detach() for output in outputs]

        def copy() -> None:
            for destination, part in zip(destinations, flat.chunk(len(destinations)), strict=True):
                destination.copy_(part.view_as(destination))

        if flat.numel() > 0:
            self._at_end(copy, flat, *destinations)

    def finish(self) -> None:
        """Makes the copies of the end."""
        for copy in self._copies:
            copy()

    def _with_copies(self) -> list[Part]:
        """Parts that streams do, with the copies of the end on a stream of their own: the current one is for what comes
        next, which may be the send that the peer wants first."""
        if not self._copies:
            return self.parts
        works = [part for part in self.parts if isinstance(part, DeviceWork)]
        with on_side_stream(self._copied[0].device, self.source_rank, self._copied):
            for work in works:
                work.follow()
            self.finish()
            mark = works[0].mark()
        self._copies, self._copied = [], []
        return [*works, mark]

    def work(
        self, outputs: Sequence[torch.Tensor], in_background: Callable[[BackendWork], None] | None = None
    ) -> BackendWork:
        """The operation as torch sees it."""
        if any(part.on_stream for part in self.parts):
            return StreamWork(self._with_copies(), outputs, timeout=self.timeout)
        return BackendWork(
            self.parts,
            outputs,
            timeout=self.timeout,
            finish=self.finish if self._copies else None,
            in_background=in_background,
        )


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """One rank's end of a world of torch ranks.

    Collectives and point-to-point messages have a world each: torch lets a send pass the collectives that were called
    before it, while hdpcomm orders all operations of a world. Messages of device tensors are the streams' of the first.
    """

    def __init__(self, world: Communicator, messages: Communicator) -> None:
        self.world = world
        self.messages = messages
        self._held: deque[tuple[BackendWork, Sequence[Part]]] = deque()
        self._lock = threading.Lock()
        self._futures: queue.SimpleQueue[BackendWork | None] | None = None
        self._completer: threading.Thread | None = None
        self._closed = False
        _open_engines.add(self)

    @classmethod
    def join(cls, store: Any, rank: int, size: int, *, timeout: float) -> Engine:
        """Joins the two worlds. Collective over the ranks of the store; ``timeout``: seconds, also of operations."""
        try:
            world = bootstrap.join(store, rank, size, timeout=timeout)
            try:
                messages = bootstrap.join(store, rank, size, timeout=timeout, devices=False)
            except BaseException:
                world.close()
                raise
        except Error as error:
            raise translate(error) from error.__cause__
        return cls(world, messages)

    def hold(self, work: BackendWork, parts: Sequence[Part]) -> None:
        """Keeps a started operation until it has ended, though its caller may drop it, for the copies of its end."""
        with self._lock:
            self._held.append((work, parts))
            while self._held and all(part.done() for part in self._held[0][1]):
                ended, _ = self._held.popleft()
                ended.is_completed()

    def complete_in_order(self, work: BackendWork) -> None:
        """Completes the future of a collective in the background; collectives end in the order in which they began."""
        with self._lock:
            if self._futures is None:
                self._futures = queue.SimpleQueue()
                self._completer = threading.Thread(
                    target=_complete, args=(self._futures,), name="hdpcomm-futures", daemon=True
                )
                self._completer.start()
            self._futures.put(work)

    def complete_alone(self, work: BackendWork) -> None:
        """Completes the future of a message in the background: messages end in any order."""
        threading.Thread(target=work.complete_future, name="hdpcomm-future", daemon=True).start()

    def abort(self, reason: str) -> None:
        """Ends all pending operations of this rank; the other ranks concerned are notified."""
        self.world.abort(reason)
        self.messages.abort(reason)
        self.close()

    def close(self) -> None:
        """Leaves both worlds and ends the threads. Local, idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            futures, completer = self._futures, self._completer
        self.world.close()
        self.messages.close()
        if futures is not None and completer is not None:
            futures.put(None)
            if completer is not threading.current_thread():
                completer.join()
        self._held.clear()


def _complete(futures: queue.SimpleQueue[BackendWork | None]) -> None:
    while (work := futures.get()) is not None:
        with contextlib.suppress(Exception):  # of a callback; torch has logged it
            work.complete_future()
        del work


def _close_engines() -> None:
    for engine in list(_open_engines):
        engine.close()


atexit.register(_close_engines)  # before that of bootstrap: threads end before the interpreter does

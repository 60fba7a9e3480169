"""Worlds that all groups share, and one operation in them from its tensors to its Work: contiguous stand-ins, the parts
started, copies at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm import bootstrap
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.device.communicator import DeviceWork
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.torch_backend.work import BackendWork, Part, StreamWork, on_side_stream, translate

__all__ = ["Engine", "Operation"]

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

"""State that all groups of one world share."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from hdpcomm.comm import bootstrap
from hdpcomm.comm.communicator import Communicator
from hdpcomm.errors import Error
from hdpcomm.torch_backend.work import BackendWork, Part, translate

__all__ = ["Engine"]


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

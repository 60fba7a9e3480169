"""Calls of other libraries that keep no deadline and hear no Ctrl-C, made on a thread that nobody has to wait for."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

from hdpcomm import _core

__all__ = ["CallThread"]

_LAST_S = 2.0  # for late calls, at the end of the process
_T = TypeVar("_T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class CallThread:
    """One thread that makes calls in order. A call that is late is left alone; later ones have a new thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls | None = None
        self._worker: threading.Thread

    def __call__(self, call: Callable[[], _T], seconds: float) -> _T:
        """Returns or raises as ``call`` does. Raises: TimeoutError past ``seconds``; KeyboardInterrupt at once."""
        calls = self._calls
        if calls is None:
            calls = self._calls = SimpleQueue()
            self._worker = threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True)
            self._worker.start()
            weakref.finalize(self, calls.put, None)
        future: Future[_T] = Future()
        calls.put((future, call))
        try:
            return future.result(max(0.0, seconds))
        except FutureTimeout:
            if future.done():  # the call's own, or its end came just now
                return future.result()
            self._leave(calls, self._worker)
            raise TimeoutError from None
        except BaseException:
            if not future.done():
                self._leave(calls, self._worker)
            raise

    def close(self) -> None:
        """Ends the thread, after the calls that it has; a later call has a new one."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _leave(self, calls: _Calls, thread: threading.Thread) -> None:
        self._calls = None
        calls.put(None)
        _left.append(thread)


# Threads with a call that was late. The interpreter's end cuts off threads, which C++ code does not survive.
_left: list[threading.Thread] = []


def _join_left() -> None:
    limit = time.monotonic() + _LAST_S
    for thread in _left:
        with contextlib.suppress(RuntimeError):
            thread.join(max(0.0, limit - time.monotonic()))
    if any(thread.is_alive() for thread in _left):
        _core.outlast_late_threads()


atexit.register(_join_left)


def _serve(calls: _Calls) -> None:
    while (each := calls.get()) is not None:
        future, call = each
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del each, future, call

"""Threads that make tokens, none of which can hold up the end of a loader or of its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

__all__ = ["DaemonThreads"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads:
    """A pool of threads. Python waits for those of a ``ThreadPoolExecutor`` before a process ends, for ever if a
    tokenizer or a file system is stuck; for these it does not.

    Args:
        count: threads, which are started with the first calls.
        name: of each, with its number behind it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The result of ``call(*args, **kwargs)``, made by the next free thread; cancelled if the pool is closed."""
        future: Future[T] = Future()

        def run() -> None:
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._guard:
            if self._closed:
                future.cancel()
                return future
            self._calls.put(run)
            if len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def close(self, timeout_s: float) -> bool:
        """Cancels the calls that no thread has begun and waits for the others.

        Args:
            timeout_s: longest wait.

        Returns: whether all threads have ended.
        """
        with self._guard:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()

"""Calls of other libraries that keep no deadline and hear no Ctrl-C, made on threads that nobody has to wait for."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hdpcomm import _core

__all__ = ["call_within"]

_LAST_S = 2.0  # for late calls, at the end of the process
_T = TypeVar("_T")


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Returns or raises as ``call`` does, on a thread of its own; one that is late is left alone.

    Raises: TimeoutError past ``seconds``; KeyboardInterrupt at once.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hdpcomm-call", daemon=True)
    thread.start()
    try:
        thread.join(max(0.0, seconds))
        if thread.is_alive():
            raise TimeoutError
    except BaseException:
        _late[:] = [each for each in (*_late, thread) if each.is_alive()]
        raise
    if errors:
        raise errors.pop()
    return results.pop()


# The interpreter's end cuts off threads, which C++ code does not survive.
_late: list[threading.Thread] = []


def _join_late() -> None:
    limit = time.monotonic() + _LAST_S
    for thread in _late:
        with contextlib.suppress(RuntimeError):
            thread.join(max(0.0, limit - time.monotonic()))
    if any(thread.is_alive() for thread in _late):
        _core.outlast_late_threads()


atexit.register(_join_late)

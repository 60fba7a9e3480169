"""Ending a run in good order: SIGTERM and Ctrl-C let the step finish, then all ranks stop at the same one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While it is entered, the first signal only asks for the end; a Ctrl-C after it interrupts at once.

    In a thread that is not the main one signals stay as they are, and nothing is asked for.

    Args:
        on_ask: called with each signal that does not interrupt.
    """

    def __init__(self, on_ask: Callable[[int], None] | None = None) -> None:
        self._asked = 0
        self._on_ask = on_ask
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = self._asked or number
        if self._on_ask is not None:
            self._on_ask(number)

    def agreed(self, comm: Communicator, *, late: bool = False, save: bool = False) -> tuple[int, bool]:
        """(the signal that any rank of ``comm`` was given since the start, SIGALRM if it is ``late`` on any, or 0;
        whether any wants to ``save``). Collective: equal on all ranks."""
        asked = torch.tensor([self._asked or late * signal.SIGALRM, save], dtype=torch.int64)
        comm.all_reduce(asked, "max")
        return int(asked[0]), bool(asked[1])

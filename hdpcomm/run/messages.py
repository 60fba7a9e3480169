"""Records the messages of rings while steps run, for traces with arrows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["MessageLog", "recorded"]


class MessageLog:
    """Messages of this rank: ``{"to" or "from": global rank, "bytes", "start", "end"}`` in the order of the pair.

    A send starts when it is posted; a receive ends when the program has waited for it. Times are those of
    ``time.perf_counter()``.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def take(self, origin: float) -> list[dict[str, Any]]:
        """The messages since the last call, with times in seconds since ``origin``."""
        taken, self.messages = self.messages, []
        return [each | {"start": each["start"] - origin, "end": each["end"] - origin} for each in taken]


def recorded(comm: Communicator, log: MessageLog) -> Communicator:
    """``comm``, whose exchanges and those of its subsets are noted in ``log``. Local."""
    return cast("Communicator", _Recorded(comm, log))


class _Recorded:
    def __init__(self, comm: Communicator, log: MessageLog) -> None:
        self._comm, self._log = comm, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        made = self._comm.subset(ranks)
        return None if made is None else recorded(made, self._log)

    def exchange(
        self,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        *,
        async_op: bool = False,
    ) -> Any:
        started = time.perf_counter()
        work = self._comm.exchange(sends, recvs, async_op=True)
        rows = [
            {way: self._comm.ranks[message[1]], "bytes": _bytes(message[0]), "start": started, "end": started}
            for way, messages in (("to", sends), ("from", recvs))
            for message in messages
        ]
        self._log.messages += rows
        noted = _RecordedWork(work, rows)
        if not async_op:
            noted.wait()
        return noted


class _RecordedWork:
    def __init__(self, work: Any, rows: Sequence[dict[str, Any]]) -> None:
        self._work, self._rows = work, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *arguments: Any, **options: Any) -> None:
        self._work.wait(*arguments, **options)
        now = time.perf_counter()
        for row in self._rows:
            row["end"] = now


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())

"""Heartbeats of ranks, and deadlines that follow them. All of it is local."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from hdpcomm import _core
from hdpcomm.arguments import check_number
from hdpcomm.errors import InvalidUsage

__all__ = ["BUSY_LIMIT_S", "Busy", "LivenessDeadlines", "check_activity"]

BUSY_LIMIT_S = 1800.0
_LONGEST_NAME = 60


def check_activity(what: Any, limit_s: Any) -> float:
    """The limit of an activity in seconds. Raises: InvalidUsage for a name that no error could show, or a bad limit."""
    if not isinstance(what, str) or not 0 < len(what) <= _LONGEST_NAME or not (what.isascii() and what.isprintable()):
        raise InvalidUsage(
            f"busy() got what={what!r}; give 1 to {_LONGEST_NAME} printable ASCII characters that say what this rank "
            "does, such as 'reads data'"
        )
    return check_number("busy()", "limit_s", limit_s, above=0)


class Busy:
    """See :meth:`hdpcomm.comm.Communicator.busy`."""

    __slots__ = ("_activities", "_limit_s", "_what", "_world")

    def __init__(self, world: _core.comm.World, what: str, limit_s: float) -> None:
        self._world, self._what, self._limit_s = world, what, limit_s
        self._activities: list[int] = []

    def __enter__(self) -> None:
        self._activities.append(self._world.begin_activity(self._what, self._limit_s))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._world.end_activity(self._activities.pop())


class LivenessDeadlines:
    """See :meth:`hdpcomm.comm.Communicator.liveness_deadlines`."""

    __slots__ = ("_world",)

    def __init__(self, world: _core.comm.World) -> None:
        self._world = world

    def __enter__(self) -> None:
        self._world.go_by_liveness(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._world.go_by_liveness(False)

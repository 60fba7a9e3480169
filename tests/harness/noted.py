"""Communicators and Works that note when reductions start and when they are waited for."""

from __future__ import annotations

from typing import Any

__all__ = ["NotedComm"]


class NotedComm:
    """A communicator in whose place ``started`` is noted when a reduction starts, and ``awaited`` when it is waited
    for; ``None``: that is not noted."""

    def __init__(self, comm: Any, events: list[Any], *, started: Any = None, awaited: Any = None) -> None:
        self._comm, self._events = comm, events
        self._started, self._awaited = started, awaited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        return self._noted(self._comm.all_reduce, args, options)

    def reduce_scatter(self, *args: Any, **options: Any) -> Any:
        return self._noted(self._comm.reduce_scatter, args, options)

    def _noted(self, call: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._started is not None:
            self._events.append(self._started)
        return _NotedWork(call(*args, **options), self._events, self._awaited)


class _NotedWork:
    def __init__(self, work: Any, events: list[Any], awaited: Any) -> None:
        self._work, self._events, self._awaited = work, events, awaited

    def wait(self) -> None:
        if self._awaited is not None:
            self._events.append(self._awaited)
        self._work.wait()

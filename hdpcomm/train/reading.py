"""A step's ``fetch`` that tells the other ranks that this one reads data, so that they wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hdpcomm.train.shards import Fetch, FetchAhead, FetchParts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["declared"]


class _Declared:
    def __init__(self, fetch: Any, comm: Communicator) -> None:
        self._fetch, self._comm = fetch, comm

    def __call__(self, place: int, /) -> Any:
        with self._comm.busy("reads data"):
            return self._fetch(place)


class _DeclaredParts(_Declared):
    def part(self, place: int, start: int, stop: int, /) -> tuple[Tensor, Tensor]:
        with self._comm.busy("reads data"):
            parts: tuple[Tensor, Tensor] = self._fetch.part(place, start, stop)
            return parts


class _DeclaredAhead(_DeclaredParts):
    def ahead(self, parts: Sequence[tuple[int, int, int]], /) -> None:
        self._fetch.ahead(parts)


def declared(fetch: Fetch, comm: Communicator) -> Fetch:
    """``fetch``, each call of which is an activity of this rank (:meth:`hdpcomm.comm.Communicator.busy`). It reads
    parts of sequences, and reads ahead, if ``fetch`` does. Local."""
    if isinstance(fetch, FetchAhead):
        return _DeclaredAhead(fetch, comm)
    return (_DeclaredParts if isinstance(fetch, FetchParts) else _Declared)(fetch, comm)

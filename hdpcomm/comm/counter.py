"""A counter that the ranks of a communicator share: each number is handed out once."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage

__all__ = ["SharedCounter", "open_counter"]

_fetch_add = _core.comm.fetch_add
_NONE = -1  # in place of a word: the owner has none left


@untraced
class SharedCounter:
    """A count that starts at 0 and that ranks add to, each when it likes; from :meth:`Communicator.counter`.

    Rank 0 of the communicator, the owner, holds it; its program takes no part. The ranks of its host add in shared
    memory, the others ask its host by a frame, which the threads of its transport answer. They are Python threads, so
    an owner that holds the interpreter's lock delays them. When the owner dies, the ranks of its host go on counting
    until an operation tells them of the death; the ranks of other hosts get PeerLost.

    Examples:
        >>> import hdpcomm as hdp
        >>> with hdp.init() as comm, comm.counter() as counter:
        ...     first, second = counter.fetch_add(), counter.fetch_add(5)
        ...     comm.barrier()  # no rank counts any more
        >>> first, second
        (0, 1)
    """

    __slots__ = ("_core",)

    def __init__(self, core: _core.comm.SharedCounter) -> None:
        self._core = core

    def fetch_add(self, amount: int = 1) -> int:
        """Adds ``amount`` (1 to 2^32 - 1) and returns the count before: atomic over all ranks and threads.

        Local: no other rank takes part. From another host it waits for the answer, by the same deadline as operations,
        and it is no operation: an error leaves the communicator usable. After CommTimeout or Ctrl-C the amount may have
        been added or not.

        Raises: InvalidUsage for another amount, a sum above 2^32 - 1 (nothing is added), or a counter that its owner or
        this rank has closed; PeerLost if the owner has left, or has died on another host; CommTimeout.
        """
        return _fetch_add(self._core, amount)

    def close(self) -> None:
        """Ends the counter: the owner for all ranks, another rank for itself. Local; also done when it is dropped.

        A ``fetch_add`` that comes later raises InvalidUsage, so the owner closes it after an operation that all ranks
        join when they are done, such as a barrier.
        """
        self._core.close()

    def __enter__(self) -> SharedCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SharedCounter {self._core.word}, generation {self._core.generation}, of rank {self._core.owner}>"


def open_counter(core: _core.comm.Communicator, broadcast: Callable[[torch.Tensor], Any]) -> SharedCounter:
    """Collective: rank 0 opens a counter and tells the others of it by ``broadcast``."""
    place = torch.empty(2, dtype=torch.int64)
    if core.rank:
        broadcast(place)
        word, generation = place.tolist()
        if word == _NONE:
            raise InvalidUsage(
                f"counter(): rank {core.ranks[0]} owns as many counters as it may: close those that are over",
                rank=core.world.rank,
                peer=core.ranks[0],
            )
        return SharedCounter(_core.comm.join_counter(core, word, generation))
    try:
        own = _core.comm.open_counter(core)
    except InvalidUsage:
        if not core.world.over:
            place.fill_(_NONE)
            broadcast(place)
        raise
    counter = SharedCounter(own)
    place[0], place[1] = own.word, own.generation
    try:
        broadcast(place)
    except BaseException:
        counter.close()
        raise
    return counter

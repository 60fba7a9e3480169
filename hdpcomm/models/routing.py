"""Where the rows of a layer with experts go (:class:`Routing`), worked out once for a pass and its recomputation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["HostNumbers", "Routing", "Routings", "chosen_before", "equal_shares", "kept_routing", "routing_before"]


class HostNumbers:
    """Numbers of a tensor on their way to the host. Local.

    On a GPU the copy goes to pinned memory by the current stream: the device goes on with what is issued before
    :meth:`get`, and the host waits for the copy only.

    Args:
        numbers: int64, any shape.
        on_meta: the numbers where those are on the meta device, and have no values.
    """

    def __init__(self, numbers: Tensor, on_meta: Sequence[int] = ()) -> None:
        self._found: Sequence[int] | None = on_meta if numbers.is_meta else None
        self._ready: torch.cuda.Event | None = None
        self._copy = numbers
        if numbers.is_cuda:
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(numbers.device))

    def get(self) -> Sequence[int]:
        """The numbers, flat. The first call waits for the copy."""
        if self._found is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._found = self._copy.flatten().tolist()
            self._copy, self._ready = torch.empty(0), None
        return self._found


def equal_shares(count: int, parts: int) -> list[int]:
    """How many of ``count`` rows each of the parts gets that are as equal as can be. Local."""
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The rows of one pass through a layer with experts.

    Attributes:
        chosen: ``[tokens, top_k]``, the experts of each token; integers of any size.
        experts: of the layer.
        sizes: without a group the rows for each expert. With one, three lists one after the other: rows for each rank,
            rows from each rank, and rows of each expert on this rank; ``None`` where the group's exchange is bounded.
        received: with a group, int64 ``[ranks x own experts]``: rows from each rank for each expert on this rank.
        bounds: of a bounded exchange, the most rows that each rank can have for any one.
    """

    chosen: Tensor
    experts: int
    sizes: HostNumbers | None
    received: Tensor | None = None
    bounds: tuple[int, ...] = ()


class Routings:
    """The routings of the layers inside of a recomputed block, in the order of its forward pass. Local.

    Recomputation takes them over. So it sends each token to the experts that it was sent to, also where kernels that
    do not repeat their bits would choose other ones, and nobody asks for counts again.
    """

    def __init__(self) -> None:
        self._made: list[Routing] = []

    def forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of the block."""
        return _Block(self._made, again=False)

    def again(self) -> AbstractContextManager[None]:
        """Surrounds its recomputation, on any thread and any number of times."""
        return _Block(self._made, again=True)


@dataclass(slots=True)
class _Place:
    """Where a thread is in a block."""

    made: list[Routing]
    again: bool
    next: int = 0


class _Current(threading.local):
    """The innermost block of this thread, since ranks may be threads of one process."""

    place: _Place | None = None


_current = _Current()


class _Block:
    def __init__(self, made: list[Routing], *, again: bool) -> None:
        self._made, self._again = made, again
        self._before: list[_Place | None] = []

    def __enter__(self) -> None:
        self._before.append(_current.place)
        _current.place = _Place(self._made, self._again)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.place = self._before.pop()


def kept_routing(routing: Routing) -> Routing:
    """Returns the routing; inside a block that will be recomputed it is kept, with experts as small numbers. Local."""
    place = _current.place
    if place is not None and not place.again:
        small = next(t for t in (torch.uint8, torch.int16, torch.int64) if routing.experts <= torch.iinfo(t).max + 1)
        place.made.append(replace(routing, chosen=routing.chosen.to(small)))
    return routing


def routing_before() -> Routing | None:
    """In recomputation, the routing of the next layer with experts in the block. Local."""
    place = _current.place
    if place is None or not place.again or place.next >= len(place.made):
        return None
    place.next += 1
    return place.made[place.next - 1]


def chosen_before() -> Tensor | None:
    """In recomputation, the experts ``[tokens, top_k]`` int64 that :func:`routing_before` is about to give. Local."""
    place = _current.place
    if place is None or not place.again or place.next >= len(place.made):
        return None
    return place.made[place.next].chosen.long()

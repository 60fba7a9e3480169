"""Parameters side by side in flat memory, cut into equal parts among the ranks that hold them: :class:`Bucket`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hdpcomm.comm.topology import nodes_of
from hdpcomm.comm.window import Window
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.train.state.layout import Holders, Layout

__all__ = ["BUCKET_BYTES", "Bucket", "BucketShards", "Sharding", "SharedShards", "make_buckets"]

BUCKET_BYTES = 32 << 20
"""Long enough for the wire, short enough that the first bucket leaves early."""

_ALIGNED = 16
"""Elements to whose multiple a rank's piece is rounded up, so that pieces begin at whole cache lines."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The ranks that have parts of what some ranks hold alike.

    Attributes:
        owners: each has a part; ``None``: every rank has all of it.
        across: the ranks that have the same part as this one; ``None``: it is the only one.
    """

    owners: Communicator | None
    across: Communicator | None

    @property
    def parts(self) -> int:
        return 1 if self.owners is None else self.owners.size

    @property
    def own(self) -> int:
        """The part of this rank."""
        return 0 if self.owners is None else self.owners.rank

    @property
    def first(self) -> bool:
        """Whether this rank is the first of those that have its part."""
        return self.across is None or self.across.rank == 0

    @property
    def pieces(self) -> int:
        """Into how many pieces a part is cut, of which each rank that has it updates one."""
        return 1 if self.owners is None or self.across is None else self.across.size

    @property
    def updates_alone(self) -> bool:
        """Whether no other rank updates what this one does, or this is the first of those."""
        return self.owners is not None or self.first

    @classmethod
    def of(cls, replicas: Communicator, zero: int) -> Sharding:
        """Sharding of ZeRO's stages (Rajbhandari et al., arXiv 1910.02054): 1 cuts among all replicas, 2 and 3 among
        those of a host, where each reads and writes the memory of the others, and the optimizer's state once more among
        the hosts. Local.

        Raises: InvalidUsage: hosts have other numbers of replicas.
        """
        if zero == 0:
            return cls(None, replicas)
        if zero == 1:
            return cls(replicas, None)
        nodes = nodes_of(replicas)
        hosts: dict[int, list[int]] = {}
        for position, rank in enumerate(replicas.ranks):
            hosts.setdefault(nodes[rank], []).append(position)
        sizes = sorted({len(positions) for positions in hosts.values()})
        if len(sizes) > 1:
            raise InvalidUsage(
                f"zero={zero} cuts weights and gradients among the replicas of a host, and of the {replicas.size} "
                f"ranks {list(replicas.ranks)} hosts have {' or '.join(map(str, sizes))}; place as many on each host "
                "(Mesh(placement=)), or give zero=1"
            )
        own = hosts[nodes[replicas.global_rank]]
        place = own.index(replicas.rank)
        across = replicas.subset([positions[place] for positions in hosts.values()]) if len(hosts) > 1 else None
        return cls(replicas.subset(own), across)


@dataclass(slots=True)
class Bucket:
    """Parameters with the same holders, one after the other, cut into equal parts.

    Attributes:
        holders: the ranks that hold the same parameters.
        shared: (first element, element after the last) from ``start`` on that ``holders.alike`` hold, too.
        sharding: the ranks that have parts of them, of the optimizer's state and of the sums of gradients.
        start: place of its first element in the flat buffer of all buckets.
        offsets: of each parameter, from ``start``.
        part: elements of one part; the last part ends with padding.
        piece: elements of a part that one rank updates: all, unless hosts share the optimizer's state.
    """

    holders: Holders
    sharding: Sharding
    start: int = 0
    part: int = 0
    piece: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    elements: int = 0

    @property
    def parts(self) -> int:
        """Into how many parts it is cut."""
        return self.sharding.parts

    @property
    def length(self) -> int:
        """Elements, with the padding."""
        return self.part * self.parts

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's part of ``[length]``: a view."""
        return whole[self.sharding.own * self.part : (self.sharding.own + 1) * self.part]

    def own_piece(self, part: Tensor) -> Tensor:
        """The piece of this rank's part ``[part]`` that it updates: a view."""
        return part[self._piece * self.piece : (self._piece + 1) * self.piece]

    @property
    def _piece(self) -> int:
        across = self.sharding.across
        return across.rank if across is not None and self.sharding.pieces > 1 else 0

    def spans(self, part: int) -> Iterator[tuple[nn.Parameter, int, int, slice]]:
        """For each parameter the first and last (exclusive) of its elements in a part, equal if there are none, and
        where they are in the part."""
        return self._spans(part * self.part, self.part)

    def piece_spans(self) -> Iterator[tuple[nn.Parameter, int, int, slice]]:
        """:meth:`spans` of the piece that this rank updates."""
        return self._spans(self.sharding.own * self.part + self._piece * self.piece, self.piece)

    def _spans(self, first: int, count: int) -> Iterator[tuple[nn.Parameter, int, int, slice]]:
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            begin, size = first - offset, parameter.numel()
            start, stop = min(max(begin, 0), size), min(max(begin + count, 0), size)
            yield parameter, start, stop, slice(start - begin, stop - begin)

    def split_shared(self, piece: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of what this rank updates, ``[piece]``: those that ``holders.alike`` hold, too, and the others."""
        if not self.holders.mixed:
            return [piece], []
        first = self.sharding.own * self.part + self._piece * self.piece
        edges = [0, *(min(max(edge - first, 0), self.piece) for span in self.shared for edge in span), self.piece]
        views = [piece[start:stop] for start, stop in itertools.pairwise(edges)]
        return [each for each in views[1::2] if each.numel()], [each for each in views[::2] if each.numel()]

    def add(self, parameter: nn.Parameter, shared: Iterable[tuple[int, int]]) -> None:
        self.parameters.append(parameter)
        self.shared += ((self.elements + start, self.elements + stop) for start, stop in shared)
        self.offsets.append(self.elements)
        self.elements += parameter.numel()


def make_buckets(
    parameters: Iterable[nn.Parameter],
    layout: Layout,
    *,
    zero: int = 0,
    elements: float = float("inf"),
    group_of: Callable[[nn.Parameter], Hashable] = lambda _: None,
) -> list[Bucket]:
    """Buckets of about ``elements`` elements, in the order in which a backward pass ends them: from the last parameter.

    The same on all ranks that hold the same parameters. Local.

    Args:
        group_of: parameters with other keys are never in one bucket.
    """
    shardings: dict[int, Sharding] = {}
    open_buckets: dict[tuple[int, Hashable], Bucket] = {}
    buckets: list[Bucket] = []
    for parameter in reversed(list(parameters)):
        placement = layout.of(parameter)
        holders = placement.holders
        key = id(holders), group_of(parameter)
        if key not in open_buckets:
            if id(holders) not in shardings:
                shardings[id(holders)] = Sharding.of(holders.replicas, zero)
            open_buckets[key] = Bucket(holders, shardings[id(holders)])
        bucket = open_buckets[key]
        bucket.add(parameter, placement.shared)
        if bucket.elements >= elements:
            buckets.append(open_buckets.pop(key))
    buckets += open_buckets.values()
    start = 0
    for bucket in buckets:
        bucket.start = start
        pieces = bucket.sharding.pieces
        bucket.piece = -(-bucket.elements // (bucket.parts * pieces * _ALIGNED)) * _ALIGNED
        bucket.part = pieces * bucket.piece
        start += bucket.length
    return buckets


_ALIGNED_BYTES = 64
"""Bytes to whose multiple parts begin: a cache line."""


@dataclass(slots=True)
class BucketShards:
    """The shards of one bucket, in the memory of their owners.

    Attributes:
        count: elements of a part.
        word: of each owner's window, which tells how many have added to its part.
    """

    owners: Communicator
    count: int
    dtype: torch.dtype
    offset: int
    word: int
    window: Window | None = None

    def part(self, owner: int) -> Tensor:
        """``[count]``, a view of the owner's memory."""
        assert self.window is not None
        return self.window.tensor(owner, self.offset, self.count, self.dtype)

    @property
    def own(self) -> Tensor:
        return self.part(self.owners.rank)


class SharedShards:
    """Collects what is to lie in shared memory, and makes one window for each set of owners."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, ...], list[BucketShards]] = {}
        self.windows: list[Window] = []
        self.made: list[BucketShards] = []
        """All that are in the windows."""

    def reserve(self, bucket: Bucket, dtype: torch.dtype) -> BucketShards:
        """The shards of a bucket, whose memory :meth:`make` brings. Local; in one order on all owners."""
        owners = bucket.sharding.owners
        assert owners is not None
        wanted = self._wanted.setdefault(owners.ranks, [])
        end = wanted[-1].offset + wanted[-1].count * wanted[-1].dtype.itemsize if wanted else 0
        made = BucketShards(owners, bucket.part, dtype, -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES, len(wanted))
        wanted.append(made)
        return made

    def make(self) -> None:
        """Collective over all owners, which have reserved alike."""
        for wanted in self._wanted.values():
            last = wanted[-1]
            window = Window(last.owners, words=len(wanted), nbytes=last.offset + last.count * last.dtype.itemsize)
            for parts in wanted:
                parts.window = window
            self.windows.append(window)
            self.made += wanted
        self._wanted.clear()

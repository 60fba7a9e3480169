"""Images and frames of videos among the tokens of sequences: which rank encodes each, and who gets its embeddings."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.table import MicroBatch
from hdpcomm.plan.tree import TrajectoryTree

__all__ = ["Item", "ItemExchange", "PlacedItems", "place_items"]

_Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a sequence whose embeddings an encoder makes by itself: an image, or a frame of a video.

    Attributes:
        start: of the sequence's tokens, the first that stands for the item.
        tokens: so many stand for it, one after the other.
        patches: rows that the encoder computes for it.
    """

    start: int
    tokens: int
    patches: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacedItems:
    """All items of a step, by what is planned and their places there, and the device that encodes each.

    Attributes:
        items: of each sequence of the batch.
        sources: of each length or tree that is planned, its sequence, or the trajectories of its tree.
        place, start, tokens, device: int64 ``[items]``: the place among what is planned, the first token there, how
            many there are, and the device. Devices are numbered by stage, HDP rank and tensor rank.
        sequence, number: int64 ``[items]``: of which sequence it is taken, and which of its items it is there.
        first_row: int64 ``[items + 1]``: the embeddings of all items, one after the other, begin and end there.
        tensor: tensor ranks of each HDP rank.
    """

    items: Sequence[Sequence[Item]]
    sources: Sequence[int | TrajectoryTree]
    place: _Rows
    start: _Rows
    tokens: _Rows
    device: _Rows
    sequence: _Rows
    number: _Rows
    first_row: _Rows
    tensor: int

    def digest(self) -> str:
        """Equal for equal items at equal places."""
        columns = (self.place, self.start, self.tokens, self.device, self.sequence, self.number)
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()

    def of_device(self, device: int) -> _Rows:
        """Numbers of the items that a device encodes."""
        return np.flatnonzero(self.device == device)

    def rows_of(self, place: int, length: int) -> _Rows:
        """int64 ``[length]``: for each token of a sequence or tree the row of its embedding among those of all items,
        or -1."""
        rows = np.full(length, -1, dtype=np.int64)
        for item in range(*np.searchsorted(self.place, (place, place + 1))):
            start, count, first = self.start[item], self.tokens[item], self.first_row[item]
            rows[start : start + count] = np.arange(first, first + count)
        return rows


def place_items(
    items: Sequence[Sequence[Item]],
    lengths: Sequence[int],
    devices: int,
    seconds: Callable[[int], float],
    *,
    tensor: int = 1,
    sources: Sequence[int | TrajectoryTree] | None = None,
) -> PlacedItems:
    """Deals the items to devices, the longest first, each to the one that has least to do: all encode before the passes
    of the plan, which are even themselves. The same on all ranks that are given the same. Local.

    Args:
        items: of each sequence, by rising places.
        lengths: tokens of each sequence.
        seconds: that encoding so many patches takes, of an item by itself.
        tensor: tensor ranks of each HDP rank.
        sources: of what is planned; trajectories that share an image have it once. ``None``: the sequences.

    Raises: InvalidUsage: other numbers of sequences, items that overlap or do not lie inside of theirs, or that a tree
        has in part.
    """
    if len(items) != len(lengths):
        raise InvalidUsage(f"items of {len(items)} sequences were given for {len(lengths)}; give a list for each")
    for place, (own, length) in enumerate(zip(items, lengths, strict=True)):
        end = 0
        for item in own:
            if item.start < end or item.tokens < 1 or item.patches < 1 or item.start + item.tokens > length:
                raise InvalidUsage(
                    f"sequence {place} of {length} tokens has {item} behind one that ends at {end}; give items with "
                    "tokens of their own inside of the sequence, by rising places"
                )
            end = item.start + item.tokens
    sources = range(len(lengths)) if sources is None else sources
    flat = [(place, *each) for place, source in enumerate(sources) for each in _items_of(source, items)]
    work = [seconds(items[sequence][number].patches) for *_, sequence, number in flat]
    heap = [(0.0, device) for device in range(devices)]
    by_device = np.zeros(len(flat), dtype=np.int64)
    for each in sorted(range(len(flat)), key=lambda each: -work[each]):
        busy, by_device[each] = heap[0]
        heapq.heapreplace(heap, (busy + work[each], heap[0][1]))
    place, start, tokens, sequence, number = np.array(flat, dtype=np.int64).reshape(-1, 5).T
    first_row = np.concatenate(([0], np.cumsum(tokens)))
    return PlacedItems(items, sources, place, start, tokens, by_device, sequence, number, first_row, tensor)


def _items_of(source: int | TrajectoryTree, items: Sequence[Sequence[Item]]) -> list[tuple[int, int, int, int]]:
    """(first token, tokens, sequence, number there) of each item of a sequence, or of a tree of them."""
    if isinstance(source, int):
        return [(item.start, item.tokens, source, number) for number, item in enumerate(items[source])]
    found: dict[int, tuple[int, int, int, int]] = {}
    for sequence in source.trajectories:
        places = source.token_places(sequence)
        for number, item in enumerate(items[sequence]):
            first, last = int(places[item.start]), int(places[item.start + item.tokens - 1])
            _, tokens, other, at = found.setdefault(first, (first, item.tokens, sequence, number))
            if last - first + 1 != item.tokens or tokens != item.tokens or items[other][at].patches != item.patches:
                raise InvalidUsage(
                    f"sequence {sequence} shares a part of {item} with {list(source.trajectories)}; give trees= whose "
                    "sequences share images as a whole"
                )
    return [found[first] for first in sorted(found)]


@dataclass(frozen=True, slots=True, eq=False)
class ItemExchange:
    """Which embeddings a device sends to the others, and gets from them, in one all-to-all; each goes to the one device
    that has its token between layers.

    Attributes:
        sent: int64, of the embeddings that this device has made those for device 0, then those for device 1, ...
        send_counts, receive_counts: ``[devices]``.
        order: int64, for each received embedding its place among those that this device wants.
        wanted: for each micro-batch of this device, by index, (its first place among those, the local rows that take
            them).
    """

    sent: _Rows
    send_counts: list[int]
    receive_counts: list[int]
    order: _Rows
    wanted: dict[int, tuple[int, _Rows]]

    @classmethod
    def of(
        cls, placed: PlacedItems, batches: Iterable[MicroBatch], rows_of: Callable[[MicroBatch, int], _Rows],
        device: int, devices: int,
    ) -> ItemExchange:  # fmt: skip
        """The exchange of a plan's micro-batches, for a device. Local.

        Args:
            rows_of: ``rows_of(batch, place)``: for each token of the shard of the rank at that place in the
                micro-batch, what :meth:`PlacedItems.rows_of` says.
        """
        first, tensor = placed.first_row, placed.tensor
        owner = np.repeat(placed.device, placed.tokens)
        own = np.flatnonzero(owner == device)
        local = np.full(int(first[-1]), -1, dtype=np.int64)
        local[own] = np.arange(len(own))
        sends: list[list[_Rows]] = [[] for _ in range(devices)]
        gets: list[_Rows] = []
        wanted: dict[int, tuple[int, _Rows]] = {}
        count = 0
        for batch in batches:
            for place, rank in enumerate(batch.ranks):
                shard = rows_of(batch, place)
                block = -(-len(shard) // tensor)
                for part in range(tensor):
                    rows = shard[part * block : (part + 1) * block]
                    here = np.flatnonzero(rows >= 0)
                    rows = rows[here]
                    sends[rank * tensor + part].append(local[rows][owner[rows] == device])
                    if rank * tensor + part == device and len(rows):
                        wanted[batch.index] = (count, here)
                        gets.append(owner[rows])
                        count += len(rows)
        nothing = np.zeros(0, dtype=np.int64)
        owners = np.concatenate([*gets, nothing])
        return cls(
            np.concatenate([*(part for parts in sends for part in parts), nothing]),
            [sum(map(len, parts)) for parts in sends],
            np.bincount(owners, minlength=devices).tolist(),
            np.argsort(owners, kind="stable"),
            wanted,
        )

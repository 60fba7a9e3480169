"""Images and frames of videos among the tokens of sequences: which rank encodes each, and who gets its embeddings."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.plan.micro_batch import MicroBatch

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
    """All items of a step, in the order of their sequences, and the rank that encodes each.

    Attributes:
        items: of each sequence.
        sequence, start, tokens, device: int64 ``[items]``; ``device``: that encodes it. Devices are numbered by stage,
            HDP rank and tensor rank.
        first_row: int64 ``[items + 1]``: the embeddings of all items, one after the other, begin and end there.
        tensor: tensor ranks of each HDP rank.
    """

    items: Sequence[Sequence[Item]]
    sequence: _Rows
    start: _Rows
    tokens: _Rows
    device: _Rows
    first_row: _Rows
    tensor: int

    def digest(self) -> str:
        """Equal for equal items at equal places."""
        columns = (self.sequence, self.start, self.tokens, self.device)
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()

    def of_device(self, device: int) -> _Rows:
        """Numbers of the items that a device encodes."""
        return np.flatnonzero(self.device == device)

    def rows_of(self, sequence: int, length: int) -> _Rows:
        """int64 ``[length]``: for each token of a sequence the row of its embedding among those of all items, or -1."""
        rows = np.full(length, -1, dtype=np.int64)
        for item in range(*np.searchsorted(self.sequence, (sequence, sequence + 1))):
            start, count, first = self.start[item], self.tokens[item], self.first_row[item]
            rows[start : start + count] = np.arange(first, first + count)
        return rows


def place_items(
    items: Sequence[Sequence[Item]],
    lengths: Sequence[int],
    devices: int,
    seconds: Callable[[int], float],
    tensor: int = 1,
) -> PlacedItems:
    """Deals the items to devices, the longest first, each to the one that has least to do: all encode before the passes
    of the plan, which are even themselves. The same on all ranks that are given the same. Local.

    Args:
        items: of each sequence, by rising places.
        lengths: tokens of each sequence.
        seconds: that encoding so many patches takes, of an item by itself.
        tensor: tensor ranks of each HDP rank.

    Raises: InvalidUsage: other numbers of sequences, or items that overlap or do not lie inside of theirs.
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
    flat = [(place, item) for place, own in enumerate(items) for item in own]
    work = [seconds(item.patches) for _, item in flat]
    heap = [(0.0, device) for device in range(devices)]
    by_device = np.zeros(len(flat), dtype=np.int64)
    for number in sorted(range(len(flat)), key=lambda number: -work[number]):
        busy, by_device[number] = heap[0]
        heapq.heapreplace(heap, (busy + work[number], heap[0][1]))
    tokens = np.array([item.tokens for _, item in flat], dtype=np.int64)
    return PlacedItems(
        items,
        np.array([place for place, _ in flat], dtype=np.int64),
        np.array([item.start for _, item in flat], dtype=np.int64),
        tokens,
        by_device,
        np.concatenate(([0], np.cumsum(tokens))),
        tensor,
    )


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

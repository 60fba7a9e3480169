"""Which rank holds which tokens of a pack: as pieces of sequences, or of the segments of a tree.

Each plain sequence of a pack is cut into 2N pieces; rank r of N holds pieces r and 2N-1-r, its *head* and its *tail*,
so that under a causal mask every rank has the same work for every sequence. Piece sizes differ by at most one token,
and the longer pieces are distributed so that the ranks' totals over the pack differ by at most one: any length and any
N, without padding. A rank's rows are [head of sequence 0, tail of sequence 0, head of sequence 1, ...]. Source:
ByteScale (arXiv 2502.21231) section 7.

Pure and local: every rank computes the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from hdpcomm._core import kernels as _core
from hdpcomm.attention.rows import Rows
from hdpcomm.attention.tiles import Atoms, Band, Int64, Span, Tile, band_of, tiles_of
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import Tree

__all__ = ["Layout", "NO_SPANS", "SequenceLayout", "by_rank", "local_rows", "sequence_layout", "zigzag_holders"]

Window = int | tuple[int, int] | None
NO_SPANS: Int64 = np.zeros((0, 3), dtype=np.int64)


def local_rows(owner: Int64, count: Int64, size: int) -> Int64:
    """First local row of each piece, if every rank holds its pieces one after the other."""
    order = np.argsort(owner, kind="stable")
    owner, count = owner[order], count[order]
    held, row = by_rank(owner, count, size), np.empty_like(count)
    row[order] = np.cumsum(count) - count - (np.cumsum(held) - held)[owner]
    return row


def by_rank(owner: Int64, amount: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """[size]: the sum of ``amount`` of each rank; owners below 0 are left out."""
    mine = owner >= 0
    total: npt.NDArray[Any] = np.bincount(owner[mine], weights=amount[mine], minlength=size).astype(amount.dtype)
    return total


def zigzag_holders(size: int) -> Int64:
    """The ranks of the 2N pieces of a sequence or segment."""
    return np.concatenate([np.arange(size), np.arange(size)[::-1]])


@dataclass(frozen=True, slots=True, eq=False)
class Layout(ABC):
    """Pieces, none empty, by rising row of the pack; each lies in one segment, and a rank holds its pieces in order.

    A segment is a sequence, or a segment of a tree.
    """

    size: int
    """N, the number of ranks."""
    segment: Int64
    """[pieces], never falling."""
    start: Int64
    """[pieces]: position of the first token."""
    source: Int64
    """[pieces]: first row in the pack."""
    count: Int64
    """[pieces]: tokens."""
    owner: Int64
    """[pieces]: the rank."""
    row: Int64
    """[pieces]: first row on the owner."""

    @property
    def sliced(self) -> bool:
        """Whether it is of a slice."""
        return False

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return int(self.count.sum())

    def rows(self, rank: int) -> int:
        """Tokens that ``rank`` holds."""
        return _rows_by_rank(self)[rank]

    def segments(self, rank: int) -> Int64:
        """[pieces of the rank, 3]: (local row, row in the pack, rows)."""
        mine = self.owner == rank
        return np.stack([self.row[mine], self.source[mine], self.count[mine]], axis=1)

    def first_positions(self, rank: int) -> Int64:
        """[pieces of the rank]: position of the first token."""
        first: Int64 = self.start[self.owner == rank]
        return first

    def own_spans(self, rank: int) -> dict[int, list[Span]]:
        """By segment: the tokens of ``rank``, with their rows."""
        mine = self.owner == rank
        spans: dict[int, list[Span]] = {}
        for s, a, n, row in zip(
            *(x[mine].tolist() for x in (self.segment, self.start, self.count, self.row)), strict=True
        ):
            spans.setdefault(s, []).append(Span(a, a + n, row))
        return spans

    def own_runs(self, rank: int) -> dict[int, list[slice]]:
        """By segment: runs of the rows of ``rank``."""
        spans = self.own_spans(rank)
        return {segment: [slice(x.row, x.row + x.rows) for x in own] for segment, own in spans.items()}

    def grouped(self, size: int) -> Layout:
        """The layout of groups of ``size`` neighbours; a group holds what its members hold."""
        owner = self.owner // size
        return replace(self, size=self.size // size, owner=owner, row=local_rows(owner, self.count, self.size // size))

    def rows_in(self, whole: Layout, rank: int) -> Rows:
        """Copies from the rows of a rank to the rows in which ``whole``, of the same pack or more, has them."""
        mine = self.owner == rank
        source, count = self.source[mine], self.count[mine]
        piece = np.searchsorted(whole.source, source, side="right") - 1
        return Rows(np.stack([whole.row[piece] + source - whole.source[piece], self.row[mine], count], axis=1))

    @property
    @abstractmethod
    def facts(self) -> tuple[str, str]:
        """Text that is the same on two ranks only if they mean the same pack, and a summary of it for messages."""

    @abstractmethod
    def band(self, causal: bool, window: Window) -> Band:
        """The mask inside a segment, or of a position relative to those on its way from the root. Raises
        InvalidUsage."""

    def windowed(self, band: Band) -> bool:
        """Whether some tile limits the keys on the left."""
        return band.low is not None

    @abstractmethod
    def atoms(self, keys: Layout, band: Band) -> Atoms:
        """All runs of ``keys``, with the ranks whose queries need them."""

    @abstractmethod
    def tiles(self, keys: Layout, rank: int, k_spans: dict[int, list[Span]], band: Band) -> list[Tile]:
        """Tiles of the queries of ``rank`` and the ``keys`` in ``k_spans`` (by segment), each pair once."""

    @abstractmethod
    def pairs(self, keys: Layout, band: Band) -> float:
        """(query, key) pairs that the mask allows, on all ranks; of sequences about how many."""

    def calls(self) -> int:
        """About how many kernel calls a block of keys takes."""
        return max(1, len(self.owner) // self.size)

    def check_attended(self) -> None:  # noqa: B027
        """Raises InvalidUsage for an empty sequence."""


@lru_cache(maxsize=256)
def _rows_by_rank(layout: Layout) -> list[int]:
    rows: list[int] = by_rank(layout.owner, layout.count, layout.size).tolist()
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLayout(Layout):
    """The zigzag of plain sequences."""

    bounds: Int64
    """[sequences, 2N + 1]: first token, inside its sequence, of each piece; the last column holds the lengths."""
    limit: tuple[float, float]
    """``key_limit`` and ``limited`` of a :class:`BalancedPack`; (0, 0): none."""
    spans: Int64
    """[spans, 3]: (sequence, first position, position after the last) whose tokens see all of each other."""
    tree: ClassVar[Tree | None] = None
    """No sequence sees another."""
    slice_bounds: ClassVar[tuple[int, ...]] = ()
    """Slices are of trees, which may be single sequences."""
    number: ClassVar[int] = 0
    first_token: ClassVar[int] = 0

    @property
    def lengths(self) -> Int64:
        """[sequences]"""
        return self.bounds[:, -1]

    @property
    def firsts(self) -> Int64:
        """[sequences]: the first token of each."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def origins(self) -> Int64:
        """[sequences]: the token at position 0."""
        return self.firsts

    @property
    def previous(self) -> Int64:
        """[tokens]: the token before each; -1 for the first of a sequence."""
        before = np.arange(self.tokens) - 1
        before[self.firsts[self.lengths > 0]] = -1
        return before

    @property
    def facts(self) -> tuple[str, str]:
        lengths = self.lengths.tolist()
        shown = str(lengths) if len(lengths) <= 12 else f"{lengths[:12]}..."
        limit = ", balanced for a share of {1:g} over {0:g} keys at most".format(*self.limit) if self.limit[1] else ""
        spans = f", spans {self.spans.tolist()}" if len(self.spans) else ""
        return (
            f"{lengths}{limit}{spans}",
            f"{len(lengths)} sequences with {sum(lengths)} tokens, lengths {shown}{limit}{spans}",
        )

    def local_cu(self, rank: int) -> Int64:
        """[sequences + 1]: running sum of the sequences' tokens on ``rank``."""
        mine = self.owner == rank
        counts = np.bincount(self.segment[mine], weights=self.count[mine], minlength=len(self.bounds))
        return np.concatenate(([0], np.cumsum(counts.astype(np.int64))))

    def own_runs(self, rank: int) -> dict[int, list[slice]]:
        cuts = self.local_cu(rank).tolist()
        return {i: [slice(a, b)] for i, (a, b) in enumerate(pairwise(cuts)) if a < b}

    def grouped(self, size: int) -> SequenceLayout:
        """Group g holds the pieces of ranks g * size .. g * size + size - 1 as one head and one tail."""
        return _of_bounds(np.ascontiguousarray(self.bounds[:, ::size]), self.size // size, spans=self.spans)

    def band(self, causal: bool, window: Window) -> Band:
        if len(self.spans) and not causal:
            raise InvalidUsage("causal=False was given with a SpanPack, whose spans are for causal attention")
        return band_of(causal, window)

    def windowed(self, band: Band) -> bool:
        return band.low is not None or len(self.spans) > 0

    def atoms(self, keys: Layout, band: Band) -> Atoms:
        keys = _sequences(keys)
        needs = self._needs(keys, band)
        cuts = np.sort(np.concatenate([keys.bounds, needs.reshape(len(needs), 4 * self.size)], axis=1), axis=1)
        sequence, column = np.nonzero(cuts[:, :-1] < cuts[:, 1:])
        start, stop = cuts[sequence, column], cuts[sequence, column + 1]
        piece = np.searchsorted(keys.source, keys.firsts[sequence] + start, side="right") - 1
        of_atom, position, owner = needs[sequence], start[:, None, None], keys.owner[piece]
        needed = np.any((of_atom[..., 0] <= position) & (position < of_atom[..., 1]), axis=2)
        needed[np.arange(len(owner)), owner] = False
        return Atoms(sequence, start, stop, owner, keys.row[piece] + start - keys.start[piece], needed)

    def _needs(self, keys: SequenceLayout, band: Band) -> Int64:
        """[sequences, N, 2, 2]: (first, last) key that the head and the tail of each rank see."""
        lengths = keys.lengths
        shift = (lengths - self.lengths)[:, None]
        sequence, first, last = self.spans.T
        needs = np.zeros((len(lengths), self.size, 2, 2), dtype=np.int64)
        for rank in range(self.size):
            pieces = [rank, 2 * self.size - 1 - rank]
            start, stop = self.bounds[:, pieces], self.bounds[:, [p + 1 for p in pieces]]
            low = np.zeros_like(start) if band.low is None else np.maximum(start + shift + band.low, 0)
            high = np.broadcast_to(lengths[:, None], stop.shape)
            if band.high is not None:
                high = np.minimum(high, stop + shift + band.high)
            if len(sequence):
                meets = (start[sequence] < last[:, None]) & (stop[sequence] > first[:, None])
                high = high.copy()
                np.maximum.at(high, sequence, np.where(meets, last[:, None], 0))
            seen = (start < stop) & (low < high)
            needs[:, rank, :, 0] = np.where(seen, low, 0)
            needs[:, rank, :, 1] = np.where(seen, high, 0)
        return needs

    def tiles(self, keys: Layout, rank: int, k_spans: dict[int, list[Span]], band: Band) -> list[Tile]:
        queries, shift = self.own_spans(rank), (_sequences(keys).lengths - self.lengths).tolist()
        tiles = [tile for s, spans in k_spans.items() for tile in tiles_of(queries.get(s, ()), spans, shift[s], band)]
        for s, first, last in self.spans.tolist():
            own, others = (_within(spans.get(s, ()), first, last) for spans in (queries, k_spans))
            tiles += tiles_of(own, others, 0, Band(1, None))
        return tiles

    def pairs(self, keys: Layout, band: Band) -> float:
        lengths = self.lengths.tolist(), _sequences(keys).lengths.tolist()
        within = float((np.diff(self.spans[:, 1:]) ** 2).sum()) / 2
        return sum(_pairs(n, m, band) for n, m in zip(*lengths, strict=True)) + within

    def calls(self) -> int:
        return max(1, int((self.lengths > 0).sum()))

    def check_attended(self) -> None:
        if (empty := np.flatnonzero(self.lengths == 0)).size:
            raise InvalidUsage(
                f"sequence {empty[0]} of cu_seqlens is empty ({len(empty)} of {len(self.lengths)} are): leave it out; "
                "a length of 0 is mostly a mistake in the code that computes cu_seqlens"
            )


def _sequences(keys: Layout) -> SequenceLayout:
    return cast(SequenceLayout, keys)  # queries of plain sequences see no others


def _within(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """The parts of spans at positions [first, last)."""
    cut = (Span(max(a, first), min(b, last), row + max(0, first - a)) for a, b, row in spans)
    return [span for span in cut if span.start < span.stop]


def _pairs(n: int, m: int, band: Band) -> float:
    """About how many pairs of n queries and m keys the mask allows."""
    if n == 0 or m == 0:
        return 0.0
    first, last = band.keys(m - n, m - n + 1, m), band.keys(m - 1, m, m)
    return n * (max(0, first[1] - first[0]) + max(0, last[1] - last[0])) / 2


@lru_cache(maxsize=256)
def sequence_layout(cu_seqlens: bytes, size: int, limit: tuple[float, float], spans: bytes) -> SequenceLayout:
    """``cu_seqlens``, and ``spans`` [n, 3] as of :class:`SequenceLayout`: of int64 numbers."""
    bounds = _core.zigzag_bounds(np.frombuffer(cu_seqlens, dtype=np.int64), size, *limit)
    return _of_bounds(bounds, size, limit, np.frombuffer(spans, dtype=np.int64).reshape(-1, 3))


def _of_bounds(
    bounds: Int64, size: int, limit: tuple[float, float] = (0.0, 0.0), spans: Int64 = NO_SPANS
) -> SequenceLayout:
    bounds.setflags(write=False)
    counts = np.diff(bounds, axis=1)
    segment, piece = np.nonzero(counts)
    start, count, owner = bounds[segment, piece], counts[segment, piece], zigzag_holders(size)[piece]
    first = (np.cumsum(bounds[:, -1]) - bounds[:, -1])[segment]
    row = local_rows(owner, count, size)
    return SequenceLayout(size, segment, start, first + start, count, owner, row, bounds, limit, spans)

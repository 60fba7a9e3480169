"""Masks as tiles: rectangles of local queries x keys of a buffer, each with at most one diagonal band; and atoms, the
runs of keys that the same ranks need, by which messages and tiles are planned.

Query i of a sequence sees key j iff ``low <= j - (i + length_k - length_q) <= high``: causal is high = 0, a sliding
window bounds low, and different lengths are aligned at their ends (as in flash-attn). Everything here is pure and
local.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hdpcomm.arguments import check_whole
from hdpcomm.errors import InvalidUsage

__all__ = [
    "Atoms", "Band", "Int64", "Span",   "Tile", "atom_spans", "band_of", "band_tile", "join_tiles",
    "pairs_before", "run_starts", "tiles_of", "window_pair",
]  # fmt: skip

Int64: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Band:
    """The keys that a query sees, relative to the key at its own position; None means no limit."""

    low: int | None
    high: int | None

    def keys(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """[first, last) of the keys 0..length that queries at key positions [start, stop) see."""
        if start >= stop:
            return 0, 0
        first = 0 if self.low is None else max(0, start + self.low)
        last = length if self.high is None else min(length, stop + self.high)
        return (first, last) if first < last else (0, 0)


def window_pair(window: int | tuple[int, int] | None) -> tuple[int, int]:
    """``window`` as (left, right), -1 for no limit. Raises InvalidUsage."""
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)):
        width = check_whole("attention", "window, the keys that a query sees, itself included,", window, least=1)
        return width - 1, width - 1
    if len(window) != 2:
        raise InvalidUsage(f"window={window}; expected (left, right), or the number of keys that a query sees")
    try:
        left, right = (check_whole("attention", "window", side, least=-1) for side in window)
    except InvalidUsage as error:
        raise InvalidUsage(f"window={window}; expected (left, right), each at least 0, or -1 for no limit") from error
    return left, right


def band_of(causal: bool, window: int | tuple[int, int] | None) -> Band:
    """The band of ``causal`` and ``window``, as :func:`hdpcomm.attention.ring_attention` describes them."""
    left, right = window_pair(window)
    return Band(None if left == -1 else -left, 0 if causal else None if right == -1 else right)


class Span(NamedTuple):
    """Consecutive tokens of one sequence in consecutive local rows: positions [start, stop) from row ``row`` on.

    A tuple, like :class:`Tile`, since a plan creates thousands of them.
    """

    start: int
    stop: int
    row: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Tile(NamedTuple):
    """Queries [q_start, q_stop) x keys [k_start, k_stop), as rows of the tensors that a backend gets.

    The a-th query of the tile sees its b-th key iff ``low <= b - a <= high`` (None: no limit). Every query of the
    tile sees at least one of its keys, every key is seen, and a limit that hides nothing is None.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int | None = None
    high: int | None = None

    @property
    def full(self) -> bool:
        return self.low is None and self.high is None

    @property
    def num_q(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_k(self) -> int:
        return self.k_stop - self.k_start

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the mask allows."""
        if self.full:
            return self.num_q * self.num_k
        low = -self.num_q if self.low is None else self.low
        high = self.num_k if self.high is None else self.high
        return sum(min(self.num_k - 1, a + high) - max(0, a + low) + 1 for a in range(self.num_q))


def band_tile(q: Span, k: Span, shift: int, band: Band) -> Tile | None:
    """The part of q x k inside the band, or None; ``shift`` = length_k - length_q, 0 in a tree."""
    n, m = q.rows, k.rows
    offset = q.start + shift - k.start
    if band.low is None and (band.high is None or offset + band.high >= m - 1):
        return Tile(q.row, q.row + n, k.row, k.row + m)  # fully visible, like most pairs of pieces
    low = None if band.low is None else band.low + offset
    high = None if band.high is None else band.high + offset
    first_q = 0 if high is None else max(0, -high)  # query a sees keys a + low .. a + high
    last_q = n if low is None else min(n, m - low)
    if first_q >= last_q:
        return None
    first_k = 0 if low is None else max(0, first_q + low)
    last_k = m if high is None else min(m, last_q + high)
    if first_k >= last_k:
        return None
    n, m = last_q - first_q, last_k - first_k
    low = None if low is None else low + first_q - first_k
    high = None if high is None else high + first_q - first_k
    return Tile(
        q.row + first_q,
        q.row + last_q,
        k.row + first_k,
        k.row + last_k,
        None if low is None or low <= 1 - n else low,
        None if high is None or high >= m - 1 else high,
    )


def pairs_before(position: Int64, band: Band) -> Int64:
    """Pairs of the queries at positions 0 to ``position`` - 1 of one way through the tree."""
    inside = position if band.low is None else np.minimum(position, 1 - band.low)
    pairs: Int64 = inside * (inside + 1) // 2 + (position - inside) * (0 if band.low is None else 1 - band.low)
    return pairs


def _joined(first: Tile, second: Tile) -> Tile | None:
    """The union of two adjacent unmasked tiles, or None if they are not."""
    if not (first.full and second.full):
        return None
    if (first.q_start, first.q_stop) == (second.q_start, second.q_stop) and first.k_stop == second.k_start:
        return first._replace(k_stop=second.k_stop)
    if (first.k_start, first.k_stop) == (second.k_start, second.k_stop) and first.q_stop == second.q_start:
        return first._replace(q_stop=second.q_stop)
    return None


def join_tiles(tiles: Iterable[Tile]) -> list[Tile]:
    """The tiles, neighbours in the list joined where their union is an unmasked tile."""
    joined: list[Tile] = []
    for tile in tiles:
        together = _joined(joined[-1], tile) if joined else None
        if together is None:
            joined.append(tile)
        else:
            joined[-1] = together
    return joined


def _one_triangle(q_spans: Sequence[Span], k_spans: Sequence[Span], shift: int, band: Band) -> Tile | None:
    """The causal square of a rank's own tokens as one tile: head and tail are in the order of positions. Or None."""
    if band != Band(None, 0) or shift != 0 or len(q_spans) != len(k_spans):
        return None
    if any((q.start, q.stop) != (k.start, k.stop) for q, k in zip(q_spans, k_spans, strict=True)):
        return None
    for spans in (q_spans, k_spans):
        if any(b.row != a.row + a.rows for a, b in pairwise(spans)):
            return None
    q, k = q_spans[0], k_spans[0]
    rows = sum(span.rows for span in q_spans)
    return Tile(q.row, q.row + rows, k.row, k.row + rows, None, 0 if rows > 1 else None)


def tiles_of(q_spans: Sequence[Span], k_spans: Sequence[Span], shift: int, band: Band) -> list[Tile]:
    """Tiles of one sequence: all pairs of ``q_spans`` x ``k_spans`` inside ``band``, each exactly once, in a fixed
    order.

    Spans are in the order of positions; ``shift`` = length_k - length_q.
    """
    q_spans = [span for span in q_spans if span.rows]
    k_spans = [span for span in k_spans if span.rows]
    if not q_spans or not k_spans:
        return []
    if (triangle := _one_triangle(q_spans, k_spans, shift, band)) is not None:
        return [triangle]
    by_query = [join_tiles(t for k in k_spans if (t := band_tile(q, k, shift, band)) is not None) for q in q_spans]
    return join_tiles(tile for tiles in by_query for tile in tiles)


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Runs of keys of one sequence and one owner that the same ranks need, ordered by (sequence, position)."""

    sequence: Int64
    """The segment of a tree that the keys are of."""
    start: Int64
    stop: Int64
    owner: Int64
    row: Int64
    """First row on the owner."""
    needed: npt.NDArray[np.bool_]
    """[atoms, N]: whether the rank needs the atom; False for the owner."""

    @property
    def rows(self) -> Int64:
        return self.stop - self.start


def run_starts(*joints: npt.NDArray[np.bool_]) -> Int64:
    """Where runs begin; each of ``joints`` says, for items 1, 2, ..., whether they continue the item before."""
    return np.concatenate(([0], np.flatnonzero(~np.logical_and.reduce(joints)) + 1))


def atom_spans(atoms: Atoms, chosen: Int64, row: Int64) -> dict[int, list[Span]]:
    """For each sequence: runs of the atoms ``chosen`` that are consecutive both in the sequence and in the buffer."""
    if not len(chosen):
        return {}
    sequence, start, stop = atoms.sequence[chosen], atoms.start[chosen], atoms.stop[chosen]
    first = run_starts(
        sequence[1:] == sequence[:-1], start[1:] == stop[:-1], row[1:] == row[:-1] + stop[:-1] - start[:-1]
    )
    last = np.concatenate((first[1:], [len(chosen)])) - 1
    spans: dict[int, list[Span]] = {}
    for s, a, b, r in np.stack([sequence[first], start[first], stop[last], row[first]], axis=1).tolist():
        spans.setdefault(s, []).append(Span(a, b, r))
    return spans

"""Sharding of prefix trees, and of slices of them: every rank gets the same share of the work and as many tokens.

Whole subtrees go to one rank each, so that their keys stay there. Where that leaves the ranks unequal, the heaviest
subtree is opened: its first segment is cut in 2N pieces, of which rank r holds r and 2N-1-r (a zigzag, as of a plain
sequence), and its child subtrees are dealt anew. The work of a query is its position, which grows evenly along a
segment, so such a segment is equal work for all ranks wherever it hangs in the tree. The pieces of the longest opened
segment are sized so that the ranks' tokens differ by at most one.

Each slice of a tree is dealt so by itself; what ranks keep of the slices before it are pieces of the same tree. A plain
sequence in slices is a tree of one segment.

Pure and local: every rank computes the same from the tree.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from hdpcomm._core import kernels as _core
from hdpcomm.attention.layout import Layout, SequenceLayout, Window, by_rank, local_rows, zigzag_holders
from hdpcomm.attention.tiles import (
    Atoms,
    Band,
    Int64,
    Span,
    Tile,
    band_of,
    band_tile,
    join_tiles,
    pairs_before,
    tiles_of,
)
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import Tree

__all__ = [
    "ONLY_SEQUENCES",
    "TokenLayout",
    "TreeLayout",
    "chunked",
    "past_tokens",
    "seen_keys",
    "slice_layouts",
    "tree_layout",
]

ONLY_SEQUENCES = "chunks are of causal attention over plain sequences"
Floats = npt.NDArray[np.float64]
_ALL_RANKS = -1
"""Owner of a segment of which all ranks hold a share."""
_SLACK = 1 / 32
"""How far the busiest rank's work may be above the mean before another subtree is opened."""
_NEVER = np.iinfo(np.int64).max // 2


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout(Layout):
    """Which rank holds which tokens of a tree, or of chunks that see nothing of each other (trees of one segment).

    In a slice: which holds its own tokens, whose rows are numbered from its first one, or all up to its end.
    """

    tree: Tree
    slice_bounds: tuple[int, ...] = ()
    """Where the slices of the tree begin, and its tokens, depth-first; empty: it is whole."""
    number: int = 0
    """The slice whose queries these are, or see these."""

    @property
    def facts(self) -> tuple[str, str]:
        parts = self.tree.parents, self.tree.lengths, self.owner, self.count
        digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
        description = f"a tree of {len(self.tree)} segments with {self.tree.num_tokens} tokens, {self.tree!r}"
        if not self.slice_bounds:
            return digest, description
        what = f"slice {self.number} of a sequence that is cut at {list(self.slice_bounds)}"
        return f"{digest} {self.number} {self.slice_bounds}", what if len(self.tree) == 1 else f"{what}, {description}"

    @property
    def sliced(self) -> bool:
        return bool(self.slice_bounds)

    @property
    def lengths(self) -> Int64:
        """[segments]: tokens of each."""
        return self.tree.lengths

    @property
    def firsts(self) -> Int64:
        """[segments]: the first token of each in the whole tree."""
        return self.tree.rows

    @property
    def origins(self) -> Int64:
        """[segments]: the token at position 0, if the way to a segment lay right before it."""
        return self.tree.rows - self.tree.starts

    @property
    def previous(self) -> Int64:
        """[tokens of the whole tree]: the token before each on its way from the root; -1 for a first one."""
        return self.tree.previous

    @property
    def first_token(self) -> int:
        """The token of the tree that is row 0 of the pack; not 0 in a slice only."""
        return int(self.origins[self.segment[0]] + self.start[0] - self.source[0])

    def band(self, causal: bool, window: Window) -> Band:
        if not causal:
            what = "slice" if self.sliced else "tree"
            raise InvalidUsage(f"causal=False was given with a {what}, whose tokens see only what is before them")
        return band_of(causal, window)

    def of_tokens(self, first: Int64, end: Int64) -> TreeLayout:
        """The layout of the runs [first, end) of tokens alone, which rise; a rank has rows of these only."""
        start = np.maximum(self.source[:, None], first[None, :])
        count = np.minimum((self.source + self.count)[:, None], end[None, :]) - start
        piece, run = np.nonzero(count > 0)
        source, counts, owner = start[piece, run], count[piece, run], self.owner[piece]
        return replace(
            self, segment=self.segment[piece], start=self.start[piece] + source - self.source[piece], source=source,
            count=counts, owner=owner, row=local_rows(owner, counts, self.size),
        )  # fmt: skip

    def atoms(self, keys: Layout, band: Band) -> Atoms:
        return cast(TreeLayout, keys)._atoms(band)  # which know their slice's queries

    def _atoms(self, band: Band) -> Atoms:
        start, stop = self.start, self.start + self.count
        first_piece = np.searchsorted(self.segment, np.arange(len(self.tree) + 1))
        low = np.empty((len(start), self.size), dtype=np.int64)
        queries = self.source >= (self.slice_bounds[self.number] if self.slice_bounds else 0)  # the others were kept
        following, last = np.arange(len(start)) + 1, first_piece[self.tree.ends[self.segment]]
        for rank in range(self.size):
            # All later pieces of the subtree see this one, the lowest position the furthest back.
            seen_from = _range_min(np.where(queries & (self.owner == rank), start, _NEVER), following, last)
            nearest = start if band.low is None else np.maximum(seen_from + band.low, start)
            low[:, rank] = np.where(seen_from < _NEVER, np.minimum(nearest, stop), stop)
        cuts = np.sort(np.concatenate([start[:, None], low, stop[:, None]], axis=1), axis=1)
        piece, column = np.nonzero(cuts[:, :-1] < cuts[:, 1:])
        first, end, owner = cuts[piece, column], cuts[piece, column + 1], self.owner[piece]
        needed = low[piece] <= first[:, None]
        needed[np.arange(len(owner)), owner] = False
        return Atoms(self.segment[piece], first, end, owner, self.row[piece] + first - start[piece], needed)

    def tiles(self, keys: Layout, rank: int, k_spans: dict[int, list[Span]], band: Band) -> list[Tile]:  # noqa: ARG002
        mine = np.flatnonzero(self.owner == rank)
        segment, ends = self.segment[mine].tolist(), self.tree.ends
        queries = [
            Span(a, a + n, row)
            for a, n, row in np.stack([self.start[mine], self.count[mine], self.row[mine]], axis=1).tolist()
        ]
        tiles: list[Tile] = []
        for s, seen in k_spans.items():
            first, below, last = bisect_left(segment, s), bisect_right(segment, s), bisect_left(segment, int(ends[s]))
            tiles += tiles_of(queries[first:below], seen, 0, band)
            if below == last:
                continue
            if band.low is None:  # descendants follow each other in the rows, and see all
                q_start, q_stop = queries[below].row, queries[last - 1].row + queries[last - 1].rows
                far = [Tile(q_start, q_stop, key.row, key.row + key.rows) for key in seen]
            else:
                near = [q for q in queries[below:last] if q.start + band.low < seen[-1].stop]
                far = [tile for q in near for key in seen if (tile := band_tile(q, key, 0, band)) is not None]
            tiles += join_tiles(far)
        return tiles

    def pairs(self, keys: Layout, band: Band) -> float:  # noqa: ARG002
        first, end = self.start, self.start + self.count
        return float((pairs_before(end, band) - pairs_before(first, band)).sum())


TokenLayout: TypeAlias = SequenceLayout | TreeLayout
"""Layout of tokens that follow each other: of a pack of sequences, or of a tree."""


def _range_min(values: Int64, first: Int64, last: Int64) -> Int64:
    """The least of ``values[first:last]`` for each pair; :data:`_NEVER` for an empty range."""
    levels = [values]
    while 2 ** len(levels) <= len(values):
        step = 2 ** (len(levels) - 1)
        levels.append(np.minimum(levels[-1][:-step], levels[-1][step:]))
    least_values = np.full(len(first), _NEVER)
    length = np.maximum(last - first, 0)
    level = np.frexp(np.maximum(length, 1))[1] - 1  # the largest power of 2 in the length
    for at, least in enumerate(levels):
        here = (level == at) & (length > 0)
        least_values[here] = np.minimum(least[first[here]], least[last[here] - 2**at])
    return least_values


@dataclass(frozen=True, slots=True)
class _Segments:
    """The segments of a slice, which may begin and end inside of one; see :class:`Tree` for the names."""

    segments: Int64
    """Their numbers in the tree."""
    parents: Int64
    lengths: Int64
    starts: Int64
    ends: Int64

    def __len__(self) -> int:
        return len(self.segments)


def _segments_of(tree: Tree, first: int, end: int) -> _Segments:
    """The segments of a tree with the tokens [first, end), depth-first."""
    segments, starts, lengths = tree.span(first, end)
    number, last = (int(segments[0]), int(segments[-1])) if len(segments) else (0, 0)
    return _Segments(
        segments=segments,
        parents=np.maximum(tree.parents[segments] - number, -1),
        lengths=lengths,
        starts=starts,
        ends=np.minimum(tree.ends[segments], last + 1) - number,
    )


@lru_cache(maxsize=256)
def tree_layout(tree: Tree, size: int) -> TreeLayout:
    """The layout of a tree over ``size`` ranks; their numbers of tokens differ by at most one."""
    return _dealt(tree, _segments_of(tree, 0, tree.num_tokens), size)


@lru_cache(maxsize=256)
def slice_layouts(tree: Tree, bounds: tuple[int, ...], number: int, size: int) -> tuple[TreeLayout, TreeLayout]:
    """The layouts of the queries of a slice, and of the keys up to its end. Pure and local."""
    own_segments = _segments_of(tree, bounds[number], bounds[number + 1])
    queries = replace(_dealt(tree, own_segments, size), slice_bounds=bounds, number=number)
    before = () if number == 0 else (slice_layouts(tree, bounds, number - 1, size)[1],)
    own = replace(queries, source=queries.source + bounds[number])
    segment, start, source, count, owner = (
        np.concatenate([getattr(each, name) for each in (*before, own)])
        for name in ("segment", "start", "source", "count", "owner")
    )
    keys = replace(
        own, segment=segment, start=start, source=source, count=count, owner=owner, row=local_rows(owner, count, size)
    )
    return queries, keys


@lru_cache(maxsize=256)
def seen_keys(keys: TreeLayout) -> TreeLayout:
    """The layout of those keys up to the end of a slice that it sees: its own, and those on the way to its first one.
    Pure and local."""
    tree, (first, end) = keys.tree, keys.slice_bounds[keys.number : keys.number + 2]
    way = np.array(tree.path(int(np.searchsorted(tree.rows, first, side="right")) - 1))
    start = np.append(tree.rows[way], first)
    stop = np.append(np.minimum(tree.rows[way] + tree.lengths[way], first), end)
    seen = keys.of_tokens(start, stop)
    return keys if seen.tokens == keys.tokens else seen


@lru_cache(maxsize=256)
def chunked(layout: TokenLayout, chunk: int) -> TreeLayout:
    """The chunks of each sequence as segments of their own, in the rows in which the ranks hold the sequences: of a
    pack of plain sequences, or of the queries of a slice of one, or of the keys up to its end. Pure and local.

    Args:
        chunk: tokens; the last chunk of a sequence may have fewer.

    Raises: InvalidUsage for a tree.
    """
    lengths = layout.lengths
    if layout.tree is not None and not (layout.sliced and len(lengths) == 1):
        raise InvalidUsage(f"chunk={chunk} was given with a tree; {ONLY_SEQUENCES}")
    counts, total = -(-lengths // chunk), int(lengths.sum())
    numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    chunks, token = np.repeat(layout.firsts, counts) + numbers * chunk, layout.source + layout.first_token
    end = token[-1] + layout.count[-1]
    first = np.unique(np.concatenate([token, chunks[(chunks > token[0]) & (chunks < end)]]))
    piece, segment = (np.searchsorted(starts, first, side="right") - 1 for starts in (token, chunks))
    inside = first - token[piece]
    return TreeLayout(
        layout.size, segment, first - chunks[segment], layout.source[piece] + inside, np.diff(first, append=end),
        layout.owner[piece], layout.row[piece] + inside, Tree([-1] * len(chunks), np.diff(chunks, append=total)),
        layout.slice_bounds, layout.number,
    )  # fmt: skip


def past_tokens(tree: Tree, cut: int, count: int) -> Int64:
    """Which tokens before ``cut`` are among the last ``count`` before any token from there on, rising."""
    firsts = np.append(cut, tree.rows[tree.rows > cut]) if cut < tree.num_tokens else np.zeros(0, dtype=np.int64)
    previous, past = np.append(tree.previous, -1), [np.zeros(0, dtype=np.int64)]
    for _ in range(count):
        firsts = np.unique(previous[firsts])
        past.append(firsts[(firsts >= 0) & (firsts < cut)])
    return np.unique(np.concatenate(past))


def _dealt(tree: Tree, part: _Segments, size: int) -> TreeLayout:
    owner, bounds = _split(part, size)
    shared, whole = np.flatnonzero(owner == _ALL_RANKS), np.flatnonzero(owner != _ALL_RANKS)
    segment = np.concatenate([whole, np.repeat(shared, 2 * size)])
    inside = np.concatenate([np.zeros_like(whole), bounds[:, :-1].reshape(-1)])
    count = np.concatenate([part.lengths[whole], np.diff(bounds, axis=1).reshape(-1)])
    rank = np.concatenate([owner[whole], np.tile(zigzag_holders(size), len(shared))])
    order = np.lexsort((inside, segment))
    order = order[count[order] > 0]
    segment, inside, count, rank = segment[order], inside[order], count[order], rank[order]
    return TreeLayout(
        size=size,
        segment=part.segments[segment],
        start=part.starts[segment] + inside,
        source=(np.cumsum(part.lengths) - part.lengths)[segment] + inside,
        count=count,
        owner=rank,
        row=local_rows(rank, count, size),
        tree=tree,
    )


def _split(tree: _Segments, size: int) -> tuple[Int64, Int64]:
    """[segments]: the rank that holds the whole segment, or :data:`_ALL_RANKS`; and the bounds of the pieces of the
    latter, [shared segments, 2N + 1]."""
    if size == 1:
        return np.zeros(len(tree), dtype=np.int64), np.zeros((0, 3), dtype=np.int64)
    below = [np.concatenate(([0], np.cumsum(x))) for x in (_squares(tree.starts, tree.lengths), tree.lengths)]
    work, tokens = ((x[tree.ends] - x[:-1]) * (size / max(1, x[-1])) for x in below)  # of subtrees; a rank's mean is 1
    weight = np.maximum(work, tokens)
    subtrees = [(-float(weight[root]), root) for root in np.flatnonzero(tree.parents < 0).tolist()]
    heapq.heapify(subtrees)  # the heaviest first
    opened, best = 0, (np.inf, np.zeros(0, dtype=np.int64), np.zeros((0, 2 * size + 1), dtype=np.int64))
    while True:
        too_heavy = bool(subtrees) and -subtrees[0][0] > 1 + _SLACK
        if not too_heavy:
            owner = _deal(tree, [root for _, root in sorted(subtrees)], work, tokens, size)
            bounds = _piece_bounds(tree, owner, size)
            excess = np.inf if bounds is None else _excess(tree, owner, bounds, size)
            if bounds is not None and excess < best[0]:
                best = (excess, owner, bounds)
            if excess <= _SLACK or not subtrees:
                return best[1:]
        for _ in range(1 if too_heavy else min(len(subtrees), 1 + opened // 8)):
            _, root = heapq.heappop(subtrees)
            opened += 1
            child = root + 1
            while child < tree.ends[root]:
                heapq.heappush(subtrees, (-float(weight[child]), child))
                child = int(tree.ends[child])


def _squares(start: Int64, length: Int64) -> Int64:
    """Twice the pairs of ``length`` queries from position ``start`` on; of a whole sequence, length^2."""
    return length * (2 * start + length)


def _deal(tree: _Segments, subtrees: list[int], work: Floats, tokens: Floats, size: int) -> Int64:
    """The owners of the segments of ``subtrees``, by falling weight to the rank with the least; all ranks share the
    others."""
    owner = np.full(len(tree), _ALL_RANKS, dtype=np.int64)
    loads = [[0.0, 0.0] for _ in range(size)]
    for root in subtrees:
        w, t = float(work[root]), float(tokens[root])
        rank = min(range(size), key=lambda r: max(loads[r][0] + w, loads[r][1] + t))
        loads[rank][0] += w
        loads[rank][1] += t
        owner[root : tree.ends[root]] = rank
    return owner


def _piece_bounds(tree: _Segments, owner: Int64, size: int) -> Int64 | None:
    """The bounds of the shared segments' pieces; those of the longest one make the ranks' tokens equal. None: it is too
    short for that."""
    shared = np.flatnonzero(owner == _ALL_RANKS)
    bounds = _core.zigzag_bounds(np.concatenate(([0], np.cumsum(tree.lengths[shared]))), size)
    pieces = np.diff(bounds, axis=1)
    held = by_rank(
        np.concatenate([owner, *[zigzag_holders(size)] * len(shared)]), np.append(tree.lengths, pieces), size
    )
    if held.max() - held.min() <= 1:
        return bounds
    if not len(shared):
        return None
    longest = int(np.argmax(tree.lengths[shared]))
    total = int(held.sum())
    wanted = total // size + (np.arange(size) < total % size) - held
    wanted += by_rank(zigzag_holders(size), pieces[longest], size)
    if wanted.min() < 0:
        return None
    heads = wanted // 2
    bounds[longest, 1:] = np.cumsum(np.concatenate([heads, (wanted - heads)[::-1]]))
    return bounds


def _excess(tree: _Segments, owner: Int64, bounds: Int64, size: int) -> float:
    """By how much the work of the busiest rank exceeds the mean."""
    shared = owner == _ALL_RANKS
    pieces = _squares(tree.starts[shared, None] + bounds[:, :-1], np.diff(bounds, axis=1))
    holders = np.tile(zigzag_holders(size), len(pieces))
    work = by_rank(np.append(owner, holders), np.append(_squares(tree.starts, tree.lengths), pieces.reshape(-1)), size)
    return float(work.max() * size / max(1, work.sum()) - 1)

"""The plan of one ring attention for one rank: which KV it sends and receives in which step.

KV travels towards lower ranks: at step t, rank r works on the KV of rank (r + t) mod N. Each run of tokens that the
same ranks need (an *atom*) goes from its owner to the nearest of them, from there to the next, and stops at the last:
it is sent once per rank that needs it, which is the minimum. With a causal mask and zigzag, ranks r-1 .. 0 need both
halves of rank r and the ranks past 0 only its head, so a quarter of a plain ring's traffic is not sent; with a window
most steps send nothing.

In backward, KV takes the same route; the gradient of an atom follows one step behind, each rank adds its part, and the
last one sends the sum to the owner: one message per rank that needs the atom, again the minimum. All sums have one
fixed order.

Pure and local: every rank computes its part of the same plan. Source of the zigzag: ByteScale (arXiv 2502.21231)
section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hdpcomm.attention._kernels import Rows
from hdpcomm.attention.atoms import Atoms, atom_spans, run_starts
from hdpcomm.attention.layout import AnyLayout, Layout
from hdpcomm.attention.pieces import Pieces
from hdpcomm.attention.tiles import Band, Span, Tile, tiles_of

__all__ = ["RingMessage", "RingPlan", "Step", "build_plan", "find_atoms", "own_spans", "rank_tiles", "ring_plan"]

Int64 = npt.NDArray[np.int64]


def _needs(q_layout: Layout, kv_layout: Layout, band: Band) -> Int64:
    """[sequences, N, 2, 2]: (first, last) key that the head and the tail of each rank see."""
    lengths = kv_layout.lengths
    shift = (lengths - q_layout.lengths)[:, None]
    needs = np.zeros((len(lengths), q_layout.size, 2, 2), dtype=np.int64)
    for rank in range(q_layout.size):
        spans = q_layout.spans(rank)
        first, last = spans[..., 0] + shift, spans[..., 1] + shift
        low = np.zeros_like(first) if band.low is None else np.maximum(first + band.low, 0)
        high = np.broadcast_to(lengths[:, None], last.shape)
        if band.high is not None:
            high = np.minimum(high, last + band.high)
        seen = (spans[..., 0] < spans[..., 1]) & (low < high)
        needs[:, rank, :, 0] = np.where(seen, low, 0)
        needs[:, rank, :, 1] = np.where(seen, high, 0)
    return needs


@lru_cache(maxsize=128)
def find_atoms(q_layout: AnyLayout, kv_layout: AnyLayout, band: Band) -> Atoms:
    """All atoms of a pack."""
    if isinstance(kv_layout, Pieces):
        return kv_layout.atoms(band)
    assert not isinstance(q_layout, Pieces)
    size = kv_layout.size
    needs = _needs(q_layout, kv_layout, band)
    cuts = np.sort(np.concatenate([kv_layout.bounds, needs.reshape(len(needs), 4 * size)], axis=1), axis=1)
    sequence, column = np.nonzero(cuts[:, :-1] < cuts[:, 1:])
    start, stop = cuts[sequence, column], cuts[sequence, column + 1]
    piece = (kv_layout.bounds[sequence] <= start[:, None]).sum(axis=1) - 1
    owner = np.minimum(piece, 2 * size - 1 - piece)
    of_atom = needs[sequence]
    position = start[:, None, None]
    needed = np.any((of_atom[..., 0] <= position) & (position < of_atom[..., 1]), axis=2)
    needed[np.arange(len(owner)), owner] = False
    return Atoms(sequence, start, stop, owner, _owner_rows(kv_layout, sequence, start, piece, owner), needed)


def _owner_rows(layout: Layout, sequence: Int64, start: Int64, piece: Int64, owner: Int64) -> Int64:
    row = np.zeros_like(start)
    for rank in range(layout.size):
        mine = owner == rank
        spans, first = layout.spans(rank), layout.local_cu(rank)
        tail = piece[mine] != rank
        inside = start[mine] - layout.bounds[sequence[mine], piece[mine]]
        head_rows = spans[sequence[mine], 0, 1] - spans[sequence[mine], 0, 0]
        row[mine] = first[sequence[mine]] + np.where(tail, head_rows, 0) + inside
    return row


@dataclass(frozen=True, slots=True, eq=False)
class RingMessage:
    """Rows of a buffer that go to, or come from, ``peer`` (a rank of the communicator)."""

    peer: int
    step: int
    """Identifies the buffer: the step in which this rank works on it (0 is its own KV)."""
    rows: Rows
    """Copies from buffer rows to rows 0, 1, ... of the message."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Sends, receives and tiles of a rank in one step. KV *due* at step t is posted before the work of step t - 1,
    gradients before t."""

    source: int
    kv_rows: int
    """Rows of the KV buffer of this step."""
    tiles: tuple[Tile, ...]
    kv_sends: tuple[RingMessage, ...]
    """KV due at this step on other ranks."""
    kv_recvs: tuple[RingMessage, ...]
    """KV due at this step on this rank; together all rows of the buffer."""
    grad_sends: tuple[RingMessage, ...]
    """Gradients due at this step on other ranks."""
    grad_recvs: tuple[RingMessage, ...]
    """Gradients due at this step on this rank, to be added to those of :attr:`RingMessage.step`."""
    kv_until: int
    """Last step at which rows of this step's KV buffer are sent."""
    grad_until: int
    """Last step at which rows of this step's gradients are sent."""


@dataclass(frozen=True, slots=True, eq=False)
class RingPlan:
    """The steps of one rank; step N only returns gradients to their owners and has no tiles."""

    rank: int
    size: int
    q_rows: int
    kv_rows: int
    steps: tuple[Step, ...]
    neighbours_only: bool
    """Whether on all ranks KV comes only from the next rank, one whole buffer a step, and is forwarded at once or not
    at all."""
    most_rows: int
    """An upper bound of the rows of a KV buffer, over all ranks and steps."""

    @property
    def rows_sent(self) -> int:
        """KV rows that this rank sends in forward."""
        return sum(message.rows.total for step in self.steps for message in step.kv_sends)

    @property
    def grad_rows_sent(self) -> int:
        """Gradient rows that this rank sends in backward."""
        return sum(message.rows.total for step in self.steps for message in step.grad_sends)


@dataclass(frozen=True, slots=True, eq=False)
class _Hops:
    """The atoms that one rank handles, in order; distances are ring steps from the owner, and ``size`` means none."""

    atom: Int64
    owner: Int64
    rows: Int64
    me: Int64
    """Distance of this rank, which is the step in which it works on the atom."""
    before: Int64
    """Distance of the rank that sends it: the last one before this rank that needs it, or 0 for the owner."""
    after: Int64
    """Distance of the next rank that needs it."""
    last: Int64
    """Distance of the last rank that needs it, or 0."""
    row: Int64
    """First row in this rank's buffer."""


def _hops(atoms: Atoms, rank: int, size: int) -> _Hops:
    atom = np.nonzero(atoms.needed[:, rank] | (atoms.owner == rank))[0]
    owner, rows = atoms.owner[atom], atoms.rows[atom]
    me = (owner - rank) % size
    steps = np.arange(size)[None, :]
    needed = np.take_along_axis(atoms.needed[atom], (owner[:, None] - steps) % size, axis=1)
    before = np.where(needed & (steps < me[:, None]), steps, 0).max(axis=1, initial=0)
    after = np.where(needed & (steps > me[:, None]), steps, size).min(axis=1, initial=size)
    last = np.where(needed, steps, 0).max(axis=1, initial=0)
    row = atoms.row[atom].copy()
    for step in range(1, size):
        here = me == step
        row[here] = np.cumsum(rows[here]) - rows[here]
    return _Hops(atom, owner, rows, me, before, after, last, row)


class _MessagesByStep:
    """The messages of one kind, by the step at which they are due.

    Messages between two ranks have no tags, so both ends must list them in the same order: one exchange has at most one
    message of a kind for a pair of ranks, the kinds come in a fixed order, and rows in the order of atoms.
    """

    def __init__(self, hops: _Hops, chosen: npt.NDArray[np.bool_], due: Int64, peer: Int64) -> None:
        due, peer, step, row, rows = (x[chosen] for x in (due, peer, hops.me, hops.row, hops.rows))
        order = np.lexsort((step, peer, due))
        keys = np.stack([due, peer, step], axis=1)[order]
        edges = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
        self._until: dict[int, int] = {}
        self._messages: dict[int, list[RingMessage]] = {}
        if not len(keys):
            return
        for first, part in zip([0, *edges.tolist()], np.split(order, edges), strict=True):
            at, to, of = keys[first].tolist()
            self._messages.setdefault(at, []).append(RingMessage(to, of, _as_rows(row[part], rows[part])))
            self._until[of] = max(self._until.get(of, 0), at)

    def due(self, step: int) -> tuple[RingMessage, ...]:
        return tuple(self._messages.get(step, ()))

    def until(self, step: int) -> int:
        """The last step at which rows of the buffer of ``step`` are due."""
        return self._until.get(step, step)


def _as_rows(row: Int64, rows: Int64) -> Rows:
    """Copies from buffer rows to rows 0, 1, ... of a message."""
    first = run_starts(row[1:] == row[:-1] + rows[:-1])
    counts = np.add.reduceat(rows, first)
    return Rows(np.stack([np.cumsum(counts) - counts, row[first], counts], axis=1))


@lru_cache(maxsize=256)
def _spans_of(layout: Layout, rank: int) -> list[list[Span]]:
    """For each sequence: the head and the tail of ``rank``, with their rows."""
    spans, first = layout.spans(rank).tolist(), layout.local_cu(rank).tolist()
    return [
        [Span(head[0], head[1], row), Span(tail[0], tail[1], row + head[1] - head[0])]
        for (head, tail), row in zip(spans, first, strict=False)
    ]


def own_spans(layout: AnyLayout, rank: int) -> dict[int, list[Span]]:
    """By sequence (segment): the tokens of ``rank``, with their rows."""
    if isinstance(layout, Pieces):
        return layout.own_spans(rank)
    return dict(enumerate(_spans_of(layout, rank)))


def rank_tiles(
    q_layout: AnyLayout, kv_layout: AnyLayout, band: Band, rank: int, k_spans: dict[int, list[Span]]
) -> tuple[Tile, ...]:
    """Tiles of the queries of ``rank`` and the keys ``k_spans`` (by sequence) of a buffer."""
    if isinstance(q_layout, Pieces):
        return tuple(q_layout.tiles(rank, k_spans, band))
    assert not isinstance(kv_layout, Pieces)
    q_spans = _spans_of(q_layout, rank)
    shift = (kv_layout.lengths - q_layout.lengths).tolist()
    return tuple(tile for s, spans in k_spans.items() for tile in tiles_of(q_spans[s], spans, shift[s], band))


def _neighbours_only(atoms: Atoms, size: int) -> bool:
    """Whether every atom is needed by the 0, 1, 2, ... ranks next to its owner."""
    distances = (atoms.owner[:, None] - np.arange(1, size)[None, :]) % size
    needed = np.take_along_axis(atoms.needed, distances, axis=1)
    return bool((needed[:, 1:] <= needed[:, :-1]).all())


def build_plan(q_layout: AnyLayout, kv_layout: AnyLayout, band: Band, *, rank: int) -> RingPlan:
    """The plan of ``rank``; :func:`ring_plan` caches it."""
    size = q_layout.size
    atoms = find_atoms(q_layout, kv_layout, band)
    hops = _hops(atoms, rank, size)
    foreign, goes_on = hops.me > 0, hops.after < size
    previous, following = (hops.owner - hops.before) % size, (hops.owner - hops.after) % size
    kv_out = _MessagesByStep(hops, goes_on, hops.after, following)
    kv_in = _MessagesByStep(hops, foreign, hops.me, previous)
    grads_out = _MessagesByStep(hops, foreign & goes_on, hops.after, following)
    grads_in = _MessagesByStep(hops, foreign & (hops.before > 0), hops.me, previous)
    sums_out = _MessagesByStep(hops, foreign & ~goes_on, hops.me + 1, hops.owner)
    sums_in = _MessagesByStep(hops, ~foreign & (hops.last > 0), hops.last + 1, (hops.owner - hops.last) % size)
    steps = []
    for t in range(size + 1):
        here = hops.me == t if 0 < t < size else np.zeros_like(foreign)
        k_spans = own_spans(kv_layout, rank) if t == 0 else atom_spans(atoms, hops.atom[here], hops.row[here])
        steps.append(
            Step(
                source=(rank + t) % size,
                kv_rows=kv_layout.rows(rank) if t == 0 else int(hops.rows[here].sum()),
                tiles=rank_tiles(q_layout, kv_layout, band, rank, k_spans),
                kv_sends=kv_out.due(t),
                kv_recvs=kv_in.due(t),
                grad_sends=grads_out.due(t) + sums_out.due(t),
                grad_recvs=grads_in.due(t) + sums_in.due(t),
                kv_until=kv_out.until(t),
                grad_until=max(grads_out.until(t), sums_out.until(t)),
            )
        )
    return RingPlan(
        rank,
        size,
        q_layout.rows(rank),
        kv_layout.rows(rank),
        tuple(steps),
        neighbours_only=_neighbours_only(atoms, size),
        most_rows=max(kv_layout.rows(each) for each in range(size)),
    )


_cached_plan = lru_cache(maxsize=128)(build_plan)


def ring_plan(q_layout: AnyLayout, kv_layout: AnyLayout, band: Band, *, rank: int) -> RingPlan:
    """The plan of ``rank`` for these layouts of queries and keys; cached, so the layers of a micro-batch share one."""
    return _cached_plan(q_layout, kv_layout, band, rank=rank)

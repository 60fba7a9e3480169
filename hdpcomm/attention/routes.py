"""Which KV goes where, and when: the plan of one ring attention as one rank sees it.

KV travels towards lower ranks: at step t, rank r works on the KV of rank (r + t) mod N. Each run of tokens that the
same ranks need (an *atom*) goes from its owner to the nearest of them, from there to the next, and stops at the last:
it crosses each link once per rank that needs it, which is the minimum. With a causal mask and zigzag, ranks r-1 .. 0
need both halves of rank r and the ranks past 0 only its head, so a quarter of a plain ring's traffic never leaves;
with a window most steps send nothing.

In backward, KV takes the same way; the gradient of an atom follows one step behind, each rank adds its part, and the
last one sends the sum home: as many messages as ranks that need it, again the minimum. All sums are made in one fixed
order.

Pure and local: every rank computes its side of the same plan. Source of the zigzag: ByteScale (arXiv 2502.21231)
section 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hdpcomm.attention._kernels import Rows
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.tiles import Band, Span, Tile, tiles_of

__all__ = ["Atoms", "Message", "RingPlan", "Step", "atom_spans", "find_atoms", "ring_plan", "spans_of"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Runs of keys of one sequence and one owner that the same ranks need, by (sequence, position)."""

    sequence: Int64
    start: Int64
    stop: Int64
    owner: Int64
    row: Int64
    """First row on the owner."""
    needed: npt.NDArray[np.bool_]
    """[atoms, N]: whether a rank needs it; False for the owner."""

    @property
    def rows(self) -> Int64:
        return self.stop - self.start


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
def find_atoms(q_layout: Layout, kv_layout: Layout, band: Band) -> Atoms:
    """All atoms of a pack."""
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
class Message:
    """Rows of a buffer that go to, or come from, ``peer`` (a rank of the communicator)."""

    peer: int
    step: int
    """Whose buffer: the step in which this rank works on it (0 is its own KV)."""
    rows: Rows
    """From buffer rows to rows 0, 1, ... of the message."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a rank does in one step. KV *due* at step t is posted before the work of step t - 1, gradients before t."""

    source: int
    kv_rows: int
    """Rows of the KV buffer of this step."""
    tiles: tuple[Tile, ...]
    kv_sends: tuple[Message, ...]
    """KV due at this step elsewhere."""
    kv_recvs: tuple[Message, ...]
    """KV due at this step here; together all rows of the buffer."""
    grad_sends: tuple[Message, ...]
    """Gradients due at this step elsewhere."""
    grad_recvs: tuple[Message, ...]
    """Gradients due at this step here: to add to this step's own, or (step 0) to those of this rank's own KV."""
    kv_until: int
    """Last step at which rows of this step's KV buffer are sent."""
    grad_until: int
    """Last step at which rows of this step's gradients are sent."""


@dataclass(frozen=True, slots=True, eq=False)
class RingPlan:
    """The steps of one rank; step N only brings gradients home and has no tiles."""

    rank: int
    size: int
    q_rows: int
    kv_rows: int
    steps: tuple[Step, ...]

    @property
    def rows_sent(self) -> int:
        """KV rows that this rank sends in forward."""
        return sum(message.rows.total for step in self.steps for message in step.kv_sends)

    @property
    def grad_rows_sent(self) -> int:
        """Gradient rows that this rank sends in backward."""
        return sum(message.rows.total for step in self.steps for message in step.grad_sends)


class _Outbox:
    """Collects rows by (due step, kind, peer, buffer); insertion in the order of atoms, which both ends share.

    Messages between two ranks have no tags, so both ends must list them alike: within one exchange there is at most
    one of a kind for a pair of ranks, and the kinds come in a fixed order.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, int, int], list[tuple[int, int]]] = {}

    def add(self, due: int, kind: str, peer: int, step: int, row: int, rows: int) -> None:
        runs = self._rows.setdefault((due, kind, peer, step), [])
        if runs and runs[-1][0] + runs[-1][1] == row:
            runs[-1] = (runs[-1][0], runs[-1][1] + rows)
        else:
            runs.append((row, rows))

    def messages(self, due: int, kind: str) -> tuple[Message, ...]:
        found = sorted((peer, step) for at, what, peer, step in self._rows if (at, what) == (due, kind))
        return tuple(Message(peer, step, _as_rows(self._rows[due, kind, peer, step])) for peer, step in found)

    def until(self, kinds: tuple[str, ...], step: int) -> int:
        return max((due for due, what, _, of in self._rows if what in kinds and of == step), default=step)


def _as_rows(runs: Iterable[tuple[int, int]]) -> Rows:
    segments, offset = [], 0
    for row, rows in runs:
        segments.append((offset, row, rows))
        offset += rows
    return Rows(segments)


def _route(atoms: Atoms, rank: int, size: int) -> tuple[_Outbox, list[list[int]], dict[int, int]]:
    """Messages of ``rank``, the atoms that it works on by step, and the buffer row of each of them."""
    outbox = _Outbox()
    by_step: list[list[int]] = [[] for _ in range(size)]
    fill = [0] * size
    row_of: dict[int, int] = {}
    involved = np.nonzero(atoms.needed[:, rank] | (atoms.owner == rank))[0]
    for atom in involved.tolist():
        owner, rows = int(atoms.owner[atom]), int(atoms.stop[atom] - atoms.start[atom])
        me = (owner - rank) % size
        stops = sorted((owner - needer) % size for needer in np.nonzero(atoms.needed[atom])[0].tolist())
        peer = [(owner - distance) % size for distance in range(size)]
        row = int(atoms.row[atom]) if me == 0 else fill[me]
        fill[me] += rows
        by_step[me].append(atom)
        row_of[atom] = row
        before = max((stop for stop in stops if stop < me), default=0)
        after = min((stop for stop in stops if stop > me), default=None)
        if after is not None:
            outbox.add(after, "kv_send", peer[after], me, row, rows)
        if me != 0:
            outbox.add(me, "kv_recv", peer[before], me, row, rows)
            if before != 0:
                outbox.add(me, "grad_recv", peer[before], me, row, rows)
            if after is not None:
                outbox.add(after, "grad_send", peer[after], me, row, rows)
            else:
                outbox.add(me + 1, "home_send", owner, me, row, rows)
        elif stops:
            outbox.add(stops[-1] + 1, "home_recv", peer[stops[-1]], 0, row, rows)
    return outbox, by_step, row_of


def spans_of(layout: Layout, rank: int) -> list[list[Span]]:
    """Per sequence: head and tail of ``rank`` with their rows."""
    spans, first = layout.spans(rank).tolist(), layout.local_cu(rank).tolist()
    return [
        [Span(head[0], head[1], row), Span(tail[0], tail[1], row + head[1] - head[0])]
        for (head, tail), row in zip(spans, first, strict=False)
    ]


def atom_spans(atoms: Atoms, chosen: list[int], row_of: dict[int, int]) -> dict[int, list[Span]]:
    """Per sequence: runs of atoms that are neighbours both in the sequence and in the buffer."""
    spans: dict[int, list[Span]] = {}
    for atom in chosen:
        runs = spans.setdefault(int(atoms.sequence[atom]), [])
        start, stop, row = int(atoms.start[atom]), int(atoms.stop[atom]), row_of[atom]
        if runs and runs[-1].stop == start and runs[-1].row + runs[-1].rows == row:
            runs[-1] = Span(runs[-1].start, stop, runs[-1].row)
        else:
            runs.append(Span(start, stop, row))
    return spans


def build_plan(q_layout: Layout, kv_layout: Layout, band: Band, *, rank: int) -> RingPlan:
    """The plan of ``rank``; see :func:`ring_plan`, which remembers them."""
    size = q_layout.size
    atoms = find_atoms(q_layout, kv_layout, band)
    outbox, by_step, row_of = _route(atoms, rank, size)
    q_spans = spans_of(q_layout, rank)
    own = dict(enumerate(spans_of(kv_layout, rank)))
    shift = (kv_layout.lengths - q_layout.lengths).tolist()
    kv_rows = int(kv_layout.local_cu(rank)[-1])
    steps = []
    for t in range(size + 1):
        k_spans = own if t == 0 else {} if t == size else atom_spans(atoms, by_step[t], row_of)
        tiles = [tile for s, spans in k_spans.items() for tile in tiles_of(q_spans[s], spans, shift[s], band)]
        rows = kv_rows if t == 0 else 0 if t == size else sum(int(atoms.rows[a]) for a in by_step[t])
        steps.append(
            Step(
                source=(rank + t) % size,
                kv_rows=rows,
                tiles=tuple(tiles),
                kv_sends=outbox.messages(t, "kv_send"),
                kv_recvs=outbox.messages(t, "kv_recv"),
                grad_sends=outbox.messages(t, "grad_send") + outbox.messages(t, "home_send"),
                grad_recvs=outbox.messages(t, "grad_recv") + outbox.messages(t, "home_recv"),
                kv_until=outbox.until(("kv_send",), t),
                grad_until=outbox.until(("grad_send", "home_send"), t),
            )
        )
    return RingPlan(rank, size, int(q_layout.local_cu(rank)[-1]), kv_rows, tuple(steps))


_cached_plan = lru_cache(maxsize=128)(build_plan)


def ring_plan(q_layout: Layout, kv_layout: Layout, band: Band, *, rank: int) -> RingPlan:
    """The plan of ``rank`` for queries and keys laid out like this; the layers of a micro-batch share one."""
    return _cached_plan(q_layout, kv_layout, band, rank=rank)

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
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hdpcomm.attention._kernels import Rows
from hdpcomm.attention.backends.base import Backend, Score
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.tiles import Atoms, Band, Int64, Tile, atom_spans, run_starts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["RingMessage", "RingPlan", "Route", "Step", "find_atoms", "ring_plan"]


@lru_cache(maxsize=128)
def find_atoms(q_layout: Layout, kv_layout: Layout, band: Band) -> Atoms:
    """All atoms of a pack."""
    return q_layout.atoms(kv_layout, band)


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

    size: int
    steps: tuple[Step, ...]
    neighbours_only: bool
    """Whether on all ranks KV comes only from the next rank, one whole buffer a step, and is forwarded at once or not
    at all."""
    most_rows: int
    """An upper bound of the rows of a KV buffer, over all ranks and steps."""


Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, eq=False)
class Route(Generic[Plan]):
    """How one call of attention runs on this rank; ``comm`` is None for a group of one."""

    plan: Plan
    comm: Communicator | None
    backend: Backend
    score: Score


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


def _neighbours_only(atoms: Atoms, size: int) -> bool:
    """Whether every atom is needed by the 0, 1, 2, ... ranks next to its owner."""
    distances = (atoms.owner[:, None] - np.arange(1, size)[None, :]) % size
    needed = np.take_along_axis(atoms.needed, distances, axis=1)
    return bool((needed[:, 1:] <= needed[:, :-1]).all())


@lru_cache(maxsize=128)
def ring_plan(q_layout: Layout, kv_layout: Layout, band: Band, *, rank: int) -> RingPlan:
    """The plan of ``rank`` for these layouts of queries and keys; cached, so the layers of a micro-batch share one."""
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
        k_spans = kv_layout.own_spans(rank) if t == 0 else atom_spans(atoms, hops.atom[here], hops.row[here])
        steps.append(
            Step(
                kv_rows=kv_layout.rows(rank) if t == 0 else int(hops.rows[here].sum()),
                tiles=tuple(q_layout.tiles(kv_layout, rank, k_spans, band)),
                kv_sends=kv_out.due(t),
                kv_recvs=kv_in.due(t),
                grad_sends=grads_out.due(t) + sums_out.due(t),
                grad_recvs=grads_in.due(t) + sums_in.due(t),
                kv_until=kv_out.until(t),
                grad_until=max(grads_out.until(t), sums_out.until(t)),
            )
        )
    return RingPlan(
        size,
        tuple(steps),
        neighbours_only=_neighbours_only(atoms, size),
        most_rows=max(kv_layout.rows(each) for each in range(size)),
    )

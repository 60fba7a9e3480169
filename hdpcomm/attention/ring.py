"""Ring attention: passes KV, and in backward its gradients, and computes on a block while the next is in flight.

KV travels towards lower ranks: at step t, rank r works on the KV of rank (r + t) mod N. Each run of tokens that the
same ranks need (an *atom*) goes from its owner to the nearest of them, from there to the next, and stops at the last:
it is sent once per rank that needs it, which is the minimum. With a causal mask and zigzag, ranks r-1 .. 0 need both
halves of rank r and the ranks past 0 only its head, so a quarter of a plain ring's traffic is not sent; with a window
most steps send nothing.

In backward, KV takes the same route; the gradient of an atom follows one step behind, each rank adds its part, and the
last one sends the sum to the owner: one message per rank that needs the atom, again the minimum. All sums have one
fixed order. Plans are pure and local: every rank computes its part of the same one.

Source of the zigzag: ByteScale (arXiv 2502.21231) section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Accumulator, Backend, GradSum, Score
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.rows import Payload, RowExchange, Rows
from hdpcomm.attention.tiles import Atoms, Band, Int64, Tile, atom_spans, run_starts
from hdpcomm.comm import Communicator
from hdpcomm.comm.device.paths import LandingZone
from hdpcomm.comm.work import ring_step

__all__ = ["RingMessage", "RingPlan", "Route", "Step", "find_atoms", "ring_backward", "ring_forward", "ring_plan"]


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


_ALIGNMENT = 4096
"""Bytes to whose multiples buffers in a landing zone are aligned."""


class _LandingBuffers:
    """Two alternating buffers of one pass in the landing zone of a device world: KV arrives where the attention kernel
    reads it. That of step ``t`` is free again when the work of step ``t`` is done.

    Both sides compute a message's offset from the plan, so they need not exchange it.
    """

    __slots__ = ("_bytes", "_lands", "_rows", "_type", "_width", "_zone")

    def __init__(self, zone: LandingZone, plan: RingPlan, comm: Communicator, payload: Payload) -> None:
        self._width, self._rows = payload.width, payload.rows
        self._type = payload.like.dtype
        self._bytes = _buffer_bytes(plan, payload)
        self._zone = zone
        self._lands = {
            message.peer: comm.lands(message.peer)
            for step in plan.steps
            for message in (*step.kv_sends, *step.kv_recvs)
        }
        zone.enter()

    def place(self, peer: int, step: int) -> tuple[int, ...]:
        """The offset argument of a KV message that is due at ``step``: where the step's buffer begins, in bytes.

        Empty if the peer is on another host, where messages take no offset: the receiver's buffer is the same, and the
        message goes there as to any other memory.
        """
        return (self._offset(step),) if self._lands[peer] else ()

    def _offset(self, step: int) -> int:
        return step % 2 * self._bytes

    def buffer(self, step: int, rows: int) -> Tensor:
        """[rows, width]"""
        size = rows * self._width * self._type.itemsize
        start = self._offset(step)
        return self._zone.memory[start : start + size].view(self._type).view(rows, self._width)

    def own(self) -> Tensor:
        """The buffer of step 0, for this rank's own KV, which is sent from the zone like that of later steps."""
        return self.buffer(0, self._rows)

    def close(self) -> None:
        """Releases the landing zone; call it when all work that reads the buffers is enqueued."""
        self._zone.leave()


def _buffer_bytes(plan: RingPlan, payload: Payload) -> int:
    used = plan.most_rows * payload.width * payload.like.element_size()
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def _landing_of(plan: RingPlan, comm: Communicator | None, payload: Payload) -> _LandingBuffers | None:
    """The landing buffers of a pass, or None if the transport has no zone for the payload or both do not fit into it.

    Ranks that can send to each other's zone have zones of one size, so both ends of a message decide alike.
    """
    if comm is None or not plan.neighbours_only:
        return None
    zone = comm.landing_zone(payload.like)
    if zone is None or 2 * _buffer_bytes(plan, payload) > zone.memory.numel():
        return None
    return _LandingBuffers(zone, plan, comm, payload)


class _RingBuffers:
    """The buffers of one pass, by step, and the exchanges that fill and send them."""

    def __init__(self, plan: RingPlan, comm: Communicator | None, payload: Payload) -> None:
        self._plan, self._comm = plan, comm
        self._payload = payload
        self._new = payload.like.new_empty
        self._kv: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        # Where the transport has a landing zone, KV arrives in it, in two alternating buffers.
        self._landing = _landing_of(plan, comm, payload)
        if plan.steps[0].kv_until > 0:
            self._kv[0] = payload.pack(None if self._landing is None else self._landing.own())

    def kv(self, step: int) -> Tensor | None:
        """The rows of ``step`` as they travel; None for this rank's own."""
        return self._kv[step] if step else None

    def new_grads(self, step: int, dtype: torch.dtype) -> Tensor:
        """Zeros for the gradients of the rows of ``step``."""
        shape = (self._plan.steps[step].kv_rows, self._payload.width)
        self.grads[step] = torch.zeros(shape, dtype=dtype, device=self._payload.like.device)
        return self.grads[step]

    def post(self, due: int, *, grads: bool) -> RowExchange:
        """Posts KV due at step ``due + 1`` and, with ``grads``, gradients due at ``due``."""
        pending = RowExchange()
        if due + 1 < self._plan.size:
            self._add_kv(pending, due + 1)
        if grads:
            step = self._plan.steps[due]
            for message in step.grad_sends:
                pending.send(self.grads[message.step], message.rows, message.peer)
            for message in step.grad_recvs:
                pending.receive(self.grads[message.step], message.rows, message.peer, add=True)
        pending.post(self._comm)
        return pending

    def _add_kv(self, pending: RowExchange, due: int) -> None:
        step, landing = self._plan.steps[due], self._landing
        for message in step.kv_sends:
            place = () if landing is None else landing.place(message.peer, due)
            pending.send(self._kv[message.step], message.rows, message.peer, *place)
        if step.kv_rows:
            shape = step.kv_rows, self._payload.width
            self._kv[due] = self._new(shape) if landing is None else landing.buffer(due, step.kv_rows)
        for message in step.kv_recvs:
            place = () if landing is None else landing.place(message.peer, due)
            pending.receive(self._kv[due], message.rows, message.peer, *place)

    def finish(self, pending: RowExchange, due: int) -> None:
        """Waits for what :meth:`post` posted for ``due``, and frees the buffers that no later step sends."""
        pending.finish()
        steps = self._plan.steps
        for step in [s for s in self._kv if s <= due and steps[s].kv_until <= due + 1]:
            del self._kv[step]
        for step in [s for s in self.grads if 0 < s <= due and steps[s].grad_until <= due]:
            del self.grads[step]

    def close(self) -> None:
        """Releases the landing zone, after the last step."""
        self._kv.clear()
        if self._landing is not None:
            self._landing.close()


def ring_forward(q: Tensor, payload: Payload, route: Route[RingPlan]) -> Accumulator:
    """Attention of this rank's queries over all keys of the pack. Collective over the ranks of the route."""
    plan, backend = route.plan, route.backend
    dtype = backend.compute_dtype(q.dtype)
    buffers = _RingBuffers(plan, route.comm, payload)
    result = Accumulator((*q.shape[:2], payload.v_dim), q)
    queries = q.to(dtype)
    for t in range(plan.size):
        with ring_step("forward", t, plan.size):
            pending = buffers.post(t, grads=False)
            if tiles := plan.steps[t].tiles:
                backend.forward((queries, *payload.expand(buffers.kv(t), dtype)), tiles, route.score, result)
            buffers.finish(pending, t)
    buffers.close()
    return result


def ring_backward(
    dout: Tensor, q: Tensor, payload: Payload, out: Tensor, lse: Tensor, route: Route[RingPlan]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and of the payload's tensors, of the type of ``lse`` where they are sums; ``out`` and ``lse``: of
    :func:`ring_forward`. Collective over the ranks of the route."""
    plan, backend = route.plan, route.backend
    dtype = backend.compute_dtype(q.dtype)
    queries, douts, outs = q.to(dtype), dout.to(dtype), out.to(dtype)
    dq = GradSum(q.shape, q, lse.dtype)
    if plan.size == 1 and not payload.shared:  # nothing travels: gradients need no buffer of the wide type
        keys, values = payload.expand(None, dtype)
        dk, dv = (GradSum(x.shape, q, lse.dtype) for x in (keys, values))
        if tiles := plan.steps[0].tiles:
            backend.backward(douts, (queries, keys, values), outs, lse, tiles, route.score, (dq, dk, dv))
        return dq.total(), dk.total(), dv.total()
    buffers = _RingBuffers(plan, route.comm, payload)
    for t in range(plan.size + 1):
        with ring_step("backward", t, plan.size + 1):
            grads = buffers.new_grads(t, lse.dtype) if t < plan.size else None
            pending = buffers.post(t, grads=t > 0)
            if grads is not None and (tiles := plan.steps[t].tiles):
                qkv, pair = (queries, *payload.expand(buffers.kv(t), dtype)), payload.new_grads(grads)
                sums = (dq, GradSum.into(pair[0]), GradSum.into(pair[1]))
                backend.backward(douts, qkv, outs, lse, tiles, route.score, sums)
                payload.fold(buffers.kv(t), pair, grads, dtype)
            buffers.finish(pending, t)
    buffers.close()
    return dq.total(), *payload.split(buffers.grads[0])

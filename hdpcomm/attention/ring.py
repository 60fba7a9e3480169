"""Ring attention: passes KV, and in backward its gradients, and computes on a block while the next is in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention._kernels import RowExchange
from hdpcomm.attention.backends.base import Accumulator, GradSum
from hdpcomm.attention.payload import Payload
from hdpcomm.attention.routes import RingPlan, Route
from hdpcomm.comm.profiling import ring_step

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.device.paths import LandingZone

__all__ = ["ring_backward", "ring_forward"]

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
        self._grads: dict[int, Tensor] = {}
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
        self._grads[step] = torch.zeros(shape, dtype=dtype, device=self._payload.like.device)
        return self._grads[step]

    def post(self, due: int, *, grads: bool) -> RowExchange:
        """Posts KV due at step ``due + 1`` and, with ``grads``, gradients due at ``due``."""
        pending = RowExchange()
        if due + 1 < self._plan.size:
            self._add_kv(pending, due + 1)
        if grads:
            step = self._plan.steps[due]
            for message in step.grad_sends:
                pending.send(self._grads[message.step], message.rows, message.peer)
            for message in step.grad_recvs:
                pending.receive(self._grads[message.step], message.rows, message.peer, add=True)
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
        for step in [s for s in self._grads if 0 < s <= due and steps[s].grad_until <= due]:
            del self._grads[step]

    def close(self) -> None:
        """Releases the landing zone, after the last step."""
        self._kv.clear()
        if self._landing is not None:
            self._landing.close()

    def own_grads(self) -> Tensor:
        """The gradients of this rank's own rows."""
        return self._grads[0]


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
    return dq.total(), *payload.split(buffers.own_grads())

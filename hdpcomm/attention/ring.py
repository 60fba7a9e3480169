"""Ring attention: passes KV, and in backward its gradients, and computes on a block while the next is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention._kernels import Rows, add_rows, copy_rows
from hdpcomm.attention.backends.base import Accumulator, Backend, GradSum, Score
from hdpcomm.attention.kv_buffers import landing_of
from hdpcomm.attention.payload import Payload
from hdpcomm.attention.routes import RingPlan
from hdpcomm.comm.profiling import ring_step

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["ring_backward", "ring_forward"]


@dataclass(slots=True)
class _PendingExchange:
    """One posted exchange; it keeps all that is read or written alive until :meth:`finish`."""

    work: Any = None
    sends: list[tuple[Any, ...]] = field(default_factory=list)
    recvs: list[tuple[Any, ...]] = field(default_factory=list)
    placements: list[tuple[torch.Tensor, torch.Tensor, Rows]] = field(default_factory=list)
    """(buffer, message, rows): messages to copy into a buffer, where their rows are not one range."""
    additions: list[tuple[int, torch.Tensor, Rows]] = field(default_factory=list)
    """(step, message, rows): gradients to add to those of that step."""

    def post(self, comm: Communicator | None) -> None:
        if self.sends or self.recvs:
            assert comm is not None
            self.work = comm.exchange(self.sends, self.recvs, async_op=True)

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        for buffer, message, rows in self.placements:
            copy_rows(buffer, message, rows)


def _outgoing(buffer: torch.Tensor, rows: Rows) -> torch.Tensor:
    if (whole := rows.contiguous_source()) is not None:
        return buffer[whole[0] : whole[1]]
    message = buffer.new_empty((rows.total, *buffer.shape[1:]))
    copy_rows(message, buffer, rows)
    return message


class _RingBuffers:
    """The buffers of one pass, by step, and the exchanges that fill and send them."""

    def __init__(self, plan: RingPlan, comm: Communicator | None, payload: Payload) -> None:
        self._plan, self._comm = plan, comm
        self._payload = payload
        self._new = payload.like.new_empty
        self._kv: dict[int, torch.Tensor] = {}
        self._grads: dict[int, torch.Tensor] = {}
        # Where the transport has a landing zone, KV arrives in it, in two alternating buffers.
        self._landing = landing_of(plan, comm, payload)
        if plan.steps[0].kv_until > 0:
            self._kv[0] = payload.pack(None if self._landing is None else self._landing.own())

    def kv(self, step: int) -> torch.Tensor | None:
        """The rows of ``step`` as they travel; None for this rank's own."""
        return self._kv[step] if step else None

    def new_grads(self, step: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for the gradients of the rows of ``step``."""
        shape = (self._plan.steps[step].kv_rows, self._payload.width)
        self._grads[step] = torch.zeros(shape, dtype=dtype, device=self._payload.like.device)
        return self._grads[step]

    def post(self, due: int, *, grads: bool) -> _PendingExchange:
        """Posts KV due at step ``due + 1`` and, with ``grads``, gradients due at ``due``."""
        pending = _PendingExchange()
        if due + 1 < self._plan.size:
            self._add_kv(pending, due + 1)
        if grads:
            self._add_grads(pending, due)
        pending.post(self._comm)
        return pending

    def _add_kv(self, pending: _PendingExchange, due: int) -> None:
        step, landing = self._plan.steps[due], self._landing
        for message in step.kv_sends:
            place = () if landing is None else landing.place(message.peer, due)
            pending.sends.append((_outgoing(self._kv[message.step], message.rows), message.peer, *place))
        if landing is not None:
            if step.kv_recvs:
                self._kv[due] = landing.buffer(due, step.kv_rows)
                source = step.kv_recvs[0].peer
                pending.recvs.append((self._kv[due], source, *landing.place(source, due)))
            return
        if step.kv_rows:
            self._kv[due] = self._new((step.kv_rows, self._payload.width))
        for message in step.kv_recvs:
            buffer = self._kv[due]
            if (whole := message.rows.contiguous_source()) is not None:
                pending.recvs.append((buffer[whole[0] : whole[1]], message.peer))
            else:
                arriving = self._new((message.rows.total, self._payload.width))
                pending.recvs.append((arriving, message.peer))
                pending.placements.append((buffer, arriving, message.rows.inverse()))

    def _add_grads(self, pending: _PendingExchange, due: int) -> None:
        step = self._plan.steps[due]
        for message in step.grad_sends:
            pending.sends.append((_outgoing(self._grads[message.step], message.rows), message.peer))
        for message in step.grad_recvs:
            arriving = self._grads[0].new_empty((message.rows.total, self._payload.width))
            pending.recvs.append((arriving, message.peer))
            pending.additions.append((message.step, arriving, message.rows.inverse()))

    def finish(self, pending: _PendingExchange, due: int) -> None:
        """Waits for what :meth:`post` posted for ``due``, and frees the buffers that no later step sends."""
        pending.finish()
        for step, message, rows in pending.additions:
            add_rows(self._grads[step], message, rows)
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

    def own_grads(self) -> torch.Tensor:
        """The gradients of this rank's own rows."""
        return self._grads[0]


def ring_forward(
    q: torch.Tensor,
    payload: Payload,
    *,
    plan: RingPlan,
    comm: Communicator | None,
    backend: Backend,
    score: Score,
) -> Accumulator:
    """Attention of this rank's queries over all keys of the pack. Collective over ``comm`` (None: a group of one)."""
    dtype = backend.compute_dtype(q.dtype)
    buffers = _RingBuffers(plan, comm, payload)
    result = Accumulator((*q.shape[:2], payload.v_dim), q)
    queries = q.to(dtype)
    for t in range(plan.size):
        with ring_step("forward", t, plan.size):
            pending = buffers.post(t, grads=False)
            tiles = plan.steps[t].tiles
            if tiles:
                keys, values = payload.expand(buffers.kv(t), dtype)
                backend.forward(queries, keys, values, tiles, score, result)
            buffers.finish(pending, t)
    buffers.close()
    return result


def ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    payload: Payload,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    plan: RingPlan,
    comm: Communicator | None,
    backend: Backend,
    score: Score,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q and of the payload's tensors, of the type of ``lse`` where they are sums; ``out`` and ``lse``: of
    :func:`ring_forward`. Collective over ``comm``."""
    dtype = backend.compute_dtype(q.dtype)
    queries, douts, outs = q.to(dtype), dout.to(dtype), out.to(dtype)
    dq = GradSum(q.shape, q, lse.dtype)
    if plan.size == 1 and not payload.shared:  # nothing travels: gradients need no buffer of the wide type
        keys, values = payload.expand(None, dtype)
        dk, dv = (GradSum(x.shape, q, lse.dtype) for x in (keys, values))
        if tiles := plan.steps[0].tiles:
            backend.backward(douts, queries, keys, values, outs, lse, tiles, score, (dq, dk, dv))
        return dq.total(), dk.total(), dv.total()
    buffers = _RingBuffers(plan, comm, payload)
    for t in range(plan.size + 1):
        with ring_step("backward", t, plan.size + 1):
            pending = buffers.post(t, grads=t > 0)
            if t < plan.size:
                grads = buffers.new_grads(t, lse.dtype)
                tiles = plan.steps[t].tiles
                if tiles:
                    keys, values = payload.expand(buffers.kv(t), dtype)
                    pair = payload.new_grads(grads)
                    sums = (dq, GradSum.into(pair[0]), GradSum.into(pair[1]))
                    backend.backward(douts, queries, keys, values, outs, lse, tiles, score, sums)
                    payload.fold(buffers.kv(t), pair, grads, dtype)
            buffers.finish(pending, t)
    buffers.close()
    return dq.total(), *payload.split(buffers.own_grads())

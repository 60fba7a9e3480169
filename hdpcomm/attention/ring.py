"""The ring: carries KV, and in backward also its gradients, and computes on a block while the next is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention._kernels import Rows, add_rows, copy_rows
from hdpcomm.attention.backends.base import Accumulator, Backend, Score
from hdpcomm.attention.kv_buffers import landing_of
from hdpcomm.attention.routes import RingPlan

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["ring_backward", "ring_forward"]


@dataclass(slots=True)
class _Flight:
    """One posted exchange: everything it reads or writes stays alive until it has been waited for."""

    work: Any = None
    sends: list[tuple[Any, ...]] = field(default_factory=list)
    recvs: list[tuple[Any, ...]] = field(default_factory=list)
    placements: list[tuple[torch.Tensor, torch.Tensor, Rows]] = field(default_factory=list)
    """(buffer, message, rows): messages whose rows are not one range of the buffer, to be put in place on arrival."""
    additions: list[tuple[int, torch.Tensor, Rows]] = field(default_factory=list)
    """(step, message, rows): gradients to add to the buffer of that step."""

    def post(self, comm: Communicator | None) -> None:
        if self.sends or self.recvs:
            assert comm is not None
            self.work = comm.exchange(self.sends, self.recvs, async_op=True)

    def land(self) -> None:
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


class _Carrier:
    """Buffers of one pass, by step, and the exchanges that fill and empty them."""

    def __init__(self, plan: RingPlan, comm: Communicator | None, k: torch.Tensor, v: torch.Tensor) -> None:
        self._plan, self._comm = plan, comm
        self._row = (2, *k.shape[1:])
        self._new = k.new_empty
        self._kv: dict[int, torch.Tensor] = {}
        self._own = (k, v)
        self._grads: dict[int, torch.Tensor] = {}
        # Where the transport has a landing zone, KV arrives at its final place in it: two buffers in turn.
        self._landing = landing_of(plan, comm, k)
        if plan.steps[0].kv_until > 0:
            own = None if self._landing is None else self._landing.own()
            self._kv[0] = torch.stack((k, v), dim=1, out=own)

    def kv(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 0:
            return self._own
        buffer = self._kv[step]
        return buffer[:, 0], buffer[:, 1]

    def new_grads(self, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros for the gradients of the KV of ``step``."""
        rows = self._plan.steps[step].kv_rows
        buffer = torch.zeros((rows, *self._row), dtype=dtype, device=self._own[0].device)
        self._grads[step] = buffer
        return buffer[:, 0], buffer[:, 1]

    def post(self, due: int, *, grads: bool) -> _Flight:
        """Posts KV due at step ``due + 1`` and, with ``grads``, gradients due at ``due``."""
        flight = _Flight()
        if due + 1 < self._plan.size:
            self._post_kv(flight, due + 1)
        if grads:
            self._post_grads(flight, due)
        flight.post(self._comm)
        return flight

    def _post_kv(self, flight: _Flight, due: int) -> None:
        step, landing = self._plan.steps[due], self._landing
        for message in step.kv_sends:
            place = () if landing is None else landing.place(message.peer, due)
            flight.sends.append((_outgoing(self._kv[message.step], message.rows), message.peer, *place))
        if landing is not None:
            if step.kv_recvs:
                self._kv[due] = landing.buffer(due, step.kv_rows)
                source = step.kv_recvs[0].peer
                flight.recvs.append((self._kv[due], source, *landing.place(source, due)))
            return
        if step.kv_rows:
            self._kv[due] = self._new((step.kv_rows, *self._row))
        for message in step.kv_recvs:
            buffer = self._kv[due]
            if (whole := message.rows.contiguous_source()) is not None:
                flight.recvs.append((buffer[whole[0] : whole[1]], message.peer))
            else:
                arriving = self._new((message.rows.total, *self._row))
                flight.recvs.append((arriving, message.peer))
                flight.placements.append((buffer, arriving, message.rows.inverse()))

    def _post_grads(self, flight: _Flight, due: int) -> None:
        step = self._plan.steps[due]
        for message in step.grad_sends:
            flight.sends.append((_outgoing(self._grads[message.step], message.rows), message.peer))
        for message in step.grad_recvs:
            arriving = self._grads[0].new_empty((message.rows.total, *self._row))
            flight.recvs.append((arriving, message.peer))
            flight.additions.append((message.step, arriving, message.rows.inverse()))

    def land(self, flight: _Flight, due: int) -> None:
        """Waits for what :meth:`post` posted for ``due``, and frees what nobody needs any more."""
        flight.land()
        for step, message, rows in flight.additions:
            add_rows(self._grads[step], message, rows)
        steps = self._plan.steps
        for step in [s for s in self._kv if s <= due and steps[s].kv_until <= due + 1]:
            del self._kv[step]
        for step in [s for s in self._grads if 0 < s <= due and steps[s].grad_until <= due]:
            del self._grads[step]

    def close(self) -> None:
        """After the last step: the landing zone is free for others."""
        self._kv.clear()
        if self._landing is not None:
            self._landing.close()

    def home(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._grads[0][:, 0], self._grads[0][:, 1]


def ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: RingPlan,
    comm: Communicator | None,
    backend: Backend,
    score: Score,
) -> Accumulator:
    """Attention of this rank's queries over all keys of the pack. Collective over ``comm`` (None: a group of one)."""
    dtype = backend.compute_dtype(q.dtype)
    carrier = _Carrier(plan, comm, k, v)
    result = Accumulator(q.shape, q)
    queries = q.to(dtype)
    for t in range(plan.size):
        flight = carrier.post(t, grads=False)
        tiles = plan.steps[t].tiles
        if tiles:
            keys, values = carrier.kv(t)
            backend.forward(queries, keys.to(dtype), values.to(dtype), tiles, score, result)
        carrier.land(flight, t)
    carrier.close()
    return result


def ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    plan: RingPlan,
    comm: Communicator | None,
    backend: Backend,
    score: Score,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v in the type of ``lse``; ``out`` and ``lse`` are the final ones. Collective over ``comm``."""
    dtype = backend.compute_dtype(q.dtype)
    carrier = _Carrier(plan, comm, k, v)
    queries, douts, outs = q.to(dtype), dout.to(dtype), out.to(dtype)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    for t in range(plan.size + 1):
        flight = carrier.post(t, grads=True) if t else carrier.post(t, grads=False)
        if t < plan.size:
            dk, dv = carrier.new_grads(t, lse.dtype)
            tiles = plan.steps[t].tiles
            if tiles:
                keys, values = carrier.kv(t)
                grads = (dq, dk, dv)
                backend.backward(douts, queries, keys.to(dtype), values.to(dtype), outs, lse, tiles, score, grads)
        carrier.land(flight, t)
    carrier.close()
    dk, dv = carrier.home()
    return dq, dk, dv

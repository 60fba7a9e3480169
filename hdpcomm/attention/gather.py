"""The gather variant: every rank fetches all the KV that it needs, one group of heads at a time, then computes.

KV goes directly from its owner to each rank that needs it, with the traffic of the ring. The buffer holds it in the
order of positions, so each query piece takes one kernel call and no partial results are merged. The KV of the next
heads is in flight while the present ones are computed. In backward the gradients go directly back, and the owner adds
them in the order of ranks. Memory: all KV that a rank needs, for one group of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Accumulator, GradSum
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.ring import Route, find_atoms
from hdpcomm.attention.rows import Payload, RowExchange, Rows, copy_rows
from hdpcomm.attention.tiles import Band, Int64, Tile, atom_spans
from hdpcomm.comm import Communicator

__all__ = ["GatherPlan", "GradReturn", "fetch_rows", "gather_backward", "gather_forward", "gather_plan", "head_passes"]

_MAX_GROUPS = 4
"""Most groups of heads: more groups overlap better, but need more and smaller messages."""


@dataclass(frozen=True, slots=True, eq=False)
class GatherPlan:
    """Sends, receives and tiles of one rank in a gather."""

    q_rows: int
    kv_rows: int
    buffer_rows: int
    own: Rows
    """Copies from this rank's KV to the buffer."""
    sends: tuple[tuple[int, Rows], ...]
    """(peer, copies from this rank's KV to the message)."""
    recvs: tuple[tuple[int, Rows], ...]
    """(peer, copies from the buffer to the message)."""
    tiles: tuple[Tile, ...]


def _packed(row: Int64, rows: Int64) -> Int64:
    """[runs, 3]: (row of the message, row, rows), for a message that holds these runs of rows one after the other."""
    return np.stack([np.cumsum(rows) - rows, row, rows], axis=1)


@lru_cache(maxsize=128)
def gather_plan(q_layout: Layout, kv_layout: Layout, band: Band, *, rank: int) -> GatherPlan:
    """The plan of ``rank``; pure and local."""
    atoms = find_atoms(q_layout, kv_layout, band)
    chosen = np.nonzero(atoms.needed[:, rank] | (atoms.owner == rank))[0]
    rows, owner, source = atoms.rows[chosen], atoms.owner[chosen], atoms.row[chosen]
    place = np.cumsum(rows) - rows
    mine = owner == rank
    peers = [peer for peer in range(q_layout.size) if peer != rank]
    taken = {peer: atoms.needed[chosen, peer] & mine for peer in peers}
    sends = [(peer, source[here], rows[here]) for peer, here in taken.items()]
    recvs = [(peer, place[owner == peer], rows[owner == peer]) for peer in peers]
    return GatherPlan(
        q_rows=q_layout.rows(rank),
        kv_rows=kv_layout.rows(rank),
        buffer_rows=int(rows.sum()),
        own=Rows(np.stack([place[mine], source[mine], rows[mine]], axis=1)),
        sends=tuple((peer, Rows(_packed(start, count))) for peer, start, count in sends if len(count)),
        recvs=tuple((peer, Rows(_packed(start, count))) for peer, start, count in recvs if len(count)),
        tiles=tuple(q_layout.tiles(kv_layout, rank, atom_spans(atoms, chosen, place), band)),
    )


def head_passes(heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """(heads of q, heads of k) of each group of heads; the groups are fetched and computed one after the other."""
    count = next(n for n in range(min(_MAX_GROUPS, kv_heads), 0, -1) if kv_heads % n == 0)
    step, ratio = kv_heads // count, heads // kv_heads
    return [(slice(i * step * ratio, (i + 1) * step * ratio), slice(i * step, (i + 1) * step)) for i in range(count)]


class _Fetch:
    """The exchange that brings the rows of a payload to this rank."""

    def __init__(self, plan: GatherPlan, comm: Communicator | None, own: Tensor) -> None:
        """``own``: this rank's rows [kv_rows, width]."""
        self._plan, self._own = plan, own
        self._buffer = own.new_empty((plan.buffer_rows, own.shape[1]))
        self._exchange = RowExchange()
        for peer, rows in plan.sends:
            self._exchange.send(own, rows, peer)
        for peer, rows in plan.recvs:
            self._exchange.receive(self._buffer, rows, peer)
        self._exchange.post(comm)

    def wait(self) -> Tensor:
        """[buffer_rows, width]"""
        copy_rows(self._buffer, self._own, self._plan.own)
        self._exchange.finish()
        return self._buffer


def fetch_rows(plan: GatherPlan, comm: Communicator | None, x: Tensor) -> Tensor:
    """[buffer_rows, width]: this rank's rows ``x`` [kv_rows, width] and those that it needs of others. Collective over
    ``comm``."""
    return _Fetch(plan, comm, x).wait()


class GradReturn:
    """The exchange that sends the gradients of fetched rows to their owners."""

    def __init__(self, plan: GatherPlan, comm: Communicator | None, grads: Tensor) -> None:
        self._own = grads.new_zeros((plan.kv_rows, *grads.shape[1:]))
        self._exchange = RowExchange()
        for peer, rows in plan.recvs:
            self._exchange.send(grads, rows, peer)
        for peer, rows in plan.sends:
            self._exchange.receive(self._own, rows, peer, add=True)
        self._exchange.post(comm)
        copy_rows(self._own, grads, plan.own.inverse())

    def wait(self) -> Tensor:
        """[kv_rows, width]: the gradients of this rank's own rows."""
        self._exchange.finish()
        return self._own


class _Passes:
    """The groups of heads of a payload, one after the other; the rows of the next group are in flight meanwhile.

    Rows that serve all heads are fetched once.
    """

    def __init__(self, plan: GatherPlan, comm: Communicator | None, payload: Payload, heads: int) -> None:
        self._plan, self._comm, self._shared = plan, comm, payload.shared
        groups = head_passes(heads, payload.kv_heads)
        self.queries = [q_heads for q_heads, _ in groups]
        self.parts = [payload.heads(kv_heads) for _, kv_heads in groups]
        self._next: _Fetch | None = _Fetch(plan, comm, self.parts[0].pack())
        self._buffer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.parts)

    def buffer(self, i: int) -> Tensor:
        """The rows of pass ``i``; called once for each pass, in order."""
        if self._buffer is None or not self._shared:
            fetch = self._next
            assert fetch is not None
            more = not self._shared and i + 1 < len(self)
            self._next = _Fetch(self._plan, self._comm, self.parts[i + 1].pack()) if more else None
            self._buffer = fetch.wait()
        return self._buffer


def gather_forward(q: Tensor, payload: Payload, route: Route[GatherPlan]) -> Accumulator:
    """Like :func:`hdpcomm.attention.ring.ring_forward`. Collective over the ranks of the route."""
    plan, backend = route.plan, route.backend
    dtype = backend.compute_dtype(q.dtype)
    results: list[Accumulator] = []
    passes = _Passes(plan, route.comm, payload, q.shape[1])
    for i, (heads, part) in enumerate(zip(passes.queries, passes.parts, strict=True)):
        buffer = passes.buffer(i)
        results.append(result := Accumulator((*q[:, heads].shape[:2], payload.v_dim), q))
        if plan.tiles:
            qkv = q[:, heads].to(dtype).contiguous(), *part.expand(buffer, dtype)
            backend.forward(qkv, plan.tiles, route.score, result)
    return results[0] if len(results) == 1 else Accumulator.of_heads(results)


def gather_backward(
    dout: Tensor, q: Tensor, payload: Payload, out: Tensor, lse: Tensor, route: Route[GatherPlan]
) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`hdpcomm.attention.ring.ring_backward`. Collective over the ranks of the route."""
    plan, backend = route.plan, route.backend
    dtype = backend.compute_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    passes = _Passes(plan, route.comm, payload, q.shape[1])
    returns: list[GradReturn] = []
    own: list[Tensor] = []
    grads: Tensor | None = None
    for i, (heads, part) in enumerate(zip(passes.queries, passes.parts, strict=True)):
        buffer = passes.buffer(i)
        if grads is None or not payload.shared:
            grads = torch.zeros((plan.buffer_rows, part.width), dtype=lse.dtype, device=q.device)
        if plan.tiles:
            queries = GradSum(q[:, heads].shape, q, lse.dtype)
            pair = part.new_grads(grads)
            keys, values = part.expand(buffer, dtype)
            douts, q_part, outs = (x[:, heads].to(dtype).contiguous() for x in (dout, q, out))
            backend.backward(
                douts, (q_part, keys, values), outs, lse[:, heads].contiguous(), plan.tiles, route.score,
                (queries, GradSum.into(pair[0]), GradSum.into(pair[1])),
            )  # fmt: skip
            part.fold(buffer, pair, grads, dtype)
            dq[:, heads] = queries.total()
        if payload.shared and i + 1 < len(passes):
            continue
        own += [last.wait() for last in returns[-1:]]
        returns.append(GradReturn(plan, route.comm, grads))
    own.append(returns[-1].wait())
    rows = own * len(passes) if payload.shared else own
    return dq, *payload.join([part.split(grad) for part, grad in zip(passes.parts, rows, strict=True)])

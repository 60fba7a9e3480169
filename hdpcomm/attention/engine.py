"""Forward and backward of one distributed attention, in any variant; autograd calls these.

With head parallelism (Ulysses) the ranks of a communicator form groups of neighbours. Within a group, rank i takes the
i-th share of the heads of all the group's tokens. Neighbours hold neighbouring pieces of the zigzag, so a group holds
one head and one tail of each sequence, like one rank of a ring. Sources: DeepSpeed-Ulysses, and USP (arXiv 2405.07719)
for the hybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Backend, Score
from hdpcomm.attention.gather import gather_backward, gather_forward, gather_plan
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.ring import Route, ring_backward, ring_forward, ring_plan
from hdpcomm.attention.rows import Latent, Payload, Rows, copy_rows
from hdpcomm.attention.tiles import Band
from hdpcomm.comm import Communicator

__all__ = [
    "Call",
    "LatentDims",
    "as_saved",
    "backward",
    "forward",
    "grouped_layout",
    "head_shares",
    "retrace",
    "token_shares",
]


_Pair = tuple[Tensor, Tensor]


@lru_cache(maxsize=128)
def grouped_layout(layout: Layout, size: int) -> Layout:
    """The layout of groups of ``size`` neighbours."""
    return layout.grouped(size)


@dataclass(frozen=True, slots=True, eq=False)
class TokenShares:
    """Where the tokens of each member are among those of its group."""

    members: tuple[Rows, ...]
    """For each member: copies from its rows to the group's rows."""
    rows: int
    """Rows of the group."""


@lru_cache(maxsize=128)
def token_shares(layout: Layout, size: int, group: int) -> TokenShares:
    """The shares of the tokens of ``group``, one of ``layout.size // size``; pure and local."""
    whole = grouped_layout(layout, size)
    members = tuple(layout.rows_in(whole, group * size + member) for member in range(size))
    return TokenShares(members, whole.rows(group))


def head_shares(heads: int, kv_heads: int, size: int) -> tuple[list[slice], list[slice]]:
    """By member: its heads of q, and those of k and v that they use (shared where there are fewer than members); of
    numbers that the choice of a variant has found to fit."""
    q_share, kv_share = heads // size, max(1, kv_heads // size)
    queries = [slice(i * q_share, (i + 1) * q_share) for i in range(size)]
    keys = [slice(i * kv_heads // size, i * kv_heads // size + kv_share) for i in range(size)]
    return queries, keys


class HeadExchange:
    """The exchanges of a call's tensors in a group of neighbours, between (my tokens, all heads) and (the group's
    tokens, my heads). Every member takes the whole latent of MLA, and its heads of the weight.

    Args:
        layouts: of q, and of k.
        counts: heads of q, and of k.
        latent: whether keys and values are the latent of MLA.

    Attributes:
        outer: the ranks with the same place in the other groups, among which the ring or the gather runs.
    """

    def __init__(
        self, comm: Communicator, size: int, layouts: Sequence[Layout], counts: tuple[int, int], *, latent: bool
    ) -> None:
        self._member, group = comm.rank % size, comm.rank // size
        inner = comm.subset(range(group * size, (group + 1) * size))
        outer = comm.subset(range(self._member, comm.size, size))
        assert inner is not None
        assert outer is not None
        self._inner, self.outer, self._latent = inner, outer, latent
        self._counts = counts[0], 1 if latent else counts[1]
        self._heads = head_shares(*self._counts, size)
        self._tokens = [token_shares(layout, size, group) for layout in layouts]

    @property
    def queries(self) -> slice:
        """This rank's heads of q."""
        return self._heads[0][self._member]

    def collect(self, rows: tuple[Tensor, ...], kv: _Pair) -> tuple[list[Tensor], _Pair]:
        """From (my tokens, all heads) to (the group's tokens, my heads). ``rows`` have the layout of q. Collective over
        the group, as all that follow."""
        if self._latent:
            *collected, latent = self.collect_each(*rows, kv[0], kv=1)
            return collected, (latent, kv[1][self.queries].contiguous())
        *collected, k, v = self.collect_each(*rows, *kv, kv=2)
        return collected, (k, v)

    def give_back(self, *tensors: Tensor, kv: int = 0) -> list[Tensor]:
        """From (the group's tokens, my heads) to (my tokens, all heads); sums heads that several members hold, in the
        order of members. The last ``kv`` tensors have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        outgoing, shapes = [], []
        for x, kind in zip(tensors, kinds, strict=True):
            members, parts = self._tokens[kind].members, []
            for rows in members:
                parts.append(x.new_empty((rows.total, *x.shape[1:])))
                copy_rows(parts[-1], x.contiguous(), rows.inverse())
            outgoing.append(parts)
            mine = members[self._member].total
            shapes.append([(mine, share.stop - share.start, *x.shape[2:]) for share in self._heads[kind]])
        results = []
        for x, kind, parts in zip(tensors, kinds, self._swap(outgoing, shapes), strict=True):
            whole = x.new_zeros((parts[0].shape[0], self._counts[kind], *x.shape[2:]))
            for share, part in zip(self._heads[kind], parts, strict=True):
                whole[:, share] += part
            results.append(whole)
        return results

    def give_back_grads(self, dq: Tensor, pair: _Pair) -> tuple[Tensor, _Pair]:
        """Gradients of q and of the two tensors of keys and values."""
        if not self._latent:
            dq, dk, dv = self.give_back(dq, *pair, kv=2)
            return dq, (dk, dv)
        dq, dlatent = self.give_back(dq, pair[0], kv=1)
        share = pair[1].new_zeros((self._counts[0], *pair[1].shape[1:]))
        share[self.queries] = pair[1]
        return dq, (dlatent, share)

    def collect_each(self, *tensors: Tensor, kv: int = 0) -> list[Tensor]:
        """:meth:`collect` of tensors, of which the last ``kv`` have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        outgoing = [[x[:, share] for share in self._heads[kind]] for x, kind in zip(tensors, kinds, strict=True)]
        shapes = [
            [(rows.total, *parts[self._member].shape[1:]) for rows in self._tokens[kind].members]
            for parts, kind in zip(outgoing, kinds, strict=True)
        ]
        results = []
        for kind, parts in zip(kinds, self._swap(outgoing, shapes), strict=True):
            results.append(parts[0].new_empty((self._tokens[kind].rows, *parts[0].shape[1:])))
            for part, rows in zip(parts, self._tokens[kind].members, strict=True):
                copy_rows(results[-1], part, rows)
        return results

    def _swap(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Sends ``outgoing``, and gives the parts of ``shapes`` that arrive: all by tensor, then by member."""
        sends, recvs, arriving = [], [], []
        for parts, wanted in zip(outgoing, shapes, strict=True):
            here = [
                part.contiguous() if peer == self._member else part.new_empty(shape)
                for peer, (part, shape) in enumerate(zip(parts, wanted, strict=True))
            ]
            peers = [peer for peer in range(len(parts)) if peer != self._member]
            sends += [(parts[peer].contiguous(), peer) for peer in peers]
            recvs += [(here[peer], peer) for peer in peers]
            arriving.append(here)
        self._inner.exchange(sends, recvs)
        return arriving


@dataclass(frozen=True, slots=True)
class LatentDims:
    """The dimensions of MLA that its tensors do not tell."""

    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Call:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    q_layout: Layout
    kv_layout: Layout
    band: Band
    comm: Communicator | None
    backend: Backend
    score: Score
    gather: bool = False
    """Whether all KV is fetched at once instead of being passed round the ring."""
    head_group: int = 1
    """Number of neighbours that exchange heads (Ulysses); the ring or the gather runs between such groups."""
    latent: LatentDims | None = None
    """Where keys and values travel as the latent of MLA: their two tensors are then the latent and the weight."""


def _route(call: Call, heads: tuple[int, int]) -> tuple[Route[Any], HeadExchange | None]:
    """This rank's part in the ring or the gather of a call, which runs after heads were exchanged, if they are;
    ``heads``: of q and of k."""
    layouts, comm, exchange = (call.q_layout, call.kv_layout), call.comm, None
    if call.head_group > 1:
        assert comm is not None
        exchange = HeadExchange(comm, call.head_group, layouts, heads, latent=call.latent is not None)
        layouts = grouped_layout(layouts[0], call.head_group), grouped_layout(layouts[1], call.head_group)
        comm = exchange.outer
    make = gather_plan if call.gather else ring_plan
    plan = make(*layouts, call.band, rank=0 if comm is None else comm.rank)
    return Route(plan, comm, call.backend, call.score), exchange


def _payload(call: Call, kv: _Pair) -> Payload:
    if call.latent is None:
        return Payload(*kv)
    return Latent(*kv, rope_dim=call.latent.rope_dim, v_dim=call.latent.v_dim)


def forward(q: Tensor, kv: _Pair, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out in the type of ``q``, lse in float32 (float64), what :func:`backward` needs). Collective over the call's
    ranks.

    ``kv``: k and v; or the latent [rows, 1, width] and the weight [heads, nope_dim + v_dim, rank] of MLA.
    """
    route, exchange = _route(call, (q.shape[1], kv[0].shape[1]))
    if exchange is not None:
        (q,), kv = exchange.collect((q,), kv)
        sinks = None if sinks is None else sinks[exchange.queries]
    run = gather_forward if call.gather else ring_forward
    result = run(q, _payload(call, kv), route)
    if sinks is not None:
        with_sink = torch.logaddexp(result.lse, sinks.to(result.lse.dtype))  # one more key per head, of the value 0
        result.widen().mul_(torch.exp(result.lse - with_sink)[..., None])
        result.lse.copy_(with_sink)
    out, lse = result.out.to(q.dtype), result.lse
    saved = [q, *kv, out, lse]
    if exchange is not None:
        out, lse = exchange.give_back(out, lse)
    return out, lse, saved


def as_saved(kv: _Pair, call: Call, shapes: tuple[int, int]) -> _Pair:
    """The tensors of keys and values as :func:`backward` needs them, from the call's inputs. Collective over its ranks
    if they exchange heads; ``shapes``: heads of q and of k."""
    _, exchange = _route(call, shapes)
    return kv if exchange is None else exchange.collect((), kv)[1]


def retrace(q: Tensor, kv: _Pair, out: Tensor, lse: Tensor, call: Call) -> list[Tensor]:
    """The tensors that :func:`backward` needs, from a call's inputs and outputs; for callers that kept only these."""
    _, exchange = _route(call, (q.shape[1], kv[0].shape[1]))
    if exchange is not None:
        (q, out, lse), kv = exchange.collect((q, out, lse), kv)
    return [q, *kv, out, lse]


def backward(
    dout: Tensor, saved: list[Tensor], sinks: Tensor | None, call: Call, shapes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, gradients of the two tensors of ``kv``, dsinks), in float32 (float64) where they are sums; ``shapes``: heads
    of q and of k. Collective over the call's ranks.

    dsinks, and the gradient of the weight of MLA, is the share of this rank; the sum over the ranks is the gradient.
    """
    route, exchange = _route(call, shapes)
    q, first, second, out, lse = saved
    if exchange is not None:
        (dout,) = exchange.collect_each(dout)
    run = gather_backward if call.gather else ring_backward
    dq, *pair = run(dout, q, _payload(call, (first, second)), out, lse, route)
    dsinks = None
    if sinks is not None:
        mine = slice(None) if exchange is None else exchange.queries
        dsinks = torch.zeros_like(sinks, dtype=lse.dtype)
        weight = torch.exp(sinks[mine].to(lse.dtype) - lse)
        dsinks[mine] = -(weight * (dout.to(lse.dtype) * out).sum(-1)).sum(0, dtype=torch.float64).to(lse.dtype)
    dfirst, dsecond = pair
    if exchange is not None:
        dq, (dfirst, dsecond) = exchange.give_back_grads(dq, (dfirst, dsecond))
    return dq, dfirst, dsecond, dsinks

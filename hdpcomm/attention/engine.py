"""Forward and backward of one distributed attention, in any variant; autograd calls these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Backend, Score
from hdpcomm.attention.gather import gather_backward, gather_forward, gather_plan
from hdpcomm.attention.heads import HeadGroup, grouped_layout, head_shares, token_shares
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.payload import Latent, Payload
from hdpcomm.attention.ring import ring_backward, ring_forward
from hdpcomm.attention.routes import Route, ring_plan
from hdpcomm.attention.tiles import Band

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Call", "LatentDims", "as_saved", "backward", "forward", "retrace"]


_Pair = tuple[Tensor, Tensor]


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


def _route(call: Call) -> tuple[Route[Any], HeadGroup | None]:
    """This rank's part in the ring or the gather of a call, which runs after heads were exchanged, if they are."""
    q_layout, kv_layout, comm, group = call.q_layout, call.kv_layout, call.comm, None
    if call.head_group > 1:
        assert comm is not None
        group = HeadGroup(comm, call.head_group)
        q_layout, kv_layout = (grouped_layout(layout, call.head_group) for layout in (q_layout, kv_layout))
        comm = group.outer
    make = gather_plan if call.gather else ring_plan
    plan = make(q_layout, kv_layout, call.band, rank=0 if comm is None else comm.rank)
    return Route(plan, comm, call.backend, call.score), group


class _HeadExchange:
    """The exchanges of a call's tensors among neighbours, before and after the ring or the gather. Every member takes
    the whole latent of MLA, and its heads of the weight."""

    def __init__(self, call: Call, group: HeadGroup, heads: int, kv_heads: int) -> None:
        self._latent, self._group = call.latent is not None, group
        self._counts = heads, 1 if self._latent else kv_heads
        self._shares = head_shares(*self._counts, group.size)
        self._tokens = tuple(
            token_shares(layout, group.size, group.group) for layout in (call.q_layout, call.kv_layout)
        )

    @property
    def queries(self) -> slice:
        """This rank's heads of q."""
        return self._shares[0][self._group.member]

    def _collect(self, *tensors: Tensor, kv: int) -> list[Tensor]:
        """From (my tokens, all heads) to (group's tokens, my heads); the last ``kv`` tensors have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        return self._group.collect(tensors, [self._tokens[i] for i in kinds], [self._shares[i] for i in kinds])

    def collect(self, rows: tuple[Tensor, ...], kv: _Pair) -> tuple[list[Tensor], _Pair]:
        """``rows`` have the layout of q."""
        if self._latent:
            *collected, latent = self._collect(*rows, kv[0], kv=1)
            return collected, (latent, kv[1][self.queries].contiguous())
        *collected, k, v = self._collect(*rows, *kv, kv=2)
        return collected, (k, v)

    def collect_rows(self, *rows: Tensor) -> list[Tensor]:
        """:meth:`collect` without keys."""
        return self._collect(*rows, kv=0)

    def give_back(self, *tensors: Tensor, kv: int = 0) -> list[Tensor]:
        """From (group's tokens, my heads) to (my tokens, all heads)."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        tokens, heads = [self._tokens[i] for i in kinds], [self._shares[i] for i in kinds]
        return self._group.give_back(tensors, tokens, heads, [self._counts[i] for i in kinds])

    def give_back_grads(self, dq: Tensor, pair: _Pair) -> tuple[Tensor, _Pair]:
        """Gradients of q and of the two tensors of keys and values."""
        if not self._latent:
            dq, dk, dv = self.give_back(dq, *pair, kv=2)
            return dq, (dk, dv)
        dq, dlatent = self.give_back(dq, pair[0], kv=1)
        share = pair[1].new_zeros((self._counts[0], *pair[1].shape[1:]))
        share[self.queries] = pair[1]
        return dq, (dlatent, share)


def _payload(call: Call, kv: _Pair) -> Payload:
    if call.latent is None:
        return Payload(*kv)
    return Latent(*kv, rope_dim=call.latent.rope_dim, v_dim=call.latent.v_dim)


def forward(q: Tensor, kv: _Pair, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out in the type of ``q``, lse in float32 (float64), what :func:`backward` needs). Collective over the call's
    ranks.

    ``kv``: k and v; or the latent [rows, 1, width] and the weight [heads, nope_dim + v_dim, rank] of MLA.
    """
    route, group = _route(call)
    exchange = None
    if group is not None:
        exchange = _HeadExchange(call, group, q.shape[1], kv[0].shape[1])
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
    _, group = _route(call)
    return kv if group is None else _HeadExchange(call, group, *shapes).collect((), kv)[1]


def retrace(q: Tensor, kv: _Pair, out: Tensor, lse: Tensor, call: Call) -> list[Tensor]:
    """The tensors that :func:`backward` needs, from a call's inputs and outputs; for callers that kept only these."""
    _, group = _route(call)
    if group is None:
        return [q, *kv, out, lse]
    (q, out, lse), kv = _HeadExchange(call, group, q.shape[1], kv[0].shape[1]).collect((q, out, lse), kv)
    return [q, *kv, out, lse]


def backward(
    dout: Tensor, saved: list[Tensor], sinks: Tensor | None, call: Call, shapes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, gradients of the two tensors of ``kv``, dsinks), in float32 (float64) where they are sums; ``shapes``: heads
    of q and of k. Collective over the call's ranks.

    dsinks, and the gradient of the weight of MLA, is the share of this rank; the sum over the ranks is the gradient.
    """
    route, group = _route(call)
    q, first, second, out, lse = saved
    exchange = None
    if group is not None:
        exchange = _HeadExchange(call, group, *shapes)
        (dout,) = exchange.collect_rows(dout)
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

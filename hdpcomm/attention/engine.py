"""Forward and backward of one distributed attention, in any variant; autograd calls these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Backend, Score
from hdpcomm.attention.gather import gather_backward, gather_forward, gather_plan
from hdpcomm.attention.heads import HeadExchange, grouped_layout
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

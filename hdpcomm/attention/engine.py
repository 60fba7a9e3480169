"""Forward and backward of one distributed attention, in any variant; autograd calls these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention.backends.base import Accumulator, Backend, Score
from hdpcomm.attention.gather import GatherPlan, gather_backward, gather_forward, gather_plan
from hdpcomm.attention.heads import HeadGroup, grouped_layout, head_shares, token_shares
from hdpcomm.attention.layout import AnyLayout
from hdpcomm.attention.ring import ring_backward, ring_forward
from hdpcomm.attention.routes import RingPlan, ring_plan
from hdpcomm.attention.tiles import Band

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Call", "backward", "forward", "retrace"]

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    q_layout: AnyLayout
    kv_layout: AnyLayout
    band: Band
    comm: Communicator | None
    backend: Backend
    score: Score
    gather: bool = False
    """Whether all KV is fetched at once instead of being passed round the ring."""
    head_group: int = 1
    """Number of neighbours that exchange heads (Ulysses); the ring or the gather runs between such groups."""

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank


@dataclass(frozen=True, slots=True)
class _Place:
    """This rank's part in the ring or the gather of a call, which runs after heads were exchanged, if they are."""

    plan: RingPlan | GatherPlan
    comm: Communicator | None
    group: HeadGroup | None


def _place(call: Call) -> _Place:
    q_layout, kv_layout, comm, group = call.q_layout, call.kv_layout, call.comm, None
    if call.head_group > 1:
        assert comm is not None
        group = HeadGroup(comm, call.head_group)
        q_layout, kv_layout = (grouped_layout(layout, call.head_group) for layout in (q_layout, kv_layout))
        comm = group.outer
    rank = 0 if comm is None else comm.rank
    make = gather_plan if call.gather else ring_plan
    plan = make(q_layout, kv_layout, call.band, rank=rank)
    return _Place(plan, comm, group)


class _HeadExchange:
    """The exchanges of heads before and after the ring or the gather."""

    def __init__(self, call: Call, group: HeadGroup, heads: int, kv_heads: int) -> None:
        self._group = group
        self._counts = (heads, kv_heads)
        self._shares = head_shares(heads, kv_heads, group.size)
        self._tokens = tuple(
            token_shares(layout, group.size, group.group) for layout in (call.q_layout, call.kv_layout)
        )

    @property
    def queries(self) -> slice:
        """This rank's heads of q."""
        return self._shares[0][self._group.member]

    def collect(self, *tensors: torch.Tensor, kv: int = 0) -> list[torch.Tensor]:
        """From (my tokens, all heads) to (group's tokens, my heads); the last ``kv`` tensors have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        return self._group.collect(tensors, [self._tokens[i] for i in kinds], [self._shares[i] for i in kinds])

    def give_back(self, *tensors: torch.Tensor, kv: int = 0) -> list[torch.Tensor]:
        """From (group's tokens, my heads) to (my tokens, all heads)."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        tokens, heads = [self._tokens[i] for i in kinds], [self._shares[i] for i in kinds]
        return self._group.give_back(tensors, tokens, heads, [self._counts[i] for i in kinds])


def _add_sinks(result: Accumulator, sinks: torch.Tensor) -> None:
    """Adds one more key per head, with the given score and the value 0."""
    with_sink = torch.logaddexp(result.lse, sinks.to(result.lse.dtype))
    result.out *= torch.exp(result.lse - with_sink)[..., None]
    result.lse.copy_(with_sink)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(out, lse, what :func:`backward` needs), out and lse in float32 (float64). Collective over the call's ranks."""
    place = _place(call)
    exchange = None
    if place.group is not None:
        exchange = _HeadExchange(call, place.group, q.shape[1], k.shape[1])
        q, k, v = exchange.collect(q, k, v, kv=2)
        sinks = None if sinks is None else sinks[exchange.queries]
    common: dict[str, Any] = {"comm": place.comm, "backend": call.backend, "score": call.score}
    if isinstance(place.plan, RingPlan):
        result = ring_forward(q, k, v, plan=place.plan, **common)
    else:
        result = gather_forward(q, k, v, plan=place.plan, **common)
    if sinks is not None:
        _add_sinks(result, sinks)
    saved = [q, k, v, result.out, result.lse]
    if exchange is None:
        return result.out, result.lse, saved
    out, lse = exchange.give_back(result.out, result.lse)
    return out, lse, saved


def retrace(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: Call
) -> list[torch.Tensor]:
    """The tensors that :func:`backward` needs, from a call's inputs and outputs; for callers that kept only these."""
    place = _place(call)
    if place.group is None:
        return [q, k, v, out, lse]
    exchange = _HeadExchange(call, place.group, q.shape[1], k.shape[1])
    q, out, lse, k, v = exchange.collect(q, out, lse, k, v, kv=2)
    return [q, k, v, out, lse]


def backward(
    dout: torch.Tensor, saved: list[torch.Tensor], sinks: torch.Tensor | None, call: Call, shapes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dsinks) in float32 (float64); ``shapes``: heads of q and of k. Collective over the call's ranks.

    dsinks is the share of this rank's tokens (and heads); the sum over the ranks is the gradient.
    """
    place = _place(call)
    q, k, v, out, lse = saved
    exchange = None
    if place.group is not None:
        exchange = _HeadExchange(call, place.group, *shapes)
        (dout,) = exchange.collect(dout)
    common: dict[str, Any] = {"comm": place.comm, "backend": call.backend, "score": call.score}
    if isinstance(place.plan, RingPlan):
        grads = ring_backward(dout, q, k, v, out, lse, plan=place.plan, **common)
    else:
        grads = gather_backward(dout, q, k, v, out, lse, plan=place.plan, **common)
    dsinks = None
    if sinks is not None:
        mine = slice(None) if exchange is None else exchange.queries
        dsinks = torch.zeros_like(sinks, dtype=lse.dtype)
        weight = torch.exp(sinks[mine].to(lse.dtype) - lse)
        dsinks[mine] = -(weight * (dout.to(lse.dtype) * out).sum(-1)).sum(0, dtype=torch.float64).to(lse.dtype)
    if exchange is None:
        return (*grads, dsinks)
    dq, dk, dv = exchange.give_back(*grads, kv=2)
    return dq, dk, dv, dsinks

"""``ring_attention``: exact attention over packed sequences that several ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention.backends import choose
from hdpcomm.attention.backends.base import Backend, Problem, Score
from hdpcomm.attention.layout import CuSeqlens, layout_of
from hdpcomm.attention.ring import ring_backward, ring_forward
from hdpcomm.attention.routes import RingPlan, ring_plan
from hdpcomm.attention.tiles import band_of
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["ring_attention"]


@dataclass(frozen=True, slots=True)
class _Call:
    """What forward and backward share beside the tensors."""

    plan: RingPlan
    comm: Communicator | None
    backend: Backend
    score: Score


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = ring_forward(q, k, v, plan=call.plan, comm=call.comm, backend=call.backend, score=call.score)
        ctx.call = call
        ctx.save_for_backward(q, k, v, result.out, result.lse)
        ctx.mark_non_differentiable(result.lse)
        return result.out.to(q.dtype), result.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        dq, dk, dv = ring_backward(
            dout, q, k, v, out, lse, plan=call.plan, comm=call.comm, backend=call.backend, score=call.score
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise InvalidUsage(f"expected q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]; got {shapes}")
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise InvalidUsage(f"k and v must have one shape, and the head_dim of q; got {shapes}")
    if q.shape[1] == 0 or q.shape[2] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidUsage(
            f"the heads of q must be a multiple of the heads of k and v, and none may be 0; got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InvalidUsage(f"q, k and v must have one floating-point type; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise InvalidUsage(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_contiguous():
            raise InvalidUsage(
                f"{name} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()}); call .contiguous() first"
            )


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact softmax attention over packed sequences, each rank holding a zigzag shard of every sequence.

    ``q``: [T_local, heads, head_dim], ``k``, ``v``: [T_local, kv_heads, head_dim], contiguous: what
    :func:`hdpcomm.attention.shard` gives this rank. ``comm``: the ranks that share the pack; None or a communicator
    of one rank means no communication. ``cu_seqlens``: int32 [num_sequences + 1] of the whole pack, the same on all
    ranks (best on the CPU: a CUDA tensor has to be waited for); ``cu_seqlens_k``: of the keys, where their lengths
    differ; the ends of queries and keys are then aligned. ``window``: how many keys a query sees to its left, itself
    included (without ``causal`` also to its right), or (left, right) as in flash-attn, -1 for no limit. ``scale``:
    default head_dim ** -0.5.

    Returns the output [T_local, heads, head_dim] in the type of ``q``, and with ``return_lse`` also the log-sum-exp
    [T_local, heads] in float32 (float64 for float64), not differentiable; a query that sees no key gives 0 and -inf.
    Differentiable in q, k, v. Collective over ``comm``, in forward and in backward.
    Raises InvalidUsage for bad arguments, and what the communicator raises.
    """
    _check_tensors(q, k, v)
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    q_layout = layout_of(cu_seqlens, size=size)
    kv_layout = q_layout if cu_seqlens_k is None else layout_of(cu_seqlens_k, size=size, name="cu_seqlens_k")
    if len(q_layout.bounds) != len(kv_layout.bounds):
        raise InvalidUsage(
            f"cu_seqlens has {len(q_layout.bounds)} sequences, cu_seqlens_k {len(kv_layout.bounds)}; expected as many"
        )
    band = band_of(causal, window)
    plan = ring_plan(q_layout, kv_layout, band, rank=rank)
    for name, x, rows in (("q", q, plan.q_rows), ("k", k, plan.kv_rows)):
        if x.shape[0] != rows:
            raise InvalidUsage(
                f"{name} has {x.shape[0]} tokens; under cu_seqlens, rank {rank} of {size} holds {rows} (see shard())"
            )
    problem = Problem(q.device.type, q.dtype, q.shape[1], k.shape[1], q.shape[2], windowed=band.low is not None)
    score = Score(q.shape[2] ** -0.5 if scale is None else float(scale))
    call = _Call(plan, comm if size > 1 else None, choose(backend, problem), score)
    out, lse = _RingAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out

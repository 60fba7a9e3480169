"""RMSNorm, SwiGLU and rotary positions that keep no more for their backward passes than they have to, in few passes.

What autograd would keep of them composed of torch's operations, besides: the normalised input, and SiLU of the gate.
Bytes that are read and written for a 16-bit element, forward and backward: RMSNorm 4 and 6 by torch's fused operators
on CUDA, 28 and 80 by those of its parts; SwiGLU 10 and 22; a rotation 10 and 10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.kernels.derivatives import without_second_derivative

__all__ = ["rms_norm", "rotate", "swiglu"]


def _has_fused_norm(x: Tensor) -> bool:
    """Whether torch has one kernel for each pass: since 2.9, on CUDA."""
    return x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm")


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor
        out, factors = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(
            upstream[0].contiguous(), x, [x.shape[-1]], factors, weight, [True, True]
        )
        return of_x, of_weight, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        factors = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factors = factors.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factors)
        scaled: Tensor = (wide * factors).to(x.dtype) * weight
        return scaled

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        normed = x.to(factors.dtype) * factors
        outer = (normed.to(x.dtype) * upstream[0]).reshape(-1, x.shape[-1])
        gradient = upstream[0] * weight
        means = torch.linalg.vecdot(gradient.to(normed.dtype), normed)[..., None] / x.shape[-1]
        inner = normed.mul_(means).neg_().add_(gradient).mul_(factors)
        return inner.to(x.dtype), outer.sum(0, dtype=factors.dtype).to(weight.dtype), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = F.silu(gate).mul_(upstream[0])
        return torch.ops.aten.silu_backward(upstream[0] * up, gate), of_up


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(upstream[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in at least fp32. Local.

    Args:
        x: ``[..., width]``; kept for the backward pass, with one number for each row.
        weight: ``[width]``.
    """
    norm = _FusedRmsNorm if x.dtype == weight.dtype and _has_fused_norm(x) else _RmsNorm
    normed: Tensor = norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, elementwise; both are kept for the backward pass, and nothing else. Local."""
    mixed: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of ``x: [tokens, heads, D]`` by the angles of ``cos`` and ``sin``, each
    ``[tokens, 1, D/2]``, which get no gradients and are all that is kept. Local."""
    turned: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned

"""RMSNorm and SwiGLU that keep no more for their backward passes than they have to.

What autograd would keep of them composed of torch's operations, besides: the normalised input, and SiLU of the gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.kernels.derivatives import without_second_derivative

__all__ = ["rms_norm", "swiglu"]


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in at least fp32. Local.

    Args:
        x: ``[..., width]``; kept for the backward pass, with one number for each row.
        weight: ``[width]``.
    """
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, elementwise; both are kept for the backward pass, and nothing else. Local."""
    mixed: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return mixed

"""RMSNorm, gated activations and rotary positions that keep no more for their backward passes than they have to, in few
passes.

Compiled code composes them of torch's operations, which compilers fuse. What autograd would keep of these, besides: the
normalised input, and the activated gate.
Bytes that are read and written for a 16-bit element, forward and backward: RMSNorm 4 and 6 by torch's fused operators
on CUDA, 14 and 38 by those of its parts; gating 10 and 22; a rotation 10 and 10.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.kernels.transfers import autocast_type, without_second_derivative

__all__ = ["ACTIVATIONS", "gate_clamped", "gate_halves", "gated", "rms_norm", "rotate"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Names of the activations of a gate."""


def _has_fused_norm(x: Tensor) -> bool:
    """Whether torch has one kernel for each pass: since 2.9, on CUDA."""
    return x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm")


class _RmsNorm(torch.autograd.Function):
    """Mixed types are left to each kernel, which reads and writes them as they are and computes in the wide one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        ctx.offset, ctx.fused = offset, offset == 0 and dtype == x.dtype == weight.dtype and _has_fused_norm(x)
        if ctx.fused:
            out, factors = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            factors = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
            factors = factors.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out = torch.empty_like(x, dtype=dtype)
            torch.mul(x * factors, _wide_weight(weight, wide, offset), out=out)
        ctx.save_for_backward(x, weight, factors)
        normed: Tensor = out
        return normed

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, factors = ctx.saved_tensors
        if ctx.fused:
            of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(
                upstream[0].contiguous(), x, [x.shape[-1]], factors, weight, list(ctx.needs_input_grad[:2])
            )
            return of_x, of_weight, None, None, None
        scale = _wide_weight(weight, factors.dtype, ctx.offset)
        products = torch.mul(upstream[0], x, out=torch.empty_like(x, dtype=factors.dtype)).reshape(-1, x.shape[-1])
        of_x = of_weight = None
        with torch.autocast(autocast_type(x), enabled=False):
            if ctx.needs_input_grad[1]:
                of_weight = torch.mv(products.T, factors.flatten()).to(weight.dtype)
            sums = torch.mv(products, scale).view(factors.shape)
        if ctx.needs_input_grad[0]:
            sums.mul_(factors.pow(3))
            inner = torch.mul(upstream[0], scale, out=products.view(x.shape)).mul_(factors)
            of_x = torch.addcmul(inner, x, sums, value=-1 / x.shape[-1], out=torch.empty_like(x))
        return of_x, of_weight, None, None, None


def _wide_weight(weight: Tensor, wide: torch.dtype, offset: float) -> Tensor:
    return weight.to(wide) + offset if offset else weight.to(wide)


def _activated(kind: str, x: Tensor, out: Tensor) -> Tensor:
    if kind == "silu":
        activated: Tensor = torch.ops.aten.silu.out(x, out=out)
    else:
        activated = torch.ops.aten.gelu.out(x, approximate="tanh" if kind == "gelu_tanh" else "none", out=out)
    return activated


def _activation_gradient(kind: str, upstream: Tensor, x: Tensor, out: Tensor) -> Tensor:
    gradient: Tensor
    if kind == "silu":
        gradient = torch.ops.aten.silu_backward(upstream, x, grad_input=out)
    else:
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        gradient = torch.ops.aten.gelu_backward(upstream, x, approximate=approximate, grad_input=out)
    return gradient


class _Gated(torch.autograd.Function):
    """``up`` may be None: the second half of ``gate``'s columns, whose gradient is written in one piece then."""

    @staticmethod
    def forward(ctx: Any, kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return _activated(kind, first, torch.empty_like(first)).mul_(second)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor, Tensor | None]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        (first, of_first), (second, of_second) = (
            zip(gate.chunk(2, dim=-1), of_gate.chunk(2, dim=-1), strict=True)
            if of_up is None
            else ((gate, of_gate), (up, of_up))
        )
        _activated(ctx.kind, first, of_second).mul_(upstream[0])
        _activation_gradient(ctx.kind, torch.mul(upstream[0], second, out=of_first), first, of_first)
        return None, of_gate, of_up


class _GateClamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.alpha, ctx.limit = alpha, limit
        gate = pairs[..., ::2].clamp(max=limit)
        gate.mul_(torch.mul(gate, alpha).sigmoid_())
        return pairs[..., 1::2].clamp(-limit, limit).add_(1).mul_(gate)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (pairs,) = ctx.saved_tensors
        alpha, limit, gradient = ctx.alpha, ctx.limit, torch.empty_like(pairs)
        gate, up = pairs[..., ::2], pairs[..., 1::2]
        above = _next_above(limit, torch.promote_types(pairs.dtype, torch.float32))
        scaled = gate.clamp(max=limit).mul_(alpha)
        of_gate = up.clamp(-limit, limit).add_(1).mul_(upstream[0])
        of_gate = torch.ops.aten.silu_backward(of_gate, scaled)
        torch.ops.aten.hardtanh_backward(of_gate, gate, -math.inf, above, grad_input=gradient[..., ::2])
        of_up = F.silu(scaled, inplace=True).mul_(upstream[0]).div_(alpha)
        torch.ops.aten.hardtanh_backward(of_up, up, -above, above, grad_input=gradient[..., 1::2])
        return gradient, None, None


@cache
def _next_above(limit: float, dtype: torch.dtype) -> float:
    """The next number of a type: ``x < it`` is ``x <= limit``."""
    at, end = (torch.tensor(value, dtype=dtype, device="cpu") for value in (limit, math.inf))
    return float(torch.nextafter(at, end))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.halves = halves
        first, second = _by_half(cos, halves), _by_half(sin, halves)
        return _rotated(x, first, second, 1)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = _by_half(cos, ctx.halves), _by_half(sin, ctx.halves)
        return _rotated(upstream[0], first, second[::-1], -1), None, None, None


def _by_half(table: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    """Factors of the first and of the second half of what is turned."""
    if halves:
        return table, table
    half = table.shape[-1] // 2
    return table[..., :half], table[..., half:]


def _rotated(x: Tensor, cos: tuple[Tensor, Tensor], sin: tuple[Tensor, Tensor], sign: int) -> Tensor:
    out = torch.empty_like(x)
    half = cos[0].shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos[0], out=out[..., :half]).addcmul_(second, sin[0], value=-sign)
    torch.mul(second, cos[1], out=out[..., half : 2 * half]).addcmul_(first, sin[1], value=sign)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension, in at least fp32. Local.

    Args:
        x: ``[..., width]``; kept for the backward pass, with one number for each row.
        weight: ``[width]``.
        dtype: of the result. Default: the wider type of ``x`` and ``weight``.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype) if dtype is None else dtype
    if torch.compiler.is_compiling():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        factors = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * factors * _wide_weight(weight, wide.dtype, offset)).to(dtype)
    normed: Tensor = _RmsNorm.apply(x, weight, eps, offset, dtype)  # type: ignore[no-untyped-call]
    return normed


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, elementwise; both are kept for the backward pass, and nothing else. Local.

    Args:
        activation: one of ``ACTIVATIONS``.
    """
    if torch.compiler.is_compiling():
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=approximate)) * up
    mixed: Tensor = _Gated.apply(activation, gate, up)  # type: ignore[no-untyped-call]
    return mixed


def gate_halves(gate_up: Tensor, activation: str) -> Tensor:
    """As :func:`gated`, of the two halves of the columns of ``gate_up: [..., 2 x width]``. Local."""
    mixed: Tensor = _Gated.apply(activation, gate_up, None)  # type: ignore[no-untyped-call]
    return mixed


def gate_clamped(pairs: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's ``(clamp(up) + 1) * gate * sigmoid(alpha gate)``, with ``gate`` at most ``limit`` and ``up`` between
    ``-limit`` and ``limit``; only ``pairs`` is kept for the backward pass. Local.

    Args:
        pairs: ``[..., 2 x width]``, gate and up of each column one after the other.
    """
    mixed: Tensor = _GateClamped.apply(pairs, alpha, limit)  # type: ignore[no-untyped-call]
    return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = True) -> Tensor:
    """Turns the pairs (i, i + R/2) of the first R dimensions of ``x: [..., D]`` by angles. Local.

    Args:
        cos, sin: of the angles, which get no gradients and are all that is kept: ``[..., R/2]``; without ``halves``
            ``[..., R]``, of which each half is for the results in its own place.
    """
    if torch.compiler.is_compiling():
        first, second = _by_half(cos, halves), _by_half(sin, halves)
        one, other, rest = x.tensor_split((first[0].shape[-1], 2 * first[0].shape[-1]), dim=-1)
        return torch.cat((one * first[0] - other * second[0], other * first[1] + one * second[1], rest), dim=-1)
    turned: Tensor = _Rotation.apply(x, cos, sin, halves)  # type: ignore[no-untyped-call]
    return turned

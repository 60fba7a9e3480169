"""Backward passes without a derivative of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm.errors import InvalidUsage

__all__ = ["refuse_second_derivative", "without_second_derivative"]


def refuse_second_derivative() -> None:
    """Raises InvalidUsage inside a backward pass that is to be differentiated itself (``create_graph=True``).

    torch's ``once_differentiable`` alone does so only where the incoming gradient has a graph; the gradient of a plain
    sum has none, and then the second derivative would lack these terms in silence.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InvalidUsage(
            "a backward pass through hdpcomm was asked for with create_graph=True (gradient penalty, Hessian product); "
            "its operations have first derivatives only: call backward() or torch.autograd.grad() without create_graph"
        )


def without_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the ``backward`` of a torch.autograd.Function that has none; see :func:`refuse_second_derivative`."""
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        return once(ctx, *grads)

    return refusing

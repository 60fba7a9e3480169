"""Split backward passes: linear layers whose weight gradients are computed later (:class:`WeightGradients`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.kernels.derivatives import without_second_derivative
from hdpcomm.models.recompute import is_recomputed
from hdpcomm.models.tensor_group import RowLinear

__all__ = ["WeightGradients"]


class WeightGradients:
    """The weight gradients that backward passes have left for later, with what they need.

    In a backward pass inside :meth:`put_off`, a linear layer of :meth:`watch` gives the gradient of its input and
    keeps that input and the gradient of its output; :meth:`compute` makes the weight's gradient of both. Everything
    else (attention, norms, embeddings, experts, the loss) has all of its gradients after the backward pass. So have
    layers that are recomputed: what they would keep is what recomputation is to save.

    Source: zero-bubble pipelines, arXiv 2401.10241, section 2.
    """

    def __init__(self) -> None:
        self._owed: dict[Hashable, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._key: Hashable | None = None

    def watch(self, layers: Iterable[nn.Module]) -> int:
        """Lets linear layers inside of these put their weight gradients off; returns how many do. Local.

        Call it after :func:`hdpcomm.parallel.tensor_parallel` and :func:`hdpcomm.models.set_recompute`, and again after
        another call of that: it leaves alone what it watched of layers that are recomputed now.
        """
        watched = 0
        for layer in layers:
            if is_recomputed(layer):
                self.leave([layer])
                continue
            for module in layer.modules():
                own = vars(module).get("forward")
                if isinstance(own, RowLinear):
                    own.product = self.product
                elif type(module) is nn.Linear and (own is None or isinstance(own, _LaterLinear)):
                    module.forward = _LaterLinear(module, self)  # type: ignore[assignment, method-assign]
                else:
                    continue
                watched += 1
        return watched

    def leave(self, layers: Iterable[nn.Module]) -> None:
        """Linear layers inside of these are as they were before :meth:`watch`. Local."""
        for module in (module for layer in layers for module in layer.modules()):
            own = vars(module).get("forward")
            if isinstance(own, RowLinear) and own.product == self.product:
                own.product = nn.functional.linear
            elif isinstance(own, _LaterLinear) and own.gradients is self:
                del module.forward

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x: [..., inputs]`` times the transposed weight ``[outputs, inputs]``; differentiable. Local."""
        if not weight.requires_grad or not torch.is_grad_enabled():
            return nn.functional.linear(x, weight)
        made: Tensor = _LaterProduct.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return made

    @contextmanager
    def put_off(self, key: Hashable) -> Iterator[None]:
        """Surrounds a backward pass whose weight gradients are left for :meth:`compute` of the same key. Local."""
        self._key = key
        self._owed.setdefault(key, [])
        try:
            yield
        finally:
            self._key = None

    def compute(self, key: Hashable) -> None:
        """Adds the weight gradients of a backward pass to the parameters', as that would have done. Local.

        Raises: KeyError if there was no such backward pass, or its gradients have been computed.
        """
        for weight, x, gradient in self._owed.pop(key):
            # By autograd, so that hooks of the parameter's gradient run.
            weight.backward(gradient.t() @ x)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Drops what a step that failed has left. Local."""
        self._owed.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of the inputs and gradients that are kept now, each tensor counted once."""
        kept = {each.untyped_storage() for owed in self._owed.values() for _, *pair in owed for each in pair}
        return sum({storage._cdata: storage.nbytes() for storage in kept}.values())

    def _keep(self, weight: Tensor, x: Tensor, gradient: Tensor) -> bool:
        """Whether the gradient of the weight is left for later."""
        if self._key is None:
            return False
        self._owed[self._key].append((weight, x.flatten(0, -2), gradient.flatten(0, -2)))
        return True


class _LaterLinear:
    """The forward of a linear layer."""

    def __init__(self, linear: nn.Linear, gradients: WeightGradients) -> None:
        self._linear, self.gradients = linear, gradients

    def __call__(self, x: Tensor) -> Tensor:
        made = self.gradients.product(x, self._linear.weight)
        return made if self._linear.bias is None else made + self._linear.bias


class _LaterProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.gradients = weight, gradients
        return nn.functional.linear(x, weight)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,), (gradient,) = ctx.saved_tensors, upstream
        of_input = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or ctx.gradients._keep(ctx.weight, x, gradient):
            return of_input, None, None
        return of_input, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None

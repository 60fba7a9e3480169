"""Backward passes in other parts than torch's: layers that keep only their input and run again (:func:`set_recompute`),
and linear layers whose weight gradients are computed later (:class:`WeightGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hdpcomm.attention import carry_pack
from hdpcomm.attention.pack_context import find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import without_second_derivative
from hdpcomm.models.tensor_group import RowLinear
from hdpcomm.offload.layers import find_layers

__all__ = [
    "WeightGradients",
    "carry_into_checkpoints",
    "inner_forward",
    "recomputed_layers",
    "refuse_reentrant",
    "set_inner_forward",
    "set_recompute",
]


class _Recomputed:
    """A layer's forward inside an activation checkpoint.

    Only ``forward`` is inside, so that the layer's hooks (offload, ZeRO) run once, as they would without.
    """

    def __init__(self, forward: Callable[..., Any], own: bool) -> None:
        self.forward = forward
        self.own = own
        """The layer had a forward of its own before, beside that of its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=carry_pack, **kwargs)


_LOST = (
    "and a reentrant activation checkpoint loses their gradients, with transformers' own attention, too; call "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
)


class _Carried:
    """The function that a checkpoint calls: the first call is the forward pass, each later one computes it again."""

    def __init__(self, forward: Callable[..., Any], found_reentrant: Callable[[bool], None]) -> None:
        self._forward = forward
        self._block, self._again = carry_pack()
        self._first, self._trained = True, torch.is_grad_enabled()
        self._found_reentrant = found_reentrant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, self._block = self._block, self._again
        first, self._first = self._first, False
        shared: dict[str, MutableMapping[Any, Any]] = {}
        if first and self._trained:
            reentrant = not torch.is_grad_enabled()  # such a checkpoint has no graph in its forward pass
            self._found_reentrant(reentrant)
            shared = _mappings(self._forward) if reentrant else {}
        before = {name: _identities(each) for name, each in shared.items()}
        with block:
            out = self._forward(*args, **kwargs)
        for name, each in shared.items():
            if _identities(each) != before[name]:
                raise InvalidUsage(f"a layer hands tensors on to later layers in its argument {name}, {_LOST}")
        return out


def _mappings(forward: Callable[..., Any]) -> dict[str, MutableMapping[Any, Any]]:
    """The keyword arguments of a checkpointed layer that it may change."""
    keywords: dict[str, Any] = getattr(forward, "keywords", {})  # of functools.partial
    return {name: value for name, value in keywords.items() if isinstance(value, MutableMapping)}


def _identities(values: MutableMapping[Any, Any]) -> dict[Any, int]:
    return {key: id(value) for key, value in values.items()}


class _CarryingCheckpoint:
    """transformers' checkpoint function, reentrant or not, whose recomputation runs with the pack of its forward pass.

    Not by ``context_fn``, which a reentrant checkpoint does not take.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self.reentrant = False
        """Mode of the last call with a pack."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or find_pack() is None:
            return self.checkpoint(forward, *args, **kwargs)
        return self.checkpoint(_Carried(forward, self._found_reentrant), *args, **kwargs)

    def _found_reentrant(self, reentrant: bool) -> None:
        self.reentrant = reentrant


def _carry_hook(module: nn.Module, _: tuple[Any, ...]) -> None:
    """Forward pre-hook: ``gradient_checkpointing_enable()`` may be called at any time, and sets the function anew."""
    found = vars(module).get("_gradient_checkpointing_func")
    if found is not None and not isinstance(found, _CarryingCheckpoint) and not torch.compiler.is_compiling():
        module._gradient_checkpointing_func = _CarryingCheckpoint(found)  # type: ignore[assignment]


def carry_into_checkpoints(model: nn.Module) -> None:
    """Lets the checkpoints of a transformers model, those that it has and those that it will be given, compute again
    with the pack of their forward pass, whatever arguments its layers hand on. Local.
    """
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing") and _carry_hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_carry_hook)


def refuse_reentrant(model: nn.Module, tensors: str) -> None:
    """Raises InvalidUsage if reentrant checkpoints have just run in a model that gives ``tensors`` beside its output.
    Local."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, _CarryingCheckpoint) and function.reentrant and module.gradient_checkpointing:
            raise InvalidUsage(f"{type(module).__name__} gives {tensors} beside its output, {_LOST}")


def recomputed_layers(model: nn.Module) -> int:
    """How many layers :func:`set_recompute` has last made recompute. Local."""
    return sum(is_recomputed(module) for module in model.modules())


def is_recomputed(layer: nn.Module) -> bool:
    """Whether :func:`set_recompute` has made this layer recompute. Local."""
    return isinstance(vars(layer).get("forward"), _Recomputed)


def inner_forward(layer: nn.Module) -> Callable[..., Any]:
    """The layer's forward without recomputation. Local."""
    forward: Callable[..., Any] = layer.forward
    return forward.forward if isinstance(forward, _Recomputed) else forward


def set_inner_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives the layer another forward, beneath its recomputation. Local."""
    current = vars(layer).get("forward")
    if isinstance(current, _Recomputed):
        current.forward, current.own = forward, True
    else:
        layer.forward = forward


def set_recompute(model: nn.Module, recompute: str | int) -> int:
    """Chooses which layers of a model are computed again in the backward pass; returns how many.

    A recomputed layer keeps its input only and costs one more forward pass. The last call counts; ``"none"`` leaves the
    model as it was. Attention that is computed again communicates again: choose alike on all ranks. Local.

    Args:
        model: its layers are those of its largest ``nn.ModuleList``, as for :class:`hdpcomm.offload.ActivationOffload`.
        recompute: ``"none"``, ``"full"``, which an encoder of images follows, or the number of layers, counted from the
            first one.

    Raises:
        InvalidUsage: another value, more layers than there are, or a model without a list of layers.
    """
    if recompute == "none" and not recomputed_layers(model):
        return 0
    layers = find_layers(model)
    wanted = {"none": 0, "full": len(layers)}.get(recompute, recompute) if isinstance(recompute, str) else recompute
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(layers):
        raise InvalidUsage(
            f"recompute is {recompute!r}; give 'none', 'full' or a number of layers from 0 to {len(layers)}"
        )
    if (encoder := getattr(model, "media", None)) is not None:
        encoder.recompute = wanted == len(layers)
    for place, layer in enumerate(layers):
        current = vars(layer).get("forward")
        if place < wanted and not isinstance(current, _Recomputed):
            layer.forward = _Recomputed(layer.forward, own=current is not None)
        elif place >= wanted and isinstance(current, _Recomputed):
            if current.own:
                layer.forward = current.forward
            else:
                del layer.forward
    return wanted


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

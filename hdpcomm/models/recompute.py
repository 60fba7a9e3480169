"""Recomputation: layers that keep only their input and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdpcomm.attention import carry_pack
from hdpcomm.attention.pack_context import find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.layers import find_layers

__all__ = [
    "carry_into_checkpoints",
    "inner_forward",
    "is_recomputed",
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

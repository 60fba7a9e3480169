"""Finds the layers of a model, in whose order activations are stored and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage

__all__ = ["AbsentLayer", "find_layers", "is_compiled_whole", "layer_kind", "layer_list", "parameter_storages"]


class AbsentLayer(nn.Module):
    """Stands in a model's list for a layer that another device has: gives its input.

    Args:
        layer: the one that is absent; decoders read what kind it is from its attributes, which are kept.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name not in ("forward", "training") and not isinstance(value, nn.Module):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """``hidden_states``, the first argument or the one of that name."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden


def find_layers(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The layers in the order in which the forward pass runs them: those given, or those in the ``nn.ModuleList`` of
    the model with the most parameters, which holds a decoder's layers. Those that are absent are left out.

    Raises:
        InvalidUsage: there is no such list, the model is compiled as a whole, or a layer lies inside another one.
    """
    if isinstance(model, nn.Module):
        layers: tuple[nn.Module, ...] = tuple(each for each in layer_list(model) if not isinstance(each, AbsentLayer))
    else:
        layers = tuple(model)
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise InvalidUsage(f"{len(layers)} layers were given; give at least one, each an nn.Module")
    inside = {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
    for place, layer in enumerate(layers):
        if id(layer) in inside:
            raise InvalidUsage(f"layer {place} ({type(layer).__name__}) lies in another one; give the outer ones only")
    return layers


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The list that holds a model's layers, absent ones included. Raises InvalidUsage as :func:`find_layers`."""
    if is_compiled_whole(model):
        raise InvalidUsage(
            "the model is compiled as a whole, so that its layers cannot be told apart; compile each layer "
            "(model.layers[i] = torch.compile(model.layers[i])) and give the model that holds them"
        )
    encoder: Any = getattr(model, "media", None)  # of images, whose layers are no decoder's
    others = set() if encoder is None else {id(module) for part in encoder.modules() for module in part.modules()}
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) not in others]
    lists = [module for module in found if len(module) > 0]
    if not lists:
        raise InvalidUsage(
            f"{type(model).__name__} has no nn.ModuleList of layers; give the layers themselves, in the order of the "
            "forward pass"
        )
    sizes = [sum(parameter.numel() for parameter in found.parameters()) for found in lists]
    return lists[sizes.index(max(sizes))]


def layer_kind(layer: nn.Module) -> str:
    """Equal for layers with the same modules and parameters of the same sizes."""
    modules = [type(module).__name__ for module in layer.modules()]
    return str((modules, [(name, tuple(p.shape)) for name, p in layer.named_parameters()]))


def is_compiled_whole(module: nn.Module) -> bool:
    """Whether the module is a result of ``torch.compile(module)``."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def parameter_storages(layers: Sequence[nn.Module]) -> frozenset[int]:
    """The storages of the layers' parameters and buffers, which stay on the device anyway."""
    return frozenset(
        tensor.untyped_storage()._cdata
        for layer in layers
        for tensor in (*layer.parameters(), *layer.buffers())
        if tensor.layout == torch.strided
    )

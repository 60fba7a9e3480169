"""Finds the layers of a model, in whose order activations are stored and loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage

__all__ = ["find_layers", "is_compiled_whole", "parameter_storages"]


def find_layers(model: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The layers in the order in which the forward pass runs them: those given, or the ``nn.ModuleList`` of the model
    with the most parameters, which holds a decoder's layers.

    Raises:
        InvalidUsage: there is no such list, the model is compiled as a whole, or a layer lies inside another one.
    """
    if isinstance(model, nn.Module):
        if is_compiled_whole(model):
            raise InvalidUsage(
                "the model is compiled as a whole, so that its layers cannot be told apart; compile each layer "
                "(model.layers[i] = torch.compile(model.layers[i])) and give the model that holds them"
            )
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
        if not lists:
            raise InvalidUsage(
                f"{type(model).__name__} has no nn.ModuleList of layers; give the layers themselves, in the order of "
                "the forward pass"
            )
        sizes = [sum(parameter.numel() for parameter in found.parameters()) for found in lists]
        layers: tuple[nn.Module, ...] = tuple(lists[sizes.index(max(sizes))])
    else:
        layers = tuple(model)
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise InvalidUsage(f"{len(layers)} layers were given; give at least one, each an nn.Module")
    inside = {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
    for place, layer in enumerate(layers):
        if id(layer) in inside:
            raise InvalidUsage(f"layer {place} ({type(layer).__name__}) lies in another one; give the outer ones only")
    return layers


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

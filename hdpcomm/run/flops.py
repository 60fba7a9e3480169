"""The planner's description of a model, and of the devices that we know."""

from __future__ import annotations

from typing import Any

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import DEVICES, DeviceSpec, ModelSpec, model_from_config

__all__ = ["known_device", "spec_of"]


def known_device(device: torch.device) -> DeviceSpec | None:
    """The data sheet of a GPU that the planner has a preset of; ``None`` for others and for CPUs. Local."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((spec for preset, spec in DEVICES.items() if preset in name), None)


def spec_of(config: Any) -> ModelSpec | None:
    """The planner's description of a model; ``None`` for an architecture that it does not know.

    Args:
        config: a :class:`hdpcomm.models.LlamaConfig`, or a text configuration of transformers.
    """
    if isinstance(config, LlamaConfig):
        sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.ffn, config.vocabulary)
        top_k = config.top_k if config.experts else 1
        return ModelSpec(*sizes, experts=max(1, config.experts), top_k=top_k, name="llama")
    try:
        return model_from_config(config.to_dict())
    except InvalidUsage:
        return None

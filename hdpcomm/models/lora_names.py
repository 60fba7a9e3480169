"""Names and first values of the adapters of LoRA, as peft has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["base_name", "first_value", "is_adapter"]


def is_adapter(name: str) -> bool:
    """Is this tensor of a peft model one of LoRA's?"""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name in the model without adapters; that of a model without them is its own."""
    return name.replace("base_model.model.", "", 1).replace(".base_layer.", ".")


def first_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Initial value of an adapter, fp32 in host memory: the product of both matrices is 0. Local."""
    if ".lora_B." in name or ".lora_embedding_A." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed)
    if ".lora_embedding_B." in name:
        return torch.randn(shape, generator=generator)
    return torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(shape[-1]))

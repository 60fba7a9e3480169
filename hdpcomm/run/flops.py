"""Model FLOPs of a step, and the peak of the devices that we know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import DEVICES, ModelSpec

__all__ = ["device_peak_flops", "spec_of", "training_flops"]


def training_flops(spec: ModelSpec, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over causal sequences of these lengths, without those of recomputation."""
    squares = float(sum(length * length for length in lengths))
    return 3 * (spec.linear_flops_per_token * sum(lengths) + spec.attention_flops_per_token_squared * squares)


def device_peak_flops(device: torch.device) -> float | None:
    """The data sheet's bf16 peak of a GPU that the planner has a preset of; ``None`` for others and for CPUs. Local."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((spec.peak_flops for preset, spec in DEVICES.items() if preset in name), None)


def spec_of(config: Any) -> ModelSpec | None:
    """The planner's description of a model; ``None`` for one that is no plain decoder.

    Args:
        config: a :class:`hdpcomm.models.LlamaConfig`, or a text configuration of transformers.
    """
    if isinstance(config, LlamaConfig):
        sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.ffn, config.vocabulary)
        return ModelSpec(*sizes, name="llama")
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    ffn = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    if not isinstance(ffn, int) or any(not isinstance(getattr(config, name, None), int) for name in names):
        return None
    layers, hidden, heads, kv_heads, vocabulary = (getattr(config, name) for name in names)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    head_dim = getattr(config, "head_dim", None)
    try:
        return ModelSpec(
            layers, hidden, heads, kv_heads, ffn, vocabulary, head_dim=head_dim, experts=experts,
            top_k=min(chosen, experts), name=str(getattr(config, "model_type", "custom")),
        )  # fmt: skip
    except InvalidUsage:
        return None

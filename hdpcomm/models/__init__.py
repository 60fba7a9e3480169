"""Models that run on packed, sharded sequences."""

from hdpcomm.models.llama import Llama, LlamaConfig, apply_rope, rope_tables

__all__ = ["Llama", "LlamaConfig", "apply_rope", "rope_tables"]

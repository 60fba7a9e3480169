"""Distributed attention over packed sequences: sharding, ring attention, backends."""

from hdpcomm.attention.api import ring_attention
from hdpcomm.attention.layout import local_cu_seqlens, positions, shard, unshard

__all__ = ["local_cu_seqlens", "positions", "ring_attention", "shard", "unshard"]

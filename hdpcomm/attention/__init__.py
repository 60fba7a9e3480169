"""Distributed attention over packed sequences: sharding, ring attention and its variants, backends."""

from hdpcomm.attention.api import mla_attention, ring_attention
from hdpcomm.attention.backends import Problem
from hdpcomm.attention.backends import available as available_backends
from hdpcomm.attention.chosen import index_top_k, indexed_attention, selected_attention
from hdpcomm.attention.engine import AttentionCosts, AttentionOptions
from hdpcomm.attention.linear import delta_rule, short_conv, ssd
from hdpcomm.attention.pack_context import (
    PackContext,
    carry_pack,
    current_pack,
    packed_attention,
    packing,
    scaled_dot_product_attention,
)
from hdpcomm.attention.packs import (
    BalancedPack,
    Pack,
    SpanPack,
    as_pack,
    local_cu_seqlens,
    positions,
    shard,
    unshard,
)
from hdpcomm.attention.slices import KVStore, SequenceSlice, SlicedSequence
from hdpcomm.plan.tree import Tree

__all__ = [
    "AttentionCosts",
    "AttentionOptions",
    "BalancedPack",
    "KVStore",
    "Pack",
    "PackContext",
    "Problem",
    "SequenceSlice",
    "SlicedSequence",
    "SpanPack",
    "Tree",
    "as_pack",
    "available_backends",
    "carry_pack",
    "current_pack",
    "delta_rule",
    "index_top_k",
    "indexed_attention",
    "local_cu_seqlens",
    "mla_attention",
    "packed_attention",
    "packing",
    "positions",
    "ring_attention",
    "scaled_dot_product_attention",
    "selected_attention",
    "shard",
    "short_conv",
    "ssd",
    "unshard",
]

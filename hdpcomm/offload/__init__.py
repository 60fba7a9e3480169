"""Selective offload: activations of long sequences are copied to page-locked host memory during the forward pass, and
loaded back during the backward pass (ByteScale, arXiv 2502.21231, section 5.2). See docs/offload.md."""

from hdpcomm.offload.activations import ActivationOffload, OffloadStats
from hdpcomm.offload.meter import MemoryMeter
from hdpcomm.offload.pool import PinnedPool, PoolStats, measure_copies, rank_pool

__all__ = [
    "ActivationOffload",
    "MemoryMeter",
    "OffloadStats",
    "PinnedPool",
    "PoolStats",
    "measure_copies",
    "rank_pool",
]

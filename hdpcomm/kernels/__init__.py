"""This library's kernels on torch tensors: reductions, cross-entropy.

All functions are local. On CUDA tensors they enqueue on the current stream of the tensors' device; on CPU tensors they
are done on return. Both use the same element functions.
"""

from hdpcomm.kernels.cross_entropy import CROSS_ENTROPY_DTYPES, cross_entropy
from hdpcomm.kernels.linear_cross_entropy import (
    IGNORE,
    LabelLoss,
    LossOptions,
    linear_cross_entropy,
    loss_of_log_probs,
)
from hdpcomm.kernels.transfers import reduce

__all__ = [
    "CROSS_ENTROPY_DTYPES",
    "IGNORE",
    "LabelLoss",
    "LossOptions",
    "cross_entropy",
    "linear_cross_entropy",
    "loss_of_log_probs",
    "reduce",
]

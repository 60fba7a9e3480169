"""Settings of a step that every door takes: :class:`StepSettings`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdpcomm.train.zero.buckets import BUCKET_BYTES

__all__ = ["WHOLE", "StepSettings"]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How weights, gradients and the optimizer's state are kept; see :class:`hdpcomm.train.Trainer` for each."""

    zero: int = 0
    dtype: torch.dtype | None = None
    bucket_bytes: int = BUCKET_BYTES
    optimizer_offload: bool = False

    @property
    def masters(self) -> bool:
        """Whether the optimizer updates others than the parameters."""
        return bool(self.zero) or self.dtype is not None or self.optimizer_offload


WHOLE = StepSettings()
"""Each rank keeps all of them, and the optimizer updates the parameters as they are."""

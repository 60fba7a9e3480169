"""A step of a training run whose micro-batches offload activations: :class:`OffloadedStep`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hdpcomm.offload import ActivationOffload, MemoryMeter
from hdpcomm.plan import MemoryModel
from hdpcomm.train.metrics import StepMetrics

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["OffloadedStep"]


class OffloadedStep:
    """A step's micro-batches at their ratios, with the device memory and the bytes that they took on this rank.

    Attributes:
        meter: context of the passes; ``None`` without offload.
    """

    def __init__(self, offload: ActivationOffload | None, memory: MemoryModel, device: torch.device) -> None:
        self._offload = offload
        self._memory = memory
        self.meter = None if offload is None else MemoryMeter(device)
        self._before = 0 if offload is None else offload.stats().stored_bytes
        self._ratio = self._predicted = 0.0

    def micro_batch(self, ratio: float, tokens: int, kept: int = 0) -> contextlib.AbstractContextManager[None]:
        """Context of the forward pass of a micro-batch with ``tokens`` tokens on this rank; ``kept``: of a slice, those
        of it and all before it."""
        if self._offload is None:
            return contextlib.nullcontext()
        held = tokens * (1 - ratio * self._memory.offloadable) + self._memory.kept_at(ratio) * kept
        self._ratio = max(self._ratio, ratio)
        self._predicted = max(self._predicted, self._memory.bytes_held(held) or 0.0)
        return self._offload.micro_batch(ratio, tokens=tokens)

    def add_to(self, metrics: StepMetrics, comm: Communicator) -> StepMetrics:
        """The step's metrics with those of offload. Collective over ``comm``, if there is offload."""
        if self._offload is None or self.meter is None:
            return metrics
        most = torch.tensor([self._ratio, self.meter.peak, self._predicted], dtype=torch.float64)
        comm.all_reduce(most, "max")
        stored = torch.tensor([self._offload.stats().stored_bytes - self._before], dtype=torch.float64)
        comm.all_reduce(stored)
        ratio, memory, predicted = most.tolist()
        return replace(
            metrics,
            offload_ratio=ratio,
            offloaded_bytes=int(stored[0]),
            memory_bytes=int(memory),
            predicted_memory_bytes=int(predicted),
        )

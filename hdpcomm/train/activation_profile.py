"""Offload in a training run: what it is worth on this machine, and what a step made of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.offload import ActivationOffload, MemoryMeter, measure_copies
from hdpcomm.plan import MemoryModel
from hdpcomm.train.metrics import StepMetrics
from hdpcomm.train.profile import forward_backward

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["ActivationProfile", "OffloadedStep", "profile_activations"]


@dataclass(frozen=True, slots=True)
class ActivationProfile:
    """Device memory and copies of a model, as measured; sizes in bytes, rates in bytes/s.

    Attributes:
        fixed_bytes, token_bytes: a forward and backward pass over T tokens takes ``fixed + token x T`` at most.
        moved_bytes: of these, a token's at ratio 1: what all layers but the resident ones offload.
        d2h, h2d: rates while both directions run.
    """

    fixed_bytes: float
    token_bytes: float
    moved_bytes: float
    d2h: float
    h2d: float

    def memory_model(self, capacity: int, pool_bytes: int) -> MemoryModel:
        """For a planner: ``capacity`` tokens fit without offload, and host memory has ``pool_bytes``."""
        return MemoryModel(
            capacity,
            offloadable=self.moved_bytes / self.token_bytes,
            copy_s=self.moved_bytes / min(self.d2h, self.h2d),
            host_tokens=pool_bytes / self.token_bytes,
            token_bytes=self.token_bytes,
            state_bytes=self.fixed_bytes,
        )

    def peak_bytes(self, tokens: int, ratio: float) -> float:
        """Predicted most device memory of a pass over ``tokens`` tokens of a rank at an offload ratio."""
        return self.fixed_bytes + tokens * (self.token_bytes - ratio * self.moved_bytes)


def profile_activations(
    model: nn.Module, offload: ActivationOffload, comm: Communicator, *, tokens: int
) -> ActivationProfile:
    """Runs three short passes of at most ``tokens`` tokens on each rank alone, and copies. Collective over ``comm``.

    Every rank gets the same profile (means over the ranks). Gradients are dropped.

    Raises:
        InvalidUsage: fewer than 2 tokens, or the pool is too small for a pass of this length at ratio 1.
    """
    if tokens < 2:
        raise InvalidUsage(f"tokens is {tokens}; at least 2 are needed to see how memory grows")
    alone = comm.subset([comm.rank])
    assert alone is not None
    forward_backward(model, alone, [tokens])  # makes the gradients, which stay
    peaks = []
    for length in (tokens // 2, tokens):
        with MemoryMeter(offload.lane.place) as meter:
            forward_backward(model, alone, [length])
        peaks.append(meter.peak)
    before = offload.stats().stored_bytes
    forward_backward(model, alone, [tokens], context=offload.micro_batch(1.0, tokens=tokens))
    moved = (offload.stats().stored_bytes - before) / tokens
    model.zero_grad(set_to_none=True)
    per_token = (peaks[1] - peaks[0]) / (tokens - tokens // 2)
    rates = measure_copies(offload.pool, min(8 << 20, offload.pool.stats().capacity // 4))
    shared = torch.tensor(
        [peaks[1] - tokens * per_token, per_token, moved, rates.both_d2h, rates.both_h2d], dtype=torch.float64
    )
    comm.all_reduce(shared)
    fixed, per_token, moved, d2h, h2d = (shared / comm.size).tolist()
    return ActivationProfile(max(0.0, fixed), per_token, min(moved, 0.999 * per_token), d2h, h2d)


class OffloadedStep:
    """A step's micro-batches at their ratios, with the device memory and the bytes that they took on this rank."""

    def __init__(self, offload: ActivationOffload | None, memory: MemoryModel, device: torch.device) -> None:
        self._offload = offload
        self._memory = memory
        self._meter = None if offload is None else MemoryMeter(device)
        self._before = 0 if offload is None else offload.stats().stored_bytes
        self._ratio = self._predicted = 0.0

    def __enter__(self) -> None:
        if self._meter is not None:
            self._meter.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is not None:
            self._meter.__exit__(kind, error, trace)

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
        if self._offload is None or self._meter is None:
            return metrics
        most = torch.tensor([self._ratio, self._meter.peak, self._predicted], dtype=torch.float64)
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

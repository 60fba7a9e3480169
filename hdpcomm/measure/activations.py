"""Offload of a model's activations on this machine: the bytes that it moves, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.costs import forward_backward
from hdpcomm.offload import ActivationOffload, MemoryMeter, measure_copies
from hdpcomm.plan import MemoryModel

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["ActivationProfile", "profile_activations"]


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

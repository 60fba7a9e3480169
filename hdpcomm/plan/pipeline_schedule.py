"""The order in which the stages of pipelines run their passes, as data: :class:`PipelineSchedule`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pass", "PipelineSchedule"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro-batch (by its index in the plan) through one stage of the model on each of its ranks.

    ``weights``: of a split backward pass the gradients of weights, which each rank computes by itself; ``backward`` is
    set, too.
    """

    micro_batch: int
    stage: int
    backward: bool
    weights: bool = False


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """All passes of a step in one global order; each stage of each rank runs its own in that order.

    The planner's objective, the simulator and a runtime share it: it is the order of the simulated 1F1B, maybe with
    split backward passes. It is free of deadlocks, for any mix of groups: the first pass of the order that has not run
    needs only passes before it, and all of its ranks have run what comes before it.

    Attributes:
        stages: stages that the model is cut into.
        passes: int32 [passes, 3]: index of the micro-batch, stage; 0 for forward, 1 for backward, 2 for the gradients
            of weights that a split backward pass has left.
        handed: int64 [passes]: how many passes of the order have begun when this one has ended and hands what it gave
            to the next stage. Sender and receiver take a message at this place of the order, so that neither computes
            while the other waits.
        alone: int32 [passes]: the rank that computes gradients of weights, -1 for other passes. Where backward passes
            are split, each one has its gradients of weights after it, on each of its ranks.
        chunks: stages on each device of a rank's pipeline: stage s is on device ``s % (stages / chunks)``.
    """

    stages: int
    passes: NDArray[np.int32]
    handed: NDArray[np.int64]
    alone: NDArray[np.int32]
    chunks: int = 1

    @property
    def devices(self) -> int:
        """Devices of each rank's pipeline."""
        return self.stages // self.chunks

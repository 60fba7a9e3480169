"""The order in which the stages of pipelines run their passes, as data: :class:`PipelineSchedule`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.step import StepPlan

__all__ = ["Pass", "PipelineSchedule"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro-batch (by its index in the plan) through one stage of its ranks' pipelines."""

    micro_batch: int
    stage: int
    backward: bool


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """All passes of a step in one global order; each stage of each rank runs its own in that order.

    The planner's objective, the simulator and a runtime share it: it is the order of the simulated 1F1B. It is free of
    deadlocks, for any mix of groups: the first pass of the order that has not run needs only passes before it, and all
    of its ranks have run what comes before it.

    Attributes:
        stages: stages of each rank's pipeline.
        passes: int32 [passes, 3]: index of the micro-batch, stage, 1 for backward.
    """

    stages: int
    passes: NDArray[np.int32]

    def for_stage(self, plan: StepPlan, rank: int, stage: int) -> tuple[Pass, ...]:
        """What one stage of one rank runs, in order.

        Raises: InvalidUsage if there is no such rank or stage.
        """
        if not 0 <= stage < self.stages:
            raise InvalidUsage(f"stage {stage} asked of a pipeline of {self.stages}: give 0 to {self.stages - 1}")
        own = np.array([batch.index for batch in plan.for_rank(rank)], dtype=np.int32)
        rows = self.passes[(self.passes[:, 1] == stage) & np.isin(self.passes[:, 0], own)]
        return tuple(Pass(int(index), stage, bool(backward)) for index, _, backward in rows)

    def validate(self, plan: StepPlan) -> None:
        """Checks that every micro-batch passes every stage, forward and then backward.

        Raises: InvalidUsage: says which pass is missing, double, or too early.
        """
        place: dict[tuple[int, int, bool], int] = {}
        for number, (index, stage, backward) in enumerate(self.passes.tolist()):
            key = (index, stage, bool(backward))
            before = (index, stage - 1, False) if not backward else (index, stage + 1, True)
            if backward and stage == self.stages - 1:
                before = (index, stage, False)
            first = stage == 0 and not backward
            if key in place or (not first and before not in place):
                what = "appears twice" if key in place else "comes before the pass that it needs"
                raise InvalidUsage(f"pass {number} (micro-batch {index}, stage {stage}, backward {backward}) {what}")
            place[key] = number
        wanted = 2 * self.stages * len(plan.micro_batches)
        known = {batch.index for batch in plan.micro_batches}
        if len(place) != wanted or any(index not in known for index, _, _ in place):
            raise InvalidUsage(
                f"the schedule has {len(place)} passes and the plan's {len(known)} micro-batches need {wanted}: it "
                "belongs to another plan"
            )

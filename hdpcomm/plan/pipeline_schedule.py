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
    """One pass of a micro-batch (by its index in the plan) through one stage of the model on each of its ranks."""

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
        stages: stages that the model is cut into.
        passes: int32 [passes, 3]: index of the micro-batch, stage, 1 for backward.
        chunks: stages on each device of a rank's pipeline: stage s is on device ``s % (stages / chunks)``.
        handed: int64 [passes]: how many passes of the order have begun when this one has ended and hands what it gave
            to the next stage. Sender and receiver take a message at this place of the order, so that neither computes
            while the other waits. Default: right after it has begun.
    """

    stages: int
    passes: NDArray[np.int32]
    chunks: int = 1
    handed: NDArray[np.int64] | None = None

    @property
    def devices(self) -> int:
        """Devices of each rank's pipeline."""
        return self.stages // self.chunks

    def places_of_messages(self) -> NDArray[np.int64]:
        """``handed``, or its default."""
        return np.arange(1, len(self.passes) + 1) if self.handed is None else self.handed

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

        Raises: InvalidUsage: says which pass is missing, double, or too early, or has its message in a wrong place.
        """
        known = np.sort(plan.table.index.astype(np.int32))
        index, stage, backward = self.passes.T
        inside = (stage >= 0) & (stage < self.stages) & ((backward == 0) | (backward == 1))
        belongs = np.isin(index, known) & inside
        wanted = 2 * self.stages * len(known)
        if not belongs.all() or len(index) < wanted:
            raise InvalidUsage(
                f"the schedule has {len(index)} passes, {int(belongs.sum())} of them of this plan, and the plan's "
                f"{len(known)} micro-batches need {wanted}: it belongs to another plan"
            )
        # The place of a pass in its micro-batch: all stages forward, then all backward.
        step = np.where(backward == 1, 2 * self.stages - 1 - stage, stage)
        key = np.searchsorted(known, index) * 2 * self.stages + step
        if len(index) > wanted or len(np.unique(key)) < wanted:
            first = np.unique(key, return_index=True)[1]
            self._refuse(int(np.setdiff1d(np.arange(len(index)), first)[0]), "appears twice")
        numbers = np.empty(wanted, dtype=np.int64)
        numbers[key] = np.arange(wanted)
        place = numbers.reshape(len(known), 2 * self.stages)
        early = place[:, 1:] < place[:, :-1]
        if early.any():
            self._refuse(int(place[:, 1:][early].min()), "comes before the pass that it needs")
        handed = self.places_of_messages()
        late = (handed[place] <= place) | (handed[place] > np.concatenate([place[:, 1:], place[:, -1:] + wanted], 1))
        if handed.shape != (wanted,) or late.any():
            self._refuse(int(place[late].min()), "hands on what it gave before it has run, or after that is needed")

    def _refuse(self, number: int, what: str) -> None:
        index, stage, backward = self.passes[number].tolist()
        raise InvalidUsage(f"pass {number} (micro-batch {index}, stage {stage}, backward {bool(backward)}) {what}")

"""The order in which the stages of pipelines run their passes, as data: :class:`PipelineSchedule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.step import StepPlan

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

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Pass:
        """By a row of :attr:`PipelineSchedule.passes`."""
        index, stage, kind = row
        return cls(int(index), int(stage), kind != 0, kind == 2)

    def __str__(self) -> str:
        way = "weight gradients" if self.weights else "backward pass" if self.backward else "forward pass"
        return f"{way} of micro-batch {self.micro_batch}, stage {self.stage}"


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
        chunks: stages on each device of a rank's pipeline: stage s is on device ``s % (stages / chunks)``.
        handed: int64 [passes]: how many passes of the order have begun when this one has ended and hands what it gave
            to the next stage. Sender and receiver take a message at this place of the order, so that neither computes
            while the other waits. Default: right after it has begun.
        alone: int32 [passes]: the rank that computes gradients of weights, -1 for other passes. Given where backward
            passes are split; then each one has its gradients of weights after it, on each of its ranks.
    """

    stages: int
    passes: NDArray[np.int32]
    chunks: int = 1
    handed: NDArray[np.int64] | None = None
    alone: NDArray[np.int32] | None = None

    @property
    def devices(self) -> int:
        """Devices of each rank's pipeline."""
        return self.stages // self.chunks

    @property
    def split(self) -> bool:
        """Whether gradients of weights have passes of their own."""
        return self.alone is not None

    def rows_of(self, plan: StepPlan, rank: int) -> NDArray[np.int64]:
        """The places of the passes in which a rank takes part."""
        own = np.isin(self.passes[:, 0], np.array([batch.index for batch in plan.for_rank(rank)], dtype=np.int32))
        if self.alone is not None:
            own &= (self.alone == -1) | (self.alone == rank)
        return np.flatnonzero(own)

    def places_of_messages(self) -> NDArray[np.int64]:
        """``handed``, or its default."""
        return np.arange(1, len(self.passes) + 1) if self.handed is None else self.handed

    def for_stage(self, plan: StepPlan, rank: int, stage: int) -> tuple[Pass, ...]:
        """Passes of one stage of one rank, in order.

        Raises: InvalidUsage if there is no such rank or stage.
        """
        if not 0 <= stage < self.stages:
            raise InvalidUsage(f"stage {stage} asked of a pipeline of {self.stages}: give 0 to {self.stages - 1}")
        rows = self.passes[self.rows_of(plan, rank)]
        return tuple(Pass.of_row(row) for row in rows[rows[:, 1] == stage].tolist())

    def validate(self, plan: StepPlan) -> None:
        """Checks that every micro-batch passes every stage, forward and then backward, and that each of its ranks
        computes the gradients of weights after that where backward passes are split.

        Raises: InvalidUsage: says which pass is missing, double, or too early, or has its message in a wrong place.
        """
        known = np.sort(plan.table.index.astype(np.int32))
        rows = np.arange(len(self.passes))
        if self.split:
            rows = self._check_weights(plan)
        index, stage, backward = self.passes[rows].T
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
            self._refuse(int(rows[np.setdiff1d(np.arange(len(index)), first)[0]]), "appears twice")
        numbers = np.empty(wanted, dtype=np.int64)
        numbers[key] = rows
        place = numbers.reshape(len(known), 2 * self.stages)
        early = place[:, 1:] < place[:, :-1]
        if early.any():
            self._refuse(int(place[:, 1:][early].min()), "comes before the pass that it needs")
        self._check_slices(plan, {int(index): number for number, index in enumerate(known)}, place)
        handed = self.places_of_messages()
        if handed.shape != (len(self.passes),):
            raise InvalidUsage(f"the schedule has {len(self.passes)} passes and places for {len(handed)} messages")
        late = (handed[place] <= place) | (
            handed[place] > np.concatenate([place[:, 1:], place[:, -1:] + len(handed)], 1)
        )
        if late.any():
            self._refuse(int(place[late].min()), "hands on what it gave before it has run, or after that is needed")

    def _check_slices(self, plan: StepPlan, number: dict[int, int], place: NDArray[np.int64]) -> None:
        """Checks that forward passes of slices rise, and that their backward passes fall. ``place``: [micro-batches,
        2 * stages], where the passes are, forward and then backward from the last stage on."""
        for index, planned in plan.slices.items():
            if planned.last:
                continue
            own, following = (
                place[number[index]],
                place[number[int(plan.table.index[planned.rows[planned.number + 1]])]],
            )
            forward, backward = slice(0, self.stages), slice(self.stages, None)
            wrong = np.concatenate([following[forward] <= own[forward], own[backward] <= following[backward]])
            if wrong.any():
                first = np.concatenate([following[forward], own[backward]])[np.argmax(wrong)]
                self._refuse(int(first), "comes before that of the slice which it needs")

    def _check_weights(self, plan: StepPlan) -> NDArray[np.int64]:
        """Checks the gradients of weights; returns the places of all other passes."""
        alone, groups = self.alone, {batch.index: batch.ranks for batch in plan.micro_batches}
        if alone is None or alone.shape != (len(self.passes),):
            raise InvalidUsage(f"the schedule has {len(self.passes)} passes, and alone does not have one rank for each")
        weights = self.passes[:, 2] == 2
        ran: set[tuple[int, int]] = set()
        owed: set[tuple[int, int, int]] = set()
        for number, (row, rank) in enumerate(zip(self.passes.tolist(), alone.tolist(), strict=True)):
            index, stage, kind = row
            if (kind == 2) != (rank >= 0):
                self._refuse(number, f"is said to be that of rank {rank} alone, which gradients of weights are")
            if kind == 1 and (index, stage) not in ran:
                ran.add((index, stage))
                owed.update((index, stage, member) for member in groups.get(index, ()))
            if kind == 2:
                if (index, stage, rank) not in owed:
                    self._refuse(number, f"on rank {rank} comes twice, or before its backward pass")
                owed.remove((index, stage, rank))
        if owed:
            index, stage, rank = min(owed)
            raise InvalidUsage(
                f"rank {rank} never computes the gradients of weights of micro-batch {index}, stage {stage}"
            )
        return np.flatnonzero(~weights)

    def _refuse(self, number: int, what: str) -> None:
        raise InvalidUsage(f"pass {number} ({Pass.of_row(self.passes[number].tolist())}) {what}")

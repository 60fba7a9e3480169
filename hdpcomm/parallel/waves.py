"""Waves: in which order ranks that share experts run the micro-batches of a plan, and when they run without one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hdpcomm.plan import MicroBatch
from hdpcomm.plan.waves import make_waves

if TYPE_CHECKING:
    from hdpcomm.plan import StepPlan

__all__ = ["PlannedWaves", "plan_waves", "waves_of"]


def waves_of(plan: StepPlan, rank: int, group: Collection[int]) -> list[MicroBatch | None]:
    """What ``rank`` runs, wave by wave: a micro-batch, or ``None`` for a pass without tokens. Local.

    Each micro-batch has a wave, after those of all earlier micro-batches of its ranks, so that a rank has at most one
    in a wave and keeps the plan's order. In a wave the ranks of a group that have a micro-batch need all others of the
    group in every layer with experts; a wave in which none has one is left out for the group.

    No deadlock: a rank's operations are ordered by (wave, pass, layer), and so are those of all ranks with which it
    shares experts or a micro-batch; so of all operations that have not run, the first one has all its ranks waiting.

    Args:
        rank: of the plan, one of ``group``.
        group: the plan's ranks that share experts with it.
    """
    waves = [
        wave for wave in make_waves(plan.micro_batches) if any(each in group for batch in wave for each in batch.ranks)
    ]
    return [next((batch for batch in wave if rank in batch.ranks), None) for wave in waves]


@dataclass(frozen=True, slots=True)
class PlannedWaves:
    """What pipelines make a schedule for in place of a plan: its waves.

    Attributes:
        plan: micro-batch i is wave i, on all ranks of the expert groups that take part in it: these run its passes at
            the same time. It has the sequences of its longest micro-batch, which fit these ranks as they fit fewer.
    """

    plan: StepPlan
    _batches: Mapping[tuple[int, int], MicroBatch]

    def of_rank(self, rank: int) -> dict[int, MicroBatch | None]:
        """By number of the wave, what the rank runs in it: a micro-batch, or ``None`` for passes without tokens."""
        return {wave.index: self._batches.get((wave.index, rank)) for wave in self.plan.for_rank(rank)}


def plan_waves(plan: StepPlan, expert: int) -> PlannedWaves:
    """The waves of a plan where ``expert`` neighbouring ranks share experts; with 1, each micro-batch is one. Local."""
    if expert == 1:
        return PlannedWaves(plan, {(batch.index, rank): batch for batch in plan.micro_batches for rank in batch.ranks})
    made: list[MicroBatch] = []
    batches: dict[tuple[int, int], MicroBatch] = {}
    for number, wave in enumerate(make_waves(plan.micro_batches)):
        groups = sorted({rank // expert for batch in wave for rank in batch.ranks})
        ranks = tuple(rank for group in groups for rank in range(group * expert, (group + 1) * expert))
        longest = max(wave, key=lambda batch: batch.predicted_s)
        made.append(replace(longest, index=number, ranks=ranks))
        batches |= {(number, rank): batch for batch in wave for rank in batch.ranks}
    return PlannedWaves(replace(plan, micro_batches=tuple(made)), batches)

"""Waves: in which order ranks that share experts run the micro-batches of a plan, and when they run without one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from hdpcomm.plan import MicroBatch, SequenceFragment, SequenceInfo
from hdpcomm.plan.waves import blocks_of, in_turns, make_waves

if TYPE_CHECKING:
    from hdpcomm.plan import StepPlan

__all__ = ["PlannedWaves", "Turn", "plan_waves", "waves_of"]


class Turn(NamedTuple):
    """What a rank runs at a time.

    Attributes:
        batch: ``None``: passes without tokens, since others need this rank's experts.
        keeps: a forward pass only, for what later slices of a sequence need of this one.
    """

    batch: MicroBatch | None
    keeps: bool = False


def waves_of(plan: StepPlan, rank: int, group: Collection[int], *, training: bool = True) -> list[Turn]:
    """What ``rank`` runs, wave by wave. Local.

    Each micro-batch has a wave, after those of all earlier micro-batches of its ranks, so that a rank has at most one
    in a wave and keeps the plan's order. In a wave the ranks of a group that have a micro-batch need all others of the
    group in every layer with experts; a wave in which none has one is left out for the group. All passes of a wave are
    of one kind: slices, which first run forward only, have waves of their own.

    No deadlock: a rank's operations are ordered by (turn, pass, layer), and so are those of all ranks with which it
    shares experts or a micro-batch; so of all operations that have not run, the first one has all its ranks waiting.

    Args:
        rank: of the plan, one of ``group``.
        group: the plan's ranks that share experts with it.
        training: whether there are backward passes, before which slices run forward again.
    """
    waves = make_waves(plan.micro_batches, plan.slices)
    turns = in_turns(waves, plan.slices) if training else [(wave, False) for wave in waves]
    return [
        Turn(next((batch for batch in wave if rank in batch.ranks), None), keeps)
        for wave, keeps in turns
        if any(each in group for batch in wave for each in batch.ranks)
    ]


@dataclass(frozen=True, slots=True)
class PlannedWaves:
    """What pipelines make a schedule for in place of a plan: its waves.

    Attributes:
        plan: micro-batch i is wave i, on all ranks of the expert groups that take part in it: these run its passes at
            the same time. It has the sequences of its longest micro-batch, which fit these ranks as they fit fewer.
            The waves of a block of slices are slices of one sequence, on all ranks of the block, each with as many
            tokens on every rank as any rank has.
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
    fragments: list[SequenceFragment] = []
    next_id = int(plan.table.ids.max(initial=-1)) + 1
    for block in blocks_of(make_waves(plan.micro_batches, plan.slices), plan.slices):
        groups = sorted({rank // expert for wave in block for batch in wave for rank in batch.ranks})
        ranks = tuple(rank for group in groups for rank in range(group * expert, (group + 1) * expert))
        first, start = len(made), 0
        for wave in block:
            longest, number = max(wave, key=lambda batch: batch.predicted_s), len(made)
            batches |= {(number, rank): batch for batch in wave for rank in batch.ranks}
            if wave[0].index in plan.slices:
                stop = start + max(batch.tokens_held for batch in wave) * len(ranks)
                longest = replace(longest, sequences=(SequenceInfo(next_id + len(fragments), stop - start),))
                fragments.append(SequenceFragment(first, start, stop))
                start = stop
            made.append(replace(longest, index=number, ranks=ranks))
    waves = replace(plan, micro_batches=tuple(made), fragments=tuple(fragments) or plan.fragments)
    return PlannedWaves(waves, batches)

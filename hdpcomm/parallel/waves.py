"""Turns: in which order ranks that share experts run the micro-batches of a plan, and when they run without one."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from hdpcomm.plan import MicroBatch
from hdpcomm.plan.waves import in_turns, make_waves

if TYPE_CHECKING:
    from hdpcomm.plan import StepPlan

__all__ = ["Turn", "waves_of"]


class Turn(NamedTuple):
    """A micro-batch of a rank in a wave.

    Attributes:
        batch: ``None``: passes without tokens, since others need this rank's experts.
        keeps: a forward pass only, for what later slices of a sequence need of this one.
    """

    batch: MicroBatch | None
    keeps: bool = False


def waves_of(plan: StepPlan, rank: int, group: Collection[int], *, training: bool = True) -> list[Turn]:
    """Turns of ``rank``, wave by wave. Local.

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

"""Waves: in which order ranks that share experts run the micro-batches of a plan, and when they run without one."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdpcomm.plan import MicroBatch, StepPlan

__all__ = ["waves_of"]


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
    last: dict[int, int] = {}
    own: dict[int, MicroBatch] = {}
    needed: set[int] = set()
    for micro_batch in plan.micro_batches:
        wave = 1 + max(last.get(each, 0) for each in micro_batch.ranks)
        last.update(dict.fromkeys(micro_batch.ranks, wave))
        if any(each in group for each in micro_batch.ranks):
            needed.add(wave)
        if rank in micro_batch.ranks:
            own[wave] = micro_batch
    return [own.get(wave) for wave in sorted(needed)]

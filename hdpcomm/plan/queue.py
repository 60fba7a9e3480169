"""The queue of a plan (:attr:`StepPlan.queued`): micro-batches that are bound to no rank. All of it is local."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hdpcomm.plan.micro_batch import MicroBatch
    from hdpcomm.plan.step import StepPlan

__all__ = ["as_run", "fixed_for_rank", "pool_rows"]


def pool_rows(plan: StepPlan, pool: int) -> NDArray[np.int64]:
    """Rows of the plan's table that the ranks of a pool take, in this order: int64 ``[queued in the pool]``."""
    first = len(plan.table) - plan.queued
    return first + np.flatnonzero(_named(plan) % plan.queue_pools == pool)


def fixed_for_rank(plan: StepPlan, rank: int) -> tuple[MicroBatch, ...]:
    """:meth:`StepPlan.for_rank` without those of the queue: what the plan binds to the rank, in order."""
    first = len(plan.table) - plan.queued
    return plan.for_rank(rank, rows=first)


def as_run(plan: StepPlan, takers: NDArray[Any]) -> StepPlan:
    """The plan with the ranks that have run the micro-batches of its queue in the place of those that it names.

    ``takers``: whole numbers ``[queued]``, in the order of the table; each of the pool of the micro-batch.
    """
    ranks = plan.table.ranks.copy()
    ranks[len(ranks) - plan.queued :] = takers
    return plan.with_table(dataclasses.replace(plan.table, ranks=ranks))


def _named(plan: StepPlan) -> NDArray[np.int32]:
    """The rank that the plan names for each micro-batch of its queue, which has no other."""
    return plan.table.ranks[len(plan.table.ranks) - plan.queued :]

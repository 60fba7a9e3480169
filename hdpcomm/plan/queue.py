"""The queue of a plan (:attr:`StepPlan.queued`): micro-batches that are bound to no rank. All of it is local."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.plan.micro_batch import MicroBatch
    from hdpcomm.plan.step import StepPlan

__all__ = ["as_run", "fixed_for_rank", "pool_rows"]


def pool_rows(plan: StepPlan, pool: int) -> NDArray[np.int64]:
    """Rows of the plan's table that the ranks of a pool take, in this order: int64 ``[queued in the pool]``.

    Raises: InvalidUsage if the plan has no such pool.
    """
    if not 0 <= pool < plan.queue_pools:
        raise InvalidUsage(f"pool {pool} asked of a plan with {plan.queue_pools}: give 0 to {plan.queue_pools - 1}")
    first = len(plan.table) - plan.queued
    return first + np.flatnonzero(_named(plan) % plan.queue_pools == pool)


def fixed_for_rank(plan: StepPlan, rank: int) -> tuple[MicroBatch, ...]:
    """:meth:`StepPlan.for_rank` without those of the queue: what the plan binds to the rank, in order."""
    first = len(plan.table) - plan.queued
    return plan.for_rank(rank, rows=first)


def as_run(plan: StepPlan, takers: NDArray[Any]) -> StepPlan:
    """The plan with the ranks that have run the micro-batches of its queue in the place of those that it names.

    Args:
        takers: whole numbers ``[queued]``, in the order of the table.

    Raises:
        InvalidUsage: another number of them, or a rank of another pool.
    """
    takers = np.asarray(takers)
    if takers.shape != (plan.queued,) or (plan.queued and takers.dtype.kind not in "iu"):
        raise InvalidUsage(
            f"takers are {takers.dtype} of shape {takers.shape}, expected whole numbers [{plan.queued}]: the rank that "
            "ran each micro-batch of the queue"
        )
    named = _named(plan)
    wrong = (takers < 0) | (takers >= plan.num_ranks) | (takers % plan.queue_pools != named % plan.queue_pools)
    if wrong.any():
        place = int(np.argmax(wrong))
        index = int(plan.table.index[len(plan.table) - plan.queued + place])
        raise InvalidUsage(
            f"micro-batch {index} of the queue is said to have run on rank {takers[place]}, expected a rank of 0 to "
            f"{plan.num_ranks - 1} that is {named[place] % plan.queue_pools} modulo {plan.queue_pools}, as its pool is"
        )
    ranks = plan.table.ranks.copy()
    ranks[len(ranks) - plan.queued :] = takers
    return plan.with_table(dataclasses.replace(plan.table, ranks=ranks))


def _named(plan: StepPlan) -> NDArray[np.int32]:
    """The rank that the plan names for each micro-batch of its queue, which has no other."""
    return plan.table.ranks[len(plan.table.ranks) - plan.queued :]

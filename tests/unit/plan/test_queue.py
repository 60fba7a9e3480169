"""The queue of a plan: what is in it, files, and the plan as it ran."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Planner, SequenceInfo, StepPlan
from hdpcomm.plan.step import as_run, fixed_for_rank, pool_rows


def batch(index: int, *ranks: int, offload: float = 0.0) -> MicroBatch:
    return MicroBatch(index, ranks, (SequenceInfo(index, 10 + index),), offload, 1.0)


def plan(**changes: Any) -> StepPlan:
    """Two micro-batches that are bound to ranks and five in a queue, of two pools: ranks 0, 2 and 1, 3."""
    batches = (batch(0, 0, 1, 2), batch(1, 3), batch(2, 0), batch(3, 3), batch(4, 2), batch(5, 1), batch(6, 0))
    values: dict[str, Any] = {"queued": 5, "queue_pools": 2}
    return StepPlan("by hand", 4, batches, 3.0, 2.0, 0.0, 0.1, **(values | changes))


def test_each_pool_has_the_micro_batches_of_its_ranks_in_their_order() -> None:
    assert [pool_rows(plan(), pool).tolist() for pool in (0, 1)] == [[2, 4, 6], [3, 5]]
    assert pool_rows(plan(queue_pools=1), 0).tolist() == [2, 3, 4, 5, 6]
    assert pool_rows(plan(queued=0, queue_pools=1), 0).tolist() == []


def test_a_rank_is_bound_to_what_is_not_in_the_queue() -> None:
    assert [[each.index for each in fixed_for_rank(plan(), rank)] for rank in range(4)] == [[0], [0], [0], [1]]
    assert [each.index for each in plan().for_rank(0)] == [0, 2, 6]
    assert fixed_for_rank(plan(queued=0, queue_pools=1), 0) == plan().for_rank(0)


def test_the_plan_as_it_ran_has_other_ranks_and_nothing_else() -> None:
    ran = as_run(plan(), np.array([2, 1, 0, 3, 2]))
    assert [each.ranks for each in ran.micro_batches] == [(0, 1, 2), (3,), (2,), (1,), (0,), (3,), (2,)]
    assert [each.index for each in ran.for_rank(2)] == [0, 2, 6]
    assert [replace(each, ranks=()) for each in ran.micro_batches] == [
        replace(each, ranks=()) for each in plan().micro_batches
    ]
    assert (ran.queued, ran.queue_pools, ran.makespan_s) == (5, 2, 3.0)
    assert ran.hash != plan().hash
    assert as_run(plan(), np.array([0, 3, 2, 1, 0])).hash == plan().hash


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"queued": 8}, "queued is 8, expected 0 to 7"),
        ({"queued": -1}, "queued is -1"),
        ({"queue_pools": 5}, "queue_pools is 5, expected 1 to 4"),
        ({"queue_pools": 0}, "queue_pools is 0"),
        ({"queued": 0}, "queue_pools is 2, expected 1 to 1"),
        ({"queued": 7}, r"micro-batch 0 is in the queue, with ranks \(0, 1, 2\)"),
    ],
)
def test_plans_that_no_queue_can_be_of_are_refused(changes: dict[str, int], told: str) -> None:
    plan().validate([10, 11, 12, 13, 14, 15, 16])
    wrong = plan(**changes)
    with pytest.raises(InvalidUsage, match=told):
        wrong.validate()
    with pytest.raises(InvalidUsage, match=told):
        StepPlan.from_json(json.dumps(plan().to_dict() | changes | {"sha256": wrong.hash}))


def test_offload_and_a_queue_exclude_each_other() -> None:
    with pytest.raises(InvalidUsage, match=r"micro-batch 2 is in the queue, with .* offload ratio 0.5"):
        replace(plan(), micro_batches=(*plan().micro_batches[:2], batch(2, 0, offload=0.5)), queued=1).validate()


def test_files_and_pickles_keep_the_queue(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    for found in (StepPlan.load(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan()))):
        assert (found.queued, found.queue_pools, found.hash) == (5, 2, plan().hash)
        assert found.micro_batches == plan().micro_batches
    again = pickle.loads(pickle.dumps(StepPlan.load(tmp_path / "plan.json")))
    assert (again.queued, again.queue_pools) == (5, 2)


def test_the_hash_covers_the_queue_and_explain_tells_of_it() -> None:
    hashes = {plan(queued=queued, queue_pools=pools).hash for queued, pools in ((0, 1), (5, 1), (5, 2), (4, 2))}
    assert len(hashes) == 4
    assert "5 of them wait in a queue, one for each of 2 pools of ranks: who is free takes" in plan().explain()
    assert "queue" not in plan(queued=0, queue_pools=1).explain()


def test_plans_without_a_queue_are_written_as_before() -> None:
    made = Planner(None, ClusterSpec(2, 100), cost_model=CostModel(1e-9, 1e-6)).plan([50, 30])
    assert "queue" not in made.to_json()

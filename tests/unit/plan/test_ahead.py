"""Planning in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, PlanAhead, Planner


def make_planner() -> Planner:
    return Planner(None, ClusterSpec(ranks=4, capacity=100), cost_model=CostModel(1e-9, 1e-6))


def test_plans_come_in_order_and_equal_the_planners_own() -> None:
    batches = [[50, 300, 7], [400], [], [1] * 20]
    with PlanAhead(make_planner(), batches) as steps:
        found = list(steps)
    assert [list(step.lengths) for step in found] == batches
    assert [step.plan.hash for step in found] == [make_planner().plan(lengths).hash for lengths in batches]


def test_the_next_plan_is_made_while_the_step_runs() -> None:
    asked: list[float] = []

    def slow() -> Iterator[list[int]]:
        for _ in range(4):
            time.sleep(0.03)
            asked.append(time.perf_counter())
            yield [10, 20]

    with PlanAhead(make_planner(), slow()) as steps:
        waits = []
        for step in steps:
            waits.append(step.waited_s)
            time.sleep(0.08)
    assert len(waits) == 4
    assert waits[0] >= 0.02
    assert max(waits[1:]) < 0.03


def test_at_most_depth_plans_wait() -> None:
    taken: list[int] = []

    def batches() -> Iterator[list[int]]:
        for number in range(10):
            taken.append(number)
            yield [10]

    with PlanAhead(make_planner(), batches(), depth=2) as steps:
        time.sleep(0.05)
        assert len(taken) == 2
        next(steps)
        time.sleep(0.05)
        assert len(taken) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_another_planner_makes_the_plans_from_the_next_step_on(depth: int) -> None:
    slow = Planner(None, ClusterSpec(ranks=4, capacity=100, speeds=(0.1, 1, 1, 1)), cost_model=CostModel(1e-9, 1e-6))
    lengths = list(range(20, 90, 3))
    with PlanAhead(make_planner(), [lengths] * 6, depth=depth) as steps:
        plans = [next(steps).plan]
        steps.planner = slow
        plans += [step.plan for step in steps]
    ahead = 1 + depth  # the plans that had begun
    assert {plan.hash for plan in plans[:ahead]} == {make_planner().plan(lengths).hash}
    assert {plan.hash for plan in plans[ahead:]} == {slow.plan(lengths).hash}
    assert plans[0].hash != plans[-1].hash


def test_errors_reach_the_step_that_they_belong_to() -> None:
    with PlanAhead(make_planner(), [[10], [10, 0], [10]]) as steps:
        assert next(steps).lengths == (10,)
        with pytest.raises(InvalidUsage, match="sequence 1 has 0 tokens"):
            next(steps)
        with pytest.raises(StopIteration):
            next(steps)
    with pytest.raises(InvalidUsage, match="depth is 0"):
        PlanAhead(make_planner(), [], depth=0)


def test_close_ends_the_thread() -> None:
    steps = PlanAhead(make_planner(), ([10] for _ in range(1000)))
    next(steps)
    steps.close()
    steps.close()
    assert not any(thread.name == "hdpcomm-planner" for thread in threading.enumerate())

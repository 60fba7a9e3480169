"""Processor time of planned steps."""

import pytest

from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, SequenceInfo, StepPlan
from hdpcomm.sim import processor_seconds

COSTS = CostModel(attention=1e-6, linear=1e-3, fixed=0.5, piece=2e-3, ring_step=0.1)


def plan_of(*batches: tuple[tuple[int, ...], tuple[int, ...]]) -> StepPlan:
    made = tuple(
        MicroBatch(i, ranks, tuple(SequenceInfo(10 * i + k, length) for k, length in enumerate(lengths)), 0.0, 1.0)
        for i, (ranks, lengths) in enumerate(batches)
    )
    return StepPlan("by hand", 4, made, 1.0, 1.0, 0.0, 0.0)


def test_it_is_the_sum_over_ranks_whoever_waits() -> None:
    plan = plan_of(((0, 1), (1000,)), ((0,), (200, 300)), ((3,), (1,)))
    # By hand: attention s^2 / d, linear s / d, piece s, a ring step, and the fixed part, on each rank.
    shared = 2 * (1e-6 * 1e6 / 2 + 1e-3 * 1000 / 2 + 2e-3 * 1000 + 0.1 + 0.5)
    alone = (1e-6 * (4e4 + 9e4) + 3e-3 * 500 + 0.5) + (1e-6 + 3e-3 + 0.5)
    assert processor_seconds(plan, COSTS, ClusterSpec(ranks=4, capacity=1000)) == pytest.approx(shared + alone)
    mesh = ClusterSpec(ranks=4, capacity=1000, pipeline=3, tensor=2)
    assert processor_seconds(plan, COSTS, mesh) == pytest.approx(6 * (shared + alone))


def test_an_empty_plan_takes_none() -> None:
    assert processor_seconds(plan_of(), COSTS, ClusterSpec(ranks=4, capacity=1000)) == 0.0

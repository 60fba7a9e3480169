"""Ranks that share processors: idle time is worth nothing, so the plan with the least work wins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner
from hdpcomm.sim import simulate_step

COST = CostModel(attention=1e-8, linear=1e-5, fixed=1e-3, piece=1e-5, ring_step=2e-3)
LENGTHS = [4000, 1500, 800, 300, 200, 100]


def planner(cores, policy="balanced", **options):
    return Planner(None, ClusterSpec(4, capacity=2000, cores=cores), policy, COST, **options)


def time_of(plan, cores):
    """The step on ``cores`` processors, from the definition: all work shared out, or one for each rank."""
    work = {rank: sum(batch.predicted_s for batch in plan.for_rank(rank)) for rank in range(plan.num_ranks)}
    alone = cores / plan.num_ranks  # of the profile's times, which are those of ranks that all work at once
    return max(sum(work.values()) / plan.num_ranks, alone * simulate_step(planner(None), plan).compute_s)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 8000), min_size=1, max_size=40), st.integers(1, 3))
def test_never_more_time_than_another_policy(lengths, cores):
    plan = planner(cores).plan(lengths)
    plan.validate(lengths, memory=planner(cores).memory)
    assert plan.makespan_s == pytest.approx(time_of(plan, cores))
    for policy in ("balanced", "naive", "static"):
        other = planner(None, policy).plan(lengths)
        if policy != "balanced":  # which chooses another plan
            assert planner(cores, policy).plan(lengths).makespan_s == pytest.approx(time_of(other, cores))
        assert plan.makespan_s <= time_of(other, cores) * (1 + 1e-9)
    assert plan.lower_bound_s <= plan.makespan_s
    assert planner(cores).lower_bound(lengths) == plan.lower_bound_s
    assert 0 <= plan.idle_share < 1


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_pipelines_share_processors_among_their_devices(stages: int, chunks: int) -> None:
    """A device that waits for another stage leaves its core to others; the simulator says the same as the plan."""
    ranks = 2

    def pipelines(cores):
        cluster = ClusterSpec(ranks, capacity=2000, pipeline=stages, chunks=chunks, cores=cores)
        return Planner(None, cluster, "balanced", COST)

    for lengths in ([1500, 1400], [1500] * 12):
        for cores in (1, 2, stages * ranks - 1):
            shared = pipelines(cores)
            plan = shared.plan(lengths)
            mean = sum(batch.predicted_s * len(batch.ranks) for batch in plan.micro_batches) / ranks
            alone = simulate_step(pipelines(None), plan).compute_s  # a core each
            assert plan.makespan_s == pytest.approx(max(mean, cores / (stages * ranks) * alone))
            assert simulate_step(shared, plan).compute_s == pytest.approx(plan.makespan_s)
            assert plan.makespan_s < alone  # some devices always wait for others
            assert shared.lower_bound(lengths) == plan.lower_bound_s <= plan.makespan_s
    assert pipelines(stages * ranks).plan([1500, 1400]).hash == pipelines(None).plan([1500, 1400]).hash


def test_takes_fewer_ranks_than_with_a_core_for_each():
    apart, together = planner(None).plan(LENGTHS), planner(1).plan(LENGTHS)
    assert max(len(batch.ranks) for batch in apart.micro_batches) > 2
    assert max(len(batch.ranks) for batch in together.micro_batches) == 2
    assert time_of(together, 1) < time_of(apart, 1)


@pytest.mark.parametrize("cores", [4, 5])
def test_enough_cores_are_as_good_as_one_each(cores):
    assert planner(cores).plan(LENGTHS).hash == planner(None).plan(LENGTHS).hash


def test_with_offload():
    memory = MemoryModel(500, offloadable=0.9, copy_s=1e-9, host_tokens=1e5, token_bytes=1.0)
    shared = planner(2, memory=memory).plan([3000, 200, 100])
    shared.validate([3000, 200, 100], memory=memory)
    assert shared.makespan_s > 0


def test_bad_number_of_cores():
    with pytest.raises(InvalidUsage, match="cores is 0"):
        ClusterSpec(4, cores=0)

"""The properties of the cost model that the lower bound's proof needs, the bound itself, and the gap of large plans."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hdpcomm.plan import (
    MODELS,
    ClusterSpec,
    CostModel,
    MemoryModel,
    MicroBatch,
    Planner,
    SequenceInfo,
    StepPlan,
)
from hdpcomm.plan.cost import core_cost
from hdpcomm.plan.distributions import sample_lengths
from tests.harness.native import _testing


def random_cost(rng: random.Random) -> CostModel:
    intra, latency = rng.choice([0.0, 1e-6, 1e-5]), rng.choice([0.0, 1e-5, 1e-4])
    return CostModel(
        attention=rng.choice([0.0, 1e-10, 1e-9]),
        linear=rng.choice([0.0, 1e-6]),
        fixed=rng.choice([0.0, 1e-3]),
        piece=rng.choice([0.0, 1e-8, 1e-6]),
        ring_step=rng.choice([0.0, 1e-5]),
        kv_intra=intra,
        kv_inter=intra * rng.choice([1, 3, 10]),
        latency_intra=latency,
        latency_inter=latency * rng.choice([1, 3]),
        forward=rng.uniform(0.1, 0.9),
        forward_transfer=rng.uniform(0.1, 0.9),
    )


def test_time_is_quasi_convex_in_the_ranks_inside_and_beyond_a_node() -> None:
    rng = random.Random(7)
    for _ in range(200):
        cost, length = random_cost(rng), rng.randrange(1, 200_000)
        for one_node in (True, False):
            times = [cost.seconds([length], ranks, one_node=one_node) for ranks in range(1 if one_node else 2, 200)]
            rising = False
            for before, after in pairwise(times):
                if after > before * (1 + 1e-12):
                    rising = True
                assert not (rising and after < before * (1 - 1e-12))


def test_rank_seconds_never_fall_with_the_ranks() -> None:
    rng = random.Random(8)
    for _ in range(200):
        cost, length = random_cost(rng), rng.randrange(1, 200_000)
        work = [ranks * cost.seconds([length], ranks, one_node=ranks <= 8) for ranks in range(1, 100)]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(work))


def test_bound_of_one_sequence_is_its_fastest_time() -> None:
    rng = random.Random(9)
    for _ in range(100):
        cost, capacity, ranks = random_cost(rng), rng.choice([500, 4000]), rng.randrange(1, 40)
        length = rng.randrange(1, capacity * ranks + 1)
        cluster = ClusterSpec(ranks=ranks, capacity=capacity, ranks_per_node=8)
        least = -(-length // capacity)
        fastest = min(cost.seconds([length], size, one_node=size <= 8) for size in range(least, ranks + 1))
        planner = Planner(None, cluster, cost_model=cost)
        assert planner.lower_bound([length]) == pytest.approx(fastest, rel=1e-6)
        assert planner.plan([length]).makespan_s == pytest.approx(fastest, rel=1e-6)


def test_bound_counts_every_rank_second_when_nothing_is_lost() -> None:
    cost = CostModel(1e-9, 1e-6)
    lengths = [5000, 3000, 700, 20]
    work = sum(1e-9 * length**2 + 1e-6 * length for length in lengths)
    bound = Planner(None, ClusterSpec(ranks=3, capacity=10_000), cost_model=cost).lower_bound(lengths)
    assert bound == pytest.approx(work / 3, rel=1e-6)


def test_the_bound_of_pipelines_counts_what_the_longest_sequences_leave_idle() -> None:
    """With weights that only follow the work the plan is 1.09 of the bound; the longest sequence alone proves less."""
    cluster = ClusterSpec(ranks=32, capacity=8192, ranks_per_node=8, pipeline=4)
    planner = Planner(MODELS["llama-7b"], cluster)
    lengths = sample_lengths("lognormal:6.5:1.6", tokens=4 * 32 * 8192, context=32 * 8192, seed=3)
    bound = planner.lower_bound(lengths)
    assert bound > 1.05 * planner.lower_bound([max(lengths)])
    assert bound <= planner.plan(lengths).makespan_s <= 1.06 * bound


def test_short_sequences_do_not_lower_the_bound_of_pipelines() -> None:
    """A pipeline could fill and drain with them, if there were enough."""
    cluster = ClusterSpec(ranks=256, capacity=8192, ranks_per_node=8, pipeline=4)
    planner = Planner(MODELS["llama-7b"], cluster)
    lengths = [100_000] * 60
    assert planner.lower_bound([*lengths, 10, 2000]) >= planner.lower_bound(lengths)


def test_a_faster_link_between_nodes_is_refused() -> None:
    cost = CostModel(1e-9, 1e-6, kv_intra=2e-6, kv_inter=1e-6)
    with pytest.raises(ValueError, match="between nodes is faster"):
        core_cost(cost, MemoryModel(10), ClusterSpec(ranks=2, capacity=10))


@pytest.mark.parametrize("distribution", ["byted", "github"])
@pytest.mark.parametrize("ranks", [256, 1024])
@pytest.mark.parametrize("offload", [False, True])
def test_large_steps_come_near_the_bound(distribution: str, ranks: int, offload: bool) -> None:
    cluster = ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=8, offload=offload)
    planner = Planner(MODELS["llama-7b"], cluster)
    gaps = []
    for seed in range(3):
        lengths = sample_lengths(distribution, tokens=2**25, context=2**21, seed=seed)
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        gaps.append(plan.gap)
    assert max(gaps) <= 0.08
    assert sum(gaps) / len(gaps) <= 0.03


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_small_clusters_come_near_the_bound(ranks: int) -> None:
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=8))
    gaps = []
    for seed in range(10):
        plan = planner.plan(sample_lengths("lognormal", count=256, context=8192 * ranks, seed=seed))
        gaps.append(plan.gap)
    assert sum(gaps) / len(gaps) <= 0.03


def test_groups_that_fit_into_a_node_lie_in_one_where_they_can() -> None:
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=64, capacity=8192, ranks_per_node=8))
    plan = planner.plan(sample_lengths("github", tokens=2**21, context=2**18, seed=0))
    small = [batch.ranks for batch in plan.micro_batches if 1 < len(batch.ranks) <= 8]
    inside = [ranks for ranks in small if min(ranks) // 8 == max(ranks) // 8]
    assert len(small) > 10
    assert len(inside) >= 0.8 * len(small)


def test_ring_order_of_nodes_crosses_each_boundary_twice() -> None:
    ring = _testing.ring_order(list(range(24)))
    crossings = sum(ring[i - 1] // 8 != ring[i] // 8 for i in range(24))
    assert crossings == 4


def ramped(count: int, first: float, last: float, growth: float) -> list[float]:
    """Relative times of micro-batches that rise from ``first`` to 1 and fall to ``last``."""
    rising = [min(1.0, first * growth**i) for i in range(count)]
    falling = [1 - (1 - last) * 0.8**i for i in range(count)]
    return [min(a, b) for a, b in zip(rising, reversed(falling), strict=True)]


def best_ramps(count: int, top: int, stages: int, forward: float) -> list[float]:
    """Relative times that rise up to number ``top`` as fast as claim 11 allows, and fall as fast from there."""
    others = stages - 1

    def ramp(own: float, before: float) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            times.append((1 + before * sum(times[-others:])) / own)
        return times

    rising = ramp(others * forward, 1 - forward)
    falling = ramp(others * (1 - forward), forward)[::-1]
    return [min(a / rising[top], b / falling[top]) for a, b in zip(rising, falling, strict=True)]


@pytest.mark.parametrize(("stages", "forward"), [(2, 1 / 3), (4, 1 / 3), (4, 0.6), (4, 0.95), (8, 0.25)])
def test_no_ramp_of_a_pipeline_is_below_the_bound(stages: int, forward: float) -> None:
    """Work that can be cut at will, in any number of micro-batches of any heights: what claim 11 says of it."""
    cost = CostModel(attention=0.0, linear=1e-6, fixed=2e-3, forward=forward)
    planner = Planner(None, ClusterSpec(ranks=1, capacity=10**6, pipeline=stages), cost_model=cost)
    lengths = [500] * 2000
    bound = planner.lower_bound(lengths)
    rng = random.Random(stages)
    ratios = []
    for _ in range(120):
        count = rng.randrange(1, 40)
        heights = ramped(count, rng.uniform(0.02, 1), rng.uniform(0.1, 1), rng.uniform(1.1, 2.5))
        if rng.random() < 0.5:
            heights = best_ramps(count, rng.randrange(count), stages, forward)
        ends = [round(2000 * sum(heights[: i + 1]) / sum(heights)) for i in range(count)]
        cuts = sorted({0, *ends})
        batches = tuple(
            MicroBatch(i, (0,), tuple(SequenceInfo(k, 500) for k in range(low, high)), 0.0, 0.0)
            for i, (low, high) in enumerate(pairwise(cuts))
        )
        plan = StepPlan("balanced", 1, batches, 0.0, 0.0, 0.0, 0.0)
        ratios.append(planner.simulate(plan)["makespan"] / bound)
    assert 1 <= min(ratios) <= 1.12

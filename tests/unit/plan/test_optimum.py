"""Bound <= optimum <= plan on steps that are small enough to try every plan."""

from __future__ import annotations

import random

import pytest
from exhaustive import TooManyNodes, optimum

from hdpcomm.plan import ClusterSpec, CostModel, Planner


def tiny_case(rng: random.Random) -> tuple[list[int], int, int, CostModel]:
    ranks, count, capacity = rng.randint(1, 4), rng.choice([1, 2, 3, 3, 4, 4, 5, 6]), rng.choice([8, 32, 100, 1000])
    top = capacity * rng.choice([1, ranks, ranks])
    uniform = rng.random() < 0.6
    lengths = [rng.randint(1, top) if uniform else max(1, int(top ** rng.random())) for _ in range(count)]
    kv, latency = rng.choice([0, 0, 1e-4, 1e-3]), rng.choice([0, 0, 1e-4])
    cost = CostModel(
        attention=rng.choice([0, 1e-6, 1e-5, 1e-4]),
        linear=rng.choice([1e-4, 1e-3]),
        fixed=rng.choice([0, 0, 1e-3, 1e-2]),
        piece=rng.choice([0, 1e-5, 1e-4]),
        ring_step=rng.choice([0, 0, 1e-4, 1e-3]),
        kv_intra=kv,
        kv_inter=kv,
        latency_intra=latency,
        latency_inter=latency,
        forward_transfer=rng.choice([0.25, 1 / 3, 0.5]),
    )
    return lengths, ranks, capacity, cost


@pytest.mark.parametrize("part", range(5))
def test_bound_optimum_plan(part: int) -> None:
    """2,000 tiny cases: the bound never exceeds the optimum, the plan is within 5% of it on average."""
    rng = random.Random(part)
    ratios = []
    skipped = 0
    for _ in range(400):
        lengths, ranks, capacity, cost = tiny_case(rng)
        plan = Planner(None, ClusterSpec(ranks=ranks, capacity=capacity), cost_model=cost).plan(lengths)
        try:
            best = optimum(lengths, ranks, capacity, cost, above=plan.makespan_s * (1 + 1e-9))
        except TooManyNodes:
            skipped += 1
            continue
        assert plan.lower_bound_s <= best * (1 + 1e-9), (lengths, ranks, capacity, cost)
        assert best <= plan.makespan_s * (1 + 1e-6)
        ratios.append(plan.makespan_s / best)
    assert skipped <= 20
    assert sum(ratios) / len(ratios) <= 1.02

"""Random small problems with extreme costs, speeds, capacities, experts and stages: no bound is above its plan.

HDPCOMM_PLAN_EXTREMES=10000 tries so many of them (default 150) from HDPCOMM_PLAN_EXTREMES_FROM on.
"""

from __future__ import annotations

import os
import random

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, Planner

CASES = int(os.environ.get("HDPCOMM_PLAN_EXTREMES", "150"))
FIRST = int(os.environ.get("HDPCOMM_PLAN_EXTREMES_FROM", "0"))
SECTIONS = 10


def random_problem(seed: int) -> tuple[Planner, list[int]]:
    """Costs from nothing to a thousand times the usual ones. Where memory can offload, the longest sequences of some
    steps are longer than the cluster holds without it; the others fit."""
    rng = random.Random(f"extreme {seed}")

    def cost(usual: float) -> float:
        return rng.choice([0.0, usual, usual * 10 ** rng.uniform(-3, 3)])

    expert = rng.choice([1, 1, 1, 2, 4])
    pipeline = rng.choice([1, 1, 2, 4]) if expert == 1 else 1
    ranks = expert * rng.randint(1, max(1, rng.choice([4, 12, 32]) // expert))
    capacity = rng.choice([7, 100, 1000, 10_000])
    cluster = ClusterSpec(
        ranks=ranks,
        capacity=capacity,
        ranks_per_node=rng.randint(1, ranks),
        pipeline=pipeline,
        chunks=rng.choice([1, 1, 2]) if pipeline > 1 else 1,
        expert=expert,
        expert_imbalance=rng.choice([1.0, rng.uniform(1, expert)]),
        split_backward=pipeline > 1 and rng.random() < 0.2,
        speeds=tuple(rng.choice([1.0, 0.5, 0.02, rng.uniform(0.01, 1)]) for _ in range(ranks))
        if rng.random() < 0.25
        else None,
    )
    intra, latency, linear = cost(1e-6), cost(1e-5), cost(1e-5)
    costs = CostModel(
        attention=cost(1e-8),
        linear=linear,
        fixed=cost(1e-3),
        piece=cost(1e-7),
        ring_step=cost(1e-5),
        kv_intra=intra,
        kv_inter=intra + cost(1e-6),
        latency_intra=latency,
        latency_inter=latency + cost(1e-5),
        experts=rng.uniform(0, linear) if expert > 1 else 0.0,
    )
    memory = None
    if rng.random() < 0.4:
        memory = MemoryModel(
            capacity,
            offloadable=rng.uniform(0.1, 0.95),
            copy_s=1e-6 * 10 ** rng.uniform(-3, 2),
            host_tokens=10 ** rng.uniform(1, 8),
        )
    longest = rng.choice([1, capacity // 3 + 1, capacity, capacity * ranks])
    if memory is not None and rng.random() < 0.5:
        longest = int(capacity * ranks * rng.uniform(1, 1 / (1 - memory.offloadable)))
    lengths = [rng.randint(max(1, longest // rng.choice([1, 2, 50])), longest) for _ in range(rng.choice([1, 8, 100]))]
    return Planner(None, cluster, cost_model=costs, memory=memory), lengths


@pytest.mark.parametrize("section", range(SECTIONS))
def test_extreme_problems_have_plans_above_their_bounds(section: int) -> None:
    for seed in range(FIRST + section, FIRST + CASES, SECTIONS):
        planner, lengths = random_problem(seed)
        try:
            plan = planner.plan(lengths)
        except InvalidUsage:
            assert max(lengths) > planner.max_length, f"seed {seed}"  # copies do not hide, or the host has no room
            continue
        planner.validate(plan, lengths)
        assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-6), f"seed {seed}"


def test_one_micro_batch_a_rank_is_in_the_bound() -> None:
    """Each rank that works pays the fixed cost once, however little it has to do: T >= c + W / R."""
    costs = CostModel(attention=0.0, linear=1e-5, fixed=1e-3)
    planner = Planner(None, ClusterSpec(ranks=32, capacity=1000), cost_model=costs)
    plan = planner.plan([32] * 100)
    assert plan.lower_bound_s == pytest.approx(1e-3 + 1e-5 * 3200 / 32, rel=1e-5)
    assert plan.makespan_s <= 1.03 * plan.lower_bound_s


@pytest.mark.parametrize("stages", [1, 2])
def test_speeds_without_a_1_are_those_of_slower_costs(stages: int) -> None:
    costs = CostModel(attention=1e-8, linear=1e-5, fixed=1e-3)
    lengths = [1 + 37 * i % 900 for i in range(200)]
    for ranks in (1, 4):
        fast = Planner(None, ClusterSpec(ranks=ranks, capacity=1000, pipeline=stages), cost_model=costs).plan(lengths)
        slow_cluster = ClusterSpec(ranks=ranks, capacity=1000, pipeline=stages, speeds=(0.02,) * ranks)
        slow = Planner(None, slow_cluster, cost_model=costs).plan(lengths)
        assert [batch.ranks for batch in slow.micro_batches] == [batch.ranks for batch in fast.micro_batches]
        assert slow.makespan_s == pytest.approx(50 * fast.makespan_s)
        assert slow.lower_bound_s == pytest.approx(50 * fast.lower_bound_s, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 4])
def test_many_micro_batches_of_a_pipeline_end_near_the_bound(ranks: int) -> None:
    """Hundreds of waves, whose order is found from those next to each end, within a counted amount of work."""
    costs = CostModel(attention=1e-8, linear=1e-5, fixed=1e-3)
    lengths = [1 + 37 * i % 900 for i in range(1500 * ranks)]
    planner = Planner(None, ClusterSpec(ranks=ranks, capacity=1000, pipeline=4), cost_model=costs)
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert all(len(plan.for_rank(rank)) > 600 for rank in range(ranks))
    assert plan.makespan_s <= 1.02 * plan.lower_bound_s


@pytest.mark.parametrize("seed", [0, 1])
def test_groups_of_middle_lengths_lie_in_nodes(seed: int) -> None:
    """Sequences of 5K to 30K tokens on pipelines: rings across hosts made plans 34 to 38% longer than the bound."""
    rng = random.Random(seed)
    lengths = [rng.randint(5_000, 30_000) for _ in range(120)]
    cluster = ClusterSpec(ranks=64, capacity=8192, ranks_per_node=8, device="h100", pipeline=4)
    planner = Planner(MODELS["llama-7b"], cluster)
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert plan.makespan_s <= 1.29 * plan.lower_bound_s
    small = [batch for batch in plan.micro_batches if len(batch.ranks) <= 8]
    assert all(min(batch.ranks) // 8 == max(batch.ranks) // 8 for batch in small)

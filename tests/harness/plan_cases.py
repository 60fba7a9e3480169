"""Random plans for the tests of plans as arrays and as files."""

from __future__ import annotations

import os
import random

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import POLICIES, ClusterSpec, CostModel, MemoryModel, Planner, StepPlan, Tree

__all__ = ["CASES", "large_plan", "no_objects", "random_plan"]

COST = CostModel(1e-9, 1e-6, 1e-4, piece=1e-7, ring_step=1e-5, kv_inter=3e-6, latency_inter=1e-5)
MEMORY = MemoryModel(100, offloadable=0.9, copy_s=1e-7, host_tokens=1e9)
CASES = int(os.environ.get("HDPCOMM_PLAN_TABLE_CASES", "60"))


def random_plan(seed: int) -> StepPlan:
    """A plan of any policy: with trees, nodes, offload, pipelines."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 12)
    pipeline = rng.choice([1, 1, 2])
    cluster = ClusterSpec(ranks=ranks, capacity=100, ranks_per_node=rng.randint(1, ranks), pipeline=pipeline)
    memory = MEMORY if rng.random() < 0.3 else None
    items: list[int | Tree] = [
        rng.randint(1, rng.choice([40, 100, 100 * ranks // 2 + 1])) for _ in range(rng.randint(0, 20))
    ]
    if rng.random() < 0.3:
        items.append(Tree([-1, 0, 0, 0], [rng.randint(1, 50) for _ in range(4)]))
    policy = rng.choice([each for each in POLICIES if each != "static"])
    try:
        return Planner(None, cluster, policy, COST, memory=memory).plan(items)
    except InvalidUsage:  # groups of 2^k ranks do not hold all of them
        return Planner(None, cluster, "balanced", COST, memory=memory).plan(items)


def no_objects(plan: StepPlan) -> bool:
    """Whether nobody has looked at all micro-batches yet."""
    try:
        StepPlan.micro_batches.__get__(plan)  # type: ignore[attr-defined]
    except AttributeError:
        return True
    return False


def large_plan() -> StepPlan:
    planner = Planner(None, ClusterSpec(ranks=64, capacity=1000, ranks_per_node=8), cost_model=COST)
    return planner.plan([30_000, *[900] * 2000])

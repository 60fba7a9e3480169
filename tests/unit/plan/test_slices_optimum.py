"""Bound <= optimum <= plan on steps in slices that are small enough to try every plan.

HDPCOMM_PLAN_CASES=N (default 250) tries N / 2 steps, N / 4 with several stages on a device, and N / 6 with split
backward passes, with both, or with speeds.
"""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, Planner, SequenceFragment
from tests.harness.exhaustive import TooManyNodes, sliced_optimum

CASES = int(os.environ.get("HDPCOMM_PLAN_CASES", "250"))
Case = tuple[list[int], ClusterSpec, CostModel, MemoryModel, int]


def tiny_case(rng: random.Random, kind: str) -> Case:
    """One or two sequences that may be cut among short ones, and the most slices of each."""
    ranks, slices = rng.choice([1, 1, 2]), rng.randint(1, 3)
    stages, capacity = rng.choice([2, 2, 2, 3]), rng.choice([3, 4, 6, 8])
    top = min(10, capacity * ranks * rng.choice([1, 1, min(slices, stages)]))
    lengths = [rng.randint(1, max(1, capacity // 2)) for _ in range(rng.choice([1, 2, 2, 3, 5 - ranks]))]
    for place in range(min(len(lengths), rng.choice([1, 1, 2]))):
        lengths[place] = rng.randint(max(1, top // 2), top)
    kv = rng.choice([0, 0, 1e-3, 1e-2])
    cost = CostModel(
        attention=rng.choice([0, 1e-4, 1e-3, 3e-3]),
        linear=1e-2,
        fixed=rng.choice([0, 0, 1e-3, 1e-2]),
        piece=rng.choice([0, 0, 1e-3]),
        ring_step=rng.choice([0, 0, 1e-3]),
        kv_intra=kv,
        kv_inter=kv * rng.choice([1, 3]),
        forward=rng.choice([1 / 3, 1 / 3, 0.25, 0.5]),
        forward_transfer=rng.choice([0.25, 1 / 3, 0.5]),
        weights=rng.choice([0.3, 0.6]) if "split" in kind else 1 / 3,
    )
    cluster = ClusterSpec(
        ranks,
        capacity,
        ranks_per_node=rng.randint(1, ranks),
        pipeline=stages,
        chunks=rng.choice([2, 2, 3]) if "chunks" in kind else 1,
        split_backward="split" in kind,
        speeds=tuple(rng.choice([1.0, 0.5, 0.8]) for _ in range(ranks)) if kind == "speeds" else None,
    )
    return lengths, cluster, cost, MemoryModel(capacity), slices


@pytest.mark.parametrize(
    ("kind", "share"), [("plain", 2), ("split", 6), ("speeds", 6), ("chunks", 4), ("split chunks", 6)]
)
def test_bound_optimum_plan_in_slices(kind: str, share: int) -> None:
    rng = random.Random(21)
    ratios, tightness = [], []
    while len(ratios) < CASES // share:
        lengths, cluster, cost, memory, slices = case = tiny_case(rng, kind)
        planner = Planner(None, cluster, cost_model=cost, memory=memory, slices=slices)
        try:
            plan = planner.plan(lengths)
            best = sliced_optimum(lengths, cluster, cost, memory, slices, above=plan.makespan_s * (1 + 1e-9))
        except (InvalidUsage, TooManyNodes):
            continue
        planner.validate(plan, lengths)
        assert plan.lower_bound_s <= best * (1 + 1e-9), case
        cuts = Counter(each.sequence for each in plan.fragments if isinstance(each, SequenceFragment))
        assert max(cuts.values(), default=1) <= slices, case
        ratios.append(plan.makespan_s / best)
        tightness.append(best / plan.lower_bound_s)
    ratios.sort()
    p95 = ratios[int(0.95 * len(ratios))]
    print(f"slices, {kind}: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, p95 {p95:.4f}, ", end="")
    print(f"worst {ratios[-1]:.4f}, optimum / bound {statistics.mean(tightness):.4f}")
    assert p95 <= 1.05
    assert ratios[-1] <= 1.2
    assert statistics.mean(tightness) <= {"split": 1.3, "chunks": 1.2, "split chunks": 1.2}.get(kind, 1.14)


@pytest.mark.parametrize(("stages", "slices", "on_each"), [(4, 4, 2), (8, 16, 1), (4, 8, 3)])
def test_bound_of_equal_sequences_counts_the_way_of_their_slices(stages: int, slices: int, on_each: int) -> None:
    """Links are so slow that each runs on one rank: the first slice goes down all stages, and the last one back."""
    cost = CostModel(0, 1e-3, kv_intra=1e-1, kv_inter=1e-1)
    planner = Planner(None, ClusterSpec(4, 1600, pipeline=stages), cost_model=cost, slices=slices)
    lengths = [1600] * (4 * on_each)
    least = (on_each + (stages - 1) / slices) * 1.6
    assert 0.998 * least <= planner.lower_bound(lengths) <= least * (1 + 1e-9)
    assert planner.plan(lengths).makespan_s <= 1.01 * least


def test_long_sequences_run_in_slices_side_by_side() -> None:
    """Whole, each of them needs both ranks; in two slices it has one of its own."""
    cost = CostModel(0, 1e-2, kv_intra=1e-2, kv_inter=1e-2, forward=1 / 2)
    plan = Planner(None, ClusterSpec(2, 4, pipeline=2), cost_model=cost, slices=2).plan([7, 7])
    assert plan.makespan_s == pytest.approx((7 + 4) * 1e-2)


def test_each_host_takes_its_long_sequences_one_after_the_other() -> None:
    """On all ranks links between hosts bind, and on ranks of a host a sequence ends in time in many slices only."""
    cluster = ClusterSpec(32, 8192, ranks_per_node=8, device="h100", pipeline=4)
    lengths = [100_000 + 300 * number for number in range(11)]
    plan = Planner(MODELS["llama-7b"], cluster, slices=16).plan(lengths)
    assert plan.makespan_s <= 1.18 * plan.lower_bound_s  # 1.47 where all ranks take turns
    assert all(len({rank // 8 for rank in each.ranks}) == 1 for each in plan.micro_batches)

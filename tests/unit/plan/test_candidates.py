"""Plans say which candidate of a search made them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner, StepPlan

COSTS = CostModel(attention=1e-9, linear=1e-6, fixed=1e-5)


def planned(lengths: list[int], *, policy: str = "balanced", queue: bool = False, **cluster: int) -> StepPlan:
    return Planner(None, ClusterSpec(capacity=1024, **cluster), policy, COSTS, queue=queue).plan(lengths)


@pytest.mark.parametrize(
    ("lengths", "pipeline", "made_by"),
    [
        ([900] * 8, 1, "blocks"),
        ([600] * 64, 4, "ramps"),
    ],
)
def test_plans_name_the_candidate_that_made_them(lengths: list[int], pipeline: int, made_by: str) -> None:
    plan = planned(lengths, ranks=8, pipeline=pipeline)
    assert plan.made_by.startswith(made_by)
    assert f" ms by {plan.made_by}\n" in plan.explain()


def test_other_policies_are_named() -> None:
    for policy in ("naive", "pow2", "static"):
        plan = planned([900] * 9, ranks=4, policy=policy)
        assert plan.made_by == policy
        assert " ms by " not in plan.explain()


def test_a_queue_is_named() -> None:
    plan = planned([3000, *[100 + 7 * i for i in range(60)]], ranks=4, queue=True)
    assert plan.made_by.endswith(" + queue") == (plan.queued > 0)


def test_files_keep_the_name(tmp_path: Path) -> None:
    plan = planned([1000] * 27, ranks=5)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert StepPlan.load(path).made_by == plan.made_by != ""


@pytest.mark.parametrize("count", [98_304, 98_305])
def test_parts_of_a_large_cluster_run_copies_of_one_plan(count: int) -> None:
    """Each part has every fourth sequence; the plan ends no later than those of the other policies."""
    ranks, lengths = 65_536, [3000 - i // 64 for i in range(count)]
    random.Random(0).shuffle(lengths)
    cluster = ClusterSpec(ranks=ranks, capacity=1024, ranks_per_node=8)
    planner = Planner(None, cluster, cost_model=replace(COSTS, kv_intra=1e-7, kv_inter=1e-6))
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert plan.made_by.endswith("+ copies")
    starts = plan.table.rank_bounds[:-1]
    of_first, of_last = (part.reduceat(plan.table.ranks // (ranks // 4), starts) for part in (np.minimum, np.maximum))
    assert np.array_equal(of_first, of_last)
    for policy in ("pow2", "static", "naive"):
        other = Planner(None, cluster, policy, planner.cost_model).plan(lengths)
        assert plan.makespan_s <= other.makespan_s


def test_a_few_long_sequences_make_no_parts() -> None:
    """The first part would have the longest one, and no other part one like it."""
    lengths = [1_000_000] + [1500 - i // 32 for i in range(40_000)]
    plan = planned(lengths, ranks=65_536, ranks_per_node=8)
    assert "copies" not in plan.made_by


def test_large_pipelines_are_searched_on_a_sample() -> None:
    """Twice the ranks for each sequence twice: no longer than half of it, which all shapes are tried for."""
    lengths = [4096 * (1 + i % 16) for i in range(1440)]
    cluster = ClusterSpec(ranks=2048, capacity=8192, ranks_per_node=8, pipeline=4)
    half = Planner(MODELS["llama-7b"], cluster).plan(lengths)
    planner = Planner(MODELS["llama-7b"], replace(cluster, ranks=4096))
    plan = planner.plan(lengths * 2)
    planner.validate(plan, lengths * 2)
    assert plan.makespan_s <= half.makespan_s * (1 + 1e-9)


def test_large_clusters_of_many_speeds_run_copies_of_one_plan() -> None:
    """Each part has one of eight ranks in the order of speeds; by classes of speed the plan was 6% longer."""
    rng = random.Random(0)
    speeds = tuple(rng.uniform(0.5, 1) for _ in range(1 << 14))
    lengths = [rng.randint(5000, 30_000) for _ in range(8000)]
    cluster = ClusterSpec(ranks=1 << 14, capacity=8192, ranks_per_node=8, speeds=speeds)
    part = Planner(MODELS["llama-7b"], cluster).plan(lengths)
    planner = Planner(MODELS["llama-7b"], replace(cluster, ranks=1 << 17, speeds=speeds * 8))
    plan = planner.plan(lengths * 8)
    planner.validate(plan, lengths * 8)
    assert plan.makespan_s <= 1.01 * part.makespan_s


def test_files_of_before_have_no_name() -> None:
    data = planned([1000] * 27, ranks=5).to_dict()
    del data["made_by"]
    assert StepPlan.from_json(json.dumps(data)).made_by == ""


def test_the_name_is_not_in_the_hash() -> None:
    plan = planned([1000] * 27, ranks=5)
    batches = plan.micro_batches
    assert replace(plan, micro_batches=batches, made_by="by hand").hash == plan.hash

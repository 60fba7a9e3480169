"""Plans with a queue: who takes what, how long steps are in the mean, and steps of all kinds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, Planner, StepPlan, Tree
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.plan.step import as_run, fixed_for_rank, pool_rows

CLUSTER = ClusterSpec(32, 8192, ranks_per_node=8)
COST = CostModel.analytic(MODELS["llama-7b"], CLUSTER)
ASK_S = (5e-6, 200e-6)  # until a rank knows what is next: in its host, from another one


def queued(cluster: ClusterSpec = CLUSTER, cost: CostModel = COST, **options: Any) -> Planner:
    return Planner(None, cluster, cost_model=cost, queue=True, **options)


def lengths_of(seed: int, context: int = 8192, ranks: int = 32) -> list[int]:
    return sample_lengths("byted", tokens=ranks << 15, context=context, seed=seed)


def run_queue(plan: StepPlan, cluster: ClusterSpec, *, noise: float = 0.0, seed: int = 0) -> tuple[float, list[int]]:
    """A step in which each pool's next micro-batch goes to the rank of the pool that has been free for longest: its
    seconds, and who took what. Looks through all ranks each time."""
    rng = random.Random(seed)
    ask = ASK_S[cluster.ranks > cluster.node_ranks]
    ready = [0.0] * plan.num_ranks
    first = len(plan.table) - plan.queued
    for batch in plan.micro_batches[:first]:
        end = max(ready[rank] for rank in batch.ranks) + batch.predicted_s * rng.gauss(1, noise)
        for rank in batch.ranks:
            ready[rank] = end
    takers = []
    for batch in plan.micro_batches[first:]:
        pool = range(batch.ranks[0] % plan.queue_pools, plan.num_ranks, plan.queue_pools)
        taker = min(pool, key=lambda rank: (ready[rank], rank))
        as_named = min(ready[rank] for rank in pool) + 1e-9 >= ready[batch.ranks[0]]
        takers.append(batch.ranks[0] if as_named and not noise else taker)
        speeds = cluster.speeds or (1.0,) * cluster.ranks
        seconds = batch.predicted_s * speeds[batch.ranks[0]] / speeds[takers[-1]]
        ready[takers[-1]] += ask + seconds * rng.gauss(1, noise)
    return max(ready), takers


@pytest.mark.parametrize("context", [8192, 2**15, 2**17])
def test_the_plan_names_the_ranks_that_take_what_when_all_goes_as_predicted(context: int) -> None:
    plan = queued().plan(lengths_of(1, context))
    assert plan.queued > 0
    seconds, takers = run_queue(plan, CLUSTER)
    assert takers == [batch.ranks[0] for batch in plan.micro_batches[len(plan.table) - plan.queued :]]
    asked = max(len(plan.for_rank(rank)) for rank in range(32)) * ASK_S[1]
    assert plan.makespan_s <= seconds <= plan.makespan_s + asked
    times = [batch.predicted_s for batch in plan.micro_batches[len(plan.table) - plan.queued :]]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("context", [8192, 2**15, 2**17])
def test_five_percent_of_noise_cost_one_percent(context: int) -> None:
    for seed in range(3):
        lengths = lengths_of(seed, context)
        plan, bound = queued().plan(lengths), Planner(None, CLUSTER, cost_model=COST).plan(lengths)
        drawn, without = (
            sum(run_queue(each, CLUSTER, noise=0.05, seed=draw)[0] for draw in range(100)) / 100
            for each in (plan, bound)
        )
        assert drawn <= 1.015 * plan.lower_bound_s < without
        assert plan.lower_bound_s == bound.lower_bound_s


def test_pools_of_large_clusters_take_what_is_theirs() -> None:
    cluster = ClusterSpec(600, 8192, ranks_per_node=8)
    plan = queued(cluster).plan(lengths_of(0, 2**16, ranks=600))
    assert plan.queue_pools == 3
    plan.validate(lengths_of(0, 2**16, ranks=600))
    _, takers = run_queue(plan, cluster)
    assert takers == [batch.ranks[0] for batch in plan.micro_batches[len(plan.table) - plan.queued :]]
    rows = [pool_rows(plan, pool) for pool in range(3)]
    assert sum(map(len, rows)) == plan.queued
    work = [sum(plan.table.predicted_s[row]) for row in rows]
    assert max(work) <= 1.1 * min(work)


def test_a_step_of_equal_sequences_is_a_plan_of_whoever_ran_them() -> None:
    planner, lengths = queued(), [900] * 500
    plan = planner.plan(lengths)
    assert plan.queued > 32
    _, takers = run_queue(plan, CLUSTER, noise=0.2, seed=1)
    ran = as_run(plan, np.array(takers))
    planner.validate(ran, lengths)
    assert [batch.ranks[0] for batch in ran.micro_batches[len(plan.table) - plan.queued :]] == takers
    assert ran.hash != plan.hash
    named = [batch.ranks[0] for batch in plan.micro_batches[len(plan.table) - plan.queued :]]
    assert as_run(ran, np.array(named)).hash == plan.hash


STEPS = st.lists(st.integers(1, 3000) | st.integers(1, 100), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(
    STEPS,
    st.integers(1, 9),
    st.sampled_from(["plain", "speeds", "nics", "offload", "cores", "nodes"]),
)
def test_steps_of_all_kinds_have_valid_plans(lengths: list[int], ranks: int, kind: str) -> None:
    options: dict[str, Any] = {}
    cluster = ClusterSpec(ranks, 3000 // ranks + 100, offload=kind == "offload")
    if kind == "speeds":
        cluster = replace(cluster, speeds=tuple(1.0 if rank % 3 == 0 else 0.6 for rank in range(ranks)))
    elif kind in ("nics", "nodes"):
        cluster = replace(cluster, ranks_per_node=max(1, ranks // 2), nics=1 if kind == "nics" else None)
    elif kind == "cores":
        cluster = replace(cluster, cores=max(1, ranks - 1))
    elif kind == "offload":
        options["memory"] = MemoryModel(3000 // ranks + 100, offloadable=0.7, copy_s=1e-7, host_tokens=1e6)
    cost = CostModel(1e-6, 1e-4, 1e-3, ring_step=1e-4, kv_inter=1e-5, latency_inter=1e-4)
    planner = queued(cluster, cost, **options)
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert plan.hash == planner.plan(lengths).hash
    bound = Planner(None, cluster, cost_model=cost, **options).plan(lengths)
    if kind not in ("cores", "nics"):  # where it is priced again
        assert plan.makespan_s <= 1.011 * bound.makespan_s
    assert plan.makespan_s >= plan.lower_bound_s * (1 - 1e-9)
    assert sum(len(fixed_for_rank(plan, rank)) for rank in range(ranks)) == sum(
        len(batch.ranks) for batch in plan.micro_batches[: len(plan.table) - plan.queued]
    )


def test_trees_wait_in_the_queue_too() -> None:
    trees = [Tree((-1,), (400,)), *(Tree((-1, 0, 0), (100, 20 * i, 30)) for i in range(1, 12))]
    cluster = ClusterSpec(2, 1000)
    plan = queued(cluster, CostModel(1e-6, 1e-4, 1e-3, ring_step=1e-2)).plan(trees)
    assert plan.queued > 0
    plan.validate(trees)


def test_a_step_of_one_sequence_has_no_queue_that_would_help() -> None:
    plan = queued(ClusterSpec(4, 1000)).plan([3000])
    assert (plan.queued, plan.queue_pools) == (0, 1)
    assert queued(ClusterSpec(4, 1000)).plan([]).queued == 0


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "static"},
        {"cluster": ClusterSpec(8, 100, pipeline=2)},
        {"cluster": ClusterSpec(8, 100, expert=2)},
    ],
)
def test_what_has_no_queue_is_refused(options: dict[str, Any]) -> None:
    values = {"model": None, "cluster": CLUSTER, "cost_model": COST} | options
    with pytest.raises(InvalidUsage, match="only plans of the policy 'balanced' have one"):
        Planner(**values, queue=True)


def test_the_commands_plan_with_a_queue(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--ranks", "16", "--capacity", "8K", "--tokens", "512K", "--context", "64K", "--queue"]
    assert main(["plan", *small, "--compare", "static"]) == 0
    assert "wait in a queue: who is free takes the next one" in capsys.readouterr().out
    assert main(["simulate", *small, "--policy", "balanced,static"]) == 0
    assert "micro-batches wait in a queue, and run here where predicted" in capsys.readouterr().out
    assert main(["plan", *small, "--policy", "static"]) == 6
    assert "--queue was given with the policies static" in capsys.readouterr().err

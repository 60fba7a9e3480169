"""`balanced` is never worse than another policy; long sequences of about the same length run in waves."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, Planner

CASES = int(os.environ.get("HDPCOMM_PLAN_CASES", "250"))
OTHERS = ("pow2", "static", "naive")


def random_lengths(rng: random.Random, longest: int) -> list[int]:
    count = rng.choice([1, 2, 5, 12, 40])
    kind = rng.choice(["uniform", "log", "alike", "equal", "bimodal"])
    if kind == "uniform":
        return [rng.randint(1, longest) for _ in range(count)]
    if kind == "log":
        return [max(1, int(longest ** rng.random())) for _ in range(count)]
    if kind == "bimodal":
        return [rng.choice([longest, max(1, longest // 50)]) for _ in range(count)]
    length = rng.randint(1, longest)
    return [max(1, length - (rng.randint(0, length // 20) if kind == "alike" else 0)) for _ in range(count)]


def random_planners(
    rng: random.Random, policies: tuple[str, ...], *, stages: int = 1, speeds: bool = False
) -> tuple[list[Planner], int]:
    """Planners that differ in the policy only, and the longest length that each of them may get."""
    ranks, capacity = rng.choice([1, 3, 8, 20, 64]), rng.choice([100, 1000])
    kv, latency = rng.choice([0.0, 1e-6, 1e-5]), rng.choice([0.0, 1e-4])
    cost = CostModel(
        attention=rng.choice([0.0, 1e-9, 1e-8]),
        linear=1e-6,
        fixed=rng.choice([0.0, 1e-4]),
        piece=rng.choice([0.0, 1e-7]),
        ring_step=rng.choice([0.0, 1e-5]),
        kv_intra=kv,
        kv_inter=kv * rng.choice([1, 5]),
        latency_intra=latency,
        latency_inter=latency * rng.choice([1, 5]),
    )
    memory = MemoryModel(capacity)
    if rng.random() < 0.4:
        copy = cost.forward * (cost.attention * rng.choice([500, 5000]) + cost.linear)
        memory = MemoryModel(capacity, offloadable=0.9, copy_s=copy, host_tokens=rng.choice([1e9, 500.0]))
    cluster = ClusterSpec(ranks, capacity, rng.choice([None, 2, 8]), pipeline=stages)
    if speeds:
        choices = [1.0, 0.8, 0.5] if rng.random() < 0.5 else [rng.uniform(0.1, 1) for _ in range(ranks)]
        cluster = replace(cluster, speeds=tuple(rng.choice(choices) for _ in range(ranks)))
    context = rng.choice([0, capacity * ranks])
    planners = [Planner(None, cluster, policy, cost, memory=memory, context=context) for policy in policies]
    return planners, capacity * ranks


@pytest.mark.parametrize("speeds", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_balanced_is_never_worse_than_another_policy(stages: int, speeds: bool) -> None:
    rng = random.Random(stages)
    for _ in range(CASES if stages == 1 else CASES // 8):
        (planner, *others), longest = random_planners(rng, ("balanced", *OTHERS), stages=stages, speeds=speeds)
        lengths = random_lengths(rng, longest)
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        for other in others:
            try:
                found = other.plan(lengths)
            except InvalidUsage:  # rounds sizes up
                continue
            assert plan.makespan_s <= found.makespan_s * (1 + 1e-12), (other.policy, lengths, other.cost_model)


@pytest.mark.parametrize("count", [84, 168, 336])
def test_long_sequences_of_the_same_length_run_in_waves(count: int) -> None:
    """At least as good as equal waves of all ranks."""
    cluster = ClusterSpec(ranks=1024, capacity=8192, ranks_per_node=8)
    lengths = [100_000] * count
    planner = Planner(MODELS["llama-7b"], cluster)
    plan = planner.plan(lengths)
    plan.validate(lengths, memory=MemoryModel(8192))
    sizes = {waves: 1024 // -(-count // waves) for waves in range(1, count + 1)}
    possible = {waves: size for waves, size in sizes.items() if size * 8192 >= 100_000}
    best = min(w * planner.cost_model.load_seconds(1e10, 100_000, n, one_node=n <= 8) for w, n in possible.items())
    assert plan.makespan_s <= best * (1 + 1e-3)
    assert plan.gap <= 0.14


def test_sequences_that_cannot_run_side_by_side_raise_the_bound() -> None:
    """Five sequences of 3 ranks each on 8 ranks: at most two side by side, so three follow each other somewhere."""
    cost = CostModel(1e-9, 1e-6, ring_step=1.0)  # more ranks only cost
    planner = Planner(None, ClusterSpec(ranks=8, capacity=100), cost_model=cost)
    one = planner.plan([300]).makespan_s
    assert planner.lower_bound([300] * 5) >= 2 * one * (1 - 1e-6)
    assert planner.plan([300] * 5).makespan_s == pytest.approx(3 * one, rel=1e-6)


def test_a_pack_shares_the_overlap_of_its_longest_sequence() -> None:
    """The short sequence alone needs 10 ranks; beside the long one it needs no more than that one does."""
    memory = MemoryModel(1000, offloadable=0.94, copy_s=1e-9 / 3 * 1e5, host_tokens=1e9)
    lengths = [10_000, 120_000]
    planner = Planner(
        None, ClusterSpec(ranks=10, capacity=1000), cost_model=CostModel(1e-9, 0, ring_step=10), memory=memory
    )
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert plan.lower_bound_s == pytest.approx(71.8)
    assert plan.makespan_s == pytest.approx(71.8125)


@pytest.mark.parametrize("policy", ["balanced", "pipeline", "naive", "pow2"])
def test_a_sequence_that_fits_only_beside_a_longer_one_rides_with_it(policy: str) -> None:
    memory = MemoryModel(1000, offloadable=0.94, copy_s=1e-9 / 3 * 1e5, host_tokens=1e9)
    planner = Planner(None, ClusterSpec(ranks=8, capacity=1000), policy, CostModel(1e-9, 0), memory=memory)
    lengths = [10_000, 500, 120_000]
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    together = next(batch for batch in plan.micro_batches if 0 in [sequence.id for sequence in batch.sequences])
    assert 2 in [sequence.id for sequence in together.sequences]
    with pytest.raises(InvalidUsage, match=r"sequence 0 of 10000 tokens needs 10 ranks .* and the cluster has 8"):
        planner.plan([10_000, 500, 9_000])


def test_equal_sequences_on_pipelines_take_sizes_that_fill_nodes() -> None:
    """Five or six ranks each would end with the other waves, but leave ranks of a node idle: four each take less."""
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=32, capacity=8192, ranks_per_node=8, pipeline=8))
    plan = planner.plan([5699] * 183)
    planner.validate(plan, [5699] * 183)
    assert plan.gap <= 0.1


@pytest.mark.parametrize(("stages", "ranks", "most"), [(4, 32, 0.09), (8, 256, 0.05)])
def test_waves_of_a_pipeline_are_tuned_one_by_one(stages: int, ranks: int, most: float) -> None:
    """Near-equal lengths: how many run side by side differs from wave to wave, fewer in the first and last ones."""
    rng = random.Random(ranks)
    lengths = [int(100_000 * rng.uniform(0.95, 1.05)) for _ in range(ranks * 42 // 128)]
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=8, pipeline=stages))
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert plan.gap <= most

"""Bound <= optimum <= plan on steps that are small enough to try every plan.

HDPCOMM_PLAN_CASES=N tries N steps of each kind (default 250), a thousand in each test, so that a long run meets no time
limit; docs/planner-figures.md has its figures.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import replace

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner
from tests.harness.exhaustive import TooManyNodes, fits, optimum, partitions, pipeline_optimum, sliced_optimum

CASES = int(os.environ.get("HDPCOMM_PLAN_CASES", "250"))
PARTS = -(-CASES // 1000)

parts = pytest.mark.parametrize(
    ("part", "cases"), [(part, CASES // PARTS) for part in range(PARTS)], ids=[f"part{part}" for part in range(PARTS)]
)


def tiny_case(
    rng: random.Random, *, nodes: bool, offload: bool, pipeline: bool, speeds: bool = False
) -> tuple[list[int], ClusterSpec, CostModel, MemoryModel]:
    ranks, capacity = rng.randint(1, 3 if pipeline else 4), rng.choice([8, 32, 100, 1000])
    count = rng.choice([1, 2, 3, 3] if pipeline else [1, 2, 3, 3, 4, 4, 5, 6])
    top = capacity * rng.choice([1, ranks, ranks]) * (rng.choice([1, 2, 4]) if offload else 1)
    kind = rng.choice(["uniform", "uniform", "log", "alike", "equal"])
    if kind == "uniform":
        lengths = [rng.randint(1, top) for _ in range(count)]
    elif kind == "log":
        lengths = [max(1, int(top ** rng.random())) for _ in range(count)]
    else:
        length = rng.randint(1, top)
        lengths = [max(1, length - (rng.randint(0, length // 10) if kind == "alike" else 0)) for _ in range(count)]
    kv, latency = rng.choice([0, 0, 1e-4, 1e-3]), rng.choice([0, 0, 1e-4])
    cost = CostModel(
        attention=rng.choice([0, 1e-6, 1e-5, 1e-4]),
        linear=rng.choice([1e-4, 1e-3]),
        fixed=rng.choice([0, 0, 1e-3, 1e-2]),
        piece=rng.choice([0, 1e-5, 1e-4]),
        ring_step=rng.choice([0, 0, 1e-4, 1e-3]),
        kv_intra=kv,
        kv_inter=kv * (rng.choice([1, 3]) if nodes else 1),
        latency_intra=latency,
        latency_inter=latency * (rng.choice([1, 5]) if nodes else 1),
        forward_transfer=rng.choice([0.25, 1 / 3, 0.5]),
    )
    memory = MemoryModel(capacity)
    if offload:
        # Copies that hide behind the forward pass of a sequence of some length in the range of the step's.
        hidden = rng.uniform(0.2, 2.0) * top
        copy = cost.forward * (cost.attention * hidden + cost.piece + cost.linear)
        memory = MemoryModel(
            capacity,
            offloadable=rng.choice([0.5, 0.9, 0.94]),
            copy_s=copy,
            host_tokens=rng.choice([1e9, 1e9, capacity]),
        )
    cluster = ClusterSpec(
        ranks=ranks,
        capacity=capacity,
        ranks_per_node=rng.randint(1, ranks) if nodes else None,
        pipeline=rng.randint(2, 4) if pipeline else 1,
        speeds=tuple(rng.choice([1.0, 1.0, 0.5, rng.uniform(0.05, 1)]) for _ in range(ranks)) if speeds else None,
    )
    return lengths, cluster, cost, memory


def tiny_pipeline_case(rng: random.Random) -> tuple[list[int], ClusterSpec, CostModel, MemoryModel]:
    """One or two pipelines with several micro-batches each, often one or two long ones among short ones."""
    _, cluster, cost, memory = tiny_case(rng, nodes=False, offload=rng.random() < 0.3, pipeline=True)
    ranks = rng.choice([1, 1, 1, 2])
    count = rng.choice([4, 5]) if ranks == 1 else rng.choice([3, 4])
    top = memory.capacity * ranks * (2 if memory.offloadable else 1)
    lengths = [max(1, int(top ** rng.random())) for _ in range(count)]
    if rng.random() < 0.6:
        short = max(1, top // rng.choice([3, 5, 10]))
        lengths = [max(1, short - rng.randint(0, short // 5)) for _ in range(count)]
        for i in range(rng.choice([1, 1, 2])):
            lengths[i] = rng.randint(-(-top * 2 // 3), top)
    cluster = replace(cluster, ranks=ranks, ranks_per_node=None, pipeline=rng.choice([2, 3, 4, 6]))
    return lengths, cluster, cost, memory


def feasible(lengths: list[int], cluster: ClusterSpec, cost: CostModel, memory: MemoryModel) -> bool:
    """Whether there is a plan at all: some packs of the sequences fit onto all ranks."""
    return any(
        all(fits([lengths[i] for i in pack], cluster.ranks, cost, memory) for pack in packs)
        for packs in partitions(tuple(range(len(lengths))))
    )


def compare(
    seed: int,
    cases: int,
    *,
    nodes: bool = False,
    offload: bool = False,
    pipeline: bool = False,
    speeds: bool = False,
) -> list[float]:
    """Plan / optimum of random steps, after checking that the bound is below both."""
    rng = random.Random(seed)
    ratios = []
    skipped = 0
    for _ in range(cases):
        lengths, cluster, cost, memory = tiny_case(rng, nodes=nodes, offload=offload, pipeline=pipeline, speeds=speeds)
        planner = Planner(None, cluster, "pipeline" if pipeline else "balanced", cost, memory=memory)
        case = (lengths, cluster, cost, memory)
        try:
            plan = planner.plan(lengths)
        except InvalidUsage:
            assert not feasible(*case), case
            continue
        planner.validate(plan, lengths)
        try:
            if pipeline:
                best = pipeline_optimum(lengths, cluster, cost, memory)
            else:
                best = optimum(lengths, cluster, cost, memory, above=plan.makespan_s * (1 + 1e-9))
        except TooManyNodes:
            skipped += 1
            continue
        assert plan.lower_bound_s <= best * (1 + 1e-9), case
        assert best <= plan.makespan_s * (1 + 1e-6), case
        ratios.append(plan.makespan_s / best)
    assert skipped <= 0.1 * cases
    return sorted(ratios)


def percentile(ratios: list[float], share: float) -> float:
    return ratios[min(len(ratios) - 1, int(share * len(ratios)))]


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@parts
def test_bound_optimum_plan(nodes: bool, offload: bool, part: int, cases: int) -> None:
    ratios = compare(1 + 100 * part, cases, nodes=nodes, offload=offload)
    print(f"nodes {nodes} offload {offload}: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(ratios, 0.95):.4f}, worst {ratios[-1]:.4f}")
    assert statistics.mean(ratios) <= 1.01
    assert percentile(ratios, 0.95) <= 1.01


@pytest.mark.parametrize("offload", [False, True])
@parts
def test_bound_optimum_plan_with_speeds(offload: bool, part: int, cases: int) -> None:
    ratios = compare(4 + 100 * part, cases // 2, nodes=True, offload=offload, speeds=True)
    print(f"speeds, offload {offload}: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(ratios, 0.95):.4f}, worst {ratios[-1]:.4f}")
    assert statistics.mean(ratios) <= 1.01
    assert percentile(ratios, 0.95) <= 1.02


@parts
def test_bound_optimum_plan_with_pipelines_of_different_speeds(part: int, cases: int) -> None:
    ratios = compare(5 + 100 * part, cases // 4, nodes=True, pipeline=True, speeds=True)
    print(f"pipelines, speeds: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(ratios, 0.95):.4f}, worst {ratios[-1]:.4f}")
    assert percentile(ratios, 0.95) <= 1.05


def with_domains(
    rng: random.Random, case: tuple[list[int], ClusterSpec, CostModel, MemoryModel]
) -> tuple[list[int], ClusterSpec, CostModel, MemoryModel]:
    """The same with nodes of one or two ranks and domains of two or three of these, by links between the two others."""
    lengths, cluster, cost, memory = case
    node = rng.choice([1, 1, 2])
    near = cost.kv_intra * rng.choice([1, 2, 4]), cost.latency_intra * rng.choice([1, 3])
    cost = replace(
        cost,
        kv_domain=near[0],
        latency_domain=near[1],
        kv_inter=near[0] * rng.choice([1, 3]) + rng.choice([0, 1e-4]),
        latency_inter=near[1] * rng.choice([1, 3]),
    )
    return lengths, replace(cluster, ranks_per_node=node, ranks_per_domain=node * rng.choice([2, 2, 3])), cost, memory


@pytest.mark.parametrize("kind", ["plain", "offload", "speeds", "pipeline", "several"])
def test_bound_optimum_plan_with_domains(kind: str) -> None:
    """Three levels of links: nodes, domains of nodes, and beyond."""
    rng = random.Random(11)
    ratios: list[float] = []
    while len(ratios) < CASES // (16 if kind in ("pipeline", "several") else 8):
        speeds = kind == "speeds" or (kind == "pipeline" and rng.random() < 0.3)
        tiny = tiny_case(rng, nodes=False, offload=kind == "offload", pipeline=kind == "pipeline", speeds=speeds)
        lengths, cluster, cost, memory = case = with_domains(
            rng, tiny_pipeline_case(rng) if kind == "several" else tiny
        )
        planner = Planner(None, cluster, "balanced", cost, memory=memory)
        try:
            plan = planner.plan(lengths)
            if cluster.pipeline > 1:
                best = pipeline_optimum(lengths, cluster, cost, memory)
            else:
                best = optimum(lengths, cluster, cost, memory, above=plan.makespan_s * (1 + 1e-9))
        except (InvalidUsage, TooManyNodes):
            continue
        planner.validate(plan, lengths)
        assert plan.lower_bound_s <= best * (1 + 1e-9), case
        assert best <= plan.makespan_s * (1 + 1e-6), case
        ratios.append(plan.makespan_s / best)
    ratios.sort()
    print(f"domains, {kind}: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(ratios, 0.95):.4f}, worst {ratios[-1]:.4f}")
    assert percentile(ratios, 0.95) <= 1.05


@parts
def test_bound_optimum_plan_with_pipelines(part: int, cases: int) -> None:
    """The plans are simulated, so the optimum is that of the schedule that runs, with 2 to 4 stages."""
    ratios = compare(2 + 100 * part, cases // 4, nodes=True, pipeline=True)
    ratios += compare(3 + 100 * part, cases // 8, offload=True, pipeline=True)
    ratios.sort()
    print(f"pipelines: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(ratios, 0.95):.4f}, worst {ratios[-1]:.4f}")
    assert percentile(ratios, 0.95) <= 1.05


@parts
def test_bound_optimum_plan_of_pipelines_with_several_micro_batches(part: int, cases: int) -> None:
    """What is idle around long micro-batches counts: the bound is near the optimum, and so is the plan."""
    rng = random.Random(6 + 100 * part)
    ratios, tightness = [], []
    while len(ratios) < cases // 3:
        lengths, cluster, cost, memory = case = tiny_pipeline_case(rng)
        planner = Planner(None, cluster, "balanced", cost, memory=memory)
        try:
            plan = planner.plan(lengths)
            best = pipeline_optimum(lengths, cluster, cost, memory)
        except (InvalidUsage, TooManyNodes):
            continue
        planner.validate(plan, lengths)
        assert plan.lower_bound_s <= best * (1 + 1e-9), case
        assert best <= plan.makespan_s * (1 + 1e-6), case
        ratios.append(plan.makespan_s / best)
        tightness.append(best / plan.lower_bound_s)
    print(f"pipelines, several micro-batches: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(sorted(ratios), 0.95):.4f}, optimum / bound {statistics.mean(tightness):.4f}")
    assert percentile(sorted(ratios), 0.95) <= 1.05
    assert statistics.mean(tightness) <= 1.06


def packs_case(rng: random.Random) -> tuple[list[int], ClusterSpec, CostModel, MemoryModel]:
    """Sequences of one length, of which some fit into a micro-batch together."""
    capacity, ranks = rng.choice([8, 10, 100]), rng.choice([2, 3, 3])
    cost = CostModel(
        attention=rng.choice([0, 1e-5]),
        linear=1e-3,
        fixed=rng.choice([1e-3, 1e-2]),
        ring_step=rng.choice([0, 1e-3]),
        kv_intra=rng.choice([0, 1e-3]),
        kv_inter=3e-3,
    )
    lengths = [rng.randint(capacity // 4, capacity)] * rng.randint(4, 7)
    if rng.random() < 0.3:
        lengths[0] = max(1, lengths[1] // 3)
    cluster = ClusterSpec(ranks=ranks, ranks_per_node=rng.randint(1, ranks), capacity=capacity)
    return lengths, cluster, cost, MemoryModel(capacity)


def test_bound_optimum_plan_of_packs_of_equal_sequences() -> None:
    rng = random.Random(8)
    ratios, tightness = [], []
    while len(ratios) < CASES // 3:
        lengths, cluster, cost, memory = case = packs_case(rng)
        plan = Planner(None, cluster, cost_model=cost, memory=memory).plan(lengths)
        try:
            best = optimum(lengths, cluster, cost, memory, above=plan.makespan_s * (1 + 1e-9))
        except TooManyNodes:
            continue
        assert plan.lower_bound_s <= best * (1 + 1e-9), case
        assert best <= plan.makespan_s * (1 + 1e-6), case
        ratios.append(plan.makespan_s / best)
        tightness.append(best / plan.lower_bound_s)
    print(f"packs of equal sequences: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(sorted(ratios), 0.95):.4f}, optimum / bound {statistics.mean(tightness):.4f}")
    assert percentile(sorted(ratios), 0.95) <= 1.04
    assert statistics.mean(tightness) <= 1.12


def alike_case(rng: random.Random) -> tuple[list[int], ClusterSpec, CostModel, MemoryModel]:
    """Sequences of about the same length on a few pipelines, often beside one or two short ones: see claim 15."""
    ranks, stages, capacity = rng.choice([1, 2, 2, 3]), rng.randint(2, 6), rng.choice([32, 100])
    count = {1: rng.choice([4, 5]), 2: rng.choice([3, 3, 4]), 3: 3}[ranks]
    longest = int(capacity * rng.choice([0.4, 0.7, 1, 1, ranks]))
    lengths = [max(1, longest - rng.randint(0, longest // rng.choice([5, 10, 10**9]))) for _ in range(count)]
    for i in range(rng.choice([0, 0, 1, 2])):
        lengths[i] = rng.randint(1, max(1, longest // 3))
    _, _, cost, memory = tiny_case(rng, nodes=ranks > 1, offload=rng.random() < 0.3, pipeline=True)
    memory = replace(memory, capacity=capacity)
    node = rng.randint(1, ranks)
    return lengths, ClusterSpec(ranks=ranks, ranks_per_node=node, capacity=capacity, pipeline=stages), cost, memory


def test_bound_optimum_plan_of_pipelines_with_sequences_that_are_alike() -> None:
    rng = random.Random(7)
    ratios, tightness = [], []
    while len(ratios) < CASES // 3:
        lengths, cluster, cost, memory = case = alike_case(rng)
        planner = Planner(None, cluster, "balanced", cost, memory=memory)
        try:
            plan = planner.plan(lengths)
            best = pipeline_optimum(lengths, cluster, cost, memory)
        except (InvalidUsage, TooManyNodes):
            continue
        assert plan.lower_bound_s <= best * (1 + 1e-9), case
        assert best <= plan.makespan_s * (1 + 1e-6), case
        ratios.append(plan.makespan_s / best)
        tightness.append(best / plan.lower_bound_s)
    print(f"pipelines, alike: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(sorted(ratios), 0.95):.4f}, optimum / bound {statistics.mean(tightness):.4f}")
    assert percentile(sorted(ratios), 0.95) <= 1.05
    assert statistics.mean(tightness) <= 1.06


def with_uneven_stages(rng: random.Random, cluster: ClusterSpec) -> ClusterSpec:
    """Bound, optimum and plan with stages of different work: of a few layers each, some with a head or other kinds."""
    stages = cluster.pipeline * cluster.chunks
    layers = [rng.choice([3, 3, 4, 4, 4, 5]) for _ in range(stages)]
    work = []
    for kind in range(3):
        shares = [count * (rng.uniform(0.7, 1.5) if rng.random() < 0.3 else 1.0) for count in layers]
        if kind == 1 and rng.random() < 0.2:
            shares[rng.randrange(stages)] = 0.0
        mean = sum(shares) / stages
        work.append([share / mean for share in shares])
    return replace(cluster, stage_work=tuple(zip(*work, strict=True)))


@pytest.mark.parametrize("kind", ["several", "nodes", "alike", "offload", "speeds", "chunks", "split"])
def test_bound_optimum_plan_with_uneven_stages(kind: str) -> None:
    """Each stage has a share of the work of its own."""
    rng = random.Random(21)
    ratios, tightness = [], []
    while len(ratios) < CASES // 4:
        if kind == "alike":
            case = alike_case(rng)
        elif kind in ("nodes", "offload", "speeds"):
            chosen = {kind: True} if kind != "nodes" else {}
            case = tiny_case(rng, pipeline=True, **{"nodes": kind != "offload", "offload": False, **chosen})
        else:
            case = tiny_pipeline_case(rng)
        lengths, cluster, cost, memory = case
        cluster = replace(cluster, chunks=2 if kind == "chunks" else 1, split_backward=kind == "split")
        cluster = with_uneven_stages(rng, cluster)
        planner = Planner(None, cluster, "balanced", cost, memory=memory)
        try:
            plan = planner.plan(lengths)
            best = pipeline_optimum(lengths, cluster, cost, memory, max_plans=4_000)
        except (InvalidUsage, TooManyNodes):
            continue
        planner.validate(plan, lengths)
        assert plan.lower_bound_s <= best * (1 + 1e-9), (lengths, cluster, cost, memory)
        assert best <= plan.makespan_s * (1 + 1e-6), (lengths, cluster, cost, memory)
        ratios.append(plan.makespan_s / best)
        tightness.append(best / plan.lower_bound_s)
    print(f"uneven stages, {kind}: {len(ratios)} steps, mean {statistics.mean(ratios):.4f}, ", end="")
    print(f"p95 {percentile(sorted(ratios), 0.95):.4f}, optimum / bound {statistics.mean(tightness):.4f}")
    assert percentile(sorted(ratios), 0.95) <= 1.02


def test_slices_in_uneven_stages() -> None:
    rng = random.Random(23)
    ratios: list[float] = []
    while len(ratios) < CASES // 8:
        stages, chunks = rng.choice([(2, 1), (3, 1), (2, 2)])
        cluster = with_uneven_stages(rng, ClusterSpec(1, 20, pipeline=stages, chunks=chunks))
        lengths = [rng.randint(6, 20), *(rng.randint(1, 8) for _ in range(rng.choice([0, 1, 2])))]
        cost, memory = CostModel(1e-5, 1e-3, rng.choice([0, 1e-3])), MemoryModel(20)
        plan = Planner(None, cluster, "balanced", cost, memory=memory, slices=2).plan(lengths)
        try:
            best = sliced_optimum(lengths, cluster, cost, memory, 2, above=plan.makespan_s * (1 + 1e-9))
        except TooManyNodes:
            continue
        assert plan.lower_bound_s <= best * (1 + 1e-9), (lengths, cluster, cost)
        ratios.append(plan.makespan_s / best)
    print(f"slices in uneven stages: mean {statistics.mean(ratios):.4f}, p95 {percentile(sorted(ratios), 0.95):.4f}")
    assert percentile(sorted(ratios), 0.95) <= 1.08


@pytest.mark.parametrize("length", [1, 40, 100])
def test_the_step_of_uneven_stages_with_equal_micro_batches(length: int) -> None:
    """All stages one after the other, and the largest one for each micro-batch after the first."""
    work = ((0.5, 0.5, 0.5), (1.0, 1.5, 1.0), (1.0, 1.0, 1.0), (1.5, 1.0, 1.5))
    cost = CostModel(1e-6, 1e-3, 1e-3, forward=0.5, forward_transfer=0.5)
    cluster = ClusterSpec(ranks=1, capacity=length, pipeline=4, stage_work=work)
    plan = Planner(None, cluster, cost_model=cost, memory=MemoryModel(length)).plan([length] * 6)
    parts = cost.linear * length, cost.attention * length**2, cost.fixed
    stages = [sum(part * share for part, share in zip(parts, each, strict=True)) for each in work]
    assert plan.makespan_s == pytest.approx(sum(stages) + 5 * max(stages))
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)


def test_the_work_of_stages_is_checked() -> None:
    even = ((1.0, 1.0, 1.0),) * 2
    cost, memory = CostModel(1e-6, 1e-3), MemoryModel(100)
    lengths = [50, 20, 100, 7]
    plans = [
        Planner(None, ClusterSpec(2, 100, pipeline=2, stage_work=work), cost_model=cost, memory=memory).plan(lengths)
        for work in (None, even)
    ]
    assert plans[0].makespan_s == plans[1].makespan_s
    assert plans[0].lower_bound_s == plans[1].lower_bound_s
    for wrong, told in (
        (even[:1], "for 2 stages"),
        (((1.0, 1.0), (1.0, 1.0)), "for 2 stages"),
        (((1.0, 1.0, 1.0), (1.5, 1.0, 1.0)), "whose mean is 1"),
        (((1.0, 1.0, 1.0), (float("nan"), 1.0, 1.0)), "share of a stage's work"),
        (((3.0, 1.0, 1.0), (-1.0, 1.0, 1.0)), "share of a stage's work"),
    ):
        with pytest.raises(InvalidUsage, match=told):
            ClusterSpec(2, 100, pipeline=2, stage_work=wrong)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("forward", [0.25, 1 / 3, 0.6])
def test_bound_of_equal_micro_batches(stages: int, forward: float) -> None:
    """Links are so slow that each sequence runs on one rank: n after each other take n + p - 1 times as long as one."""
    cost = CostModel(1e-6, 1e-3, 1e-3, kv_intra=1e-1, kv_inter=1e-1, forward=forward, forward_transfer=forward)
    cluster = ClusterSpec(ranks=16, ranks_per_node=8, capacity=100, pipeline=stages)
    lengths = [100] * (16 * 5)
    plan = Planner(None, cluster, cost_model=cost, memory=MemoryModel(100)).plan(lengths)
    best = (5 + stages - 1) * cost.seconds([100], 1)
    assert plan.makespan_s == pytest.approx(best)
    assert 0.99 * best <= plan.lower_bound_s <= best * (1 + 1e-9)


def test_the_passes_of_two_micro_batches_may_both_be_short() -> None:
    """The first micro-batch is on the ranks where its forward pass is fastest, and the last one where its backward pass
    is: together less than any of them takes."""
    cost = CostModel(1e-6, 1e-3, 1e-3, piece=1e-4, ring_step=1e-3, kv_intra=1e-3, kv_inter=3e-3)
    cluster = ClusterSpec(ranks=2, ranks_per_node=2, capacity=32, pipeline=3)
    plan = Planner(None, cluster, cost_model=cost, memory=MemoryModel(32)).plan([25] * 3)
    best = pipeline_optimum([25] * 3, cluster, cost, MemoryModel(32))
    assert best == pytest.approx(0.113219, rel=1e-4)
    assert plan.lower_bound_s <= best * (1 + 1e-9)


def test_a_fixed_cost_is_charged_once_where_short_sequences_ride_along() -> None:
    """All four in one micro-batch: its fixed cost must not count for the long one and again for the others."""
    cost, memory = CostModel(1e-6, 1e-4, 1e-2), MemoryModel(8)
    cluster = ClusterSpec(ranks=1, capacity=8, pipeline=2)
    plan = Planner(None, cluster, cost_model=cost, memory=memory).plan([4, 1, 1, 1])
    assert plan.lower_bound_s <= pipeline_optimum([4, 1, 1, 1], cluster, cost, memory) * (1 + 1e-9)
    assert plan.makespan_s == pytest.approx(2 * (1e-2 + 7e-4 + 19e-6))

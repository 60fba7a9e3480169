"""Pipelines with split backward passes: what they gain, what they hold, and orders that cannot run."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel import Action
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Pass, Planner, SequenceInfo, StepPlan
from hdpcomm.sim import simulate_step
from tests.harness.exhaustive import TooManyNodes, pipeline_optimum
from tests.harness.programs import check_programs, pipeline_programs, stage_passes

THIRDS = CostModel(0.0, 3e-3)  # a token takes 1 ms in each of the three products
MIXED = CostModel(1e-9, 1e-6, 1e-4, kv_intra=1e-6, kv_inter=5e-6)


def planner_of(ranks: int, devices: int, chunks: int = 1, split: bool = True, cost: CostModel = MIXED) -> Planner:
    cluster = ClusterSpec(ranks, 1000, pipeline=devices, chunks=chunks, split_backward=split)
    return Planner(None, cluster, cost_model=cost)


def plan_of(ranks: int, batches: list[tuple[tuple[int, ...], int]]) -> StepPlan:
    made = [MicroBatch(i, group, (SequenceInfo(i, length),), 0.0, 1.0) for i, (group, length) in enumerate(batches)]
    return StepPlan("by hand", ranks, tuple(made), 1.0, 1.0, 0.0, 0.0)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    ranks = draw(st.integers(1, 4))
    batches = []
    for _ in range(draw(st.integers(1, 12))):
        group = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
        batches.append((tuple(group), draw(st.integers(1, 300))))
    return plan_of(ranks, batches)


@pytest.mark.parametrize(("devices", "count"), [(2, 2), (2, 6), (3, 6), (4, 4), (4, 8), (4, 20), (8, 16)])
def test_equal_micro_batches_have_the_bubble_of_the_paper(devices: int, count: int) -> None:
    """(p - 1)(F + B - W) of idle time (arXiv 2401.10241, table 2, ZB-H1), where 1F1B has (p - 1)(F + B + W)."""
    plan = plan_of(1, [((0,), 100)] * count)
    for split, bubble in ((True, 1), (False, 3)):
        found = planner_of(1, devices, split=split, cost=THIRDS).simulate(plan)
        assert found["makespan"] == pytest.approx((3 * count + bubble * (devices - 1)) * 0.1)
        assert found["peak_tokens"].max() == 100 * min(devices, count)


@settings(max_examples=40)
@given(plan=plans(), devices=st.integers(2, 4), chunks=st.integers(1, 3))
def test_any_plan_runs_and_ends_no_later_than_1f1b(plan: StepPlan, devices: int, chunks: int) -> None:
    planner = planner_of(plan.num_ranks, devices, chunks)
    found, whole = planner.simulate(plan), planner_of(plan.num_ranks, devices, chunks, split=False).simulate(plan)
    assert found["makespan"] <= whole["makespan"] * (1 + 1e-9)
    assert found["busy"] == pytest.approx(whole["busy"])
    schedule = planner.schedule(plan)
    check_programs(pipeline_programs(schedule, plan), plan, stages=devices * chunks, split=True)
    check_times(plan, found, devices, devices * chunks)
    most = devices if chunks == 1 else devices * chunks + devices - 1
    for rank in range(plan.num_ranks):
        for device in range(devices):
            owed = [
                one
                for stage in range(device, devices * chunks, devices)
                for one in stage_passes(schedule, plan, rank, stage)
            ]
            assert len({one for one in owed if one.weights}) == chunks * len(plan.for_rank(rank))
            own = set(owed)
            order = [p for row, a in zip(schedule.passes.tolist(), schedule.alone.tolist(), strict=True)
                     if (p := Pass(*row[:2], row[2] != 0, row[2] == 2)) in own and a in (-1, rank)]  # fmt: skip
            held = np.cumsum([0 if p.backward and not p.weights else -1 if p.weights else 1 for p in order])
            assert held.max(initial=0) <= most


def check_times(plan: StepPlan, found: dict, devices: int, stages: int) -> None:
    """No device runs two passes at a time, and none before what it needs."""
    runs = defaultdict(list)
    span = {}
    for (place, stage, kind), alone, (start, end) in zip(
        found["which"].tolist(), found["alone"].tolist(), found["times"].tolist(), strict=True
    ):
        ranks = plan.micro_batches[place].ranks if alone < 0 else (alone,)
        for rank in ranks:
            runs[rank, stage % devices].append((start, end))
            span[place, stage, kind, rank] = start, end
    for own in runs.values():
        for (_, end), (start, _) in pairwise(sorted(own)):
            assert end <= start + 1e-12
    for (place, stage, kind, rank), (start, _) in span.items():
        before, kind_before = [(stage - 1, 0), (stage + 1, 1), (stage, 1)][kind]
        if kind == 1 and stage == stages - 1:
            before, kind_before = stage, 0
        if (place, before, kind_before, rank) in span:
            assert span[place, before, kind_before, rank][1] <= start + 1e-12
        else:
            assert (kind, stage) == (0, 0)
    assert len(span) == 3 * stages * sum(len(batch.ranks) for batch in plan.micro_batches)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_bound_is_below_every_plan(chunks: int) -> None:
    """Tries all packs, groups and orders of small steps."""
    rng = random.Random(chunks)
    tried = 0
    while tried < 40:
        ranks, capacity = rng.randint(1, 3), rng.choice([8, 100])
        lengths = [rng.randint(1, capacity * rng.choice([1, ranks])) for _ in range(rng.randint(1, 3))]
        kv = rng.choice([0, 1e-4, 1e-3])
        cost = CostModel(
            rng.choice([0, 1e-6, 1e-4]), rng.choice([1e-4, 1e-3]), rng.choice([0, 1e-3, 1e-2]), rng.choice([0, 1e-5]),
            ring_step=rng.choice([0, 1e-4]), kv_intra=kv, kv_inter=kv, forward_transfer=rng.choice([0.25, 0.5]),
            weights=rng.choice([0.0, 1 / 3, 2 / 3]),
        )  # fmt: skip
        cluster = ClusterSpec(ranks, capacity, pipeline=rng.randint(2, 4), chunks=chunks, split_backward=True)
        if rng.random() < 0.3:
            cluster = cluster.with_speeds(tuple(rng.choice([1.0, 0.7]) for _ in range(ranks)))
        planner = Planner(None, cluster, cost_model=cost)
        try:
            plan = planner.plan(lengths)
            best = pipeline_optimum(lengths, cluster, cost, planner.memory, max_plans=3000)
        except (InvalidUsage, TooManyNodes):
            continue
        tried += 1
        assert plan.lower_bound_s <= best * (1 + 1e-9), (lengths, cluster, cost)
        assert best <= plan.makespan_s * (1 + 1e-6)


def test_nothing_to_put_off_is_1f1b() -> None:
    """As where all layers are recomputed."""
    plan = plan_of(2, [((0,), 100), ((0, 1), 250), ((1,), 30)])
    cost = replace(MIXED, weights=0.0)
    one, other = (planner_of(2, 3, split=split, cost=cost).simulate(plan)["makespan"] for split in (True, False))
    assert one == pytest.approx(other)


def test_a_step_is_reported() -> None:
    plan = plan_of(2, [((0,), 100), ((0, 1), 250), ((1,), 30)])
    report = simulate_step(planner_of(2, 2), plan)
    assert len(report.spans) == 2 * 2 * 3 + 2 * 4
    assert sorted(report.alone[report.spans[:, 2] == 2].tolist()) == [0] * 4 + [1] * 4
    assert set(report.alone[report.spans[:, 2] < 2].tolist()) == {-1}


def test_split_passes_need_a_pipeline() -> None:
    with pytest.raises(InvalidUsage, match="split_backward was given and pipeline is 1"):
        ClusterSpec(2, 10, split_backward=True)
    with pytest.raises(InvalidUsage, match="split_backward"):
        ClusterSpec(2, 10, pipeline=2, split_backward="zb")  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="weights"):
        CostModel(0.0, 1.0, weights=1.5)


def test_wrong_programs_are_found_before_they_run() -> None:
    plan = plan_of(1, [((0,), 100), ((0,), 70)])
    programs = pipeline_programs(planner_of(1, 2).schedule(plan), plan)
    check_programs(programs, plan, stages=2, split=True)
    own = list(programs[0, 0])
    weights = [action for action in own if action.done.weights]
    rest = [action for action in own if not action.done.weights]
    for changed, message in (
        ((weights[0], *rest, weights[1]), "weight gradients of micro-batch .* comes before the backward pass"),
        ((*own, weights[0]), "comes twice"),
        (tuple(rest), "compute gradients of weights 2 times, and split backward passes leave them 4 times"),
        ((*own, Action("run", Pass(0, 1, True, True))), "does not belong there"),
    ):
        with pytest.raises(InvalidUsage, match=message):
            check_programs({**programs, (0, 0): changed}, plan, stages=2, split=True)
    with pytest.raises(InvalidUsage, match="4 times, and whole backward passes leave them 0 times"):
        check_programs(programs, plan, stages=2)

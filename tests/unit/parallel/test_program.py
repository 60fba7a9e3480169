"""Programs of pipelines: complete, free of deadlock for any plan, and wrong ones are found before they run."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel import Action
from hdpcomm.plan import (
    ClusterSpec,
    CostModel,
    MemoryModel,
    MicroBatch,
    Pass,
    Planner,
    SequenceInfo,
    StepPlan,
)
from tests.harness.programs import action_text, check_programs, pipeline_programs, schedule_by_hand

COST = CostModel(1e-9, 1e-6, 1e-4, kv_intra=1e-6, kv_inter=5e-6)
EXAMPLES = int(os.environ.get("HDPCOMM_TEST_PIPELINE_PLANS", "12"))


def planner_of(ranks, devices, chunks=1):
    return Planner(None, ClusterSpec(ranks, 1000, pipeline=devices, chunks=chunks), cost_model=COST)


def plan_of(ranks, batches):
    """``batches``: (ranks, tokens) of each micro-batch."""
    made = [
        MicroBatch(i, tuple(group), (SequenceInfo(i, length),), 0.0, 1.0) for i, (group, length) in enumerate(batches)
    ]
    return StepPlan("by hand", ranks, tuple(made), 1.0, 1.0, 0.0, 0.0)


@st.composite
def plans(draw):
    ranks = draw(st.integers(1, 4))
    batches = []
    for _ in range(draw(st.integers(1, 12))):
        group = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
        batches.append((group, draw(st.integers(1, 300))))
    return plan_of(ranks, batches)


@settings(max_examples=EXAMPLES)
@given(plan=plans(), devices=st.integers(1, 4), chunks=st.integers(1, 3))
def test_any_plan_runs_to_its_end_with_messages_that_block(plan, devices, chunks):
    chunks = chunks if devices > 1 else 1
    stages = devices * chunks
    schedule = planner_of(plan.num_ranks, devices, chunks).schedule(plan)
    programs = pipeline_programs(schedule, plan)
    check_programs(programs, plan, stages=stages)
    for (rank, device), program in programs.items():
        sent = [action for action in program if action.kind == "send"]
        for action in sent:
            assert Action("receive", action.done, device) in programs[rank, action.peer]
        borders = sum((stage < stages - 1) + (stage > 0) for stage in range(device, stages, devices))
        assert len(sent) == borders * len(plan.for_rank(rank))


@pytest.mark.parametrize(("devices", "chunks"), [(2, 1), (2, 2), (3, 2), (4, 3), (8, 4)])
def test_equal_micro_batches_have_the_bubble_of_the_paper(devices, chunks):
    """(p - 1) / v micro-batches of filling and draining: Narayanan et al., arXiv 2104.04473, section 2.2."""
    planner = planner_of(1, devices, chunks)
    for rounds in (1, 2, 4):
        count = rounds * devices
        found = planner.simulate(plan_of(1, [((0,), 100)] * count))
        wanted = (count + (devices - 1) / chunks) * COST.seconds([100])
        assert found["makespan"] == pytest.approx(wanted, rel=1e-9)
        most = devices if chunks == 1 else devices + (devices - 1) / chunks
        assert found["peak_tokens"].max() <= 100 * most * (1 + 1e-9)


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_equal_micro_batches_is_never_slower(chunks):
    for devices in (2, 3, 4, 8):
        for count in range(1, 3 * devices + 3):
            plan = plan_of(1, [((0,), 100)] * count)
            plain, interleaved = (planner_of(1, devices, v).simulate(plan)["makespan"] for v in (1, chunks))
            assert interleaved <= plain * (1 + 1e-9), (devices, count)


TWO = plan_of(1, [((0,), 10), ((0,), 10)])


def swapped(program, one, other):
    changed = list(program)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def test_classic_1f1b_with_separate_blocking_messages_is_found():
    """Stage 0 sends the second activation before it takes the first gradient; stage 1 does it the other way round."""
    programs = pipeline_programs(planner_of(1, 2).schedule(TWO), TWO)
    assert [action_text(action) for action in programs[0, 1]][:2] == [
        "receive forward pass of micro-batch 0, stage 0 from stage 0",
        "run forward pass of micro-batch 0, stage 1",
    ]
    check_programs(programs, TWO, stages=2)
    first = [
        at for at, action in enumerate(programs[0, 1]) if action.kind == "receive" and action.done.micro_batch == 1
    ]
    sent = [at for at, action in enumerate(programs[0, 1]) if action.kind == "send" and action.done.micro_batch == 0]
    wrong = programs | {(0, 1): swapped(programs[0, 1], first[0], sent[0])}
    with pytest.raises(InvalidUsage, match=r"would wait for ever; 2 devices wait in a circle.*rank 0, stage 0: send"):
        check_programs(wrong, TWO, stages=2)


def test_ranks_of_two_groups_in_different_orders_are_found():
    plan = plan_of(2, [((0, 1), 10), ((1, 0), 20)])
    programs = pipeline_programs(planner_of(2, 1).schedule(plan), plan)
    check_programs(programs, plan, stages=1)
    programs[0, 0] = swapped(programs[0, 0], 0, 2)
    with pytest.raises(InvalidUsage, match="would wait for ever"):
        check_programs(programs, plan, stages=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {(0, 0): p[0, 0][1:]}, "comes before|would wait"),
        (lambda p: {(0, 0): swapped(p[0, 0], 0, 1)}, "comes before that pass has run there"),
        (lambda p: {(0, 1): swapped(p[0, 1], 0, 1)}, "comes before what the forward pass of stage 0 gives it"),
        (lambda p: {(0, 1): p[0, 1][:2] + p[0, 1][1:]}, "comes twice"),
        (lambda p: {(0, 1): p[0, 1][:-1]}, "would wait for ever; 1 devices"),
        (lambda _: {(0, 0): (), (0, 1): ()}, "the programs run 0 passes, and 2 micro-batches through 2 stages have 8"),
        (lambda _: {(0, 0): (Action("run", Pass(7, 0, False)),)}, "does not belong there"),
        (lambda _: {(0, 0): (Action("run", Pass(0, 1, False)),)}, "does not belong there"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    programs = pipeline_programs(planner_of(1, 2).schedule(TWO), TWO)
    with pytest.raises(InvalidUsage, match=message):
        check_programs(programs | change(programs), TWO, stages=2)


def test_more_than_devices_have_room_for_is_refused():
    """All forward passes before the first backward pass: three micro-batches where two have room."""
    plan = plan_of(1, [((0,), 800)] * 3)
    passes = [(i, stage, 0) for i in range(3) for stage in range(2)]
    passes += [(i, stage, 1) for i in range(3) for stage in (1, 0)]
    programs = pipeline_programs(schedule_by_hand(2, passes), plan)
    check_programs(programs, plan, stages=2)
    told = r"rank 0, stage 0 holds 2400 tokens after run forward pass of micro-batch 2, stage 0, and has room for 2000"
    with pytest.raises(InvalidUsage, match=told):
        check_programs(programs, plan, stages=2, memory=MemoryModel(1000))
    planner = planner_of(1, 2)
    check_programs(pipeline_programs(planner.schedule(plan), plan), plan, stages=2, memory=planner.memory)
    less = replace(plan, micro_batches=tuple(replace(batch, offload_ratio=0.5) for batch in plan.micro_batches))
    check_programs(programs, less, stages=2, memory=MemoryModel(1000, offloadable=0.5, copy_s=1.0, host_tokens=1000))


def test_every_swap_of_passes_that_breaks_an_order_is_refused():
    """Swaps each two neighbours of the global order: refused exactly where one pass depends on the other."""
    plan = plan_of(2, [((0,), 10), ((1,), 20), ((0, 1), 30)])
    passes = planner_of(2, 2).schedule(plan).passes
    refused = 0
    for at in range(len(passes) - 1):
        changed = passes.copy()
        changed[[at, at + 1]] = changed[[at + 1, at]]
        programs = pipeline_programs(schedule_by_hand(2, changed), plan)
        if passes[at][0] == passes[at + 1][0]:
            refused += 1
            with pytest.raises(InvalidUsage, match=r"comes before|would wait"):
                check_programs(programs, plan, stages=2)
        else:
            check_programs(programs, plan, stages=2)
    assert refused

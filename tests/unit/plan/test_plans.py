"""Properties of every plan: complete, within capacity, executable, the same on all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import POLICIES, ClusterSpec, CostModel, MemoryModel, MicroBatch, Planner, SequenceInfo, StepPlan

COST = CostModel(1e-9, 1e-6, 1e-4, piece=1e-7, ring_step=1e-5, kv_inter=3e-6, latency_inter=1e-5)


def make_planner(policy: str, ranks: int, capacity: int, **options: int) -> Planner:
    cluster = ClusterSpec(ranks=ranks, capacity=capacity, ranks_per_node=options.pop("ranks_per_node", None))
    return Planner(None, cluster, policy, COST, **options)


def execute(plan: StepPlan) -> None:
    """Runs the waits of a plan: each rank goes to its next micro-batch, which runs once all its ranks are there."""
    queues = [list(plan.for_rank(rank)) for rank in range(plan.num_ranks)]
    done = 0
    while done < len(plan.micro_batches):
        waiting: dict[int, int] = {}
        ready = None
        for queue in queues:
            if queue:
                batch = queue[0]
                waiting[batch.index] = waiting.get(batch.index, 0) + 1
                if waiting[batch.index] == len(batch.ranks):
                    ready = batch
        assert ready is not None, "the ranks wait for each other in a circle"
        for rank in ready.ranks:
            assert queues[rank].pop(0) is ready
        done += 1
    assert not any(queues)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    ranks = draw(st.integers(1, 9))
    capacity = draw(st.integers(1, 300))
    node = draw(st.integers(1, ranks))
    longest = st.integers(1, capacity * ranks)
    lengths = draw(
        st.one_of(
            st.lists(longest, max_size=25),
            st.lists(st.integers(1, capacity), max_size=60),
            st.builds(lambda length, count: [length] * count, longest, st.integers(0, 20)),
        )
    )
    return ranks, capacity, node, lengths


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_plan_is_valid_and_runs(policy: str, case: tuple[int, int, int, list[int]]) -> None:
    ranks, capacity, node, lengths = case
    planner = make_planner(policy, ranks, capacity, ranks_per_node=node)
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    execute(plan)
    assert plan.tokens == sum(lengths)
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    assert 0 <= plan.idle_share < 1
    starts = plan.timeline()
    ends = [start + batch.predicted_s for start, batch in zip(starts, plan.micro_batches, strict=True)]
    assert max(ends, default=0.0) == pytest.approx(plan.makespan_s)
    again = make_planner(policy, ranks, capacity, ranks_per_node=node).plan(lengths)
    assert again.hash == plan.hash
    assert again.micro_batches == plan.micro_batches
    assert StepPlan.from_json(plan.to_json()).hash == plan.hash


def test_plans_written_with_the_old_name_of_the_predicted_seconds_are_read() -> None:
    plan = make_planner("balanced", 4, 100).plan([300, 50, 20])
    text = plan.to_json()
    assert '"predicted_s"' in text
    old = text.replace('"predicted_s"', '"seconds"')
    assert StepPlan.from_json(old).micro_batches == StepPlan.from_json(text).micro_batches == plan.micro_batches
    with pytest.raises(InvalidUsage, match="no step plan"):
        StepPlan.from_json(text.replace('"predicted_s"', '"expected_s"'))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda planner: pickle.loads(pickle.dumps(planner))])
def test_planners_are_copied_and_sent_to_other_processes(copied: Any) -> None:
    cluster = ClusterSpec(4, 100, pipeline=2, expert=2, offload=True)
    memory = MemoryModel(100, offloadable=0.5, copy_s=1e-9, host_tokens=1e5)
    for planner in (
        make_planner("static", 4, 100, context=300),
        Planner(None, cluster, cost_model=COST, memory=memory, slices=4),
        Planner(None, ClusterSpec(4, 100), cost_model=COST, queue=True),
    ):
        assert copied(planner).plan([300, 20, 90, 5]).hash == planner.plan([300, 20, 90, 5]).hash


def test_a_sequence_may_take_three_of_four_ranks() -> None:
    plan = make_planner("naive", 4, 100).plan([300, 50])
    assert sorted(len(batch.ranks) for batch in plan.micro_batches) == [1, 3]
    execute(plan)


def test_ranks_run_different_numbers_of_micro_batches() -> None:
    plan = make_planner("balanced", 4, 1000).plan([1000] * 6 + [100] * 40)
    assert len({len(plan.for_rank(rank)) for rank in range(4)}) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_no_sequences(policy: str) -> None:
    plan = make_planner(policy, 4, 100).plan([])
    assert plan.micro_batches == ()
    assert plan.for_rank(3) == ()
    assert plan.makespan_s == plan.lower_bound_s == plan.gap == 0
    assert "0 tokens" in plan.explain()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_fits_nowhere_is_named(policy: str) -> None:
    with pytest.raises(
        InvalidUsage, match=r"sequence 1 of 5000 tokens needs 50 ranks .* raise capacity to at least 1250"
    ):
        make_planner(policy, 4, 100).plan([10, 5000])


def test_bad_lengths_and_options() -> None:
    with pytest.raises(InvalidUsage, match="sequence 2 has 0 tokens"):
        make_planner("balanced", 4, 100).plan([10, 50, 0])
    planner = make_planner("balanced", 4, 100)
    wrong: list[tuple[list[Any], str]] = [
        ([10, 3.7], "sequence 1 is 3.7, expected a whole number"),
        (["7"], "sequence 0 is '7', expected a whole number"),
        ([5, 2**63], "sequence 1 has 9223372036854775808 tokens, expected at most 2"),
    ]
    for lengths, message in wrong:
        for call in (planner.plan, planner.lower_bound):
            with pytest.raises(InvalidUsage, match=message):
                call(lengths)
    assert planner.plan(list(np.array([10, 50]))).tokens == 60
    with pytest.raises(InvalidUsage, match="policy is 'best', expected one of balanced"):
        make_planner("best", 4, 100)
    with pytest.raises(InvalidUsage, match="does not divide the 4 ranks"):
        make_planner("static", 4, 100, context_ranks=3).plan([10])
    with pytest.raises(InvalidUsage, match=r"sequence 1 of 250 tokens is longer than the 200 tokens"):
        make_planner("static", 4, 100, context_ranks=2).plan([10, 250])
    with pytest.raises(InvalidUsage, match="needs a ModelSpec"):
        Planner(None, ClusterSpec(ranks=2), cost_model=COST)
    with pytest.raises(InvalidUsage, match="rank 4 asked of a plan for 4 ranks"):
        make_planner("balanced", 4, 100).plan([10]).for_rank(4)


def plan_of(*batches: MicroBatch, ranks: int = 2) -> StepPlan:
    return StepPlan("balanced", ranks, batches, 1.0, 1.0, 0.0, 0.0)


def batch_of(
    index: int = 0, ranks: tuple[int, ...] = (0,), lengths: tuple[int, ...] = (5,), offload: float = 0.0
) -> MicroBatch:
    return MicroBatch(index, ranks, tuple(SequenceInfo(i, n) for i, n in enumerate(lengths)), offload, 1.0)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(batch_of(1), batch_of(1)), "indices have to rise"),
        (plan_of(batch_of(ranks=(0, 2))), "expected 0 to 1"),
        (plan_of(batch_of(ranks=(0, 0))), "expected each once"),
        (plan_of(batch_of(ranks=())), "none is empty"),
        (plan_of(batch_of(offload=1.5)), "expected 0 to 1"),
        (plan_of(batch_of(lengths=(7, 4))), "puts 11 tokens on a rank, expected at most 10"),
        (plan_of(batch_of()), "sequence 1 appears 0 times"),
        (plan_of(batch_of(), batch_of(1)), "sequence 0 appears 2 times"),
        (plan_of(batch_of(lengths=(5, 5))), "sequence 1 of 5 tokens, which is not one of the 2"),
    ],
)
def test_validation_says_what_is_wrong(plan: StepPlan, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        plan.validate([5, 4], memory=MemoryModel(10))


def test_json_of_a_changed_plan_is_refused() -> None:
    text = make_planner("balanced", 2, 100).plan([150, 20]).to_json()
    with pytest.raises(InvalidUsage, match="it was changed"):
        StepPlan.from_json(text.replace('"length": 20', '"length": 21'))
    with pytest.raises(InvalidUsage, match="no step plan"):
        StepPlan.from_json("{}")
    with pytest.raises(InvalidUsage, match="no step plan"):
        StepPlan.from_json(text.replace('"policy": "balanced"', '"policy": "\\udcff"'))

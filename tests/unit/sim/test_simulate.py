"""The simulator compared with closed formulas, and its reports."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import (
    MODELS,
    POLICIES,
    ClusterSpec,
    CostModel,
    MicroBatch,
    ModelSpec,
    Planner,
    SequenceInfo,
    StepPlan,
)
from hdpcomm.sim import optimizer_seconds, reduction_seconds, simulate_step, simulate_stream

COST = CostModel(1e-9, 1e-6, 1e-4, piece=1e-7, kv_intra=1e-6, kv_inter=5e-6, latency_inter=1e-5)


def make_planner(policy: str = "balanced", *, ranks: int = 6, pipeline: int = 1) -> Planner:
    return Planner(None, ClusterSpec(ranks=ranks, capacity=200, ranks_per_node=4, pipeline=pipeline), policy, COST)


def plan_of(ranks: int, *groups: tuple[tuple[int, ...], int]) -> StepPlan:
    batches = [
        MicroBatch(index, members, (SequenceInfo(index, length),), 0.0, COST.seconds([length], len(members)))
        for index, (members, length) in enumerate(groups)
    ]
    return StepPlan("balanced", ranks, tuple(batches), 1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 1200), max_size=30))
def test_without_a_pipeline_the_simulation_is_the_prediction(policy: str, lengths: list[int]) -> None:
    report = simulate_step(make_planner(policy), lengths)
    assert report.compute_s == pytest.approx(report.plan.makespan_s, rel=1e-9)
    assert report.idle_share + report.exposed_share <= 1 + 1e-9
    assert report.peak_tokens <= 200
    assert len(report.spans) == 2 * len(report.plan.micro_batches)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 1200), min_size=1, max_size=30), stages=st.integers(2, 5))
def test_any_plan_runs_through_a_pipeline(policy: str, lengths: list[int], stages: int) -> None:
    report = simulate_step(make_planner(policy, pipeline=stages), lengths)
    batches = report.plan.micro_batches
    assert len(report.spans) == 2 * stages * len(batches)
    assert report.compute_s >= max(batch.predicted_s for batch in batches) * stages * (1 - 1e-9)
    assert report.peak_tokens <= 200 * stages
    ends = {tuple(span): end for span, (_, end) in zip(report.spans.tolist(), report.times.tolist(), strict=True)}
    for (index, stage, backward), (start, _) in zip(report.spans.tolist(), report.times.tolist(), strict=True):
        before = (index, stage - 1, 0) if not backward else (index, stage + 1, 1)
        if backward and stage == stages - 1:
            before = (index, stage, 0)
        if before in ends:
            assert start >= ends[before] - 1e-12


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_equal_micro_batches_take_the_time_of_1f1b(stages: int, count: int) -> None:
    """(m + p - 1)(F + B) for m equal micro-batches and p stages."""
    report = simulate_step(make_planner(ranks=1, pipeline=stages), plan_of(1, *[((0,), 150)] * count))
    one = COST.seconds([150])
    assert report.compute_s == pytest.approx((count + stages - 1) * one)
    assert report.peak_tokens == 150 * min(count, stages)


def test_a_group_waits_for_its_last_rank() -> None:
    report = simulate_step(make_planner(ranks=3), plan_of(3, ((0,), 200), ((1,), 100), ((1, 0), 300), ((2,), 50)))
    wait = COST.seconds([200])
    assert report.compute_s == pytest.approx(wait + COST.seconds([300], 2))
    assert report.rank_end[2] == pytest.approx(COST.seconds([50]))
    idle = 3 * report.compute_s - sum(b.predicted_s * len(b.ranks) for b in report.plan.micro_batches)
    assert report.idle_share == pytest.approx(idle / (3 * report.compute_s))


def test_ranks_with_other_counts_do_not_block_each_other_in_a_pipeline() -> None:
    """Rank 0 has a micro-batch between those it shares with rank 1: local 1F1B orders would wait in a circle."""
    plan = plan_of(2, ((0, 1), 300), ((0,), 100), ((0, 1), 250), ((1,), 30), ((0, 1), 100))
    report = simulate_step(make_planner(ranks=2, pipeline=2), plan)
    assert len(report.spans) == 20


def test_offload_stalls_only_when_the_copies_do_not_fit() -> None:
    cluster = ClusterSpec(ranks=64, capacity=8192, ranks_per_node=8, offload=True)
    planner = Planner(MODELS["llama-7b"], cluster)
    report = simulate_step(planner, [400_000, 4000])
    (batch,) = [batch for batch in report.plan.micro_batches if batch.tokens == 400_000]
    assert report.plan.micro_batches
    assert report.stalled_share == pytest.approx(0, abs=1e-9)
    assert report.peak_tokens <= 8192 + 1
    forced = MicroBatch(0, (0,), (SequenceInfo(0, 8000),), 1.0, 1.0)
    stalled = simulate_step(planner, StepPlan("naive", 64, (forced,), 1.0, 1.0, 0.0, 0.0))
    assert stalled.stalled_share > 0
    assert stalled.peak_tokens < 8000
    assert 0 <= batch.offload_ratio <= 1


def test_report_of_a_model() -> None:
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=16, capacity=8192, ranks_per_node=8))
    report = simulate_step(planner, [8192] * 64)
    assert report.step_s == pytest.approx(report.compute_s + report.sync_s + report.optimizer_s)
    assert report.tokens_per_s == pytest.approx(64 * 8192 / report.step_s)
    assert report.mfu is not None
    assert 0.3 < report.mfu < 0.7
    assert report.peak_bytes is not None
    assert 40e9 < report.peak_bytes < 80e9
    assert report.to_dict()["policy"] == "balanced"


def test_reduction_and_optimizer() -> None:
    model = ModelSpec(32, 4096, 32, 8, 11008, 32000)
    one = ClusterSpec(ranks=1)
    assert reduction_seconds(model, one) == 0
    assert reduction_seconds(model, ClusterSpec(ranks=8)) < reduction_seconds(
        model, ClusterSpec(ranks=64, ranks_per_node=8)
    )
    assert optimizer_seconds(model, one) == pytest.approx(28 * model.params / 3.35e12)


def test_stream_hides_planning_behind_steps() -> None:
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=16, capacity=8192, ranks_per_node=8))
    report = simulate_stream(planner, [[8192] * 64, [60_000, 300], [5] * 40])
    assert len(report.steps) == 3
    assert report.waits_s[0] > 0
    assert report.waits_s[1] == 0
    assert report.total_s == pytest.approx(sum(report.waits_s) + sum(step.step_s for step in report.steps))
    assert report.to_dict()["steps"][1]["tokens"] == 60_300


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="plan is for 3 ranks, the cluster has 6"):
        simulate_step(make_planner(), plan_of(3, ((0,), 10)))

"""Runs whose plans follow what the steps before took: equal on all ranks, less work for slow ones, resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import mesh
from hdpcomm.data import open_corpus
from hdpcomm.measure.step_times import rank_speeds, rank_times, slowest_rank, times_of
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import CostModel, CostSample, MicroBatch, RankTimes, SequenceFragment, SequenceInfo, StepPlan
from hdpcomm.run import RunConfig, RunFiles, Saving, Watching, open_checkpoint, read_metrics, step_record, train
from hdpcomm.run import costs as run_costs
from hdpcomm.testing import run_threads
from hdpcomm.trace.run_report import run_report
from hdpcomm.train import StepMetrics
from hdpcomm.train.step.metrics import Span
from tests.harness.signing import sign

CONFIG = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
BELIEVED = CostModel(attention=1e-8, linear=1.2e-5, fixed=1e-4)
TRUE = CostModel(attention=2e-8, linear=1e-5, fixed=1e-4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(40):
        (folder / f"{i}.txt").write_text("x" * (7 + 5 * i))
    return str(folder)


@pytest.fixture
def half_speed(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Ranks that are thought to have the costs BELIEVED, whose clocks show what TRUE says, rank 1 twice that; the plans
    of rank 0."""
    plans: list[StepPlan] = []

    def clock(_: Sequence[Span], plan: StepPlan, rank: int) -> list[float]:
        if rank == 0:
            plans.append(plan)
        most = max(len(plan.for_rank(each)) for each in range(plan.num_ranks))
        own = [TRUE.seconds([s.length for s in b.sequences], len(b.ranks)) * (1 + rank) for b in plan.for_rank(rank)]
        padded = own + [0.0] * (most - len(own))
        return [*padded, *[0.0] * most, sum(own)]

    monkeypatch.setattr(step_record, "times_of", clock)
    monkeypatch.setattr(mesh, "shared_cores", lambda _: None)
    samples = [CostSample(1, (length,), BELIEVED.seconds([length])) for length in (50, 100, 200, 400)]
    monkeypatch.setattr(run_costs, "profile_samples", lambda *_, **__: samples)
    return plans


def run(
    data: str, out: Path, *, steps: int, learn: bool = True, resume: str | None = None, **mesh: Any
) -> list[dict[str, Any]]:
    """Metrics and costs of each step, as this rank was told them."""
    options = {"model": CONFIG, "capacity": 250, "tokens_per_step": 1500} | mesh
    config = RunConfig(**options, policies=("balanced",), steps=steps, learn_costs=learn)
    told: list[dict[str, Any]] = []
    with hdp.init() as comm:

        def on_step(policy: str, metrics: StepMetrics, costs: Mapping[str, float]) -> None:
            told.append({"loss": metrics.loss, "predicted_s": metrics.predicted_s, **costs})
            if comm.rank == 0:
                files.step(policy, metrics, costs)

        corpus = open_corpus([data], context=250, comm=comm)
        with RunFiles(out if comm.rank == 0 else None, trackers="none") as files:
            train(comm, corpus, config, saving=Saving(out / "saved", resume=resume), watching=Watching(on_step))
    return told


def work_of(plan: StepPlan, rank: int) -> float:
    return sum(TRUE.seconds([s.length for s in b.sequences], len(b.ranks)) for b in plan.for_rank(rank))


def test_a_rank_at_half_speed_gets_less_and_is_named(data: str, tmp_path: Path, half_speed: list[StepPlan]) -> None:
    told = run_threads(lambda: run(data, tmp_path, steps=7), 2, timeout=100.0)
    assert told[0] == told[1]
    shares = [work_of(plan, 1) / (work_of(plan, 0) + work_of(plan, 1)) for plan in half_speed]
    assert shares[0] == pytest.approx(0.5, abs=0.1)
    assert shares[-1] == pytest.approx(1 / 3, abs=0.05)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["slowest_rank"] == 1
    assert last["slowest_speed"] == pytest.approx(0.5, abs=0.03)
    assert last["measured_s"] == pytest.approx(last["predicted_s"], rel=0.1)
    report = run_report(tmp_path)
    assert "rank 1 computed at 0.5" in report
    facts = open_checkpoint(tmp_path / "saved" / "step-7").facts
    learned = facts["learned"]["balanced"]
    assert learned["speeds"] == [1.0, pytest.approx(0.5, abs=0.03)]
    assert CostModel(**learned["cost_model"]).seconds([200]) == pytest.approx(TRUE.seconds([200]), rel=0.05)
    # What was learned is there from the first plan of the run that goes on.
    before = len(half_speed)
    again = run_threads(lambda: run(data, tmp_path, steps=9, resume="auto"), 2, timeout=100.0)
    assert again[0] == again[1]
    assert len(again[0]) == 2
    plan = half_speed[before + 1]
    assert work_of(plan, 1) / (work_of(plan, 0) + work_of(plan, 1)) == pytest.approx(1 / 3, abs=0.05)


def test_without_the_option_ranks_are_named_and_plans_stay(
    data: str, tmp_path: Path, half_speed: list[StepPlan]
) -> None:
    told = run_threads(lambda: run(data, tmp_path, steps=4, learn=False), 2, timeout=100.0)
    assert [row["slowest_rank"] for row in told[0]] == [1] * 4
    assert all(row["slowest_speed"] < 0.9 for row in told[0])
    plan = half_speed[-1]
    assert work_of(plan, 1) / (work_of(plan, 0) + work_of(plan, 1)) == pytest.approx(0.5, abs=0.1)


def test_real_clocks_give_equal_plans_on_all_ranks(data: str, tmp_path: Path) -> None:
    """Ranks that planned differently would raise Mismatch."""
    told = run_threads(lambda: run(data, tmp_path, steps=6), 3, timeout=100.0)
    assert told[0] == told[1] == told[2]
    for row in told[0]:
        assert row["measured_s"] > 0
        assert 0 <= row["slowest_rank"] < 3


@pytest.mark.usefixtures("half_speed")
def test_learned_costs_that_are_none_are_refused(data: str, tmp_path: Path) -> None:
    run_threads(lambda: run(data, tmp_path, steps=1), 2, timeout=100.0)
    [facts] = (tmp_path / "saved").rglob("meta.json")
    content = json.loads(facts.read_text())
    content["learned"] = {"balanced": {"speeds": None}}
    facts.write_text(json.dumps(content))
    sign(facts.parent)
    with pytest.raises(hdp.Error, match=r"holds no learned costs.*without --learn-costs"):
        run_threads(lambda: run(data, tmp_path, steps=2, resume="auto"), 2, timeout=100.0)


def test_a_pipeline_at_half_speed_gets_less_and_a_run_goes_on(
    data: str, tmp_path: Path, half_speed: list[StepPlan]
) -> None:
    """HDP 2 x PP 2: the ranks of the plan are pipelines, with any numbers of micro-batches."""
    told = run_threads(lambda: run(data, tmp_path, steps=7, pipeline=2), 4, timeout=100.0)
    assert all(each == told[0] for each in told)
    shares = [work_of(plan, 1) / (work_of(plan, 0) + work_of(plan, 1)) for plan in half_speed]
    assert shares[0] == pytest.approx(0.5, abs=0.1)
    assert shares[-1] == pytest.approx(1 / 3, abs=0.05)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["slowest_rank"] == 1
    assert last["slowest_speed"] == pytest.approx(0.5, abs=0.03)
    learned = open_checkpoint(tmp_path / "saved" / "step-7").facts["learned"]["balanced"]
    assert learned["speeds"] == [1.0, pytest.approx(0.5, abs=0.03)]
    again = run_threads(lambda: run(data, tmp_path, steps=9, resume="auto", pipeline=2), 4, timeout=100.0)
    assert len(again[0]) == 2
    plan = half_speed[-1]
    assert work_of(plan, 1) / (work_of(plan, 0) + work_of(plan, 1)) == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.usefixtures("half_speed")
def test_what_other_devices_learned_is_not_taken_over(data: str, tmp_path: Path) -> None:
    """Costs of a stage are none of the whole model."""
    run_threads(lambda: run(data, tmp_path, steps=4, pipeline=2), 4, timeout=100.0)
    [facts] = (tmp_path / "saved").rglob("meta.json")
    content = json.loads(facts.read_text())
    content["learned"] = {"balanced": {"speeds": None}}  # would be refused if it were looked at
    facts.write_text(json.dumps(content))
    sign(facts.parent)
    told = run_threads(lambda: run(data, tmp_path, steps=5, resume="auto"), 4, timeout=100.0)
    assert len(told[0]) == 1


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (4, {"pipeline": 2, "tensor": 2}),
        (4, {"pipeline": 2, "split_backward": True}),
        (4, {"expert": 2, "pipeline": 2, "model": replace(CONFIG, experts=2, top_k=1)}),
    ],
)
def test_real_clocks_of_meshes_give_equal_plans(data: str, tmp_path: Path, ranks: int, mesh: dict[str, Any]) -> None:
    """Ranks that planned differently would raise Mismatch; also when the run goes on."""
    told = run_threads(lambda: run(data, tmp_path, steps=3, **mesh), ranks, timeout=100.0)
    assert all(each == told[0] for each in told)
    again = run_threads(lambda: run(data, tmp_path, steps=5, resume="auto", **mesh), ranks, timeout=100.0)
    assert all(each == again[0] for each in again)
    assert len(again[0]) == 2
    hdp_ranks = ranks // mesh.get("pipeline", 1) // mesh.get("tensor", 1)
    for row in told[0] + again[0]:
        assert 0 <= row["slowest_rank"] < hdp_ranks
        assert row["measured_s"] > 0


def test_passes_of_a_micro_batch_are_counted_together() -> None:
    """By hand: a forward and a backward pass, of whose waiting some was for the ring, a tensor rank, another stage."""
    batch = [MicroBatch(i, ranks, (SequenceInfo(i, 8),), 0.0, 1.0) for i, ranks in enumerate([(0, 1), (1,)])]
    plan = StepPlan("by hand", 2, tuple(batch), 1.0, 1.0, 0.0, 0.0)
    spans = [
        Span("micro-batch", 0, 0.0, 3.0, 1.5, 0, stall_s=0.25, shared_s=0.5, apart_s=0.75),
        Span("micro-batch", 1, 3.0, 4.0, 0.0, 0),
        Span("wait for others", -1, 4.0, 4.5, 0.5, 0),
        Span("micro-batch", 0, 4.5, 6.5, 0.5, 0, shared_s=0.5),
        Span("optimizer", -1, 6.5, 9.0, 0.0, 0),
    ]
    assert times_of(spans, plan, 0) == [3.0 - 1.5 - 0.25 + 0.5 + 2.0, 0.0, 0.25, 0.0, 6.5]
    assert times_of(spans, plan, 1) == [3.75, 1.0, 0.25, 0.0, 6.5]


def test_the_slowest_device_of_a_pipeline_counts() -> None:
    batch = [MicroBatch(i, (i,), (SequenceInfo(i, 8),), 0.0, 1.0) for i in range(2)]
    plan = StepPlan("by hand", 2, tuple(batch), 1.0, 1.0, 0.0, 0.0)
    rows = torch.tensor([[1.0, 0.1, 9.0], [5.0, 0.2, 9.0], [3.0, 0.3, 9.0], [4.0, 0.4, 9.0]], dtype=torch.float64)
    found = rank_times(rows, plan, torch.tensor([[[0], [1]], [[2], [3]]]))  # [stage, HDP rank, tensor rank]
    assert found == [RankTimes((3.0,), (0.3,)), RankTimes((5.0,), (0.2,))]
    assert rank_times(rows[:2], plan) == [RankTimes((1.0,), (0.1,)), RankTimes((5.0,), (0.2,))]


def test_speeds_are_shares_of_the_others() -> None:
    """By hand: four ranks have the same work, a fifth has none; of two ranks each is measured by the other one."""
    batch = [MicroBatch(i, (i,), (SequenceInfo(i, 8),), 0.0, 1.0) for i in range(4)]
    costs = CostModel(0.0, 1e-3, 0.0)
    plan = StepPlan("by hand", 5, tuple(batch), 1.0, 1.0, 0.0, 0.0)
    times = [RankTimes((seconds,), (0.0,)) for seconds in (1.0, 2.0, 10.0, 1.0)] + [RankTimes((), ())]
    speeds = rank_speeds(plan, times, costs)
    assert speeds == pytest.approx({0: 2.0, 1: 0.5, 2: 0.1, 3: 2.0})
    assert slowest_rank(speeds) == (2, pytest.approx(0.1))
    two = StepPlan("by hand", 2, tuple(batch[:2]), 1.0, 1.0, 0.0, 0.0)
    assert rank_speeds(two, times[:2], costs) == pytest.approx({0: 2.0, 1: 0.5})
    one = StepPlan("by hand", 1, tuple(batch[:1]), 1.0, 1.0, 0.0, 0.0)
    assert rank_speeds(one, times[:1], costs) == {0: 1.0}
    assert slowest_rank({}) == (0, 1.0)


def test_slices_make_no_rank_slow() -> None:
    """They see what was kept, and may run forward twice; only the rest of a rank's work tells its speed."""
    whole = [MicroBatch(i, (i,), (SequenceInfo(1 + i, 8),), 0.0, 1.0) for i in range(2)]
    slices = [MicroBatch(2 + i, (1,), (SequenceInfo(3 + i, 8),), 0.0, 1.0) for i in range(2)]
    fragments = (SequenceFragment(0, 0, 8), SequenceFragment(0, 8, 16))
    plan = StepPlan("by hand", 2, (*whole, *slices), 1.0, 1.0, 0.0, 0.0, fragments)
    times = [RankTimes((1.0,), (0.0,)), RankTimes((1.0, 40.0, 60.0), (0.0,) * 3)]
    assert rank_speeds(plan, times, CostModel(1e-3, 1e-3)) == pytest.approx({0: 1.0, 1: 1.0})

"""Runs whose short sequences wait in a queue: losses, metrics, the report, and what cannot have one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.cli.train_report import _queue_text
from hdpcomm.comm import mesh
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import CostModel, CostSample
from hdpcomm.run import RunConfig, RunFiles, Saving, Watching, read_metrics, train
from hdpcomm.run import costs as run_costs
from hdpcomm.testing import run_threads
from hdpcomm.trace.run_report import run_report
from hdpcomm.train import StepMetrics

CONFIG = LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(attention=1e-6, linear=1e-4, fixed=1e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"the {i}th text; " * (i % 7 * (i % 5) + 1)} for i in range(120)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture(autouse=True)
def cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share processors gain nothing from a queue, and their plans have none."""
    monkeypatch.setattr(mesh, "shared_cores", lambda _: None)
    samples = [CostSample(1, (length,), COST.seconds([length])) for length in (50, 100, 200, 300)]
    monkeypatch.setattr(run_costs, "profile_samples", lambda *_, **__: samples)


def rows(data: str, out: Path, *, ranks: int = 2, resume: str | None = None, **options: Any) -> list[dict[str, Any]]:
    """What rank 0 is told of each step."""
    values = {"model": CONFIG, "steps": 6, "capacity": 300, "tokens_per_step": 1500, "queue": True} | options
    config = RunConfig(**values)

    def rank() -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        told: list[dict[str, Any]] = []

        def on_step(policy: str, metrics: Any, costs: Mapping[str, float]) -> None:
            told.append({"policy": policy, "loss": metrics.loss, "queued": metrics.queued, "moved": metrics.moved})
            told[-1] |= costs

        with hdp.init() as comm:
            saving = Saving(out / "checkpoints", every=3, resume=resume)
            corpus = open_corpus([data], context=300)
            train(comm, corpus, config, saving=saving, watching=Watching(on_step=on_step))
        return told

    return run_threads(rank, ranks, timeout=100.0)[0]  # type: ignore[no-any-return]


def losses(found: list[dict[str, Any]], policy: str = "balanced") -> Any:
    return pytest.approx([row["loss"] for row in found if row["policy"] == policy], rel=1e-4)


def test_losses_are_those_of_plans_without_a_queue(data: str, tmp_path: Path) -> None:
    bound = rows(data, tmp_path / "bound", queue=False, policies=("balanced", "static"))
    queued = rows(data, tmp_path / "queue", policies=("balanced", "static"))
    learned = rows(data, tmp_path / "learned", learn_costs=True)  # its first plan is that of ``queued``
    more = rows(data, tmp_path / "more", ranks=3, learn_costs=True)  # what it learns decides whether it has a queue
    for policy in ("balanced", "static"):
        assert [row["loss"] for row in queued if row["policy"] == policy] == losses(bound, policy)
    for each in (learned, more):
        assert [row["loss"] for row in each] == losses(bound)
    assert sum(row["queued"] for row in bound) == 0
    assert sum(row["queued"] for row in learned) > 0
    assert sum(row["queued"] for row in queued if row["policy"] == "balanced") > 0
    assert sum(row["queued"] for row in queued if row["policy"] == "static") == 0
    assert all(0 <= row["moved"] <= row["queued"] for row in (*queued, *learned, *more))


def test_a_run_goes_on_with_and_without_a_queue(data: str, tmp_path: Path) -> None:
    whole = rows(data, tmp_path)
    first_half = str(tmp_path / "checkpoints/step-3")
    for number, queue in enumerate((True, False)):
        rest = rows(data, tmp_path / str(number), queue=queue, resume=first_half)
        assert len(rest) == 3
        assert [row["loss"] for row in whole[3:]] == losses(rest)


def test_the_report_tells_who_took_what(data: str, tmp_path: Path) -> None:
    def rank() -> None:
        torch.set_num_threads(1)
        config = RunConfig(model=CONFIG, steps=3, capacity=300, tokens_per_step=1500, queue=True)
        with hdp.init() as comm, RunFiles(tmp_path if comm.rank == 0 else None, trackers="none") as files:
            watching = Watching(on_step=files.step, on_timeline=files.timeline, timelines=True)
            train(comm, open_corpus([data], context=300), config, watching=watching)

    run_threads(rank, 2, timeout=100.0)
    queued = sum(row["queued"] for row in read_metrics(tmp_path / "metrics.jsonl"))
    assert f"% of {queued:,} micro-batches under balanced" in run_report(tmp_path)


def test_the_command_tells_what_the_queue_was_good_for() -> None:
    def step(queued: int, moved: int) -> StepMetrics:
        return StepMetrics(0, 1.0, 1, 1.0, 0, 0.0, 1.0, 1, 1, 10, 1.0, 0.0, 0.0, queued=queued, moved=moved)

    told = "12 of 20 micro-batches waited in a queue; 25% of them were taken by another rank than predicted"
    assert _queue_text([step(8, 3), step(4, 0)]) == told
    assert _queue_text([step(0, 0)]).startswith("no step had a queue: its plans were not longer without one")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policies": ("static",)}, r"policies is \('static',\)"),
        ({"pipeline": 2, "model": LlamaConfig(layers=2)}, "the ranks have pipelines"),
        ({"expert": 2, "model": LlamaConfig(experts=4)}, "the ranks have expert ranks"),
    ],
)
def test_runs_that_have_no_queue(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidUsage, match=f"queue was given and {told}: only the policy balanced"):
        RunConfig(queue=True, **options)

"""When a run saves, what stays, when it ends by the clock, and what its events say."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.options import BadOption, duration, seconds_of, steps_or_time
from hdpcomm.run import RunConfig, RunFiles, RunResult, Saving, Watching, read_lines, train
from hdpcomm.testing import run_threads

CONFIG = LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return [str(folder / f"{i}.txt") for i in range(6)]


def trained(data: list[str], out: Path, held_out: list[str] = [], steps: int = 6, **saving: Any) -> RunResult:  # noqa: B006
    def rank() -> RunResult:
        with hdp.init() as comm:
            corpus = open_corpus(data, context=300, comm=comm)
            other = open_corpus(held_out, context=300, comm=comm) if held_out else None
            config = RunConfig(CONFIG, steps=steps, capacity=150, tokens_per_step=400, eval_every=2)
            options = Saving(out / "checkpoints", **saving)
            if comm.rank:
                return train(comm, corpus, config, saving=options, held_out=other)
            with RunFiles(out) as files:
                watching = Watching(files.step, files.evaluation, on_event=files.event)
                return train(comm, corpus, config, saving=options, held_out=other, watching=watching)

    results = run_threads(rank, 2, timeout=100.0)
    assert results[0].stopped_by == results[1].stopped_by
    return results[0]


def kinds(out: Path) -> list[str]:
    return [row["event"] for row in read_lines(out / "events.jsonl")]


def test_saves_by_the_clock(data: list[str], tmp_path: Path) -> None:
    trained(data, tmp_path, every_s=1e-6, keep=10)  # has always passed
    assert len(list((tmp_path / "checkpoints").iterdir())) == 6
    trained(data, tmp_path / "rarely", every_s=1e6)
    assert [path.name for path in (tmp_path / "rarely/checkpoints").iterdir()] == ["step-6"]


def test_a_run_ends_saved_before_its_limit(data: list[str], tmp_path: Path) -> None:
    until = time.time() + 12.0
    result = trained(data, tmp_path, steps=100_000, until=until)
    assert time.time() < until
    assert result.stopped_by == signal.SIGALRM
    assert result.saved is not None
    assert result.saved.is_dir()
    assert 0 < len(result.steps["balanced"]) < 100_000
    assert kinds(tmp_path)[-1] == "end"
    assert read_lines(tmp_path / "events.jsonl")[-1]["stopped_by"] == signal.SIGALRM
    over = trained(data, tmp_path, steps=100_000, until=time.time() - 1.0, resume="auto")
    assert len(over.steps["balanced"]) == 1  # each call gets on


def test_the_command_says_that_its_time_was_over(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", "--data", *data, "--steps", "100000", "--context", "300", "--ranks", "1", "--hidden", "16"]
    assert main([*given, "--out", str(tmp_path / "run"), "--time-limit", "8s", "--trackers", "none"]) == 142
    assert "ended before --time-limit 8s; go on by --resume auto" in capsys.readouterr().out


def test_the_best_one_stays(data: list[str], tmp_path: Path) -> None:
    result = trained(data, tmp_path, held_out=data[:2], keep=1, keep_best=True, steps=6)
    losses = {each.step: each.loss for each in result.evaluations["balanced"]}
    best = min(losses, key=lambda step: losses[step])
    assert (tmp_path / "checkpoints/best").resolve().name == f"step-{best}"
    facts = json.loads((tmp_path / "checkpoints/best/meta.json").read_text())
    assert facts["best"] == [best, losses[best]]
    rows = list(read_lines(tmp_path / "evaluations.jsonl"))
    for row in rows:  # mean of the two paths, by their tokens
        assert set(row["by_source"]) == {*data[:2]}
        assert min(row["by_source"].values()) <= row["loss"] <= max(row["by_source"].values())
    again = trained(data, tmp_path, held_out=data[:2], keep=1, keep_best=True, steps=8, resume="auto")
    losses |= {each.step: each.loss for each in again.evaluations["balanced"]}
    best = min(losses, key=lambda step: losses[step])
    assert (tmp_path / "checkpoints/best").resolve().name == f"step-{best}"


def test_events_of_a_run_and_of_one_that_fails(data: list[str], tmp_path: Path) -> None:
    trained(data, tmp_path, held_out=data[:1], every=3)
    found = kinds(tmp_path)
    assert found[0] == "start"
    assert found[-1] == "end"
    assert [found.count(kind) for kind in ("step", "save", "evaluation")] == [6, 2, 3]
    files = RunFiles(tmp_path)
    files.event("start", {"step": 6})
    files.__exit__(ZeroDivisionError, ZeroDivisionError("by zero"), None)
    assert read_lines(tmp_path / "events.jsonl")[-1].items() >= {"event": "end", "step": 6, "error": "by zero"}.items()
    RunFiles(tmp_path / "new").__exit__(InvalidUsage, InvalidUsage("no"), None)  # refused: nothing is written
    assert not (tmp_path / "new").exists()


def test_times_and_steps() -> None:
    assert [seconds_of(duration(text)) for text in ("90s", "30min", "1.5h", "2d")] == [90, 1800, 5400, 172800]
    assert (steps_or_time("8k"), steps_or_time("5min")) == (8192, "5min")
    for wrong in ("h", "0s", "-3h", "3 h", "1e3s", "12", "infs", "nanh", "3m", "0.0h"):
        with pytest.raises(BadOption):
            duration(wrong)
    with pytest.raises(BadOption):
        steps_or_time("3x")


@pytest.mark.parametrize("options", [{}, {"zero": 1, "dtype": "bf16"}, {"pipeline": 2}])
def test_held_out_losses_and_exports_are_of_averages(data: list[str], tmp_path: Path, options: dict[str, Any]) -> None:
    def rank() -> tuple[float, float, list[float]]:
        with hdp.init() as comm:
            corpus = open_corpus(data, context=300, comm=comm)
            config = RunConfig(
                replace(CONFIG, layers=2), steps=5, capacity=300, tokens_per_step=400, ema=0.9, **options
            )
            result = train(comm, corpus, config, held_out=corpus, export=tmp_path / "model")
            saved = Saving(tmp_path / "saved")
            plain = train(comm, corpus, replace(config, ema=None), held_out=corpus, saving=saved)
            losses = [step.loss for step in plain.steps["balanced"]]
            same = [step.loss for step in result.steps["balanced"]]
            assert losses == pytest.approx(same, rel=1e-3)  # it changes no step; plans follow measured costs
            found, other = (each.evaluations["balanced"][-1].loss for each in (result, plain))
            return found, other, losses

    averaged, plain, losses = run_threads(rank, 2, timeout=100.0)[0]
    assert plain < averaged < losses[0]  # which trails behind
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    total = count = 0.0
    for path in data:
        text = Path(path).read_bytes()
        for start in range(0, len(text), 300):
            tokens = torch.tensor([[*text[start : start + 300]]])
            if tokens.shape[1] > 1:
                logits = model(tokens).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").detach())
                count += tokens.shape[1] - 1
    assert total / count == pytest.approx(averaged, rel=1e-2 if "dtype" in options else 1e-5)

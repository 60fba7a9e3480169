"""What a run tells while it runs: held-out loss, timelines, traces, the report, and the same before it runs."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.data import BatchReader, open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.run import RunConfig, RunFiles, Watching, evaluate, read_lines, read_metrics, train
from hdpcomm.run.files import locked_folder
from hdpcomm.testing import run_threads
from hdpcomm.trace import TraceFile
from hdpcomm.trace.run_report import run_report
from hdpcomm.train import Trainer

CONFIG = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    chat = [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "yes"}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 2)
    return str(folder)


def watched(data: str, out: str, trace: str, policies: tuple[str, ...] = ("balanced", "static")) -> list[float]:
    """One rank of a run that writes all its files; losses on held-out text."""
    config = RunConfig(CONFIG, policies, steps=4, capacity=150, tokens_per_step=700, eval_every=2)
    with hdp.init() as comm:
        corpus, held_out = open_corpus([data], context=300, comm=comm).split(0.2, seed=0)
        if comm.rank:
            result = train(comm, corpus, config, held_out=held_out, watching=Watching(timelines=True, trace=True))
        else:
            with RunFiles(Path(out), trackers="none") as files, TraceFile(Path(trace)) as traced:

                def on_timeline(row: dict[str, Any]) -> None:
                    files.timeline(row)
                    traced.add(row)

                watching = Watching(files.step, files.evaluation, on_timeline, timelines=True, trace=True)
                files.started(corpus)
                result = train(comm, corpus, config, held_out=held_out, watching=watching)
    return [found.loss for found in result.evaluations["balanced"]]


@pytest.fixture(scope="module")
def run(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    told = run_threads(lambda: watched(data, str(out), str(out.parent / "trace.json")), 2, timeout=100.0)
    assert told[0] == told[1]
    assert [found["loss"] for found in read_lines(out / "evaluations.jsonl") if found["policy"] == "balanced"] == told[
        0
    ]
    return out


def held_out_loss(data: str) -> tuple[float, int]:
    with hdp.init() as comm:
        corpus = open_corpus([data], context=300, comm=comm)
        planner = Planner(None, ClusterSpec(comm.size, 150 if comm.size > 1 else 300), cost_model=CostModel(1e-9, 1e-6))
        model = Llama(CONFIG, seed=1).double()
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm)
        found = evaluate(trainer, corpus, tokens_per_step=700, step=0)
        return found.loss, found.tokens


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_held_out_loss_is_that_of_each_sequence_alone(data: str, size: int) -> None:
    (alone,) = run_threads(lambda: _oracle(data), 1)
    for loss, tokens in run_threads(lambda: held_out_loss(data), size):
        assert tokens == alone[1]
        assert loss == pytest.approx(alone[0], rel=1e-9)


def _oracle(data: str) -> tuple[float, int]:
    """torch's cross-entropy of whole logits, a sequence at a time."""
    total, count = 0.0, 0
    with hdp.init() as comm, torch.no_grad():
        corpus = open_corpus([data], context=300)
        model = Llama(CONFIG, seed=1).double()
        reader = BatchReader(corpus, tuple(range(len(corpus))))
        for place in range(len(corpus)):
            tokens, labels = reader(place)
            bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
            logits = model(tokens, positions=torch.arange(len(tokens)), cu_seqlens=bounds, comm=comm)
            total += float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            count += int((labels >= 0).sum())
    return total / count, count


def test_metrics_say_where_time_and_bytes_went(run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    assert [(row["step"], row["policy"]) for row in rows] == [(s, p) for s in range(4) for p in ("balanced", "static")]
    for row in rows:
        parts = row["compute_s"] + row["exposed_s"] + row["stall_s"] + row["idle_s"] + row["optimizer_s"]
        assert 0 < parts <= row["seconds"] * 1.01
        assert row["idle_share"] == pytest.approx(row["idle_s"] / row["seconds"])  # the terminal's and the report's
        assert row["gradient_bytes"] > 0
        assert row["ring_bytes"] + row["gradient_bytes"] <= row["bytes_sent"]
        assert row["device_bytes"] > 1e6
        assert 0 <= row["exposed_share"] <= 1
        assert "mfu" not in row  # nobody knows the peak of this CPU
    assert any(row["ring_bytes"] > 0 for row in rows)


def test_timelines_have_every_micro_batch_of_every_rank(run: Path) -> None:
    for row in read_lines(run / "timeline.jsonl"):
        for rank, measured in enumerate(row["measured"]):
            spans = measured["spans"]
            planned = [batch["index"] for batch in row["planned"] if rank in batch["ranks"]]
            assert [span["index"] for span in spans if span["phase"] == "micro-batch"] == planned
            assert [span["phase"] for span in spans][len(planned) :] == ["wait for others", "gradients", "optimizer"]
            assert [span["start_s"] for span in spans[1:]] == [span["end_s"] for span in spans[:-1]]
            assert all(0 <= span["wait_s"] <= span["end_s"] - span["start_s"] + 1e-6 for span in spans)
        assert set(row["policies"]) == {"balanced", "naive", "static"}


def test_the_trace_has_the_plan_and_what_was_done(run: Path) -> None:
    events = json.loads((run.parent / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    rows = read_lines(run / "timeline.jsonl")
    planned = sum(len(batch["ranks"]) for row in rows for batch in row["planned"])
    measured = sum(len(rank["spans"]) for row in rows for rank in row["measured"])
    spans = [event["tid"] for event in events if event["ph"] == "X"]
    assert (spans.count(0), spans.count(1)) == (planned, measured)


class _Page(html.parser.HTMLParser):
    """Collects what a page loads, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]
        self.loaded += [tag] if tag in ("script", "link", "iframe") else []

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_needs_no_other_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capfd.readouterr().out == f"{run}/report.html\n"
    page = _Page()
    page.feed((run / "report.html").read_text())
    assert page.loaded == []
    for words in (
        "Curves",
        "Policies side by side",
        "Where the time went",
        "under balanced",
        "under static",
        "Lengths",
    ):
        assert words in page.text
    assert page.text.count("as measured") == 2


def test_the_report_in_a_browser(run: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "report.html").write_text(run_report(run))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,2600"]
    where = [
        f"--user-data-dir={tmp_path}/profile",
        f"--screenshot={tmp_path}/shot.png",
        f"file://{tmp_path}/report.html",
    ]
    subprocess.run([browser, *flags, *where], timeout=60, capture_output=True, check=True)
    shot = image.open(tmp_path / "shot.png").convert("RGB")
    colours = {colour: count for count, colour in shot.getcolors(1 << 24)}
    for colour in ((43, 108, 176), (192, 86, 33)):  # both policies, and two parts of a step
        assert colours.get(colour, 0) > 500
    drawn = shot.size[0] * shot.size[1] - colours[255, 255, 255]
    assert 0.03 < drawn / (shot.size[0] * shot.size[1]) < 0.6


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no run there"),
        ("", "no step was done yet"),
        ('{"step": 1}\n[1]\n{"step": ' + "[" * 100_000, "no step was done yet"),
    ],
)
def test_no_run_to_report(content: str | None, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 6
    assert told in capfd.readouterr().err


def test_a_report_of_a_run_that_was_cut_short(run: Path, tmp_path: Path) -> None:
    for name in ("timeline.jsonl", "lengths.json", "metrics.jsonl"):
        text = (run / name).read_text()
        (tmp_path / name).write_text(text[: len(text) * 2 // 3])
    page = run_report(tmp_path)
    assert "Curves" in page
    assert "Lengths" not in page


def _step(step: int, policy: str, longest: int, seconds: float, **more: float) -> str:
    row = {"step": step, "policy": policy, "longest": longest, "seconds": seconds, "predicted_s": seconds}
    return json.dumps(row | {"loss": 1.0, "tokens": 9, "grad_norm": 1.0, "ranks": 4} | more) + "\n"


def test_the_report_shows_the_step_in_which_the_plan_matters(tmp_path: Path) -> None:
    """And how the policies differ in steps with a long sequence, and where a run went on with another mesh."""
    gains = {0: 1.0, 1: 3.0, 2: 2.0, 3: 0.9}
    metrics, timeline = "", ""
    for step, gain in gains.items():
        longest, mesh = 10 if gain <= 1 else 90, {"pipeline": 2} if step == 3 else {}
        metrics += _step(step, "naive", longest, 1.0, **mesh) + _step(step, "ddp", longest, gain)
        for policy, seconds in (("naive", 1.0), ("ddp", gain)):
            batch = {"index": 0, "ranks": [0], "lengths": [longest], "start_s": 0.0, "end_s": seconds}
            row = {"planned": [batch], "measured": [{"spans": []}], "policies": {}}
            timeline += _step(step, policy, longest, seconds, ranks=1, **row)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    (tmp_path / "timeline.jsonl").write_text(timeline)
    (tmp_path / "calibration.json").write_text(json.dumps({"memory": {"capacity": 50}}))
    page = run_report(tmp_path)
    assert re.findall("Step (.) under ([a-z]+)", page) == [("2", "naive"), ("2", "ddp")]
    assert "50 tokens that a rank holds ddp took 2.50 times as long as naive, in the others 0.95 times" in page
    assert "From step 4 on: ranks 4, pipeline 2 (before: ranks 4)" in page


def test_a_dry_run_trains_nothing(data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = ["--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24", "--zero", "1"]
    limits = ["--context", "300", "--tokens-per-step", "700", "--ranks", "2", "--compare", "static"]
    assert main(["train", "--data", data, *size, *limits, "--dry-run", "--out", str(tmp_path / "run")]) == 0
    told = capfd.readouterr().out
    assert "nothing was trained" in told
    assert told.count("memory of a device with") == 1
    assert "simulated with the costs measured here" in told
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = hdp.train.StepMetrics(3, 2.5, 10, 1.0, 0, 0.0, 1.0, 5, 1, 1, 0.5, 0.0, 0.0)
    with RunFiles(tmp_path, trackers="tensorboard") as files:
        files.step("balanced", metrics, {"idle_s": 0.25})
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (point,) = events.Scalars("balanced/loss")
    assert (point.step, point.value) == (3, 2.5)
    assert events.Scalars("balanced/idle_s")[0].value == 0.25
    assert events.Scalars("balanced/tokens_per_s")[0].value == 10.0


def test_wandb_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module that writes down what it is told."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wandb.py").write_text(
        "told = []\n"
        "class Run:\n"
        "    def log(self, values): told.append(values)\n"
        "    def finish(self): told.append('finished')\n"
        "def init(**options):\n"
        "    told.append(options)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    metrics = hdp.train.StepMetrics(3, 2.5, 10, 1.0, 0, 0.0, 1.0, 5, 1, 1, 0.5, 0.0, 0.0)
    with RunFiles(tmp_path / "run", trackers="wandb", config={"steps": 9}) as files:
        files.step("balanced", metrics, {"idle_s": 0.25})
    begun, values, end = sys.modules["wandb"].told
    monkeypatch.delitem(sys.modules, "wandb")
    assert (begun["mode"], begun["config"], begun["dir"]) == ("offline", {"steps": 9}, str(tmp_path / "run"))
    assert (values["step"], values["balanced/loss"], values["balanced/idle_s"]) == (3, 2.5, 0.25)
    assert end == "finished"


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidUsage, match="--trackers wandb was given and wandb is not installed"):
        RunFiles(tmp_path, trackers="wandb")
    RunFiles(tmp_path, trackers="auto").__exit__(None, None, None)


def test_a_report_follows_the_run_to_its_end(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    pages: list[str] = []
    running = ExitStack()
    running.enter_context(locked_folder(copy))

    def goes_on(_: float) -> None:
        pages.append((copy / "report.html").read_text())
        if len(pages) == 2:
            running.close()
            (copy / ".lock").touch()  # as a process that was killed leaves it

    monkeypatch.setattr("hdpcomm.cli.report.time.sleep", goes_on)
    assert main(["report", str(copy), "--follow"]) == 0
    assert [page.count('http-equiv="refresh"') for page in (*pages, (copy / "report.html").read_text())] == [1, 1, 0]

"""Runs that are saved and go on: the bits of an uninterrupted run, after kills, signals and damage."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import hdpcomm as hdp
from hdpcomm.data import open_corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt
from hdpcomm.models.export import check_export, export_llama
from hdpcomm.run import MetricsLog, RunConfig, RunResult, Saving, Watching, open_checkpoint, read_metrics, train
from hdpcomm.testing import run_threads
from tests.harness.warm_python import Python, run_python

CONFIG = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
STEPS = 8
Ranks = Callable[..., list[Any]]


def trained(
    data: str, out: str, resume: str | None = None, context: int = 300, keep: int = 3, **changed: Any
) -> RunResult:
    """One rank of a run of 8 steps, saved every second one."""
    torch.set_num_threads(1)
    config = RunConfig(**{"model": CONFIG, "steps": STEPS, "capacity": 300, "tokens_per_step": 700} | changed)
    saving = Saving(Path(out) / "checkpoints", every=2, keep=keep, resume=resume)
    with hdp.init() as comm, MetricsLog(Path(out) / f"metrics-{comm.rank}.jsonl") as log:
        watching = Watching(on_step=log.write)
        return train(comm, open_corpus([data], context=context), config, saving=saving, watching=watching)


def losses(out: Path) -> list[float]:
    name = "metrics.jsonl" if (out / "metrics.jsonl").exists() else "metrics-0.jsonl"
    return [float(str(row["loss"])) for row in read_metrics(out / name)]


def begun(whole: Path, out: Path, *steps: int) -> Path:
    """A run that has come as far as the given checkpoints of the whole one."""
    (out / "checkpoints").mkdir(parents=True)
    for step in steps:
        shutil.copytree(whole / f"checkpoints/step-{step}", out / f"checkpoints/step-{step}")
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return str(folder)


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of all steps on two ranks."""
    out = tmp_path_factory.mktemp("whole") / "run"
    out.mkdir()
    hdp.testing.spawn(trained, 2, data, str(out), timeout=100.0)
    return out


def test_a_run_leaves_what_is_promised(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step-4", "step-6", "step-8"]
    rows = read_metrics(whole / "metrics-0.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert {"step", "loss", "tokens", "seconds"} <= rows[0].keys()


@pytest.mark.parametrize("resume", ["auto", "the run", "the checkpoint"])
def test_a_resumed_run_has_the_bits_of_the_whole_one(
    ranks: Ranks, data: str, whole: Path, tmp_path: Path, resume: str
) -> None:
    out = begun(whole, tmp_path / "run", 4)
    given = {"auto": "auto", "the run": str(out), "the checkpoint": str(whole / "checkpoints/step-4")}[resume]
    results = ranks(2, trained, data, str(out), given)
    assert [result.first_step for result in results] == [4, 4]
    assert losses(out) == losses(whole)[4:]
    assert same_weights(out / "checkpoints/step-8", whole / "checkpoints/step-8")


def weights(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    state = {"policies": {"balanced": {"model": dict(Llama(CONFIG, seed=5).to(dtype).state_dict())}}}
    open_checkpoint(path).load_into(state)
    return state["policies"]["balanced"]["model"]


def same_weights(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return all(torch.equal(one[name], other[name]) for name in one)


def test_another_weight_decay_counts_from_the_resumed_step_on(data: str, whole: Path, tmp_path: Path) -> None:
    found = []
    for decay in (0.1, 0.9):
        out = begun(whole, tmp_path / f"run {decay}", 4)
        run_threads(functools.partial(trained, data, str(out), "auto", weight_decay=decay), 2, timeout=100.0)
        found.append(losses(out))
    usual, other = found
    assert usual[0] == other[0]  # the weights of the checkpoint
    assert all(one != two for one, two in zip(usual[1:], other[1:], strict=True))


def test_on_another_number_of_ranks(ranks: Ranks, data: str, whole: Path, tmp_path: Path) -> None:
    out = begun(whole, tmp_path / "run")
    ranks(3, trained, data, str(out), str(whole / "checkpoints/step-4"))
    assert losses(out) == pytest.approx(losses(whole)[4:], rel=1e-4)


def test_sharded_runs_go_on_with_their_bits(ranks: Ranks, data: str, tmp_path: Path) -> None:
    options = {"zero": 1, "dtype": "bf16", "recompute": 1}
    whole, out = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, out):
        folder.mkdir()
    ranks(2, functools.partial(trained, **options), data, str(whole))
    ranks(2, functools.partial(trained, **options), data, str(out), str(whole / "checkpoints/step-4"))
    assert losses(out) == losses(whole)[4:]


def test_each_rank_writes_and_reads_its_part_of_a_sharded_optimizer(ranks: Ranks, data: str, tmp_path: Path) -> None:
    sharded, whole = {"zero": 1, "dtype": "bf16"}, {"dtype": "bf16"}
    out = tmp_path / "run"
    out.mkdir()
    ranks(2, functools.partial(trained, **sharded), data, str(out))
    path = out / "checkpoints/step-4"
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    parameters = sum(p.numel() for p in Llama(CONFIG).parameters())
    assert 4 * 3 * parameters / 2 < sizes[1] < 4 * 3 * parameters / 2 * 1.1 + 60_000  # masters and moments
    assert not list((out / "checkpoints").glob(".*"))
    read = {"policies": {"balanced": {"masters": {name: torch.zeros_like(p) for name, p in
                                                  adapt(Llama(CONFIG)).named_parameters()}}}}  # fmt: skip
    dcp.load(read, checkpoint_id=path, no_dist=True)  # torch's own reader
    narrow = weights(path, torch.bfloat16)
    for name, master in read["policies"]["balanced"]["masters"].items():
        torch.testing.assert_close(master, narrow[name].float(), rtol=1e-2, atol=1e-3)
    for size, then in ((3, sharded), (1, sharded), (2, whole)):
        again = tmp_path / f"{size} {len(then)}"
        again.mkdir()
        ranks(size, functools.partial(trained, **then), data, str(again), str(path))
        assert losses(again) == pytest.approx(losses(out)[4:], rel=2e-3)


def test_a_damaged_checkpoint_is_passed_with_a_warning(
    data: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = begun(whole, tmp_path / "run", 4, 6)
    file = next((out / "checkpoints/step-6").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    run_threads(lambda: trained(data, str(out), "auto"), 1, timeout=100.0)
    assert any(message.startswith(f"{out}/checkpoints/step-6: damaged (") for message in caplog.messages)
    assert losses(out) == pytest.approx(losses(whole)[4:], rel=1e-4)


def test_a_finished_run_has_nothing_to_do(ranks: Ranks, data: str, whole: Path, tmp_path: Path) -> None:
    out = begun(whole, tmp_path / "run", 8)
    result = ranks(2, trained, data, str(out), "auto")[0]
    assert (result.first_step, result.steps, result.saved) == (8, {"balanced": []}, out / "checkpoints/step-8")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nowhere": ({"resume": "/no/such/run"}, "/no/such/run: no such checkpoint; give a folder step-N"),
    "a folder of data": ({"resume": "{data}"}, "no checkpoint of hdpcomm .meta.json is missing"),
    "another model": ({"model": LlamaConfig(hidden=32)}, "was saved with model="),
    "another seed": ({"seed": 3}, "was saved with seed=0, and this run has 3"),
    "another policy": ({"policies": ("naive",)}, "was saved with policies=.'balanced'., and this run has .'naive'."),
    "other data": (
        {"context": 200},
        "was saved on other data .* than this run's .* give the same --data, --tokenizer and --context",
    ),
    "fewer steps": ({"steps": 3}, "was saved after step 4 and --steps is 3; give more steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_of_something_else_is_refused_on_every_rank(
    ranks: Ranks, data: str, whole: Path, tmp_path: Path, case: str
) -> None:
    changed, told = BAD[case]
    given = {"resume": str(whole / "checkpoints/step-4")} | changed
    given["resume"] = given["resume"].format(data=data)
    out = begun(whole, tmp_path / "run")
    for text in ranks(2, refusal, data, str(out), given):
        assert re.search(told, text), text


def refusal(data: str, out: str, given: dict[str, Any]) -> str:
    try:
        trained(data, out, **given)
    except InvalidUsage as error:
        return str(error)
    return ""


# --- the command ---------------------------------------------------------------------------------------------------


def command(data: str, out: Path, *options: str, steps: int = STEPS) -> list[str]:
    size = ["--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24"]
    limits = ["--context", "300", "--tokens-per-step", "700", "--capacity", "300", "--steps", str(steps)]
    saving = ["--out", str(out), "--save-every", "2", "--ranks", "2", "--trackers", "none"]
    return ["-m", "hdpcomm.cli.main", "train", "--data", data, *size, *limits, *saving, *options]


KILLS = int(os.environ.get("KILLS", "2"))


@pytest.mark.parametrize("zero", [0, 1] if KILLS > 2 else [0])
def test_kills_lose_nothing_beyond_the_last_checkpoint(data: str, whole: Path, tmp_path: Path, zero: int) -> None:
    """SIGKILL of one rank or of all at random moments of training and saving, resumed each time; then an export.

    ``KILLS=20``: twenty of them, in a longer run, and again with checkpoints that all ranks write.
    """
    sharded = ["--zero", str(zero)]
    steps, first = (STEPS, 4) if KILLS <= 2 else (3 * KILLS, 2)
    if steps != STEPS:
        whole = tmp_path / "whole"
        whole.mkdir()
        hdp.testing.spawn(
            functools.partial(trained, steps=steps, keep=steps, zero=zero), 2, data, str(whole), timeout=300.0
        )
    out = begun(whole, tmp_path / "run", first)
    generator = random.Random(7)
    for _ in range(KILLS):
        with Python(command(data, out, "--resume", "auto", *sharded, steps=steps)) as process:
            for _ in range(generator.randint(1, 4)):  # so many steps are done
                process.stderr.readline()
            time.sleep(generator.random() * 0.1)
            if generator.random() < 0.5:
                process.kill()
            else:
                kill_a_rank(process.pid, generator)
            process.communicate(timeout=60)
    folder = tmp_path / "model"
    arguments = command(data, out, "--resume", "auto", "--export", str(folder), *sharded, steps=steps)
    done = run_python(arguments, timeout=100)
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(whole)[first:]
    assert f"saved: {out}/checkpoints/step-{steps}" in done.stdout
    assert f"exported: {folder}" in done.stdout
    assert (folder / "model.safetensors").exists()
    assert "tokens_per_step: 700" in (out / "config.yaml").read_text()


def kill_a_rank(launcher: int, generator: random.Random) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, IndexError, StopIteration):  # it may have ended by itself
        everyone = psutil.Process(launcher).children(recursive=True)
        server = next(each for each in everyone if len(each.children()) == 2)
        generator.choice(server.children()).kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_where(data: str, tmp_path: Path, number: int) -> None:
    out = tmp_path / "run"
    with Python(command(data, out, steps=400)) as process:
        while not process.stderr.readline().startswith("hdpcomm: step 3/"):
            assert process.poll() is None
        os.kill(process.pid, number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "saving after this step" in errors
    newest = max((out / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    assert f"saved: {newest}" in output
    assert open_checkpoint(newest).step == len(losses(out))
    again = run_python(command(data, out), timeout=60)
    assert again.returncode == 6
    assert "holds the checkpoints of a run; go on with it by --resume auto" in again.stderr


# --- what comes out ------------------------------------------------------------------------------------------------


def logits(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    with hdp.init() as comm, torch.no_grad():
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        out: torch.Tensor = model(tokens, positions=torch.arange(len(tokens)), cu_seqlens=bounds, comm=comm)
        return out


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_the_exported_model(data: str, tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, rope_theta=500.0, tied_embeddings=tied)
    ours, folder = Llama(config, seed=3), tmp_path / "model"
    export_llama(config, ours.state_dict(), folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = open_corpus([data], context=300).read(3)
    text = bytes(tokens.tolist()).decode()
    assert tokenizer(text)["input_ids"] == tokens.tolist()
    assert tokenizer.decode(tokens) == text
    assert tokenizer("é\n\0")["input_ids"] == list("é\n\0".encode())
    (mine,) = run_threads(lambda: logits(ours, tokens), 1)
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(InvalidUsage, match="this folder is not empty; give a new one"):
        check_export(folder)
    with pytest.raises(InvalidUsage, match="the weights have no blocks"):
        export_llama(config, {"embedding.weight": torch.zeros(256, 16)}, tmp_path / "other")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("run", ("--resume", "auto", "--seed", "5")),
        ("run", ("--resume", "auto", "--context", "200")),
        ("new", ("--resume", "nothere")),
        ("new", ("--resume", "{run}/checkpoints/step-4", "--hidden", "32")),
    ],
)
def test_a_refused_run_writes_nothing(
    data: str, whole: Path, tmp_path: Path, where: str, options: tuple[str, ...]
) -> None:
    run = begun(whole, tmp_path / "run", 4)
    for name in ("config.yaml", "lengths.json", "calibration.json"):
        (run / name).write_text("of the run before")
    before = contents(tmp_path)
    given = [option.format(run=run) for option in options]
    done = run_python(command(data, tmp_path / where, *given), timeout=100)
    assert done.returncode != 0
    assert "hdpcomm: error: " in done.stderr
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]

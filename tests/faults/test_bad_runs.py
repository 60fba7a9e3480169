"""``hdpcomm train`` with forty kinds of bad input: one line that says what to do, exit code 6, and no rank hangs.

Ranks are threads of this process, so that a case takes milliseconds; a rank that hung would fail its deadline.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from hdpcomm.cli import train as train_command
from hdpcomm.cli.main import main
from hdpcomm.data import build_data
from hdpcomm.errors import InvalidUsage
from hdpcomm.run import CheckpointFolder, RunFiles
from hdpcomm.testing import run_threads
from tests.harness.payload import Payload

SMALL = ["--layers", "1", "--hidden", "8", "--heads", "1", "--kv-heads", "1", "--ffn", "8", "--steps", "1"]
LIMITS = ["--context", "64", "--tokens-per-step", "128", "--ranks", "2", "--trackers", "none"]


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def start(job: Any, ranks: int) -> Any:
        return run_threads(train_command.run_rank, ranks, job, timeout=60.0)[0]

    monkeypatch.setattr(train_command, "ranks_of_job", start)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good data, a good run and, if transformers is here, a good model."""
    root = tmp_path_factory.mktemp("good")
    (root / "a.txt").write_text("some text " * 40)
    return root


@pytest.fixture(scope="module")
def saved(good: Path) -> Path:
    """A run that was saved after its only step."""
    patch = pytest.MonkeyPatch()
    patch.setattr(train_command, "ranks_of_job", lambda job, n: run_threads(train_command.run_rank, n, job)[0])
    assert main(["train", "--data", str(good / "a.txt"), *SMALL, *LIMITS, "--out", str(good / "run")]) == 0
    patch.undo()
    return good / "run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "good"
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def told(arguments: list[str], capfd: pytest.CaptureFixture[str], without: Collection[str] = ()) -> str:
    """What the command said; it must have refused, in one line."""
    capfd.readouterr()
    words = [*([] if "--model" in arguments else SMALL[:-2]), *SMALL[-2:], *LIMITS]
    given = zip(words[::2], words[1::2], strict=True)
    common = [word for name, value in given if name not in without for word in (name, value)]
    assert main(["train", *common, *arguments]) == 6
    shown = capfd.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.startswith("hdpcomm: error: ")]
    assert len(lines) == 1
    assert len(lines[0]) < 1200
    assert "internal error" not in lines[0]
    return lines[0]


# --- configuration --------------------------------------------------------------------------------------------------

CONFIG = {
    "stpes: 3": "Option 'stpes' is not accepted; did you mean steps?",
    "steps: 0": "0 is below 1; at least 1 was expected",
    "steps: 1e99": "is above 2^53",
    "policy: best": "'best' not among choices",
    "lr: .nan": "is not a finite number above 0",
    "compare: balanced": "--compare balanced is the policy of the run itself",
    "capacity: 8": "raise --capacity to at least 32 or --ranks to 8",
    "tokens_per_step: 10": "raise --tokens-per-step to at least 64",
    "recompute: 2": "recompute is 2; give 'none', 'full' or a number of layers from 0 to 1",
    "offload: 1M": "the model has 1 layers, of which the last two always stay on the device",
    "eval_every: 2": "--eval-every was given without held-out text",
    "{eval_every: 2, eval_fraction: 1.0}": "1.0 of the documents were to be held out; give a number between 0 and 1",
    "{eval_fraction: 0.5}": "leaves nothing to train on; give other text by --eval-data",
    "{heads: 3}": "choose hidden as a multiple of 2 x heads",
    "&a [*a]": "this file holds no options",
}


@pytest.mark.parametrize("content", CONFIG)
def test_configuration(content: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    said = {"--" + word.replace("_", "-") for word in re.findall(r"(\w+):", content)}
    line = told(["--data", str(good / "a.txt"), "--config", str(path)], capfd, without=said)
    assert CONFIG[content] in line


# --- data -----------------------------------------------------------------------------------------------------------


def write(name: str, content: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def outside(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data/passwd").symlink_to("/etc/passwd")
    return folder / "data"


def damaged_store(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"text": "some text of a line"}\n' * 9)
    build_data([folder / "a.jsonl"], folder / "store")
    tokens = folder / "store/tokens-0.bin"
    tokens.write_bytes(b"x" + tokens.read_bytes()[1:])
    return folder / "store"


DATA: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (lambda folder: folder / "none", "no such file or folder; check the path given with --data"),
    "empty": (write("a.txt", ""), "the file is empty; give a file with text in it"),
    "binary": (write("a.txt", "\0\1\2"), "this is a binary file"),
    "an empty folder": (lambda folder: folder, "this folder holds no text file"),
    "a pipe": (pipe, "this is a pipe, a socket or a device; give a file"),
    "a link that leads out": (outside, "this folder holds no text file"),
    "no JSON": (write("a.jsonl", "{"), "a.jsonl:1: this line is not JSON"),
    "deep JSON": (write("a.jsonl", "[" * 100_000), "a.jsonl:1: this JSON is nested too deeply"),
    "another field": (write("a.jsonl", '{"body": "x"}'), "choose one with --text-field or --messages-field"),
    "a message without a role": (write("a.jsonl", '{"messages": [3]}'), "an object with a 'role' and a 'content' was"),
    "no answers": (write("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}'), "conversations without an"),
    "no Parquet": (write("a.parquet", "text"), "no Parquet file, or a damaged one"),
    "single tokens": (write("a.txt", "x"), "no token of this batch has a label"),
    "a damaged store": (damaged_store, "tokens-0.bin: damaged between bytes 0 and"),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, wanted = DATA[case]
    if "Parquet" in case:
        pytest.importorskip("pyarrow")
    assert wanted in told(["--data", str(make(tmp_path))], capfd)


# --- the model's folder ---------------------------------------------------------------------------------------------


def changed(name: str, content: str | None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)

    return make


def config_with(**values: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))

    return make


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def plant(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(folder.with_name("ran"))}, folder / "pytorch_model.bin")


def listed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")


def index_of(*files: object) -> Callable[[Path], None]:
    weight_map = dict(zip(("lm_head.weight", "model.norm.weight"), files, strict=False))
    return changed("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


MODEL: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config.json": (changed("config.json", None), "is no folder with a config.json"),
    "no JSON": (changed("config.json", "{"), "config.json is no model that transformers knows"),
    "an unknown kind": (config_with(model_type="nothing"), "config.json is no model that transformers knows"),
    "a vocabulary below the tokens": (
        config_with(vocab_size=100),
        "the data has tokens up to 255 (byte)",
    ),
    "no layers": (config_with(num_hidden_layers=0), "config.json is no model that transformers knows"),
    "a million layers": (config_with(num_hidden_layers=10**6), "it has 1,000,000 layers"),
    "an unknown activation": (config_with(hidden_act="best"), "hidden_act 'best' is unknown"),
    "negative heads": (config_with(head_dim=-1), "head_dim is -1"),
    "kernels of a hub": (config_with(_attn_implementation="org/kernel"), "would load code; take it out"),
    "a list of weights": (listed, "pytorch_model.bin cannot be read as a model's weights (no plain tensors)"),
    "cut weights": (cut, "model.safetensors cannot be read as a model's weights"),
    "weights that run code": (plant, "pytorch_model.bin cannot be read as a model's weights (no plain tensors)"),
    "weights of another folder": (
        index_of("model.safetensors", "../other.safetensors"),
        "index.json: names ../other.safetensors, which is outside of this folder",
    ),
    "weights by number": (index_of(5), "index.json: no index of a model's weights"),
    "an index of nothing": (changed("model.safetensors.index.json", "[]"), "no index of a model's weights"),
    "weights of another size": (
        config_with(hidden_size=16, head_dim=16),
        "the files and the configuration are of two models",
    ),
    "a damaged tokenizer": (changed("tokenizer.json", "{"), "holds no tokenizer that transformers can load"),
    "dropout in attention": (config_with(attention_dropout=0.5), "dropout"),
}


@pytest.mark.parametrize("case", MODEL)
def test_model_folder(case: str, good: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, wanted = MODEL[case]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    make(folder)
    assert wanted in told(["--data", str(good / "a.txt"), "--model", str(folder)], capfd)
    assert not (tmp_path / "ran").exists()


# --- the checkpoint -------------------------------------------------------------------------------------------------


def remove_weights(step: Path) -> None:
    next(step.glob("*.distcp")).unlink()


def flip_weights(step: Path) -> None:
    path = next(step.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def foreign(step: Path) -> None:
    for path in step.iterdir():
        path.unlink()
    torch.save({"step": 1}, step / "model.pt")


CHECKPOINT: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "no meta.json": (changed("meta.json", None), [], "no checkpoint there is whole; give another one by --resume PATH"),
    "a deep meta.json": (changed("meta.json", "[" * 100_000), [], "no checkpoint there is whole"),
    "no weights": (remove_weights, [], "no checkpoint there is whole"),
    "a flipped bit": (flip_weights, [], "no checkpoint there is whole"),
    "of another program": (foreign, [], "no checkpoint there is whole"),
    "of another model": (lambda _: None, ["--ffn", "16"], "was saved with model="),
    "of other data": (lambda _: None, ["--context", "32"], "give the same --data, --tokenizer and --context"),
    "of another seed": (lambda _: None, ["--seed", "5"], "was saved with seed=0, and this run has 5"),
    "nowhere": (lambda _: None, ["--resume", "/no/such/run"], "/no/such/run: no such checkpoint; give a folder step-N"),
    "not asked for": (lambda _: None, ["--resume", ""], "no checkpoint of hdpcomm"),
}


@pytest.mark.parametrize("case", CHECKPOINT)
def test_checkpoint(case: str, good: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, more, wanted = CHECKPOINT[case]
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    make(run / "checkpoints/step-1")
    assert wanted in told(["--data", str(good / "a.txt"), "--out", str(run), "--resume", "auto", *more], capfd)


def test_there_are_forty() -> None:
    assert len(CONFIG) + len(DATA) + len(MODEL) + len(CHECKPOINT) >= 40


# --- the folder of the run ------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder(good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with RunFiles(run):
        before = sorted(run.iterdir())
        message = told(["--data", str(good / "a.txt"), "--out", str(run)], capfd)
        assert f"--out {run} is in use by another run (process {os.getpid()} on " in message
        assert sorted(run.iterdir()) == before
    assert not (run / ".lock").exists()
    with pytest.raises(KeyError), RunFiles(run):
        raise KeyError
    assert not (run / ".lock").exists()
    run.mkdir(exist_ok=True)
    (run / ".lock").write_text("process 1 on a host that was switched off")  # the lock of a dead process is free
    with (
        RunFiles(run),
        pytest.raises(InvalidUsage, match=f"in use by another run .process {os.getpid()}"),
        RunFiles(run),
    ):
        pass
    assert not (run / ".lock").exists()


def test_a_folder_that_cannot_be_written(good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "run", Path("/proc/run")):
        message = told(["--data", str(good / "a.txt"), "--out", str(out)], capfd)
        assert f"--out {out} cannot be written (" in message


@pytest.mark.parametrize("name", ["config.yaml", "lengths.json", "metrics.jsonl", "calibration.json", "timeline.jsonl"])
def test_a_full_disk(
    name: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file that a run writes, on a device that has no room."""
    opened = os.fdopen

    def onto_full_device(descriptor: int, mode: str, *more: Any, **options: Any) -> Any:
        if mode != "rb" and name in os.readlink(f"/proc/self/fd/{descriptor}"):
            with open("/dev/full", "wb") as full:
                os.dup2(full.fileno(), descriptor)
        return opened(descriptor, mode, *more, **options)

    monkeypatch.setattr(os, "fdopen", onto_full_device)
    assert (
        main(["train", "--data", str(good / "a.txt"), *SMALL[:-1], "3", *LIMITS, "--out", str(tmp_path / "run")]) == 1
    )
    said = capfd.readouterr().err
    assert re.search(rf"hdpcomm: error: .*{name}: .*No space left on device.*; make room", said), said
    assert "internal error" not in said


OWN = (".lock", "config.yaml", "lengths.json", "calibration.json", "metrics.jsonl", "timeline.jsonl")


@pytest.mark.parametrize("plant", ["link", "second name", "pipe"])
@pytest.mark.parametrize("name", [*OWN, "evaluations.jsonl"])
def test_a_run_writes_in_its_folder_only(
    name: str, plant: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder from somewhere else whose files lead out of it: nothing behind them is changed."""
    outside, own = tmp_path / "profile", tmp_path / "run" / name
    outside.write_text("alias x=y\n")
    own.parent.mkdir()
    if plant == "pipe":
        os.mkfifo(own)
    else:
        (own.symlink_to if plant == "link" else own.hardlink_to)(outside)
    message = told(["--data", str(good / "a.txt"), "--out", str(own.parent)], capfd)
    assert name in message
    assert "a link, pipe or device where a file of the run belongs; remove it" in message
    assert outside.read_text() == "alias x=y\n"


def test_a_checkpoint_that_finds_no_room(
    good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(CheckpointFolder, "save", limited(CheckpointFolder.save, 2000))
    try:
        assert main(["train", "--data", str(good / "a.txt"), *SMALL, *LIMITS, "--out", str(tmp_path / "run")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err
    assert re.search(
        "hdpcomm: error: a checkpoint could not be written to .*: File too large; make room there", said
    ), said
    assert not (tmp_path / "run/checkpoints").exists()


def limited(call: Callable[..., Any], most: int) -> Callable[..., Any]:
    """``call``, after which no file of this process may have more bytes."""

    def run(*arguments: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return call(*arguments, **options)

    return run


def test_a_folder_for_checkpoints_that_is_a_file(good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("")
    message = told(["--data", str(good / "a.txt"), "--out", str(tmp_path / "run")], capfd)
    assert "run/checkpoints: cannot be made (File exists); give a folder that can" in message


def test_a_rank_without_memory(good: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wide = [*SMALL[:8], "--ffn", str(10**13), "--steps", "1"]
    assert main(["train", "--data", str(good / "a.txt"), *wide, *LIMITS]) == 1
    said = capfd.readouterr().err
    assert re.search(r"hdpcomm: error: rank [01] is out of memory \(.*allocate.*\); give a smaller --capacity", said), (
        said
    )


def test_a_tracker_that_is_missing_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidUsage, match="--trackers wandb was given and wandb is not installed"):
        RunFiles(tmp_path / "run", trackers="wandb")
    assert not (tmp_path / "run").exists()

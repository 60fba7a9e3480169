"""``hdpcomm train --elastic``: ranks die, the others go on, with the losses of a run that was resumed by hand."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hdpcomm.cli.main import main
from hdpcomm.run import read_lines
from tests.harness.warm_python import Python, run_python

SIZE = ["--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24"]
LIMITS = ["--context", "300", "--tokens-per-step", "700", "--trackers", "none"]
DEATHS = int(os.environ.get("DEATHS", "2"))  # in all, two of them in a run
TOLD = re.compile(r"going on with (\d) ranks? from (?:.*/step-(\d+)|step 0, since there is no checkpoint yet)")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return str(folder)


@pytest.fixture(autouse=True)
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def command(data: str, out: Path, *options: str, steps: int) -> list[str]:
    saving = ["--out", str(out), "--steps", str(steps), *options]
    return ["-m", "hdpcomm.cli.main", "train", "--data", data, *SIZE, *LIMITS, *saving]


def losses(out: Path) -> list[tuple[int, float]]:
    """Every step in the order in which it was done, repeated ones included."""
    return [(row["step"], row["loss"]) for row in read_lines(out / "metrics.jsonl")]


def ranks_of(process: Python, count: int) -> list[psutil.Process]:
    """The ranks, of which so many live, by their number."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = [rank for rank in each.children() if rank.status() != psutil.STATUS_ZOMBIE]
                if len(ranks) == count:
                    return sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))
    raise AssertionError(f"there are not {count} ranks")


def wait_for_steps(process: Python, out: Path, count: int) -> None:
    """Until so many lines of metrics are there."""
    limit = time.monotonic() + 100
    path = out / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate(10)
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("run", range(-(-DEATHS // 2)))
def test_the_others_go_on_with_the_losses_of_a_resumed_run(data: str, tmp_path: Path, run: int) -> None:
    """Three ranks, of which two die one after the other at random moments; ``DEATHS=20``: in ten such runs, and each of
    the two is compared with a run by hand."""
    draw, out, steps = random.Random(run), tmp_path / "run", 30
    options = ["--save-every", "3", "--keep", "100", "--elastic", "--ranks", "3"]
    options += ["--zero", "1", "--dtype", "bf16"] if run % 2 == 0 else []
    process = Python(command(data, out, *options, steps=steps))
    wait_for_steps(process, out, 1)
    living = ranks_of(process, 3)
    for least, most in ((1, 6), (2, 4)):
        wait_for_steps(process, out, len(losses(out)) + draw.randint(least, most))
        time.sleep(draw.random() * 0.05)
        living.pop(draw.randrange(len(living))).kill()
    told, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert f"saved: {out}/checkpoints/step-{steps}" in told
    went_on = [(int(count), int(step or 0)) for count, step in TOLD.findall(errors)]
    assert [count for count, _ in went_on] == [2, 1], errors
    assert len(re.findall(r"rank \d died", errors)) == 2, errors
    assert "Warning" not in errors, errors
    rows, compared = losses(out), []
    for ranks, step in reversed(went_on):  # a step of the last attempt is the last line of that step
        first = max(i for i, row in enumerate(rows) if row[0] == step)
        compared.insert(0, (ranks, step, rows[first:]))
        rows = rows[:first]
    assert [step for step, _ in rows] == list(range(len(rows)))
    for ranks, step, piece in compared if DEATHS > 2 else compared[:1]:
        assert [number for number, _ in piece] == list(range(step, step + len(piece)))
        by_hand = tmp_path / f"by hand on {ranks}"
        (by_hand / "checkpoints").mkdir(parents=True)
        if step:
            shutil.copytree(out / f"checkpoints/step-{step}", by_hand / f"checkpoints/step-{step}")
        again = [*options[4:], "--ranks", str(ranks), "--resume", "auto"]
        arguments = command(data, by_hand, *(o for o in again if o != "--elastic"), steps=steps)
        run_python(arguments, timeout=100, check=True)
        if step:  # without a checkpoint, the costs are measured anew
            assert losses(by_hand)[: len(piece)] == piece


def test_without_a_checkpoint_it_begins_again_and_what_does_not_fit_is_an_error(data: str, tmp_path: Path) -> None:
    """Two ranks hold together what one does not. The one that dies is the one that wrote the files."""
    out = tmp_path / "run"
    process = Python(command(data, out, "--capacity", "150", "--elastic", "--ranks", "2", steps=1000))
    wait_for_steps(process, out, 2)
    ranks_of(process, 2)[0].kill()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 6, errors
    assert "going on with 1 rank from step 0, since there is no checkpoint yet" in errors
    assert "the longest sequence has 300 tokens, and 1 ranks with a capacity of 150" in errors


def test_torchrun_starts_all_ranks_anew(data: str, tmp_path: Path) -> None:
    out, steps = tmp_path / "run", 30
    options = ["--elastic", "--save-every", "2", "--keep", "100"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = Python([*launcher, *command(data, out, *options, steps=steps)])
    wait_for_steps(process, out, 3)
    psutil.Process(process.pid).children()[1].kill()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    rows = losses(out)
    assert sorted({step for step, _ in rows}) == list(range(steps))
    assert len(set(rows)) == steps < len(rows)  # what was done again has the same bits


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--elastic"], "--elastic was given without --out; name the folder of the run"),
        (["--elastic", "--out", "{out}", "--compare", "ddp"], "--elastic was given with --compare ddp, which cannot"),
        (["--elastic", "--out", "{out}", "--pipeline", "2", "--layers", "4"], "--elastic was given with --pipeline"),
    ],
)
def test_what_cannot_be_elastic(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    given = [option.format(out=tmp_path / "run") for option in options]
    check: Callable[[list[str]], int] = main
    assert check(["train", "--data", data, *SIZE, *LIMITS, *given]) == 6
    assert told in capsys.readouterr().err

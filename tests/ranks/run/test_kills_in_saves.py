"""Runs that are killed, all ranks at once, while a checkpoint is being written: the same command always goes on."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import psutil

from hdpcomm.run import read_lines
from tests.harness.warm_python import Python

KILLS = int(os.environ.get("HDPCOMM_TEST_SAVE_KILLS", "4"))
SIZES = ["--context", "300", "--tokens-per-step", "900", "--hidden", "32", "--layers", "2", "--ranks", "2"]
OPTIONS = ["--zero", "1", "--dtype", "bf16", "--save-every", "1", "--trackers", "none", "--resume", "auto"]


def kill_in_a_save(command: list[str], folder: Path, draw: random.Random) -> None:
    """Starts the run, and kills it at a random moment of a save after the first ones."""
    process = Python(command)
    limit, saves = time.monotonic() + 100, draw.randint(1, 3)
    seen: set[str] = set()
    while len(seen) <= saves:
        assert process.poll() is None, process.communicate(10)
        assert time.monotonic() < limit
        seen |= {path.name.split(".")[1] for path in folder.glob(".step-*")}
        time.sleep(0.0005)
    time.sleep(draw.random() * 0.03)
    tree = [psutil.Process(process.pid)]
    tree += tree[0].children(recursive=True)
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate(timeout=60)
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.wait(30)


def test_a_run_goes_on_from_any_kill(tmp_path: Path) -> None:
    """``HDPCOMM_TEST_SAVE_KILLS=100``: so many kills, at least as many saves that were cut."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"the {i}th text; " * (20 + i))
    out, draw = tmp_path / "run", random.Random(0)
    data = [str(tmp_path / f"{i}.txt") for i in range(8)]
    command = ["-m", "hdpcomm.cli.main", "train", "--data", *data, *SIZES, *OPTIONS, "--out", str(out), "--steps"]
    before = 0
    for _ in range(KILLS):
        kill_in_a_save([*command, "100000"], out / "checkpoints", draw)
        newest = max((int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")), default=0)
        assert newest >= before  # nothing that was saved is lost
        before = newest
    process = Python([*command, str(before + 3)])
    told, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert f"saved: {out}/checkpoints/step-{before + 3}" in told
    assert not list((out / "checkpoints").glob(".step-*"))
    starts = [row["step"] for row in read_lines(out / "events.jsonl") if row["event"] == "start"]
    assert starts == sorted(starts)
    assert KILLS // 2 < len(starts) <= KILLS + 1  # a few are killed while they look at what another kill has left
    assert starts[-1] == before

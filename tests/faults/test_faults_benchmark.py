"""benchmarks/faults.py: its rows, file and exit codes; never its times."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.warm_python import run_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"
KILLS = int(os.environ.get("FAULTS_KILLS", "5"))  # random points; one of each phase


def run(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return run_python([str(SCRIPT), *arguments], timeout=timeout)


def test_rows_and_file(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    done = run("--transports", "shm", "--rounds", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    kinds = ["size", "dtype", "op", "root", "order"]
    stopped = ["CommTimeout: plain", "CommTimeout: empty()"]
    assert [row["error"] for row in rows] == [*(f"Mismatch: {kind}" for kind in kinds), *stopped, "PeerLost: SIGKILL"]
    for row in rows:
        assert set(row) == {"error", "transport", "median_s", "worst_s", "limit_s", "met"}
        assert 0 <= row["median_s"] <= row["worst_s"]
        assert row["met"] == (row["worst_s"] <= row["limit_s"])
    assert done.returncode == (0 if all(row["met"] for row in rows) else 4), done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(rows)


@pytest.mark.timeout(300 + 20 * KILLS)
def test_kills(tmp_path: Path) -> None:
    file = tmp_path / "kills.json"
    arguments = ["--kills", str(KILLS), "--seed", "3", "--json", str(file)]
    done = run(*arguments, *(["--transports", "shm"] if KILLS <= 5 else []), timeout=300 + 20 * KILLS)
    written = json.loads(file.read_text())
    rows = written["rows"]
    assert (written["kills"], written["seed"]) == (KILLS, 3)
    assert {row["error"] for row in rows} == {
        f"SIGKILL: {phase}" for phase in ("traffic", "joining", "closing", "training", "saving")
    }
    assert sum(row["points"] for row in rows) == KILLS
    assert not [fault for row in rows for fault in row["faults"]], done.stderr
    assert done.returncode == (0 if all(row["met"] for row in rows) else 4), done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(rows)


# Semaphores are in /dev/shm; one that a process of another program holds, and one that nobody holds.
OTHERS = """
import _multiprocessing, sys
held = _multiprocessing.SemLock(1, 1, 1, sys.argv[1], False)
print("held", flush=True)
sys.stdin.read()
_multiprocessing.sem_unlink(sys.argv[1])
"""
LOOKS = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import killed_ranks
work = Path(sys.argv[2])
(work / "tmp").mkdir()
before = killed_ranks.things_there(work)
killed_ranks.GONE_S = 0.2
def start(name, **more):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "close_fds": True}
    process = subprocess.Popen([sys.executable, "-c", sys.argv[3], name], env=os.environ | more, **pipes)
    assert process.stdout.readline() == b"held\\n"
    return process
def looked():
    found = killed_ranks.left(work, before)  # tests beside this one may be about to map what they have made there
    return [thing for thing in found if name[1:] in thing or thing.startswith("process ")]
name = f"/mp-test-{os.getpid()}"
others = start(name)
print(looked())
others.communicate()
ours = start(name, **{killed_ranks.MARK: str(work)})
print([thing.replace(str(ours.pid), "N").replace(str(os.getpid()), "N") for thing in looked()])
ours.kill()
ours.communicate()
print([thing.replace(str(os.getpid()), "N") for thing in looked()])
os.unlink(f"/dev/shm/sem.{name[1:]}")
print(looked())
"""


def test_what_another_program_has_in_memory_is_not_left(tmp_path: Path) -> None:
    done = run_python(["-c", LOOKS, str(SCRIPT.parent), str(tmp_path), OTHERS], timeout=60)
    left = "shared memory /dev/shm/sem.mp-test-N"
    assert done.stdout.splitlines() == ["[]", str(["process N", left]), str([left]), "[]"], done.stderr


CHECKPOINTS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from hdpcomm.run.checkpoints import CheckpointFolder
from killed_ranks import checkpoint_faults
path = Path(sys.argv[2])
folder = CheckpointFolder(path, keep=3)
print(checkpoint_faults(path, 0), checkpoint_faults(path, 1))
for step in (1, 2):
    folder.save(step, {"x": torch.zeros(2)}, {})
folder.wait()
print(checkpoint_faults(path, 2), checkpoint_faults(path, 3))
"""


def test_a_checkpoint_is_missed_only_when_it_was_due(tmp_path: Path) -> None:
    done = run_python(["-c", CHECKPOINTS, str(SCRIPT.parent), str(tmp_path)], timeout=60)
    missed = [
        f"the newest checkpoint is {name}, not step-{step} or a later one" for name, step in ((None, 1), ("step-2", 3))
    ]
    assert done.stdout.splitlines() == [f"[] {[one]}" for one in missed], done.stderr


def test_bad_flags_say_so() -> None:
    done = run("--transports", "pigeon")
    assert done.returncode == 2
    assert "invalid choice: 'pigeon'" in done.stderr
    assert "give at least 1" in run("--rounds", "0").stderr
    assert "--kills -1: give at least 1" in run("--kills", "-1").stderr

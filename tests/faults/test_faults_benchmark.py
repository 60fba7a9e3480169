"""benchmarks/faults.py: its rows, file and exit codes; never its times."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import run_python

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


def test_bad_flags_say_so() -> None:
    done = run("--transports", "pigeon")
    assert done.returncode == 2
    assert "invalid choice: 'pigeon'" in done.stderr
    assert "give at least 1" in run("--rounds", "0").stderr
    assert "--kills -1: give at least 1" in run("--kills", "-1").stderr

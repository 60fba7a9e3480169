"""benchmarks/flood.py: its rows, file and exit codes; never its rates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.harness.warm_python import run_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flood.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([str(SCRIPT), *arguments], timeout=100)


def test_rows_and_file(tmp_path: Path) -> None:
    file = tmp_path / "flood.json"
    few = ["--connections", "12", "--pace", "0.1", "--rounds", "1", "--seconds", "0.05"]
    done = run(*few, "--bytes", "8", "65536", "--json", str(file))
    written = json.loads(file.read_text())
    rows = written["rows"]
    assert [row["bytes"] for row in rows] == [8, 65536], done.stderr
    assert (written["connections"], written["rounds"]) == (12, 1)
    for row in rows:
        assert min(row["none_per_s"], row["deaf_per_s"], row["rank_per_s"]) > 0
        assert row["strangers"] >= 12  # each connected at least once
        assert row["met"] == (row["lost"] <= 0.10)
    assert done.returncode == (0 if all(row["met"] for row in rows) else 4), done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(rows)


def test_bad_flags_say_so() -> None:
    assert "--rounds 0: give more than 0" in run("--rounds", "0").stderr
    assert "--bytes 0: give at least 1" in run("--bytes", "0").stderr

"""benchmarks/faults.py: its rows, file and exit codes; never its times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


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


def test_bad_flags_say_so() -> None:
    done = run("--transports", "pigeon")
    assert done.returncode == 2
    assert "invalid choice: 'pigeon'" in done.stderr
    assert "give at least 1" in run("--rounds", "0").stderr

"""benchmarks/loss.py runs, and its JSON holds every method."""

import json
from pathlib import Path

from tests.harness.warm_python import run_python

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "loss.py"


def test_runs(tmp_path):
    file = tmp_path / "loss.json"
    command = [str(BENCHMARK), "--tokens", "600", "--vocabulary", "20000", "--width", "8"]
    result = run_python([*command, "--repeat", "1", "--json", str(file)], timeout=100)
    assert result.returncode == 0, result.stderr
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows.keys() == {"torch", "fused", "chunks"}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["chunks"]["memory_bytes"] < 20000 * 600 * 4 / 2 < 20000 * 600 * 4 < rows["torch"]["memory_bytes"]

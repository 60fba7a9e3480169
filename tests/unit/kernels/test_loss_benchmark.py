"""benchmarks/loss.py runs, and its JSON holds every method."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "loss.py"


def test_runs(tmp_path):
    file = tmp_path / "loss.json"
    command = [sys.executable, str(BENCHMARK), "--tokens", "600", "--vocabulary", "20000", "--width", "8"]
    result = subprocess.run(
        [*command, "--repeat", "1", "--json", str(file)], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows.keys() == {"torch", "fused", "chunks"}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["chunks"]["memory_bytes"] < 20000 * 600 * 4 / 2 < 20000 * 600 * 4 < rows["torch"]["memory_bytes"]

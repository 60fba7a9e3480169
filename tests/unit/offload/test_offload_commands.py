"""``hdpcomm train --offload`` and benchmarks/offload.py: flags, exit codes, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from tests.harness.warm_python import run_python

BENCHMARK = Path(__file__).parents[3] / "benchmarks/offload.py"


def test_train_with_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.json"
    small = ["--ranks", "1", "--layers", "4", "--hidden", "32", "--ffn", "64", "--steps", "2"]
    sizes = ["--context", "1024", "--capacity", "1024", "--tokens-per-step", "2048"]
    assert main(["train", *small, *sizes, "--offload", "64M", "--json", str(file)]) == 0
    steps = json.loads(file.read_text())["steps"]
    assert all(step["predicted_memory_bytes"] > 0 for step in steps)
    assert all(step["memory_bytes"] > 0 for step in steps)  # ratios depend on the machine's rates: test_offload_plan.py
    assert main(["train", "--ranks", "1", "--layers", "2", "--offload", "64M"]) == 6
    assert "at least 3 layers" in capsys.readouterr().err


def test_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    command = [str(BENCHMARK), "--device", "sim", "--lengths", "64", "--ratios", "0.5,1"]
    command += ["--layers", "4", "--repeats", "1", "--pool", "8M", "--json", str(file)]
    done = run_python(command, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"none", "r=0.5", "r=1", "save_on_cpu"}
    assert rows["r=1"]["memory_bytes"] < rows["r=0.5"]["memory_bytes"] < rows["none"]["memory_bytes"]
    refused = run_python([*command, "--longest"], timeout=100)
    assert refused.returncode != 0
    assert "no limit of its own" in refused.stderr

"""``hdpcomm perf offload``, ``hdpcomm train --offload`` and benchmarks/offload.py: flags, exit codes, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from tests.harness.warm_python import run_python

RATES = {"d2h", "h2d", "both_d2h", "both_h2d", "plain_d2h", "plain_h2d", "fresh_d2h"}
BENCHMARK = Path(__file__).parents[3] / "benchmarks/offload.py"


def test_perf_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.json"
    sweep = ["perf", "offload", "--device", "sim", "-b", "64K", "-e", "256K", "-f", "2", "-n", "2"]
    assert main([*sweep, "-J", str(file)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 3
    content = json.loads(file.read_text())
    assert [row["size"] for row in content["rows"]] == [65536, 131072, 262144]
    assert all(row[name] > 0 for row in content["rows"] for name in RATES)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["offload", "--ranks", "2"], "ranks have no effect here"),
        (["offload", "-b", "0", "-e", "0"], "at least one byte"),
        (["sendrecv", "--device", "sim"], "--device belongs to offload"),
    ],
)
def test_options_without_meaning_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perf", *arguments]) == 6
    assert told in capsys.readouterr().err


def test_train_with_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.json"
    small = ["--ranks", "1", "--layers", "4", "--hidden", "32", "--ffn", "64", "--steps", "2"]
    sizes = ["--context", "1024", "--capacity", "1024", "--tokens-per-step", "2048"]
    assert main(["train", *small, *sizes, "--offload", "64M", "--json", str(file)]) == 0
    assert "to host/step" in capsys.readouterr().out
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

"""The benchmark of trees: flags, exit codes, the schema of its results; never its times."""

import json
from pathlib import Path

from tests.harness.warm_python import run_python

BENCHMARK = Path(__file__).parents[3] / "benchmarks/trees.py"


def _run(*flags):
    return run_python([str(BENCHMARK), *flags], timeout=120)


def test_a_small_batch(tmp_path):
    file = tmp_path / "trees.json"
    done = _run(
        "--prefix", "64", "--answers", "2x16,9", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--repeat", "1",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert set(found["rows"]) == {"tree", "ring", "alone"}
    for row in found["rows"].values():
        assert row["bytes"] == row["least_bytes"]
    assert found["rows"]["tree"]["pairs"] == 64 * 65 // 2 + (16 + 16 + 9) * 64 + 2 * 16 * 17 // 2 + 9 * 10 // 2
    assert "| tree |" in done.stdout


def test_bad_flags():
    assert _run("--answers", "many").returncode == 2
    assert _run("--ranks").returncode == 2

"""benchmarks/torch_backend.py runs, and its JSON holds what docs/performance.md is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    short = ["--free", "--sizes", "8", "--rounds", "1", "--iterations", "2", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "benchmarks/torch_backend.py", *short],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["bound"] is False
    operations = {row["operation"] for row in record["rows"]}
    assert operations >= {"send / recv", "batch_isend_irecv + wait", "all_reduce", "barrier", "step under FSDP2"}
    for row in record["rows"]:
        assert row["hdpcomm"] > 0
        assert row["gloo"] > 0
        assert row["operation"] in done.stdout


def test_bad_size() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/torch_backend.py", "--sizes", "8,few"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "'few' is no size" in done.stderr

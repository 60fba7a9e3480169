"""benchmarks/torch_backend.py runs, and its JSON holds what docs/communication-figures.md is made of."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.warm_python import run_python

ROOT = Path(__file__).parents[3]


def test_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    short = ["--free", "--sizes", "8", "--rounds", "1", "--iterations", "2", "--json", str(file)]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = run_python(["benchmarks/torch_backend.py", *short], cwd=ROOT, env=environment, timeout=100)
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
    done = run_python(["benchmarks/torch_backend.py", "--sizes", "8,few"], cwd=ROOT, timeout=60)
    assert done.returncode != 0
    assert "'few' is no size" in done.stderr

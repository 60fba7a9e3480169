"""benchmarks/collectives.py: its flags, exit codes and the schema of its results; never its times."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.harness.warm_python import run_python

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "collectives.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([str(SCRIPT), *arguments], timeout=100)


def test_schema(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    done = run(
        *("--ranks", "2", "--ops", "all_gather", "--sizes", "8,1K", "--rounds", "1"),
        *("--peers", "--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    assert "**all_gather, 2 ranks**" in done.stdout
    record = json.loads(path.read_text())
    assert set(record) == {"date", "machine", "rounds", "pinned", "versions", "rows"}
    rows = {(row["op"], row["bytes"], row["library"]) for row in record["rows"]}
    assert rows == {
        *(("all_gather", size, "hdpcomm") for size in (8, 1024)),
        *(("limit", size, name) for size in (8, 1024) for name in ("memcpy", "process_vm_readv")),
    }
    for row in record["rows"]:
        assert (row["language"], row["ranks"], len(row["rounds_us"])) == ("python", 2, 1)
        assert row["median_us"] > 0


def test_bad_flags_say_so(tmp_path: Path) -> None:
    done = run("--cpp", str(tmp_path))
    assert done.returncode == 2
    assert "HDPCOMM_BUILD_BENCHMARKS=ON" in done.stderr

"""The attention benchmark: its flags, exit codes and the schema of its results; never its times."""

import json
from pathlib import Path

from tests.harness.warm_python import run_python

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "attention.py"


def _run(*arguments):
    return run_python([str(SCRIPT), *arguments], timeout=100)


def test_schema(tmp_path):
    file = tmp_path / "out.json"
    done = _run(
        "--ranks", "2", "--packs", "64,2x16", "--variants", "ring", "gather", "--heads", "2", "--kv-heads", "1",
        "--head-dim", "8", "--repeat", "1", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    report = json.loads(file.read_text())
    assert set(report) == {"setting", "machine", "versions", "results"}
    assert [line["variant"] for line in report["results"]] == ["ring", "gather"]
    for line in report["results"]:
        assert (line["tokens"], line["sequences"], line["ranks"]) == (96, 3, 2)
        assert line["bytes_sent_per_rank"] > 0
        assert {"speedup", "efficiency", "exposed_share", "forward_s", "backward_s"} < set(line)


def test_bad_flags_say_so():
    done = _run("--variants", "star")
    assert done.returncode == 2
    assert "invalid choice: 'star'" in done.stderr

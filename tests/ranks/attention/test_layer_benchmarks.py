"""The benchmarks of linear layers and of bytes: flags, exit codes, the schema of their results; never their times."""

import json
from pathlib import Path

from tests.harness.warm_python import run_python

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def _run(script, *arguments):
    return run_python([str(BENCHMARKS / script), *arguments], timeout=100)


def test_time(tmp_path):
    file = tmp_path / "out.json"
    done = _run(
        "linear_attention.py", "--packs", "64,2x16", "--exchanges", "scan", "--key-heads", "1", "--head-dim", "8",
        "--hidden", "8", "--repeat", "1", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    report = json.loads(file.read_text())
    assert set(report) == {"setting", "machine", "versions", "results"}
    (line,) = report["results"]
    assert (line["what"], line["tokens"], line["ranks"], line["exchange"]) == ("layer", 96, 2, "scan")
    assert line["bytes_sent_per_rank"] > 0
    assert {"speedup", "machine_speedup", "single_s", "total_s"} < set(line)


def test_bytes_are_those_that_were_computed(tmp_path):
    file = tmp_path / "out.json"
    done = _run(
        "layer_bytes.py", "--ranks", "3", "--lengths", "60", "240", "--mla-length", "60",
        "--tree", "48", "12", "12", "12", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(file.read_text())["results"]
    by_length = {length: [line for line in lines if line["length"] == length] for length in (60, 240)}
    assert all(line["times_minimum"] == 1 for line in lines if "gather" not in line["layer"])
    for short, long in zip(by_length[60][2:], by_length[240], strict=True):
        assert short["layer"] == long["layer"]
        assert short["forward_bytes"] == long["forward_bytes"]
    softmax, recurrence, flat_softmax, flat_recurrence = lines[-4:]
    assert [line["length"] for line in lines[-4:]] == [84, 84, 180, 180]
    assert softmax["forward_bytes"] < flat_softmax["forward_bytes"]
    assert recurrence["forward_bytes"] < flat_recurrence["forward_bytes"]
    latent, kv = by_length[60][:2]
    assert kv["forward_bytes"] * 576 == latent["forward_bytes"] * 16 * (192 + 128)


def test_bad_flags_say_so():
    done = _run("linear_attention.py", "--exchanges", "pigeon")
    assert done.returncode == 2
    assert "invalid choice: 'pigeon'" in done.stderr

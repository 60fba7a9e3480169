"""`benchmarks/gpu.sh` where there is no GPU: exit codes, records, limits; its scripts on the CPU on small sizes."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hdpcomm.testing import run_threads

TOP = Path(__file__).resolve().parents[2]
SCRIPTS = ("main", "common", "kernels", "cross_entropy", "exchange", "ring", "sanitizer_driver")


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a module of benchmarks/gpu, as a script there imports its neighbours."""
    monkeypatch.syspath_prepend(str(TOP / "benchmarks/gpu"))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def on_cpu(script, monkeypatch):
    """As ``script``, with the CPU in place of the GPU: no time is measured."""
    common = script("common")
    monkeypatch.setattr(common, "CUDA", torch.device("cpu"))

    def seconds(call, **_):
        call(0)
        call(1)
        return 0.5

    monkeypatch.setattr(common, "seconds", seconds)
    monkeypatch.setattr(common, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 100)
    return script


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert isinstance(end, Event)
        return 2.0


def sound(rows):
    """Every row has what the table prints, and what main.py writes."""
    assert rows
    for row in json.loads(json.dumps(rows)):
        assert set(row) == {"name", "value", "unit", "target", "met"}
        assert isinstance(row["value"], float)
        assert row["met"] in (True, False, None)
        assert (row["met"] is None) == (row["target"] == "")
        assert len(row["name"]) <= 58
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row["value"] for row in rows}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path):
    done = subprocess.run(
        ["bash", str(TOP / "benchmarks/gpu.sh"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.startswith("no GPU: ")
    assert done.stderr.endswith("Nothing was run.\n")
    assert not (tmp_path / "out").exists()


def test_flags(script, capsys):
    main = script("main")
    with pytest.raises(SystemExit, match="2"):
        main.main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
    names = [part.name for part in main.all_parts()]
    assert names[:9] == [
        "build", "tests", "memcheck", "racecheck", "synccheck", "kernels", "cross_entropy", "exchange", "ring",
    ]  # fmt: skip
    assert main.TOTAL_S < 540


def python(main, name, code, limit_s=20.0, **more):
    return main.Part(name, (sys.executable, "-c", code, "{json}"), limit_s, **more)


ROW = '{"name": "speed", "value": 2.5, "unit": "GB/s", "target": ">= 2", "met": %s}'
WRITE = "import sys; open(sys.argv[1], 'w').write('{\"rows\": [" + ROW.replace('"', '\\"') + "]}')"


def run(main, out, *parts, total_s=60.0):
    main.versions = lambda: {"torch": "none"}  # importing torch in another process takes seconds
    code = main.run_all(list(parts), out, {"device": "none", "date": "today"}, total_s)
    return code, json.loads((out / "gpu.json").read_text())


@pytest.mark.parametrize(("met", "code"), [("true", 0), ("false", 4)])
def test_rows_reach_the_table_and_the_file(script, tmp_path, capsys, met, code):
    main = script("main")
    got, result = run(main, tmp_path / "new", python(main, "good", WRITE % met))
    assert got == code
    assert result["device"] == "none"
    assert result["versions"]["torch"] == "none"
    assert result["parts"][0]["status"] == "ok"
    assert result["parts"][0]["rows"][0]["value"] == 2.5
    printed = capsys.readouterr().out
    assert "speed" in printed
    assert ("NO" in printed) == (met == "false")


def test_versions_are_those_that_run(script):
    found = script("main").versions()
    assert found["torch"] == torch.__version__
    assert {"python", "machine", "hdpcomm"} <= set(found)


def test_a_part_that_fails_costs_only_itself(script, tmp_path, capsys):
    main = script("main")
    got, result = run(
        main, tmp_path,
        python(main, "crash", "import os, sys; print('why it crashed'); sys.stdout.flush(); os.abort()"),
        python(main, "hang", "import time; time.sleep(60)", 1.2),
        python(main, "garbled", "import sys; open(sys.argv[1], 'w').write('no json')"),
        main.Part("absent", ("/nonexistent",), 5.0),
        python(main, "tool", "", missing="it is not installed"),
        python(main, "good", WRITE % "true"),
    )  # fmt: skip
    assert got == 1
    statuses = {record["part"]: record["status"] for record in result["parts"]}
    assert statuses == {
        "crash": "failed", "hang": "timeout", "garbled": "failed", "absent": "failed", "tool": "missing", "good": "ok",
    }  # fmt: skip
    notes = {record["part"]: record["note"] for record in result["parts"]}
    assert "exit code -6" in notes["crash"]
    assert notes["hang"] == "stopped after 1 s"
    assert "cannot be read" in notes["garbled"]
    assert notes["tool"] == "it is not installed"
    assert "why it crashed" in (tmp_path / "gpu.log").read_text()
    assert "stopped after" in capsys.readouterr().out


def test_no_part_runs_past_the_whole_limit(script, tmp_path):
    main = script("main")
    late = python(main, "late", "")
    got, result = run(main, tmp_path, python(main, "slow", "import time; time.sleep(60)"), late, total_s=1.5)
    assert got == 1
    assert [record["status"] for record in result["parts"]] == ["timeout", "skipped"]


def test_what_a_part_leaves_running_ends_with_it(script, tmp_path):
    main = script("main")
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid)"
    run(main, tmp_path, python(main, "parent", child))
    pid = int((tmp_path / "gpu.log").read_text().splitlines()[-1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_kernel_figures(on_cpu, monkeypatch):
    module = on_cpu("kernels")
    for name, value in (("TOKENS", 8), ("HEADS", 2), ("DIM", 8), ("LENGTHS", [3, 8]), ("BUFFER_BYTES", 4096)):
        monkeypatch.setattr(module, name, value)
    values = sound(module.measure())
    assert values["copy, read and write"] == 1.0
    assert len(values) == 13
    # bytes of the merge: out and lse read and written, the block read
    assert values["merge of a float32 block: share of the copy"] == 8 * 2 * (8 * 12 + 12) / 0.5 / 1e9


def test_cross_entropy_figures(on_cpu, monkeypatch):
    module = on_cpu("cross_entropy")
    monkeypatch.setattr(module, "TOKENS", 100)
    monkeypatch.setattr(module, "COLUMNS", 50)
    values = sound(module.measure())
    assert values["cross-entropy: loss, relative to torch's"] < 1e-4
    assert values["cross-entropy: faster than torch unfused"] == 1.0
    assert values["cross-entropy: memory beside the logits"] == 0.0


def test_every_kernel_of_the_sanitizer_driver_runs(on_cpu, monkeypatch, capsys):
    module = on_cpu("sanitizer_driver")
    monkeypatch.setattr(module, "CUDA", torch.device("cpu"))
    assert module.main() == 0
    assert "every kernel ran" in capsys.readouterr().out


def _exchange_on_a_rank(module):
    import hdpcomm as hdp

    with hdp.init() as comm:
        assert module.one_way(comm, 8, 3) > 0
        assert module.both_ways(comm, 1 << 16, 3) > 0


def test_exchange_bodies(on_cpu):
    module = on_cpu("exchange")
    run_threads(_exchange_on_a_rank, 2, module)
    assert module.memcpy(8, 2) == 0.5


def test_exchange_rows(on_cpu, monkeypatch):
    module = on_cpu("exchange")
    found = {"small": 1.0, "large": 1.0, "both": 1.0, "beside": 1.0}
    for name in ("run_threads", "spawn"):
        monkeypatch.setattr(module, name, lambda *_, **__: [found, found])
    values = sound(module.measure())
    assert values["threads: 8 B, times cudaMemcpyAsync"] == 2.0


def _ring_on_a_rank(module):
    import hdpcomm as hdp

    with hdp.init() as comm:
        wrong = module.error(comm, [30, 1, 33])
        assert module.step_seconds(comm, comm.barrier, steps=1) > 0
        assert module.step_seconds(module.Silent(comm), comm.barrier, steps=1) > 0
        return wrong


def test_ring_bodies(on_cpu, monkeypatch):
    module = on_cpu("ring")
    for name, value in (("TOKENS", 32), ("HEADS", 4), ("KV_HEADS", 2), ("DIM", 16)):
        monkeypatch.setattr(module, name, value)
    assert max(run_threads(_ring_on_a_rank, 2, module)) < module.TOLERANCE


def test_ring_rows(on_cpu, monkeypatch):
    module = on_cpu("ring")
    found = {"error": 0.001, "step": 2.0, "silent": 1.9}
    for name in ("run_threads", "spawn"):
        monkeypatch.setattr(module, name, lambda *_, **__: [found, found])
    values = sound(module.measure())
    assert values["ring, 4 threads: exposed communication"] == pytest.approx(0.05)

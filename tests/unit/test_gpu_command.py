"""`benchmarks/gpu.sh` where there is no GPU: exit codes, records, limits; its scripts on the CPU on small sizes."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch

from hdpcomm.offload import ActivationOffload
from hdpcomm.plan import CostModel
from hdpcomm.testing import run_threads
from tests.harness.native import _testing

TOP = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "main", "common", "build", "kernels", "cross_entropy", "exchange", "ring", "graph", "activations", "offload",
    "sanitizer_driver", "step", "queues", "train",
)  # fmt: skip


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
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 100)
    return script


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert isinstance(end, Event)
        return 2.0


class Stream:
    cuda_stream = 1

    def wait_stream(self, stream):
        assert stream is not self


class Driver:
    """Memory operations that run at once; none waits."""

    def cuStreamBatchMemOp_v2(self, stream, count, batch, flags):
        assert (stream.value, flags.value) == (1, 0)
        for each in batch[: count.value]:
            flag = ctypes.c_uint32.from_address(each.address)
            if each.kind == 2:
                flag.value = each.value
        return 0


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


def measured(module):
    groups = module.GROUPS
    if isinstance(groups, dict):
        groups = [each for named in groups.values() for each in named]
    rows, failed = sys.modules["common"].collect(groups, lambda _: None)
    assert failed == 0
    return rows


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
    batches = main.all_parts()
    assert [[part.name for part in batch] for batch in batches] == [
        ["build"], ["train"], ["train_mixed"], ["train_long"],
        ["kernels"], ["cross_entropy"], ["exchange"], ["ring"], ["ring4"], ["graph"],
        ["test_training"], ["test_transport"], ["test_zero"], ["test_torch_backend"], ["test_nccl"],
        ["test_commands"], ["queues"],
        ["test_attention", "test_device", "test_experts", "test_kernels", "test_offload",
         "memcheck", "racecheck", "synccheck"],
        ["offload"], ["calibrate"],
    ]  # fmt: skip
    assert main.TOTAL_S < 540
    for part in (part for batch in batches for part in batch):
        files = [word for word in part.command if word.endswith(".py")]
        assert all((TOP / name).is_file() for name in files), part


def python(main, name, code, limit_s=20.0, **more):
    return main.Part(name, (sys.executable, "-c", code, "{json}"), limit_s, **more)


ROW = '{"name": "speed", "value": 2.5, "unit": "GB/s", "target": ">= 2", "met": %s}'
WRITE = "import sys; open(sys.argv[1], 'w').write('{\"rows\": [" + ROW.replace('"', '\\"') + "]}')"


def run(main, out, *parts, total_s=60.0):
    main.versions = lambda: {"torch": "none"}  # importing torch in another process takes seconds
    code = main.run_all([[part] for part in parts], out, {"device": "none", "date": "today"}, total_s)
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


def test_runs_into_one_folder_are_merged(script, tmp_path, monkeypatch):
    main = script("main")
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write({{!r}}); "
    parts = [
        python(main, "first", note.format("1") + WRITE % "true"),
        python(
            main,
            "second",
            note.format("2") + f"import pathlib; assert pathlib.Path({str(tmp_path / 'good')!r}).exists()",
        ),
    ]
    gpu = {"device": "one", "driver": "5"}
    monkeypatch.setattr(main, "all_parts", lambda: [[part] for part in parts])
    monkeypatch.setattr(main, "find_gpu", lambda: (gpu, ""))
    monkeypatch.setattr(main, "versions", lambda: {"torch": "none"})
    monkeypatch.setattr(main, "commit", lambda: "abc")
    assert main.main([str(tmp_path)]) == 1
    assert ran.read_text() == "12"
    (tmp_path / "good").touch()
    assert main.main([str(tmp_path), "--missing"]) == 0
    assert ran.read_text() == "122"
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [(part["part"], part["status"]) for part in result["parts"]] == [("first", "ok"), ("second", "ok")]
    assert result["commit"] == "abc"
    assert main.main([str(tmp_path), "--only", "first"]) == 0
    assert [part["part"] for part in json.loads((tmp_path / "gpu.json").read_text())["parts"]] == ["second", "first"]
    gpu["driver"] = "6"  # then nothing of before counts
    assert main.main([str(tmp_path), "--missing"]) == 0
    assert ran.read_text() == "122112"


def test_ctrl_c_ends_the_parts_that_run(script, tmp_path, monkeypatch, capsys):
    """They are sessions of their own. Unheard, the command would wait for their limits, longer than this test may."""
    main = script("main")
    code = "import os, subprocess, sys, time; out = sys.argv[1]\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    code += "open(out + '.new', 'w').write(f'{os.getpid()} {child.pid}'); os.rename(out + '.new', out + '.pids')\n"
    code += "time.sleep(600)"
    batch = [python(main, name, code, 600.0) for name in ("a", "b")]
    files = [tmp_path / f"{part.name}.rows.json.pids" for part in batch]

    def interrupt():
        until = time.monotonic() + 60
        while not all(file.exists() for file in files) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(main, "all_parts", lambda: [batch, [python(main, "never", "")]])
    monkeypatch.setattr(main, "find_gpu", lambda: ({"device": "none"}, ""))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        assert main.main([str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err
    assert f"interrupted; what had ended is in {tmp_path}" in told
    assert "never" not in told
    for file in files:
        for pid in map(int, file.read_text().split()):
            assert ends(pid)


def ends(pid):
    """Whether a process that was killed ends; nobody may be there to reap the child of a part."""
    until = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
    return True


def test_parts_of_a_batch_run_at_the_same_time(script, tmp_path):
    main = script("main")
    main.versions = lambda: {"torch": "none"}
    meet = "import pathlib, sys, time; here = pathlib.Path(sys.argv[1]).parent; (here / '{0}').touch()\n"
    meet += "while not (here / '{1}').exists(): time.sleep(0.01)"
    batch = [python(main, name, meet.format(name, other)) for name, other in (("a", "b"), ("b", "a"))]
    assert main.run_all([batch], tmp_path, {}, 20.0) == 0
    log = (tmp_path / "gpu.log").read_text()
    assert "=== a: ok" in log
    assert "=== b: ok" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "gpu.json", "gpu.log"]


def test_places_in_commands(script, tmp_path):
    main = script("main")
    code = "import os, sys; open(sys.argv[1] + '/made', 'w').write(os.environ['PYTHONPATH'])"
    part = main.Part("made", (sys.executable, "-c", code, "{out}"), 20.0)
    got, _ = run(main, tmp_path, part)
    assert got == 0
    assert (tmp_path / "made").read_text().split(":")[0] == str(TOP)


def test_a_group_that_fails_costs_only_itself(on_cpu, capsys):
    common = on_cpu("common")
    kept = []
    groups = [lambda: [common.row("a", 1.0, "s")], lambda: 1 / 0, lambda: [common.row("b", 2.0, "s", at_most=1.0)]]
    rows, failed = common.collect(groups, lambda so_far: kept.append(len(so_far)))
    assert ([each["name"] for each in rows], failed, kept) == (["a", "b"], 1, [1, 1, 2])
    assert rows[1]["met"] is False
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_build_names_the_architecture_and_this_python(script):
    words = script("build").arguments("90")
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in words
    assert f"-DPython_EXECUTABLE={sys.executable}" in words
    assert f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={TOP / 'hdpcomm'}" in words
    assert words[3:5] == ["-B", str(TOP / f"build/gpu-{sys.implementation.cache_tag}-90")]


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
    values = sound(measured(module))
    assert values["copy, read and write"] == 1.0
    assert len(values) == 11
    # bytes of the merge: out and lse read and written, the block read
    assert values["merge of a float32 block: share of the copy"] == 8 * 2 * (8 * 12 + 12) / 0.5 / 1e9


def test_cross_entropy_figures(on_cpu, monkeypatch):
    module = on_cpu("cross_entropy")
    monkeypatch.setattr(module, "TOKENS", 100)
    monkeypatch.setattr(module, "COLUMNS", 50)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    values = sound(measured(module))
    assert values["cross-entropy: loss, relative to torch's"] < 1e-4
    assert values["cross-entropy: faster than torch unfused"] == 1.0
    assert values["cross-entropy: memory beside the logits"] == 0.0
    assert values["cross-entropy: faster than torch.compile"] == 1.0
    assert values["cross-entropy fp32: over unfused; Liger's public is 2.64"] == 1.0


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
        assert module.landing(comm, 1 << 16, 3) > 0
        assert module.product_beside(comm) == 1.0
        for name in module.REDUCTIONS:
            assert module.all_reduce(comm, 1 << 16, name, 3) > 0
        assert module.host_seconds(comm, comm.barrier) > 0


def test_exchange_bodies(on_cpu, monkeypatch):
    module = on_cpu("exchange")
    for name, value in (("SIDE", 32), ("PRODUCTS", 2), ("BESIDE_THEM", 5), ("LARGE", 1 << 14)):
        monkeypatch.setattr(module, name, value)
    run_threads(_exchange_on_a_rank, 2, module, transport="sim")
    assert module.memcpy(8, 2) == 0.5


def test_exchange_rows(on_cpu, monkeypatch):
    module = on_cpu("exchange")
    names = ("small", "small both", "small host", "small graph", "large", "landing", "both", "beside")
    found = dict.fromkeys(names, 1.0)
    found |= {f"{name} {size}": 1.0 for name in module.REDUCTIONS for size in ("small", "large")}
    monkeypatch.setattr(module, "spawn", lambda *_, **__: [found] * 2)
    monkeypatch.setattr(module, "calls_of_the_driver", lambda: {"cuEventRecord": 1e-6})
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setattr(module, "LARGE", 1 << 14)
    values = sound(measured(module))
    assert values["processes: 8 B, times cudaMemcpyAsync"] == 2.0
    assert values["64 MiB in turns by a flag each way: share"] == 1.0
    monkeypatch.setenv("HDPCOMM_MPS", "1")
    assert "processes, MPS: message of 8 B" in sound(measured(module))


def small_steps(module, monkeypatch):
    sizes = {"vocabulary": 64, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "tied_embeddings": False}
    for name, value in (
        ("DEVICE", "cpu"), ("LAYER", sizes), ("MIXED", [96, 40, 17, 3, 2]), ("LONG", [512]), ("STEPS", 1),
        ("MEASURED", 32), ("POOL_BYTES", 16 << 20), ("product_flops", lambda: 1e11),
        ("ActivationOffload", lambda pool, model: ActivationOffload(pool, model, min_bytes=1)),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "spawn", lambda fn, ranks, *given, **_: run_threads(fn, ranks, *given, transport="sim"))


def test_training_steps_of_one_rank(on_cpu, monkeypatch):
    module = on_cpu("step")
    small_steps(module, monkeypatch)
    monkeypatch.setenv("HDPCOMM_TRANSPORT", "shm")
    values = sound(module.one_rank())
    assert values["1 rank, mixed against FSDP2: loss differs by"] <= 1e-3
    assert values["1 rank, mixed: share of the matrix peak"] > 0
    # Passes behind which copies hide: measured ones of a busy machine may not, and then nothing is offloaded.
    monkeypatch.setattr("hdpcomm.measure.memory.profile_cost_model", lambda *_, **__: CostModel(1e-9, 1.0))
    values = sound(module.with_offload())
    assert values["1 rank, 64K, offload: loss differs by"] <= 1e-3
    assert 0 < values["1 rank, 64K, offload: ratio"] <= 1


def test_training_steps_of_two_ranks(on_cpu, monkeypatch):
    module = on_cpu("step")
    small_steps(module, monkeypatch)
    monkeypatch.setattr(module, "on_torch", module.on_hdpcomm)
    monkeypatch.setenv("HDPCOMM_MPS", "1")

    def rival(comm, lengths, capacity):
        return module.hybrid(comm, lengths, capacity)

    values = sound(module.two_ranks("mixed", module.MIXED, "FSDP2", rival))
    assert values["2 processes, MPS, mixed: ranks of the longest sequence"] == 2
    assert values["2 processes, MPS, mixed against FSDP2: loss differs by"] <= 1e-3


def test_streams_that_are_held_up(on_cpu, monkeypatch):
    module = on_cpu("queues")

    def shared(_):
        device = _testing.TestDevice(0)
        device.share_queues(5)
        return device

    monkeypatch.setattr(module, "open_cuda", shared)
    monkeypatch.setattr(module, "spawn", lambda fn, ranks, *given, **_: [fn(*given)] * ranks)
    monkeypatch.setenv("HDPCOMM_MPS", "1")
    values = sound(measured(module))
    assert values["processes, MPS, queues not set: held up, copy from host"] == 5
    assert len(values) == 16


def test_groups_by_name(on_cpu, monkeypatch, capsys):
    common = on_cpu("common")
    groups = {name: [lambda name=name: [common.row(name, 1.0, "s")]] for name in ("a", "b")}
    monkeypatch.setattr(sys, "argv", ["x.py", "--groups", "b"])
    with pytest.raises(SystemExit, match="0"):
        common.main("x", groups)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["b"]


@pytest.mark.parametrize("service", [True, False])
def test_the_service_that_lets_processes_share_a_gpu(service, tmp_path):
    """A stand-in for its control program notes how it is called; without it, the command runs all the same."""
    note = tmp_path / "note"
    if service:
        (tmp_path / "nvidia-cuda-mps-control").write_text(
            f'#!/bin/sh\necho "$@ $(test "$1" = -d || cat)" >> {note}\necho $CUDA_MPS_PIPE_DIRECTORY >> {note}\n'
        )
        (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    code = (
        "import os, sys; print(os.environ.get('HDPCOMM_MPS'), os.environ.get('CUDA_MPS_PIPE_DIRECTORY')); sys.exit(3)"
    )
    done = subprocess.run(
        [sys.executable, str(TOP / "benchmarks/gpu/with_mps.py"), sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 3
    runs, folder = done.stdout.split()
    if service:
        assert runs == "1"
        assert note.read_text().split() == ["-d", folder, "quit", folder]
        assert not Path(folder).exists()
    else:
        assert (runs, folder) == ("None", "None")
        assert "processes get time slices" in done.stderr


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
    assert max(run_threads(_ring_on_a_rank, 2, module, transport="sim")) < module.TOLERANCE


def test_ring_rows(on_cpu, monkeypatch):
    module = on_cpu("ring")
    found = {"error": 0.001, "step": 2.0, "silent": 1.9}
    monkeypatch.setattr(module, "spawn", lambda *_, **__: [found, found])
    values = sound(measured(module))
    assert values["ring, 4 processes: exposed communication"] == pytest.approx(0.05)


def _graph_on_a_rank(module):
    import hdpcomm as hdp

    with hdp.init() as comm:
        step, kv, result = module.ring_step(comm)
        kv.fill_(1.0)
        comm.barrier()
        assert module.host_seconds(comm, step) > 0
        return result.clone()


def test_graph_bodies(on_cpu, monkeypatch):
    module = on_cpu("graph")
    for name, value in (("HEADS", 2), ("TOKENS", 16), ("DIM", 8)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "CUDA", torch.device("cpu"))
    for result in run_threads(_graph_on_a_rank, 2, module, transport="sim"):
        assert (result == 2.0).all()  # the mean of ones, of its own and of what landed


def test_graph_rows(on_cpu, monkeypatch):
    module = on_cpu("graph")
    found = {"eager": 300.0, "replayed": 20.0, "differs": 0.0}
    monkeypatch.setattr(module, "spawn", lambda *_, **__: [found, found])
    assert sound(measured(module))["ring step: host time over the graph's"] == 15.0


def test_offload_figures(on_cpu, monkeypatch):
    module = on_cpu("activations")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 << 20, 64 << 20))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=1 << 30))
    small = {"DEVICE": "sim", "POOL": "64M", "COPY_BYTES": 1 << 16, "MEDIUM": 256, "LONG": 512, "SHORT": 128}
    for name, value in (small | {"PROBE": 64, "K": 16, "CAP_BYTES": 4e6}).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.bench, "longest_of", lambda *arguments: arguments[2])
    values = sound(measured(module))
    assert values["offload: D2H, share of it"] > 0
    assert values["16K tokens, 8 layers: r=0.5, activation memory saved"] > 0.2
    assert values["32K tokens: r=1, activation memory saved"] > 0.3
    assert (
        values["longest sequence in 40 GB, 8 layers, r=1"]
        > values["longest sequence in 40 GB, 8 layers, without offload"]
    )


def test_the_longest_sequence_is_found(on_cpu):
    bench = on_cpu("activations").bench

    class Limited:
        def measure(self, method, tokens, _context, _base):
            error = "out of memory" if tokens > 41_000 else ""
            return bench.Row(method, tokens, 1.0, 1, None, None, error)

    assert bench.longest_of(Limited(), 0.0, 30_000) > 36_000
    assert 36_000 < bench.longest_of(Limited(), 1.0, 80_000) <= 41_000
    Limited.measure = lambda *arguments: bench.Row(arguments[1], arguments[2], None, None, None, None, "no")
    assert bench.longest_of(Limited(), 1.0, 8192) == 0


def test_the_service_ends_with_a_part_that_is_killed(tmp_path):
    note, folder = tmp_path / "note", tmp_path / "folder"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\n[ "$1" = -d ] || cat >> {note}\n')
    control.chmod(0o755)
    code = f"import os, time; open('{folder}', 'w').write(os.environ['CUDA_MPS_PIPE_DIRECTORY']); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, str(TOP / "benchmarks/gpu/with_mps.py"), sys.executable, "-c", code],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (folder.exists() and folder.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # as main.py ends a part
    process.wait()
    while (not note.exists() or Path(folder.read_text()).exists()) and time.monotonic() < until:
        time.sleep(0.01)
    assert note.read_text() == "quit\n"
    assert not Path(folder.read_text()).exists()

"""``hdpcomm perf`` as a command: its output, files and exit codes, and other libraries. Never checks times."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.comm import Communicator
from hdpcomm.perf.config import PerfConfig
from tests.harness.warm_python import Python, run_python

ROOT = Path(__file__).parents[3]


def perf(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    variables = dict(os.environ) | environment
    return run_python(["-m", "hdpcomm.cli.main", "perf", *arguments], timeout=100, env=variables, cwd=ROOT)


def test_table_and_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    arguments = ("allreduce_perf", "--ranks", "2", "-b", "8", "-e", "1K", "-f", "128", "-n", "2", "-I", "-t", "1")
    done = perf(*arguments, "-J", str(path), SECRET_TOKEN="s3cret", HDPCOMM_LIVENESS_S="0.3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# hdpcomm version ")
    assert any(line.startswith("#  Rank  1 Group  0 Pid ") for line in lines)
    header = next(line for line in lines if "size" in line and "#wrong" in line)
    side = ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"]
    assert header.split() == ["#", "size", "count", "type", "redop", "root", *side, *side]
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert [row[:5] for row in rows] == [["8", "2", "float", "sum", "-1"], ["1024", "256", "float", "sum", "-1"]]
    assert all(len(row) == 5 + 2 * len(side) and row[8] == row[16] == "0" for row in rows)
    assert any(line.startswith("# Out of bounds values : 0 OK") for line in lines)
    assert any(line.startswith("# Avg bus bandwidth    : ") for line in lines)
    document = json.loads(path.read_text())
    assert set(document) >= {
        "version", "start_time", "args", "env", "nccl_version", "config", "results", "out_of_bounds",
        "average_bus_bandwidth", "errors", "end_time",
    }  # fmt: skip
    assert document["version"] == 4
    assert "HDPCOMM_LIVENESS_S=0.3" in document["env"]
    assert "s3cret" not in path.read_text()
    assert [device["rank"] for device in document["config"]["devices"]] == [0, 1]
    first = document["results"][0]
    assert set(first["out_of_place"]) == {"time", "alg_bw", "bus_bw", "nwrong"}
    assert {"min_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct", "times_us"} <= set(first["in_place_per_iter"])
    assert (first["size"], first["count"], first["actual_iterations"]) == (8, 2, 2)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank of a launcher's job, so that a command runs here."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


SMALL = ["perf", "all_reduce", "-b", "8", "-e", "64", "-f", "8", "-n", "2", "-I", "1"]


@pytest.mark.usefixtures("alone")
def test_cycles(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert main([*SMALL, "-N", "2", "-J", str(path)]) == 0
    assert len(json.loads(path.read_text())["results"]) == 4


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_ranks_of_srun(tmp_path: Path) -> None:
    """Two tasks of a Slurm step on one host, without torchrun's variables."""
    path = tmp_path / "r.json"
    command = ["-m", "hdpcomm.cli.main", *SMALL, "-J", str(path)]
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"PMI_SIZE": "2", "MASTER_PORT": free_port()}
    ranks = [
        Python(
            command,
            env=dict(os.environ) | step | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK"), str(rank)),
            merged=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [output.count("# Avg bus bandwidth") for output in outputs] == [1, 0]
    document = json.loads(path.read_text())
    assert [(device["rank"], device["device"]) for device in document["config"]["devices"]] == [(0, 0), (1, 1)]
    assert [row["size"] for row in document["results"]] == [8, 64]


class OnGpu:
    """A world of one rank, with the members that the header reads."""

    rank, size, device = 0, 1, torch.device("cuda", 3)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(x)


def test_the_device_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from hdpcomm.perf import runner

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU model {device.index}")
    (found,) = runner._devices(OnGpu(), PerfConfig("all_reduce"))  # type: ignore[arg-type]
    assert (found.rank, found.pid, found.device) == (0, os.getpid(), 3)
    assert (found.device_hex, found.device_info) == ("cuda:3", "GPU model 3")
    with hdp.init(transport="sim") as world:
        (found,) = runner._devices(world, PerfConfig("all_reduce"))
    assert (found.device, found.device_hex) == (0, "cpu")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 7),
        (RuntimeError("broken"), 1),
        (hdp.DeviceError("no device"), 2),
        (hdp.PeerLost("gone"), 3),
        (hdp.Mismatch("other call"), 3),
        (hdp.CommTimeout("slow"), 4),
        (hdp.InvalidUsage("bad"), 6),
    ],
)
def test_exit_codes_of_failures(
    error: Exception | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    original = Communicator.all_reduce

    def failing(self: Communicator, x: Any, *args: Any, **options: Any) -> Any:
        if error is not None:
            raise error
        work = original(self, x, *args, **options)
        options.get("out", x)[0] = -1
        return work

    monkeypatch.setattr(Communicator, "all_reduce", failing)
    path = tmp_path / "r.json"
    assert main([*SMALL, "-J", str(path)]) == code
    told = capsys.readouterr()
    document = json.loads(path.read_text())
    if error is None:
        assert "# Out of bounds values : 4 FAILED" in told.out
        assert document["out_of_bounds"] == {"count": 4, "okay": "false"}
        assert document["errors"] == []
    else:
        assert document["errors"] == [f"{type(error).__name__}: {error}"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["all_reduce", "--bogus"], 6, "unrecognized arguments: --bogus"),
        (["all_reduce", "-b", "8x"], 6, "'8x' is no size"),
        (["all_reduce", "-b", "8", "-e", "4"], 6, "-b 8 is above -e 4"),
        (["all_reduce", "-g", "2"], 6, "--ranks N starts N of them; give 1"),
        (["all_reduce", "-t", "0"], 6, "--ranks N starts N of them; give 1"),
        (["all_reduce", "-i", "1", "-f", "2"], 6, "not allowed with"),
        (["all_reduce", "-R", "2"], 6, "give 0 or 1"),
        (["all_reduce", "-n", "0"], 6, "argument -n/--iters: 0 is below 1"),
        (["all_reduce", "-w", "x"], 6, "argument -w/--warmup_iters: 'x' is not a whole number"),
        (["all_reduce", "--subset", "0,x"], 6, "like 0,3,1"),
        (["all_reduce", "-J", "/nowhere/x.json"], 6, "does not exist"),
        (["all_reduce", "-o", "median"], 6, "unknown; give one of: sum"),
        (["all_reduce", "-r", "0"], 6, "all_reduce has no root"),
        (["all_gather", "-o", "sum"], 6, "does not reduce"),
        (["nonsense"], 6, "invalid choice: 'nonsense'"),
        ([], 6, "arguments are required: OP"),
        (["all_reduce", "-o", "mulsum"], 6, "mulsum: unknown"),
        (["all_reduce", "-d", "f8e4m3"], 6, "unknown element type"),
    ],
)
def test_bad_usage(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = main(["perf", *arguments])
    except SystemExit as end:
        got = int(end.code or 0)
    assert got == code
    assert message in capsys.readouterr().err

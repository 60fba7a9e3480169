"""The environments of srun, mpirun and mpiexec, and what is missing in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm._core import device
from hdpcomm.cli.main import main
from hdpcomm.comm.launchers import (
    agent_restarts,
    first_host,
    joined,
    local_place,
    master,
    place,
    rank_and_size,
    tasks_on_node,
)
from hdpcomm.comm.machine import Machine
from hdpcomm.offload import rank_pool

PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "WORLD_SIZE", "RANK", "LOCAL_")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def use(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}
SLURM |= {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[007-010]"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_alone() -> None:
    assert place() is None
    with pytest.raises(hdp.InvalidUsage, match=r"MASTER_PORT is not set.*torchrun"):
        master()


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **SLURM)
    found = place()
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("srun", 5, 8, 1)
    address, port = master()
    assert address == "gpu007"
    assert 20_000 <= port < 30_000
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert master() == (address, port)  # the same on all ranks
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert master()[1] != port  # and another one in the next step
    use(monkeypatch, MASTER_ADDR="10.0.0.9", MASTER_PORT="2345")
    assert master() == ("10.0.0.9", 2345)


ONE_HOST = {
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "job1",
    },
    "MPICH": {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
    "srun": {
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    },
}


@pytest.mark.parametrize("launcher", ONE_HOST)
def test_one_host_needs_no_address(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    use(monkeypatch, **ONE_HOST[launcher])
    assert joined()
    assert (rank_and_size(), local_place(2, 4)) == ((2, 4), (2, 4))
    address, port = master()
    assert address == "127.0.0.1"
    assert 20_000 <= port < 30_000
    assert master() == (address, port)
    use(monkeypatch, MASTER_ADDR="head", MASTER_PORT="5")
    assert master() == ("head", 5)


def test_how_often_torchrun_has_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert agent_restarts() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert agent_restarts() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert agent_restarts() == 2


def test_srun_on_several_hosts_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **SLURM, SLURM_STEP_TASKS_PER_NODE="3(x2),2", SLURM_NODEID="2")
    assert master()[0] == "gpu007"
    assert local_place(5, 8) == (1, 2)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert local_place(5, 8) == (1, 3)
    use(monkeypatch, PMI_RANK="5", PMI_SIZE="8", PMI_JOBID="4711.0")  # srun --mpi=pmi2
    found = place()
    assert found is not None
    assert (found.launcher, found.address, found.local_size) == ("srun", "gpu007", 3)


@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH"])
def test_the_daemons_of_mpirun_are_tasks_of_slurm(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    use(monkeypatch, **SLURM)  # inherited from the daemon
    use(monkeypatch, **ONE_HOST[launcher])
    assert rank_and_size() == (2, 4)
    assert master()[0] == "127.0.0.1"


SHELLS = {
    "srun": {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "command",
    [["train", "--ranks", "4"], ["perf", "all_reduce", "--ranks", "4"], ["acceptance", "--ranks", "4"]],
)
def test_commands_start_ranks_in_an_interactive_shell(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    shell: str,
    command: list[str],
) -> None:
    (tmp_path / "some.txt").write_text("some text; " * 100)

    def started(ranks: int, **_options: object) -> None:
        raise hdp.InvalidUsage(f"{ranks} ranks were started")

    monkeypatch.setattr("hdpcomm.comm.launch.RankPool", started)
    use(monkeypatch, **SHELLS[shell])
    assert not joined()
    options = ["--data", str(tmp_path), "--context", "512"] if command[0] == "train" else []
    assert main([*command, *options]) == 6
    assert "4 ranks were started" in capsys.readouterr().err
    use(monkeypatch, RANK="0", WORLD_SIZE="1")  # torchrun's world of one is a world
    assert joined()
    assert rank_and_size() == (0, 1)


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="needs MPICH")
def test_a_port_of_mpich_itself(tmp_path: Path) -> None:
    """All ranks of one host find the same port, also behind a script."""
    script = tmp_path / "script.sh"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    code = (
        "import sys; from hdpcomm.comm.launchers import *\n"
        "place = [*rank_and_size(), *local_place(*rank_and_size()), *master()]\n"
        "sys.stdout.write(' '.join(map(str, place)) + chr(10))"  # in one piece: the other rank writes, too
    )
    told = [
        subprocess.run(
            ["mpiexec.hydra", "-n", "2", *wrapper, sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for wrapper in ([], [str(script)])
    ]
    for text in told:
        lines = sorted(line.split() for line in text.splitlines())
        assert [line[:5] for line in lines] == [["0", "2", "0", "2", "127.0.0.1"], ["1", "2", "1", "2", "127.0.0.1"]]
        assert lines[0][5] == lines[1][5]


def test_a_batch_script_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SLURM_JOB_ID="4711", SLURM_PROCID="0", SLURM_NTASKS="8")
    assert place() is None


def test_mpirun_on_one_host_and_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_NAMESPACE="prterun-a-17@1")
    found = place()
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("mpirun", 1, 2, 1)
    assert master()[0] == "127.0.0.1"
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    with pytest.raises(hdp.InvalidUsage, match=r"mpirun started ranks on several hosts.*-x MASTER_ADDR"):
        master()
    monkeypatch.setenv("MASTER_ADDR", "head")
    assert master()[0] == "head"


def test_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, PMI_RANK="2", PMI_SIZE="3", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1", MASTER_ADDR="head")
    found = place()
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.address) == ("mpiexec", 2, 3, None)
    with pytest.raises(hdp.InvalidUsage, match="MASTER_PORT is not set"):
        master()


def test_torchrun_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **SLURM, WORLD_SIZE="2", RANK="0", MASTER_PORT="29500")
    assert master() == ("127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_PROCID": "five"}, "SLURM_PROCID='five' is not an integer"),
        ({"SLURM_PROCID": "8"}, r"SLURM_PROCID=8 is not in 0\.\.7"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS=''"),
    ],
)
def test_bad_values(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    use(monkeypatch, **SLURM | variables)
    with pytest.raises(hdp.InvalidUsage, match=message):
        place()


def test_local_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_place(5, 8) == (5, 8)  # nobody tells
    use(monkeypatch, **OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert local_place(1, 2) == (1, 2)
    assert local_place(5, 8) == (5, 8)  # of another world than mpirun's
    use(monkeypatch, OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="1")  # --map-by node
    assert local_place(1, 2) == (0, 1)
    use(monkeypatch, LOCAL_RANK="3")
    assert local_place(1, 2) == (3, 1)
    use(monkeypatch, LOCAL_WORLD_SIZE="4")
    assert local_place(1, 2) == (3, 4)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    assert local_place(6, 8) == (2, 4)
    use(monkeypatch, LOCAL_WORLD_SIZE="0")
    with pytest.raises(hdp.InvalidUsage, match="LOCAL_WORLD_SIZE=0; give at least 1"):
        local_place(6, 8)
    use(monkeypatch, LOCAL_WORLD_SIZE="8", LOCAL_RANK="-1")
    with pytest.raises(hdp.InvalidUsage, match="LOCAL_RANK=-1; give 0 or more"):
        local_place(6, 8)
    use(monkeypatch, LOCAL_RANK="first")
    with pytest.raises(hdp.InvalidUsage, match="LOCAL_RANK='first' is not an integer"):
        local_place(6, 8)


def test_the_device_is_the_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(device, "open_cuda", lambda number: f"device {number}")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert Machine().device("cuda", 5, 8) == "device 1"  # nobody tells: modulo
    chosen.clear()
    use(monkeypatch, OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_RANK="2")
    assert Machine().device("cuda", 5, 8) == "device 2"  # mpirun --map-by node
    chosen.clear()
    use(monkeypatch, LOCAL_RANK="3")
    assert Machine().device("nccl", 5, 8) == "device 3"


def test_the_pool_is_shared_with_the_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool(_size: int, *, sharers: int, **_: object) -> None:
        raise hdp.InvalidUsage(f"{sharers} sharers")

    monkeypatch.setattr("hdpcomm.offload.pool.PinnedPool", pool)
    comm: Any = SimpleNamespace(rank=5, size=16, device=torch.device("cpu"))
    with pytest.raises(hdp.InvalidUsage, match=r"^16 sharers"):
        rank_pool(comm, 1 << 20)
    variables = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    use(monkeypatch, **SLURM | variables)
    with pytest.raises(hdp.InvalidUsage, match=r"^8 sharers"):
        rank_pool(comm, 1 << 20)


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [
        ("4", 0, 4),
        ("4(x2),3", 1, 4),
        ("4(x2),3", 2, 3),
        ("2,1(x12),5", 13, 5),
        ("4(x2)", 2, None),
        ("", 0, None),
        ("4(x", 0, None),
    ],
)
def test_the_tasks_of_a_node(counts: str, node: int, tasks: int | None) -> None:
    assert tasks_on_node(counts, node) == tasks


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-009,12],login1", "gpu007"),
        ("a[3,5-9]-ib,b2", "a3-ib"),
        ("rack[12]", "rack12"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first

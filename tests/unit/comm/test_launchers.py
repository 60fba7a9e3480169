"""The environments of srun, mpirun and mpiexec, and what is missing in them."""

from __future__ import annotations

import os

import pytest

import hdpcomm as hdp
from hdpcomm.comm.launchers import first_host, master, place

PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "WORLD_SIZE", "RANK")


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

"""How ranks find each other: torchrun's environment, an initialised torch.distributed, and what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.comm.bootstrap import close_all
from hdpcomm.comm.machine import Machine
from tests.harness.machines import joining_on
from tests.harness.warm_python import Python, run_python

REPOSITORY = Path(__file__).parents[3]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_alone() -> None:
    with hdp.init() as comm:
        assert (comm.rank, comm.size, comm.ranks, comm.transport) == (0, 1, (0,), "shm")
        x = torch.arange(3.0)
        comm.all_reduce(x, "avg")
        comm.barrier()
        assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two' is not an integer"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"RANK=2 is not in 0\.\.1"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "give at least 1"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT is not set"),
    ],
)
def test_bad_environment(clean_environment: pytest.MonkeyPatch, environment: dict[str, str], message: str) -> None:
    for name, value in environment.items():
        clean_environment.setenv(name, value)
    with pytest.raises(hdp.InvalidUsage, match=message):
        hdp.init()


def test_port_in_use(clean_environment: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in zip(VARIABLES[:4], ("0", "2", "127.0.0.1", str(port)), strict=True):
            clean_environment.setenv(name, value)
        with pytest.raises(hdp.InvalidUsage, match=f"port {port} of 127.0.0.1 is in use.*MASTER_PORT"):
            hdp.init(timeout=5)


def test_absent_rank_is_named(clean_environment: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in zip(VARIABLES[:4], ("0", "3", "127.0.0.1", str(port)), strict=True):
        clean_environment.setenv(name, value)
    with pytest.raises(hdp.CommTimeout, match=r"waited 0\.5 s in init.* for: 1, 2"):
        hdp.init(timeout=0.5)


def test_no_store(clean_environment: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES[:4], ("1", "2", "127.0.0.1", "1"), strict=True):
        clean_environment.setenv(name, value)
    with pytest.raises(hdp.CommTimeout, match="is rank 0 running"):
        hdp.init(timeout=1)


def beside_torch() -> None:
    dist.init_process_group("gloo")
    with hdp.init() as comm:
        x = torch.ones(5)
        comm.all_reduce(x)
        assert x[0] == comm.size
        dist.all_reduce(x)
        assert x[0] == comm.size**2
    first = hdp.init()
    second = hdp.init()  # an independent world
    second.barrier()
    first.barrier()
    dist.destroy_process_group()


def test_beside_torch_distributed(ranks: Any) -> None:
    ranks(2, beside_torch)


def beside_torch_without_a_launcher(how: str, rank: int, transport: str) -> list[float]:
    kept = {name: os.environ.pop(name) for name in (*VARIABLES, "LOCAL_WORLD_SIZE") if name in os.environ}
    host_name, socket.gethostname = socket.gethostname, lambda: "localhost"
    os.environ["HDPCOMM_HOSTID"] = str(rank)  # auto takes the two for hosts
    try:
        dist.init_process_group("gloo", init_method=how, rank=rank, world_size=2)
        with hdp.init(transport) as comm:
            x = torch.full((3,), float(comm.rank + 1))
            comm.all_reduce(x)
            comm.barrier()
        dist.destroy_process_group()
    finally:
        os.environ.update(kept)
        del os.environ["HDPCOMM_HOSTID"]
        socket.gethostname = host_name
    return [*x.tolist(), comm.transport]


def of_each_rank(how: str, transport: str) -> list[float]:
    return beside_torch_without_a_launcher(how, int(os.environ["RANK"]), transport)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_beside_torch_distributed_without_a_launcher(ranks: Any, tmp_path: Path, method: str, transport: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        how = {"tcp": f"tcp://127.0.0.1:{probe.getsockname()[1]}", "file": f"file://{tmp_path}/store"}[method]
    name = {"tcp": "tcp", "auto": "shm+tcp"}[transport]
    assert ranks(2, of_each_rank, how, transport) == [[3.0, 3.0, 3.0, name]] * 2


def with_devices(seen: list[bool]) -> tuple[str, float]:
    """``auto`` where each rank sees a GPU or none; a simulated one stands for it."""

    class WithSome(Machine):
        def has_gpu(self, rank: int) -> bool:
            return seen[rank]

        def device(self, transport: str, rank: int, size: int) -> Any:
            assert transport == "cuda+nccl"
            return super().device("sim", rank, size)

    with joining_on(WithSome()), hdp.init(timeout=20) as comm:
        x = torch.ones(1)
        comm.all_reduce(x)
        return comm.transport, x.item()


def test_auto_agrees_on_the_device(ranks: Any) -> None:
    assert ranks(2, with_devices, [True, True]) == [("sim", 2.0)] * 2
    assert ranks(2, with_devices, [True, False]) == [("shm", 2.0)] * 2
    assert ranks(2, with_devices, [False, True]) == [("shm", 2.0)] * 2


def cores(of_rank: list[list[int]]) -> int:
    from hdpcomm.comm.topology import cores_of_rank

    with hdp.init() as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(of_rank[comm.rank]))
        return cores_of_rank(comm)


@pytest.mark.parametrize(
    ("of_rank", "want"),
    [
        ([range(8)] * 3, [2, 2, 2]),  # nobody is bound
        ([range(4), range(4, 6), range(6, 7)], [4, 2, 1]),  # by srun, each to its own
        ([range(4), range(4, 8), range(4, 8)], [4, 2, 2]),  # mpirun --bind-to numa
        ([range(2)] * 3, [1, 1, 1]),
    ],
)
def test_cores_of_a_rank(ranks: Any, of_rank: list[range], want: list[int]) -> None:
    assert ranks(3, cores, [list(each) for each in of_rank]) == want


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, hdpcomm as hdp
            comm = hdp.init()
            x = torch.tensor([float(comm.rank)])
            comm.all_reduce(x)
            open(f"rank{comm.rank}", "w").write(str(x.item()))
            comm.close()
            """
        )
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    result = run_python(command, env=environment, timeout=90, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == ["3.0"] * 3


def forks_a_child() -> float:
    """The child of a fork ends as Python programs do; the world stays its parent's."""
    comm = hdp.init(timeout=20)
    comm.all_reduce(torch.ones(1), async_op=True).wait()  # there is a progress thread
    if comm.rank == 0:
        gc.collect()  # what earlier tests of this process have left is not the child's to collect
        child = os.fork()
        if child == 0:
            status = 1
            try:
                close_all("its process ended")
                comm.close()
                del comm
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + 15
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert ended == (child, 0)
    x = torch.ones(50_000)
    comm.all_reduce(x)
    comm.close()
    return x[-1].item()


def test_a_forked_child_does_not_close_the_world(ranks: Any) -> None:
    assert ranks(2, forks_a_child) == [2.0, 2.0]


def ends_without_closing(folder: str) -> None:
    comm = hdp.init(timeout=20).subset([0, 1])
    assert comm is not None
    sys.comm = comm  # type: ignore[attr-defined]  # there until the end
    if comm.rank == 1:
        sys.exit(0)
    with pytest.raises(hdp.PeerLost) as info:
        comm.recv(torch.zeros(1), 1)
    Path(folder, "told").write_text(str(info.value))


def test_the_end_of_a_process_tells_its_peers(tmp_path: Path) -> None:
    program = "import sys; from tests.ranks.comm import test_bootstrap as t; t.ends_without_closing(sys.argv[1])"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [Python(["-c", program, str(tmp_path)], env=common | {"RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert "rank 1 closed its communicator" in (tmp_path / "told").read_text()
    assert "its process ended" in (tmp_path / "told").read_text()

"""The transports with the real NCCL: a world of one rank on any GPU, and more ranks on two GPUs or if NCCL lets them
share one. Runs functions of tests/ranks. "Hosts" are groups of ranks on this host with different HDPCOMM_HOSTID."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.device import nccl_library
from hdpcomm.testing import run_threads, spawn
from tests.gpu.test_transport_gpu import attention
from tests.ranks.device.test_device_collectives import bits, messages

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not nccl_library.describe()[0], reason="no NCCL"),
]
MULTI_RANK = 23003  # NCCL 2.30.3 has NCCL_MULTI_RANK_GPU_ENABLE


def sharing(fn: Callable[..., Any], *args: Any) -> Any:
    """A rank that may share its GPU with another."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.setdefault("NCCL_MAX_CTAS", "4")
    return fn(*args)


def on_two_hosts(fn: Callable[..., Any], *args: Any) -> Any:
    """Host names: the first half of the ranks on one host, the others on another."""
    os.environ["HDPCOMM_HOSTID"] = str(int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"]))
    return sharing(fn, *args)


def several() -> bool:
    return torch.cuda.device_count() > 1 or nccl_library.load().version >= MULTI_RANK


def test_a_world_of_one() -> None:
    spawn(messages, 1, transport="nccl")
    assert spawn(bits, 1, 5000, transport="nccl") == run_threads(bits, 1, 5000)


@pytest.mark.parametrize("count", [777, 1_000_003])
def test_two_ranks(count: int) -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    spawn(sharing, 2, messages, transport="nccl")
    assert spawn(sharing, 2, bits, count, transport="nccl") == run_threads(bits, 2, count)


def whole_world() -> list[float]:
    with hdp.init(timeout=60) as comm:
        x = torch.full((1000,), comm.rank + 1.0, device=comm.device)
        comm.all_reduce(x)
        y = torch.empty(2000, device=comm.device)
        comm.all_gather(y, torch.full((1000,), float(comm.rank), device=comm.device))
        comm.broadcast(x, 1)
        return [float(x[0]), float(y[0]), float(y[-1])]


def test_the_whole_world_by_nccls_own_collectives() -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    assert spawn(sharing, 2, whole_world, transport="nccl") == [[3.0, 0.0, 1.0]] * 2


def test_ranks_that_may_not_share_a_gpu_hear_of_it() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank has its GPU")
    with pytest.raises(hdp.Error, match=r"ncclCommInitRankConfig failed on rank \d|closed its communicator"):
        spawn(whole_world, 2, transport="nccl")


PATHS = "cuda+nccl"


@pytest.mark.parametrize("count", [777, 1_000_003])
def test_links_inside_hosts_and_nccl_between_them(count: int) -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    spawn(on_two_hosts, 4, messages, transport=PATHS)
    assert spawn(on_two_hosts, 4, bits, count, transport=PATHS) == run_threads(bits, 4, count, hosts=(0, 0, 1, 1))


def ways() -> tuple[str, int]:
    """The transport, and NCCL's groups in a collective inside a host."""
    with hdp.init(timeout=60) as comm:
        inside = comm.subset([comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])
        assert inside is not None
        before = comm.stats()["nccl_groups"]
        inside.all_reduce(x := torch.ones(5000, device=comm.device))
        comm.synchronize()
        assert bool((x == 2).all())
        return comm.transport, comm.stats()["nccl_groups"] - before


def test_auto_takes_both_and_a_subset_of_a_host_no_nccl() -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    assert spawn(on_two_hosts, 4, ways) == [(PATHS, 0)] * 4


def test_ring_attention_that_crosses_hosts_to_bf16_tolerance() -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    got_all = spawn(on_two_hosts, 4, attention, PATHS)
    for got, want in zip(got_all, run_threads(attention, 4, "shm"), strict=True):
        for mine, expected in zip(got, want, strict=True):
            assert float((mine - expected).norm() / expected.norm()) < 2e-2


def graphs() -> None:
    """Exchanges in the foreground and in the background, a schedule, and NCCL's own collective."""
    with hdp.init(timeout=60) as comm:
        to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x = torch.zeros(2048, device=comm.device)
        y, late, total, whole = (torch.empty_like(x) for _ in range(4))

        def step() -> None:
            comm.exchange([(x, to)], [(y, back)])
            work = comm.exchange([(x, back)], [(late, to)], async_op=True)
            comm.all_reduce(x, out=total, algorithm="ring")
            work.wait()
            comm.all_reduce(total, out=whole)

        step()
        comm.synchronize()
        torch.cuda.synchronize()
        comm.barrier()
        comm.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        for turn in range(1, 8):
            x.fill_(turn * (comm.rank + 1))
            graph.replay()
            torch.cuda.synchronize()
            assert bool((y == turn * (back + 1)).all())
            assert bool((late == turn * (to + 1)).all())
            everyone = turn * sum(range(1, comm.size + 1))
            assert bool((total == everyone).all())
            assert bool((whole == comm.size * everyone).all())


def test_graphs_of_a_world_of_one() -> None:
    spawn(graphs, 1, transport="nccl")


@pytest.mark.parametrize(("size", "transport"), [(2, "nccl"), (4, PATHS)])
def test_graphs(size: int, transport: str) -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    spawn(on_two_hosts, size, graphs, transport=transport)


def killed(folder: str, victim: int) -> None:
    """Kills the process of a peer; this rank writes the error that it gets to a file."""
    comm = hdp.init(timeout=30)
    x = torch.zeros(100_000, device=comm.device)
    comm.all_reduce(x, algorithm="ring")
    comm.synchronize()
    comm.barrier()
    comm.synchronize()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        while True:
            comm.all_reduce(x, algorithm="ring")
            comm.synchronize()

    with pytest.raises((hdp.PeerLost, hdp.Aborted)) as info:
        go_on()
    Path(folder, str(comm.rank)).write_text(str(info.value))


@pytest.mark.parametrize(("size", "transport"), [(2, "nccl"), (4, PATHS)])
@pytest.mark.parametrize("victim", [0, -1])
def test_a_process_that_is_killed(size: int, transport: str, victim: int, tmp_path: Path) -> None:
    if not several():
        pytest.skip("one GPU, and this NCCL lets one rank use it")
    victim %= size
    with pytest.raises(hdp.PeerLost):
        spawn(on_two_hosts, size, killed, str(tmp_path), victim, transport=transport, timeout=60)
    heard = [(tmp_path / str(rank)).read_text() for rank in range(size) if rank != victim]
    assert all(f"rank {victim}" in text for text in heard), heard

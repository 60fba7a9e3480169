"""The collectives over streams: the cases of the host transport, with bitwise equal results."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.device.communicator import DeviceCommunicator
from hdpcomm.testing import run_threads, spawn
from tests.harness.native import _testing
from tests.harness.worlds import small_slots
from tests.ranks.comm.test_collectives import everything


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads(world_size: int) -> None:
    run_threads(everything, world_size, (tuple(range(world_size)),), transport="sim")


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def cases(comm: hdp.Communicator, count: int) -> dict[tuple[str, str], Callable[[str], torch.Tensor]]:
    """Every operation, by name and algorithm, as a call that returns this rank's result."""
    n, rank = comm.size, comm.rank
    mine, whole = (noise(k * count, seed).to(comm.device) for k, seed in ((1, rank), (n, 100 + rank)))

    def all_gather(algorithm: str) -> torch.Tensor:
        comm.all_gather(out := mine.new_zeros(n * count), mine, algorithm=algorithm)
        return out

    def reduce_scatter(algorithm: str) -> torch.Tensor:
        comm.reduce_scatter(out := mine.new_zeros(count), whole, "avg", algorithm=algorithm)
        return out

    def all_reduce(algorithm: str) -> torch.Tensor:
        comm.all_reduce(x := mine.clone(), "avg", algorithm=algorithm)
        return x

    def reduce(algorithm: str) -> torch.Tensor:
        comm.reduce(x := mine.clone(), n - 1, algorithm=algorithm)
        return x

    def broadcast(algorithm: str) -> torch.Tensor:
        comm.broadcast(x := mine.clone(), n - 1, algorithm=algorithm)
        return x

    def gather(algorithm: str) -> torch.Tensor:
        comm.gather(out := mine.new_zeros(n * count), mine, 0, algorithm=algorithm)
        return out

    def scatter(algorithm: str) -> torch.Tensor:
        comm.scatter(out := mine.new_zeros(count), whole, 0, algorithm=algorithm)
        return out

    def all_to_all(algorithm: str) -> torch.Tensor:
        comm.all_to_all(out := mine.new_zeros(n * count), whole, algorithm=algorithm)
        return out

    calls = (all_gather, reduce_scatter, all_reduce, reduce, broadcast, gather, scatter, all_to_all)
    return {(call.__name__, name): call for call in calls for name in hdp.Communicator.algorithms(call.__name__)}


def bits(count: int) -> dict[tuple[str, str], bytes]:
    with hdp.init() as comm:
        return {key: call(key[1]).cpu().numpy().tobytes() for key, call in cases(comm, count).items()}


@pytest.mark.parametrize(("world_size", "count"), [(2, 5000), (3, 777), (4, 3001)])
def test_the_same_bits_as_shared_memory(world_size: int, count: int) -> None:
    with small_slots():
        streams = run_threads(bits, world_size, count, transport="sim")
    assert streams == run_threads(bits, world_size, count, transport="shm")
    assert len(streams[0]) >= 25


def test_processes() -> None:
    assert spawn(bits, 3, 70_001, transport="sim") == run_threads(bits, 3, 70_001, transport="shm")


def in_the_background(world: hdp.Communicator) -> None:
    works, expected = [], []
    evens, odds = world.subset([0, 2]), world.subset([1, 2])
    for round_ in range(20):
        for comm in (world, evens, odds):
            if comm is None:
                continue
            x = torch.full((1 + 700 * round_,), float(comm.rank + round_))
            works.append((comm.all_reduce(x, async_op=True), x))
            expected.append(sum(range(comm.size)) + comm.size * round_)
    for (work, x), value in zip(reversed(works), reversed(expected), strict=True):
        work.wait()
        assert (x == value).all()


def test_many_in_flight_on_overlapping_subsets() -> None:
    def run() -> None:
        with hdp.init() as comm:
            in_the_background(comm)

    with small_slots():
        run_threads(run, 3, transport="sim")


def messages() -> None:
    with hdp.init() as comm:
        n, rank = comm.size, comm.rank
        for count in (0, 1, 3, 5000, 40_000):
            sent = [noise(count, 10 * rank + peer).to(comm.device) for peer in range(n)]
            got = [torch.zeros(count, device=comm.device) for _ in range(n)]
            order = [(rank + k) % n for k in range(n)]  # itself included
            comm.exchange([(sent[peer], peer) for peer in order], [(got[peer], peer) for peer in reversed(order)])
            for peer in range(n):
                assert torch.equal(got[peer].cpu(), noise(count, 10 * peer + rank))
        x = torch.zeros(9, device=comm.device)
        if n > 1 and rank == 0:  # more than a pair has slots for, before anybody receives
            works = [comm.send(torch.full_like(x, i), 1, async_op=True) for i in range(50)]
            for work in works:
                work.wait()
        elif rank == 1:
            for i in range(50):
                comm.recv(x, 0)
                assert (x == i).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_messages(world_size: int) -> None:
    with small_slots():
        run_threads(messages, world_size, transport="sim")


def sizes_grow_nothing() -> tuple[Any, ...]:
    with hdp.init() as comm:

        def use() -> int:
            for i in range(300):
                x = torch.ones(1 + i * 13 % 2000)
                comm.all_reduce(x, algorithm=("ring", "rabenseifner", "recursive")[i % 3])
                comm.exchange([(x, (comm.rank + 1) % comm.size)], [(x.clone(), (comm.rank - 1) % comm.size)])
            assert isinstance(comm, DeviceCommunicator)
            return _testing.scratch_bytes(comm.streams)

        use()
        return use(), use()


def test_nothing_grows() -> None:
    for before, after in run_threads(sizes_grow_nothing, 2, transport="sim"):
        assert before == after


def one_world() -> None:
    with hdp.init(transport="sim") as comm:
        comm.all_reduce(torch.ones(3000))


def test_worlds_leave_nothing_behind() -> None:
    for _ in range(3):
        run_threads(one_world, 2)
    before = _held()
    for _ in range(15):
        run_threads(one_world, 2)
    assert all(now <= then for now, then in zip(_held(), before, strict=True))


def _held() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of anonymous files (arenas, boards, segments) of this process."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings

"""Subsets: ordered, nested, free, and nothing is left of thousands of them."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any

import psutil
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads
from tests.harness.random_mix import random_mix


def order_and_nesting() -> None:
    world = hdp.init()
    comm = world.subset([3, 0, 2])
    assert (comm is None) == (world.rank == 1)
    if comm is not None:
        assert comm.ranks == (3, 0, 2)
        assert comm.rank == (3, 0, 2).index(world.rank)
        assert comm.global_rank == world.rank
        out = torch.empty(3, dtype=torch.int64)
        comm.all_gather(out, torch.tensor([world.rank]))
        assert out.tolist() == [3, 0, 2]
        inner = comm.subset([2, 0])  # positions: global ranks 2 and 3
        if inner is not None:
            assert inner.ranks == (2, 3)
            inner.all_gather(out[:2], torch.tensor([world.rank]))
            assert out[:2].tolist() == [2, 3]
    halves = world.split(world.rank % 2, key=-world.rank)
    assert halves is not None
    assert halves.ranks == ((2, 0), (3, 1))[world.rank % 2]
    assert (world.split(None if world.rank == 0 else 7) is None) == (world.rank == 0)


def test_order_and_nesting(ranks: Any) -> None:
    ranks(4, order_and_nesting)
    run_threads(order_and_nesting, 4)


def make_only() -> tuple[int, ...]:
    world = hdp.init()
    before = world.stats()
    subsets = [world.subset([*range(start, world.size), *range(start)]) for start in range(world.size)]
    assert all(subset is not None and subset.size == world.size for subset in subsets)
    assert world.stats() == before
    assert before["messages_sent"] == 0
    return tuple(before.values())


def test_making_a_subset_of_64_ranks_sends_nothing() -> None:
    run_threads(make_only, 64)


def talk_to_one() -> list[int]:
    world = hdp.init()
    peers = [world.stats()["peers"]]
    pair = world.subset([0, 2])
    if pair is not None:
        pair.all_reduce(torch.ones(3))
    peers.append(world.stats()["peers"])
    return peers


def test_stats_count_the_peers_that_were_used(ranks: Any) -> None:
    assert ranks(3, talk_to_one) == [[0, 1], [0, 0], [0, 1]]


def waits(async_op: bool) -> tuple[int, int, int]:
    """Nanoseconds counted and passed while rank 0 came late, and counted in an operation that timed out."""
    with hdp.init() as comm:
        x = torch.zeros(1)
        comm.barrier()
        before, started = comm.stats()["wait_ns"], time.perf_counter_ns()
        if comm.rank == 0:
            time.sleep(0.2)
        comm.all_reduce(x, async_op=async_op).wait()
        passed, after = time.perf_counter_ns() - started, comm.stats()["wait_ns"]
        if comm.rank == 0:
            time.sleep(0.3)  # to leave would end rank 1's wait before its time
        else:
            with pytest.raises(hdp.CommTimeout):
                comm.recv(x, 0, async_op=True).wait(timeout=0.05)
        return after - before, passed, comm.stats()["wait_ns"] - after


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("transport", ["shm", "sim"])
def test_stats_count_the_time_that_a_rank_waited(transport: str, async_op: bool) -> None:
    late, on_time = run_threads(waits, 2, async_op, transport=transport)
    assert 0.15e9 < on_time[0] <= on_time[1]
    assert late[0] <= late[1] - 0.15e9  # the time that it slept does not count
    assert on_time[2] >= 0.05e9
    assert late[2] == 0


def waits_in_one_of_two(async_op: bool) -> tuple[float, float, float]:
    with hdp.init(timeout=20.0) as world:
        one, other = (world.subset([0, 1]) for _ in range(2))
        assert one is not None
        assert other is not None
        assert one.waited_s() == other.waited_s() == 0.0
        x = torch.ones(4)
        world.barrier()
        before = world.stats()["wait_ns"]
        if world.rank == 0:
            time.sleep(0.3)
        work = one.all_reduce(x, async_op=async_op)
        if async_op:
            assert work is not None
            work.wait()
        return one.waited_s(), other.waited_s(), (world.stats()["wait_ns"] - before) * 1e-9


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("transport", ["shm", "sim"])
def test_each_communicator_counts_its_own_waiting(transport: str, async_op: bool) -> None:
    """Also where two have the same ranks."""
    late, on_time = run_threads(waits_in_one_of_two, 2, async_op, transport=transport)
    assert on_time[0] > 0.05
    assert late[0] < on_time[0]
    for waited, elsewhere, everywhere in (late, on_time):
        assert elsewhere == 0.0
        assert waited <= everywhere + 1e-6


def churn(count: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    world = hdp.init()
    process = psutil.Process()
    generator = random.Random(5)  # the same on all ranks

    def use(number: int) -> None:
        for _ in range(number):
            members = generator.sample(range(world.size), generator.randint(1, world.size))
            comm = world.subset(members)
            if comm is not None:
                x = torch.full((3,), float(comm.rank))
                comm.all_reduce(x)
                assert x[0] == sum(range(comm.size))

    def resources() -> tuple[int, int, int]:
        return process.num_fds(), threading.active_count(), process.num_threads()

    use(50)
    before = resources()
    use(count)
    return before, resources()


@pytest.mark.usefixtures("nothing_left_in_shm")
def test_a_thousand_subsets_leave_nothing_behind(ranks: Any) -> None:
    for before, after in ranks(4, churn, 1000):
        assert after == before


def worlds_come_and_go() -> tuple[int, int]:
    process = psutil.Process()
    counts = []
    for _ in range(4):
        with hdp.init() as comm:
            work = comm.all_reduce(torch.ones(100_000), async_op=True)  # starts the background thread
            work.wait()
        counts.append((process.num_fds(), process.num_threads()))
    return counts[1], counts[-1]


def test_worlds_leave_nothing_behind(ranks: Any) -> None:
    for early, late in ranks(2, worlds_come_and_go):
        assert late == early


@pytest.mark.parametrize("seed", [0, 1])
def test_random_mixes_of_processes(ranks: Any, seed: int) -> None:
    ranks(4, random_mix, seed, 600)


def test_random_mixes_of_threads() -> None:
    run_threads(random_mix, 8, 2, 300)


def drop_works() -> None:
    """Receives whose Work and tensors nobody holds any more before the messages come (rank 2 holds them back)."""
    count, token = 300_000, torch.zeros(1)
    with hdp.init(timeout=20) as comm:
        if comm.rank == 0:
            alive = []
            for _ in range(4):
                x = torch.zeros(count)
                alive.append(weakref.ref(x))
                comm.recv(x, 1, async_op=True)
                del x
            gc.collect()
            assert all(each() is not None for each in alive)
            comm.send(token, 2)
            comm.barrier()
            comm.send(token, 1, async_op=True).wait()  # a new operation lets go of those that have ended
            assert all(each() is None for each in alive)
        elif comm.rank == 1:
            comm.recv(token, 2)
            for _ in range(4):
                comm.send(torch.ones(count), 0)
            comm.barrier()
            comm.recv(token, 0)
        else:
            comm.recv(token, 0)
            comm.send(token, 1)
            comm.barrier()


def test_dropped_works_keep_their_tensors(ranks: Any) -> None:
    ranks(3, drop_works)

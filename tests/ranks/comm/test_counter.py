"""Counters that ranks share: each number goes to one rank, whoever counts, from wherever, with whatever else."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm import SharedCounter
from tests.faults.test_liveness import on_hosts
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import LONG_S, caught, still_works

COUNTERS = 3
Taken = list[list[tuple[int, int]]]  # by counter: first and amount of what was taken


def placed(hosts: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs a rank function where rank r is on host ``hosts[r]``."""
    with mock.patch.dict(os.environ, HDPCOMM_HOSTID=hosts[int(os.environ["RANK"])]):
        return fn(*args)


def takes(threads: int, calls: int) -> Taken:
    """Counts on several counters at once, by some threads of this rank."""
    with hdp.init(timeout=LONG_S) as comm:
        return takes_from(comm, threads, calls)


def takes_from(comm: hdp.Communicator, threads: int, calls: int) -> Taken:
    counters = [comm.counter() for _ in range(COUNTERS)]

    def take(thread: int) -> Taken:
        draw = random.Random(10 * comm.rank + thread)
        taken: Taken = [[] for _ in counters]
        for _ in range(calls):
            index, amount = draw.randrange(COUNTERS), draw.randint(1, 3)
            taken[index].append((counters[index].fetch_add(amount), amount))
        return taken

    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(take, range(threads)))
    comm.barrier()
    ends = [counter.fetch_add() for counter in counters] if comm.rank == comm.size - 1 else []
    comm.barrier()
    for counter in counters:
        counter.close()
    still_works(comm)
    taken = [[each for part in parts for each in part[index]] for index in range(COUNTERS)]
    for index, end in enumerate(ends):
        taken[index].append((end, 1))
    return taken


def check_taken(ranks: Iterable[Taken]) -> None:
    """All that was taken lies side by side, from 0 on."""
    for parts in zip(*ranks, strict=True):
        at = 0
        for first, amount in sorted(each for part in parts for each in part):
            assert first == at
            at += amount


def test_threads() -> None:
    check_taken(run_threads(takes, 3, 2, 300))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes(ranks: Any, size: int) -> None:
    check_taken(ranks(size, takes, 2, 1000))


@pytest.mark.parametrize("hosts", ["aab", "aba", "abc", "abcb"])
def test_hosts(ranks: Any, hosts: str) -> None:
    check_taken(ranks(len(hosts), placed, hosts, takes, 2, 30))


def test_more_threads_than_fetches_of_a_pair() -> None:
    taken: dict[int, Taken] = {}

    def program(comm: hdp.Communicator) -> None:
        taken[comm.rank] = takes_from(comm, 100 if comm.rank else 1, 5)

    on_hosts([0, 1], program, timeout=LONG_S)
    check_taken(taken.values())


def test_without_the_owners_help() -> None:
    """The owner's program waits for what the others do after they have counted."""
    counted = threading.Event()

    def program(comm: hdp.Communicator) -> None:
        with comm.counter() as counter:
            if comm.rank == 0:
                assert counted.wait(LONG_S)
                assert counter.fetch_add() == 21
            else:
                assert [counter.fetch_add(7) for _ in range(3)] == [0, 7, 14]
                counted.set()
            comm.barrier()

    on_hosts([0, 1], program, timeout=LONG_S)


def test_while_another_thread_of_the_rank_waits_in_an_operation() -> None:
    def program(comm: hdp.Communicator) -> None:
        counter, x = comm.counter(), torch.zeros(1)
        if comm.rank == 0:
            comm.recv(x, 1)
            assert x.item() == 0.0
            comm.send(x, 1)
        else:
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(lambda: comm.recv(torch.zeros(1), 0, async_op=True).wait())
                assert [counter.fetch_add() for _ in range(5)] == list(range(5))
                assert not waits.done()
                comm.send(x, 0)
                waits.result(LONG_S)
        comm.barrier()

    on_hosts([0, 1], program, timeout=LONG_S)


def on_subsets() -> list[int]:
    """The first of the list owns the counter; a rank may own some of several communicators."""
    with hdp.init(timeout=LONG_S) as comm:
        taken = []
        for members in ([2, 0], [1, 2], [2], [0, 1, 2]):
            group = comm.subset(members)
            if group is None:
                taken.append(-1)
                continue
            counter = group.counter()
            taken.append(counter.fetch_add())
            assert f"of rank {members[0]}>" in repr(counter)
            group.barrier()
        return taken


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_subsets(ranks: Any, hosts: str) -> None:
    columns = list(zip(*ranks(3, placed, hosts, on_subsets), strict=True))
    assert [sorted(column) for column in columns] == [[-1, 0, 1], [-1, 0, 1], [-1, -1, 0], [0, 1, 2]]


def test_ranks_with_devices() -> None:
    def program() -> int:
        with hdp.init() as comm, comm.counter() as counter:
            taken = counter.fetch_add()
            comm.barrier()
        return taken

    assert sorted(run_threads(program, 2, transport="sim")) == [0, 1]


# --- the end of a counter


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=str)
def test_a_closed_counter(hosts: list[int]) -> None:
    def program(comm: hdp.Communicator) -> None:
        old = comm.counter()
        assert old.fetch_add() in (0, 1)
        comm.barrier()
        if comm.rank == 0:
            old.close()
            old.close()
        comm.barrier()
        new = comm.counter()
        error = caught(old.fetch_add)
        assert isinstance(error, hdp.InvalidUsage)
        assert f"closed by {'rank 0' if comm.rank else 'this rank'}" in str(error)
        assert (error.op, error.rank, error.ranks) == ("fetch_add", comm.rank, (0, 1))
        assert new.fetch_add() in (0, 1)
        comm.barrier()
        if comm.rank == 1:
            new.close()  # for this rank alone
            assert "closed by this rank" in str(caught(new.fetch_add))
        comm.barrier()
        if comm.rank == 0:
            assert new.fetch_add() == 2
        still_works(comm)

    on_hosts(hosts, program, timeout=LONG_S)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=str)
def test_an_owner_has_so_many_words(hosts: list[int]) -> None:
    def program(comm: hdp.Communicator) -> None:
        counters = [comm.counter() for _ in range(16)]
        error = caught(comm.counter)
        assert isinstance(error, hdp.InvalidUsage)
        assert "rank 0 owns" in str(error)
        assert "close those that are over" in str(error)
        other = comm.subset([1, 0])
        assert other is not None
        of_rank_1 = other.counter()
        assert of_rank_1.fetch_add() in (0, 1)  # it has words
        comm.barrier()
        for index in (3, 11):
            counters[index].close()
            counters[index] = comm.counter()
        assert {counter.fetch_add() for counter in counters} <= {0, 1}
        comm.barrier()
        assert [counter.fetch_add() for counter in counters if comm.rank] == [2] * 16 * comm.rank
        comm.barrier()

    on_hosts(hosts, program, timeout=LONG_S)


def test_one_that_is_dropped_is_closed() -> None:
    with hdp.init() as comm:
        for _ in range(40):
            assert comm.counter().fetch_add() == 0


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=str)
def test_the_largest_count(hosts: list[int]) -> None:
    def program(comm: hdp.Communicator) -> None:
        counter = comm.counter()
        if comm.rank == 1:
            assert counter.fetch_add(2**32 - 1) == 0
            error = caught(counter.fetch_add)
            assert isinstance(error, hdp.InvalidUsage)
            assert "fetch_add(1) was called at 4294967295; a counter goes to 4294967295" in str(error)
        comm.barrier()
        with comm.counter() as other:
            if comm.rank == 1:
                assert other.fetch_add(2**32 - 2) == 0
                assert "was called at 4294967294" in str(caught(lambda: other.fetch_add(2)))
                assert other.fetch_add(1) == 2**32 - 2
            comm.barrier()

    on_hosts(hosts, program, timeout=LONG_S)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=str)
def test_bad_amounts(hosts: list[int]) -> None:
    def program(comm: hdp.Communicator) -> None:
        with comm.counter() as counter:
            if comm.rank == 1:
                for amount in (0, -1, 2**32, 2**64, 1.5, True, "1", None):
                    error = caught(lambda amount=amount: counter.fetch_add(amount))
                    assert isinstance(error, hdp.InvalidUsage), amount
                assert counter.fetch_add() == 0
            comm.barrier()

    on_hosts(hosts, program, timeout=LONG_S)


def in_a_child(counter: SharedCounter) -> str:
    """What a forked child is told; it may close the counter, which does nothing."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        counter_error = caught(counter.fetch_add)
        counter.close()
        os.write(writes, str(counter_error).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        return told.read()


def forks() -> None:
    with hdp.init(timeout=LONG_S) as comm, comm.counter() as counter:
        if comm.rank == 0:
            assert "is a forked child: use it there" in in_a_child(counter)
        comm.barrier()
        assert counter.fetch_add() in (0, 1)
        comm.barrier()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_forked_child_may_not_use_a_counter(ranks: Any, hosts: str) -> None:
    ranks(2, placed, hosts, forks)


def used_when_it_is_over() -> None:
    comm = hdp.init(timeout=LONG_S)
    counter = comm.counter()
    comm.close()
    for call in (counter.fetch_add, comm.counter):
        error = caught(call)
        assert isinstance(error, hdp.InvalidUsage)
        assert "closed" in str(error)
    counter.close()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_communicator_that_is_over(ranks: Any, hosts: str) -> None:
    ranks(2, placed, hosts, used_when_it_is_over)


def test_a_place_that_no_rank_tells() -> None:
    with hdp.init() as comm:
        for word, generation in ((16, 1), (-1, 1), (0, 0), (0, 2**32), (2**40, 1)):
            with pytest.raises(hdp.InvalidUsage, match="which no rank of this version of hdpcomm tells"):
                _core.comm.join_counter(comm._core, word, generation)

"""Operations that nobody waits for: they are given up at the world's deadline, and all that take part hear of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm.communicator import Communicator
from tests.harness.fault_cases import LONG_S, caught, until

SHORT_S = 0.4


def on_threads(timeouts: list[float], program: Callable[[Communicator], Any]) -> list[Any]:
    """What ``program`` returns on ranks that are threads, whose operations have these times."""
    segment = _core.transport.create_segment(len(timeouts))

    def run(rank: int) -> Any:
        world = _core.comm.join_shm_world(segment, rank, timeout=timeouts[rank], joining=LONG_S)
        with Communicator(world.communicator(), rank, len(timeouts)) as comm:
            return program(comm)

    with ThreadPoolExecutor(len(timeouts)) as pool:
        return list(pool.map(run, range(len(timeouts))))


def assert_given_up_by_rank_0(error: hdp.Error, op: str, awaited: str) -> None:
    assert isinstance(error, hdp.CommTimeout)
    assert error.op == op
    assert "rank 0 waited " in str(error)
    assert f" for {awaited}: look for a rank that did not call it" in str(error)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_an_operation_that_nobody_waits_for_is_given_up(algorithm: str) -> None:
    """Rank 2 is late; rank 1, which has all the time there is, hears of it from rank 0, which only looks on."""
    heard = threading.Event()

    def program(comm: Communicator) -> None:
        x = torch.ones(3000)
        if comm.rank == 0:
            work = comm.all_reduce(x, algorithm=algorithm, async_op=True)
            assert until(work.done)
            error = caught(work.wait)
            assert_given_up_by_rank_0(error, "all_reduce", "rank 2")
            assert (error.rank, error.peer) == (0, 2)
        else:
            if comm.rank == 2:
                assert heard.wait(LONG_S)
            error = caught(lambda: comm.all_reduce(x, algorithm=algorithm))
            heard.set()
            assert_given_up_by_rank_0(error, "all_reduce", "rank 2")
            assert "(told by rank " in str(error)
        comm.resync(timeout=LONG_S)
        comm.all_reduce(x.fill_(1), async_op=True).wait(timeout=LONG_S)
        assert x.tolist() == [3.0] * 3000

    on_threads([SHORT_S, LONG_S, LONG_S], program)


def test_the_peers_that_have_not_come_are_named() -> None:
    done = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            messages = [torch.zeros(1) for _ in range(4)]
            receives = [(messages[source], source) for source in (1, 2, 3)]
            work = comm.exchange(recvs=receives, async_op=True)
            assert until(work.done)
            error = caught(work.wait)
            assert_given_up_by_rank_0(error, "send/recv", "ranks 2, 3")
            assert error.peer is None
            done.set()
        elif comm.rank == 1:
            comm.send(torch.ones(1), 0)
        assert done.wait(LONG_S)

    on_threads([SHORT_S, LONG_S, LONG_S, LONG_S], program)


def test_a_wait_gives_an_operation_more_time() -> None:
    def program(comm: Communicator) -> None:
        x = torch.zeros(4)
        if comm.rank == 0:
            comm.recv(x, 1, async_op=True).wait(timeout=LONG_S)
            assert x.tolist() == [5.0] * 4
        else:
            time.sleep(1.8)
            comm.send(x + 5, 0)

    on_threads([1.0, LONG_S], program)


def test_operations_behind_one_that_was_given_up_are_refused() -> None:
    """At once, before they have started; after resync() they go on."""
    late = threading.Event()

    def program(comm: Communicator) -> None:
        first, second = torch.ones(1000), torch.ones(1000)
        if comm.rank == 0:
            given_up = comm.all_reduce(first, algorithm="ring", async_op=True)
            behind = comm.all_reduce(second, algorithm="ring", async_op=True)
            assert until(given_up.done)
            late.set()
            assert isinstance(caught(given_up.wait), hdp.CommTimeout)
            assert "rank 0 is out of step with rank 1 since: rank 0 waited" in str(caught(behind.wait))
        else:
            assert late.wait(LONG_S)
            assert "(told by rank 0)" in str(caught(lambda: comm.all_reduce(first, algorithm="ring")))
            assert isinstance(caught(lambda: comm.all_reduce(second, algorithm="ring")), hdp.Aborted)
        comm.resync(timeout=LONG_S)
        comm.all_reduce(second.fill_(1), algorithm="ring")
        assert second.tolist() == [2.0] * 1000

    on_threads([2.0, LONG_S], program)

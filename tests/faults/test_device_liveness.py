"""Deadlines of device operations from liveness: they wait while the awaited ranks move, and the stuck one is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.communicator import Communicator
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import LONG_S, caught

TIMEOUT_S = 0.8
LONG_WORK_S = 1.8
WORLDS = {
    "links": ("sim", None),
    "nccl": ("nccl", None),
    "nccl on two hosts": ("nccl", [0, 1, 1]),
}


def on_device(kind: str, program: Callable[[Communicator], Any], *, timeout: float = TIMEOUT_S) -> list[Any]:
    """What ``program`` returns on three ranks that are threads, each with a simulated GPU of its own."""
    transport, hosts = WORLDS[kind]

    def run() -> Any:
        with hdp.init(transport=transport, timeout=timeout) as comm:
            comm.all_reduce(torch.ones(3))  # what a first operation takes is not under test
            comm.synchronize()
            return program(comm)

    options = {} if hosts is None else {"hosts": hosts}
    return run_threads(run, 3, transport=transport, timeout=LONG_S, **options)


@pytest.mark.parametrize("kind", WORLDS)
def test_a_busy_rank_is_waited_for(kind: str) -> None:
    """Several timeouts long, by ranks that wait for it directly and by one that waits for those."""

    def program(comm: Communicator) -> None:
        x = torch.full((300,), float(comm.rank))
        pair = comm.subset([0, 1])
        with comm.liveness_deadlines():
            if comm.rank == 2:
                with comm.busy("reads data"):
                    time.sleep(LONG_WORK_S)
                comm.send(x, 1)
            elif comm.rank == 1:
                comm.recv(x, 2)
                pair.send(x * 7, 0)
            else:
                pair.recv(x, 1)
                comm.synchronize()
                assert x.tolist() == [14.0] * 300
            work = comm.all_reduce(x, async_op=True)
            if comm.rank == 1:
                with comm.busy("evaluates"):
                    time.sleep(LONG_WORK_S)
            work.wait()
            comm.synchronize()

    on_device(kind, program)


@pytest.mark.parametrize("kind", ["links", "nccl on two hosts"])
def test_the_rank_at_the_end_of_the_chain_is_named(kind: str) -> None:
    """Rank 0 waits for 1, which waits for 2, which does nothing; only 0 and 1 have asked for an error."""

    def program(comm: Communicator) -> hdp.Error | None:
        x = torch.ones(300)
        with comm.liveness_deadlines():
            if comm.rank == 2:
                comm.tick()
                until = time.monotonic() + 3 * TIMEOUT_S
                while time.monotonic() < until:
                    time.sleep(0.05)
                return None
            return caught(lambda: comm.recv(x, comm.rank + 1))

    first, second, _ = on_device(kind, program)
    for error in (first, second):
        assert isinstance(error, hdp.CommTimeout), error
        assert re.search(r"rank 2 has not moved for [\d.]+ s; last: ", str(error)), error
    assert second.peer == 2


def test_ranks_that_wait_for_each_other_keep_nobody_alive() -> None:
    """Each has declared that it is busy, but the thread that is waits in the operation."""

    def program(comm: Communicator) -> tuple[hdp.Error, float]:
        x = torch.ones(300)
        started = time.monotonic()
        with comm.liveness_deadlines(), comm.busy("does everything"):
            error = caught(lambda: comm.recv(x, (comm.rank + 1) % comm.size))
            return error, time.monotonic() - started

    for error, seconds in on_device("links", program):
        assert isinstance(error, hdp.CommTimeout), error
        assert seconds < 10 * TIMEOUT_S


def test_an_explicit_timeout_is_hard() -> None:
    def program(comm: Communicator) -> hdp.Error | None:
        x = torch.ones(300)
        with comm.liveness_deadlines():
            if comm.rank == 2:
                with comm.busy("reads data"):
                    time.sleep(TIMEOUT_S)
                return None
            work = comm.recv(x, 2, async_op=True)
            return caught(lambda: work.wait(timeout=0.2))

    for error in on_device("links", program, timeout=LONG_S)[:2]:
        assert isinstance(error, (hdp.CommTimeout, hdp.Aborted)), error
        assert "look for a rank that did not call it, or raise timeout=" in str(error)


def test_who_did_not_ask_has_the_plain_deadline() -> None:
    def program(comm: Communicator) -> hdp.Error | None:
        x = torch.ones(300)
        if comm.rank == 2:
            with comm.busy("reads data"):
                time.sleep(2 * TIMEOUT_S)
            return None
        return caught(lambda: comm.recv(x, 2))

    for error in on_device("links", program)[:2]:
        assert isinstance(error, hdp.CommTimeout), error
        assert "look for a rank that did not call it, or raise timeout=" in str(error)

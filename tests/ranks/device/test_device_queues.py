"""The host stays within what a driver holds of a stream, however large a message is and however late a peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import testing
from tests.harness.fakes import FakeMachine
from tests.harness.native import _testing
from tests.harness.worlds import small_slots

#: Operations that a driver holds of a stream (csrc/transport/stream/pacer.hpp).
HELD = 1020


def limited(ordinal: int, out_of_reach: list[int]) -> _testing.TestDevice:
    device = _testing.TestDevice(ordinal, out_of_reach)
    device.limit_queues(HELD)
    return device


def run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    machine = FakeMachine(world_size, opens=limited)
    with small_slots():
        return testing.run_threads(machine.ranks(fn), world_size, *args, transport="sim", timeout=60)


def values(count: int, seed: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 7 * seed


def long_messages(count: int) -> None:
    """Each rank's messages to all ranks, itself included, of thousands of pieces; several to the same peer."""
    with hdp.init() as comm:
        n, rank = comm.size, comm.rank
        sizes = (count, 5, count // 3)
        sends = [(values(size, 10 * rank + peer + k), peer) for peer in range(n) for k, size in enumerate(sizes)]
        recvs = [(torch.zeros(size), peer) for peer in range(n) for size in sizes]
        comm.exchange(sends, recvs)
        wanted = [values(size, 10 * peer + rank + k) for peer in range(n) for k, size in enumerate(sizes)]
        for (got, _), want in zip(recvs, wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_messages_of_thousands_of_pieces(world_size: int) -> None:
    run(long_messages, world_size, 700_000)  # 684 slots of 4 KiB


def receives_one_by_one(count: int) -> None:
    """One side calls one exchange, the other one operation for each message, landing places among them."""
    with hdp.init() as comm:
        zone = comm.landing_zone(torch.empty(0))
        assert zone is not None
        landed = zone.memory[: 4 * count].view(torch.float32)
        if comm.rank == 0:
            x = [values(count, k) for k in range(3)]
            comm.exchange([(x[0], 1), (x[1], 1, 0), (x[2], 1)], [])
            return
        first, last = torch.zeros(count), torch.zeros(count)
        comm.recv(first, 0)
        comm.exchange([], [(landed, 0, 0)])
        comm.recv(last, 0)
        for k, got in enumerate((first, landed, last)):
            assert torch.equal(got, values(count, k))


def test_one_exchange_may_be_many_operations_of_the_peer() -> None:
    run(receives_one_by_one, 2, 100_000)


def far_ahead(what: str, count: int) -> None:
    """Rank 0 enqueues ``count`` operations before rank 1 begins."""
    with hdp.init() as comm:
        x, y = values(1000, comm.rank), torch.zeros(1000)
        works = []
        if comm.rank == 1:
            time.sleep(0.3)
        for _ in range(count):
            if what == "exchange":
                works.append(comm.exchange([(x, 1 - comm.rank)], [(y, 1 - comm.rank)], async_op=True))
            else:
                works.append(comm.all_reduce(x, out=y, algorithm=what, async_op=True))
        for work in works:
            work.wait()
        want = values(1000, 1 - comm.rank) if what == "exchange" else values(1000, 0) + values(1000, 1)
        assert torch.equal(y, want)


@pytest.mark.parametrize("what", ["exchange", "one_shot", "ring"])
def test_a_host_that_is_far_ahead_waits(what: str) -> None:
    run(far_ahead, 2, what, 600)


def a_peer_never_comes() -> None:
    comm = hdp.init(timeout=1.0)
    if comm.rank == 1:
        time.sleep(2.0)
        return
    began = time.monotonic()
    works = []

    def call_often() -> None:
        for _ in range(600):
            works.append(comm.exchange([(torch.ones(1000), 1)], [(torch.ones(1000), 1)], async_op=True))

    # Where the machine is busy, the first operation's time is over before the host has to wait for room.
    with pytest.raises((hdp.CommTimeout, hdp.Aborted), match="look for a rank that did not call it"):
        call_often()
    assert time.monotonic() - began < 30


def test_the_wait_for_room_has_the_deadline() -> None:
    run(a_peer_never_comes, 2)


def joins(transport: str) -> None:
    hdp.init(transport=transport)


@pytest.mark.parametrize("transport", ["cuda", "nccl", "cuda+nccl"])
def test_threads_are_no_ranks_of_a_gpu(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(hdp.InvalidUsage, match=r"2 ranks that are threads .* on CUDA each rank is a process"):
        testing.run_threads(joins, 2, transport, timeout=20)

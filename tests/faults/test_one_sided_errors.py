"""Messages that NCCL puts, on a fake NCCL: every way in which they can fail gives a clear error, and no hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import LONG_S, caught
from tests.harness.native import _testing

HOSTS = [(), (0, 1)]


@pytest.fixture(autouse=True)
def one_sided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_NCCL_ONE_SIDED", "1")
    monkeypatch.setenv("HDPCOMM_DEVICE_LANDING_BYTES", str(1 << 20))


def ring(comm: hdp.Communicator, *, count: int = 1000, place: int = 0) -> None:
    zone = comm.landing_zone(torch.zeros(1))
    assert zone is not None
    to, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    at = zone.memory[place : place + 4 * count].view(torch.float32)
    comm.exchange([(torch.full((count,), float(comm.rank)), to, place)], [(at, back, place)])
    assert (at == back).all()


def fresh() -> None:
    with hdp.init(timeout=20) as comm:
        ring(comm)


def ranks(fn: Callable[[], Any], size: int, **options: Any) -> list[Any]:
    results = run_threads(fn, size, transport="nccl", **options)
    run_threads(fresh, size, transport="nccl")  # a new world works
    return results


def is_over(comm: hdp.Communicator) -> None:
    with pytest.raises(hdp.Error, match=r"make a new one with init\(\)|told by|last words|closed its communicator"):
        comm.all_reduce(torch.zeros(3))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("function", ["ncclSignal", "ncclWaitSignal", "ncclPutSignal", "ncclGroupEnd"])
def test_a_call_of_nccl_fails(function: str, hosts: tuple[int, ...]) -> None:
    """The peer stands in a wait for a signal that does not come any more."""
    fake = _testing.FakeNccl(2)

    def fails() -> None:
        comm = hdp.init(timeout=LONG_S)
        ring(comm)
        if comm.rank == 1:
            fake.fail_next(function, 1, 3)
        else:
            time.sleep(0.1)
        error = caught(lambda: ring(comm))
        assert f"{function} failed on rank 1: internal error (planted in {function})" in str(error)
        is_over(comm)

    ranks(fails, 2, hosts=hosts, fake_nccl=fake)
    assert fake.complaints() == []


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_leaves(hosts: tuple[int, ...]) -> None:
    def leave_early() -> None:
        comm = hdp.init(timeout=LONG_S)
        ring(comm)
        if comm.rank == 1:
            with pytest.raises(KeyError), comm:
                raise KeyError("no such shard")
            return
        error = caught(lambda: ring(comm))
        assert isinstance(error, hdp.PeerLost)
        assert "no such shard" in str(error)

    ranks(leave_early, 2, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_deadline(hosts: tuple[int, ...]) -> None:
    def late() -> None:
        comm = hdp.init(timeout=20)
        ring(comm)
        zone = comm.landing_zone(torch.zeros(1))
        assert zone is not None
        at = zone.memory[:400].view(torch.float32)
        if comm.rank == 0:
            work = comm.exchange([], [(at, 1, 0)], async_op=True)
            with pytest.raises(hdp.CommTimeout, match=r"rank 0 waited [0-9.]+ s in send/recv"):
                work.wait(timeout=0.3)
        else:
            time.sleep(0.7)
            error = caught(lambda: comm.exchange([(at + 0.0, 0, 0)], []))
            assert "rank 0 waited" in str(error)
        is_over(comm)

    ranks(late, 2, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("case", ["place", "size", "without a place"])
def test_a_mismatch_is_heard(case: str, hosts: tuple[int, ...]) -> None:
    """By the receiver at once; what was put to a wrong place of the zone may have ended for its sender."""

    def disagree() -> str:
        comm = hdp.init(timeout=LONG_S)
        ring(comm)
        zone = comm.landing_zone(torch.zeros(1))
        assert zone is not None
        place = {"place": (64,), "size": (0,), "without a place": ()}[case]
        x, at = torch.zeros(101 if case == "size" else 100), zone.memory[:400].view(torch.float32)
        if comm.rank == 1:
            error = caught(lambda: comm.exchange([], [(at, 0, 0)]))
        else:
            error = caught(lambda: (comm.exchange([(x, 1, *place)], []), comm.all_reduce(x)))
        is_over(comm)
        return f"{type(error).__name__}: {error}"

    texts = ranks(disagree, 2, hosts=hosts)
    assert any(text.startswith("Mismatch") for text in texts), texts
    assert all("call the same operations with the same arguments in the same order" in text for text in texts), texts


@pytest.mark.parametrize("function", ["ncclMemAlloc", "ncclCommWindowRegister", "ncclPutSignal", "ncclWaitSignal"])
def test_joining_fails_on_one_rank(function: str) -> None:
    """The others wait in the registration, or for the first signals."""

    def joins() -> None:
        hdp.init(timeout=LONG_S).close()

    fake = _testing.FakeNccl(3)
    fake.fail_next(function, -1 if function == "ncclMemAlloc" else 1, 1)
    with pytest.raises(hdp.DeviceError, match=rf"{function} failed on rank \d: unhandled cuda error"):
        run_threads(joins, 3, transport="nccl", fake_nccl=fake)
    run_threads(fresh, 3, transport="nccl")


def test_closing_the_window_fails_when_the_world_closes() -> None:
    """NCCL frees what is left with the communicator."""
    fake = _testing.FakeNccl(2)

    def closes() -> None:
        with hdp.init(timeout=20) as comm:
            ring(comm)
            fake.fail_next("ncclCommWindowDeregister", comm.rank, 3)

    run_threads(closes, 2, transport="nccl", fake_nccl=fake)
    run_threads(fresh, 2, transport="nccl")

"""The nccl transport on a fake NCCL: every way in which NCCL or a rank can fail gives a clear error, and no hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import (
    DISAGREEMENTS,
    bad_arguments,
    caught,
    in_another_order,
    nccl_fails_by_itself,
    still_works,
    until,
)
from tests.harness.native import _testing

HOSTS = [(), (0, 1)]  # calls compared by shared memory, and by messages


def ranks(fn: Callable[[], Any], size: int, **options: Any) -> list[Any]:
    results = run_threads(fn, size, transport="nccl", **options)
    run_threads(fresh, size, transport="nccl")  # a new world works
    return results


def fresh() -> None:
    with hdp.init(timeout=20) as comm:
        still_works(comm)


def is_over(comm: hdp.Communicator) -> None:
    """After an error device operations say so."""
    with pytest.raises(hdp.Error, match=r"make a new one with init\(\)|told by|last words|closed its communicator"):
        comm.all_reduce(torch.zeros(3))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_both_sides_hear_of_a_mismatch(name: str, hosts: tuple[int, ...]) -> None:
    def disagree() -> hdp.Error:
        comm = hdp.init(timeout=20)
        still_works(comm)
        error = caught(lambda: DISAGREEMENTS[name](comm))
        assert error.rank == comm.rank
        is_over(comm)
        return error

    errors = ranks(disagree, 2, hosts=hosts)
    named = [error for error in errors if isinstance(error, hdp.Mismatch)]
    assert named
    assert len(named) == 2 or hosts
    for error in errors:  # on several hosts the one that is told later gives the other's words
        assert "call the same operations" in str(error)
        assert error.peer == 1 - error.rank  # type: ignore[operator]


@pytest.mark.parametrize("hosts", [(), (0, 0, 1)])
@pytest.mark.parametrize("changed", [0, 2])
def test_a_changed_order_is_named(changed: int, hosts: tuple[int, ...]) -> None:
    """Three operations of one size on two subsets; one rank calls two of them the other way round."""

    def run() -> str:
        return in_another_order(hdp.init(timeout=20), changed)

    messages = ranks(run, 3, hosts=hosts)
    pairs = [message for message in messages if "called all_reduce(5 x float32, sum" in message]
    assert pairs
    assert all(f"rank {changed} " in message for message in messages), messages
    assert any("subset" in message for message in pairs)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_late_rank(hosts: tuple[int, ...]) -> None:
    def late() -> None:
        comm = hdp.init(timeout=20)
        x = torch.ones(50_000)
        if comm.rank == 0:
            with pytest.raises(hdp.CommTimeout, match=r"rank 0 waited [0-9.]+ s in all_reduce.*raise timeout="):
                comm.all_reduce(x, async_op=True).wait(timeout=0.3)
        else:
            time.sleep(0.7)
            with pytest.raises((hdp.CommTimeout, hdp.PeerLost), match=r"rank 0 waited [0-9.]+ s in all_reduce"):
                comm.all_reduce(x)
        is_over(comm)

    ranks(late, 2, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_deadline_without_a_wait(hosts: tuple[int, ...]) -> None:
    def nobody_waits() -> None:
        comm = hdp.init(timeout=0.4)
        if comm.rank == 0:
            work = comm.recv(torch.zeros(4), 1, async_op=True)
            until(work.done)
            with pytest.raises(hdp.CommTimeout, match="rank 0 waited"):
                work.wait()
        else:
            time.sleep(1)

    ranks(nobody_waits, 2, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_sends_that_wait_for_each_other_end_at_the_deadline(hosts: tuple[int, ...]) -> None:
    """NCCL's send may wait for its receive: what exchange() does at once must not be two calls."""

    def both_send_first() -> None:
        comm = hdp.init(timeout=0.5)
        comm.send(torch.zeros(100), 1 - comm.rank, async_op=True)
        with pytest.raises(hdp.Error, match=r"rank [01] waited [0-9.]+ s in send/recv"):
            comm.recv(torch.zeros(100), 1 - comm.rank)

    ranks(both_send_first, 2, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_leaves(hosts: tuple[int, ...]) -> None:
    def leave_early() -> None:
        comm = hdp.init(timeout=20)
        if comm.rank == 1:
            comm.send(torch.arange(4.0), 0)
            with pytest.raises(KeyError), comm:
                raise KeyError("no such shard")
            return
        x = torch.zeros(4)
        comm.recv(x, 1)
        assert x.tolist() == [0, 1, 2, 3]
        with pytest.raises(hdp.PeerLost, match=r"rank 1 closed its communicator.*no such shard") as info:
            comm.recv(x, 1)
        assert info.value.peer == 1

    ranks(leave_early, 2, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_abort(hosts: tuple[int, ...]) -> None:
    def aborts() -> None:
        comm = hdp.init(timeout=20)
        if comm.rank == 0:
            work = comm.all_reduce(torch.zeros(100_000), async_op=True)
            comm.abort("the user had enough")
            with pytest.raises(hdp.Aborted, match="the user had enough"):
                work.wait()
            with pytest.raises((hdp.Aborted, hdp.InvalidUsage), match="make a new one"):
                comm.all_reduce(torch.zeros(1))
        else:
            time.sleep(0.3)
            error = caught(lambda: comm.all_reduce(torch.zeros(100_000)))
            assert isinstance(error, (hdp.Aborted, hdp.PeerLost))
            assert "the user had enough" in str(error)

    ranks(aborts, 2, hosts=hosts)


FAILING_CALLS = {
    "ncclGroupStart": "ring",
    "ncclSend": "ring",
    "ncclRecv": "ring",
    "ncclGroupEnd": "ring",
    "ncclAllReduce": "auto",
}


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("function", FAILING_CALLS)
def test_a_call_of_nccl_fails(function: str, hosts: tuple[int, ...]) -> None:
    fake = _testing.FakeNccl(2)

    def fails() -> None:
        comm = hdp.init(timeout=20)
        still_works(comm)
        if comm.rank == 1:
            fake.fail_next(function, 1, 3)
        else:
            time.sleep(0.1)
        error = caught(lambda: comm.all_reduce(torch.zeros(9), algorithm=FAILING_CALLS[function]))
        assert f"{function} failed on rank 1: internal error (planted in {function})" in str(error)
        assert "NCCL 2.32.3 at the fake NCCL, NCCL_DEBUG=WARN says more" in str(error)
        assert isinstance(error, hdp.DeviceError) or comm.rank == 0
        is_over(comm)

    ranks(fails, 2, hosts=hosts, fake_nccl=fake)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_failed_operation_lets_go_of_the_callers_stream(hosts: tuple[int, ...]) -> None:
    """The call fails after NCCL has taken its group, as when a later step of a ring meets a lost peer."""
    fake = _testing.FakeNccl(2)

    def fails() -> None:
        comm = hdp.init(timeout=20)
        still_works(comm)
        if comm.rank == 1:
            fake.fail_next("ncclGroupEnd", 1, 3)
            error = caught(lambda: comm.all_reduce(torch.zeros(9), algorithm="ring"))
            assert isinstance(error, hdp.DeviceError)
            streams = comm.streams  # type: ignore[attr-defined]
            streams.device.synchronize_stream(streams.host_stream, 3.0)
        else:
            time.sleep(0.1)
            caught(lambda: comm.all_reduce(torch.zeros(9), algorithm="ring"))
        is_over(comm)

    ranks(fails, 2, hosts=hosts, fake_nccl=fake)
    assert fake.complaints() == []


@pytest.mark.parametrize("hosts", HOSTS)
def test_an_asynchronous_error_with_nothing_running(hosts: tuple[int, ...]) -> None:
    fake = _testing.FakeNccl(2)

    def breaks() -> None:
        comm = hdp.init(timeout=20)
        nccl_fails_by_itself(comm, fake, 0)
        is_over(comm)

    ranks(breaks, 2, hosts=hosts, fake_nccl=fake)
    assert fake.complaints() == []  # aborted, not destroyed


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("code", "kind"), [(1, hdp.DeviceError), (6, hdp.PeerLost)])
def test_an_asynchronous_error(code: int, kind: type[hdp.Error], hosts: tuple[int, ...]) -> None:
    fake = _testing.FakeNccl(2)

    def breaks() -> None:
        comm = hdp.init(timeout=20)
        still_works(comm)
        x = torch.zeros(100)
        if comm.rank == 0:
            work = comm.recv(x, 1, async_op=True)
            fake.set_async_error(0, code)
            error = caught(work.wait)
            assert isinstance(error, kind)
            assert "an operation of NCCL failed on rank 0" in str(error)
        else:
            time.sleep(0.5)
            error = caught(lambda: comm.send(x, 0))
            assert "an operation of NCCL failed on rank 0" in str(error)
        is_over(comm)

    ranks(breaks, 2, hosts=hosts, fake_nccl=fake)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_call_in_progress_that_never_ends(hosts: tuple[int, ...]) -> None:
    """As when NCCL connects a pair of which one side hangs: the host waits inside the call."""
    fake = _testing.FakeNccl(2)

    def stalls() -> None:
        comm = hdp.init(timeout=3.0)
        still_works(comm)
        if comm.rank == 0:
            fake.stall_groups(0)
        with pytest.raises(hdp.Error, match=r"rank [01] waited [0-9.]+ s in (send/recv|ncclGroupEnd)"):
            comm.exchange([(torch.zeros(4), 1 - comm.rank)], [(torch.zeros(4), 1 - comm.rank)])
        is_over(comm)

    ranks(stalls, 2, hosts=hosts, fake_nccl=fake)


def test_a_call_in_progress_ends_when_a_peer_fails() -> None:
    fake = _testing.FakeNccl(2)

    def fails() -> None:
        comm = hdp.init(timeout=20)
        if comm.rank == 1:
            time.sleep(0.2)
            comm.close()
            return
        fake.stall_groups(0)
        with pytest.raises(hdp.PeerLost, match="rank 1 closed its communicator"):
            comm.recv(torch.zeros(4), 1)

    ranks(fails, 2, fake_nccl=fake)


@pytest.mark.parametrize("what", ["stats", "scratch_bytes"])
def test_threads_go_on_while_one_asks_for_counts(what: str) -> None:
    """A call of NCCL in progress holds the engine; who asks it something waits without the GIL."""
    fake = _testing.FakeNccl(2)
    asking = threading.Event()

    def asks() -> None:
        comm = hdp.init(timeout=3)
        if comm.rank == 1:
            asking.wait(10)
            time.sleep(0.2)
            comm.close()
            return
        fake.stall_groups(0)
        lost = []

        def receive() -> None:
            with pytest.raises(hdp.PeerLost, match="rank 1 closed its communicator"):  # not a timeout
                comm.recv(torch.zeros(4), 1)
            lost.append(True)

        receiver = threading.Thread(target=receive)
        receiver.start()
        time.sleep(0.1)
        asking.set()
        comm.stats() if what == "stats" else _testing.scratch_bytes(comm.streams)  # type: ignore[attr-defined]
        receiver.join()
        assert lost

    ranks(asks, 2, fake_nccl=fake)


def joined(timeout: float = 20) -> None:
    with hdp.init(timeout=timeout) as comm:
        comm.barrier()


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig"])
def test_joining_fails_on_one_rank(function: str) -> None:
    fake = _testing.FakeNccl(3)
    fake.fail_next(function, -1 if function == "ncclGetUniqueId" else 2, 2)
    with pytest.raises(hdp.DeviceError, match=rf"{function} failed.*system error \(planted"):
        ranks(joined, 3, fake_nccl=fake)
    run_threads(fresh, 3, transport="nccl")


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("function", ["ncclSend", "ncclRecv"])
def test_connecting_ahead_fails_on_one_rank(function: str, hosts: tuple[int, ...]) -> None:
    """The communicator is there, and messages are under way: it is aborted, or the others would wait for it."""
    fake = _testing.FakeNccl(2)
    fake.fail_next(function, 1, 3)
    with pytest.raises(hdp.DeviceError, match=f"{function} failed on rank 1: internal error"):
        run_threads(joined, 2, transport="nccl", fake_nccl=fake, hosts=hosts)
    assert fake.complaints() == []
    run_threads(fresh, 2, transport="nccl")


def test_connecting_ahead_has_a_deadline() -> None:
    fake = _testing.FakeNccl(2)
    fake.stall_groups(1)
    with pytest.raises(hdp.CommTimeout, match=r"rank 1 waited [0-9.]+ s in ncclGroupEnd|did not end within 0\.6"):
        run_threads(joined, 2, 0.6, transport="nccl", fake_nccl=fake)
    assert fake.complaints() == []


def test_joining_has_a_deadline() -> None:
    fake = _testing.FakeNccl(2)
    fake.stall_init()
    with pytest.raises(hdp.CommTimeout, match=r"waited [0-9.]+ s in ncclCommInitRankConfig .* of 2 ranks"):
        run_threads(joined, 2, 0.5, transport="nccl", fake_nccl=fake)


def test_a_rank_that_cannot_join_ends_the_wait_of_the_others() -> None:
    def one_fails() -> str:
        if (comm := caught_in_init()) is not None:
            return comm
        return ""

    def caught_in_init() -> str | None:
        try:
            with hdp.init(timeout=20) as comm:
                comm.barrier()
        except hdp.Error as error:
            return str(error)
        return None

    fake = _testing.FakeNccl(2)
    fake.fail_next("ncclCommInitRankConfig", 1, 2)
    fake.stall_init()  # rank 0 hears of rank 1, not of the deadline
    messages = run_threads(one_fails, 2, transport="nccl", fake_nccl=fake)
    assert "ncclCommInitRankConfig failed on rank 1" in messages[1]
    assert "rank 1 closed its communicator" in messages[0]


def test_bad_arguments() -> None:
    def more() -> None:
        comm = hdp.init()
        x = torch.zeros(1)
        with pytest.raises(hdp.InvalidUsage, match="200 sends and 100 receives; NCCL takes 256"):
            comm.exchange([(x, 1 - comm.rank)] * 200, [(torch.zeros(1), 1 - comm.rank) for _ in range(100)])
        with pytest.raises(hdp.InvalidUsage, match="NCCL has no landing zone"):
            comm.exchange([(x, 1 - comm.rank, 0)], [])
        still_works(comm)

    run_threads(bad_arguments, 2, transport="nccl")
    run_threads(more, 2, transport="nccl")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(hdp.InvalidUsage, match=r"rank 0 asked for .* CUDA devices, but torch sees no"):
        hdp.init(transport="nccl")

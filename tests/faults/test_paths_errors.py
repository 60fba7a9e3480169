"""Links inside hosts and NCCL between them: whatever fails, and on whichever path, ends on all members, and nothing
hangs. Simulated devices, a fake NCCL, ranks 0 and 1 told that they share a host, rank 2 on another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from tests.faults.test_nccl_errors import is_over
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import (
    DISAGREEMENTS,
    bad_arguments,
    caught,
    in_another_order,
    nccl_fails_by_itself,
    still_works,
)
from tests.harness.native import _testing

HOSTS = (0, 0, 1)
PAIRS = [(0, 1), (1, 2)]  # over a link, by NCCL


def ranks(fn: Callable[[], Any], *, hosts: Sequence[int] = HOSTS, **options: Any) -> list[Any]:
    results = run_threads(fn, len(hosts), transport="cuda+nccl", hosts=hosts, **options)
    run_threads(fresh, len(hosts), transport="cuda+nccl", hosts=hosts)  # a new world works
    return results


def fresh() -> None:
    with hdp.init(timeout=20) as comm:
        still_works(comm)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_both_sides_hear_of_a_mismatch(name: str, hosts: tuple[int, ...]) -> None:
    def disagree() -> hdp.Error:
        comm = hdp.init(timeout=20)
        still_works(comm)
        error = caught(lambda: DISAGREEMENTS[name](comm))
        is_over(comm)
        return error

    errors = ranks(disagree, hosts=hosts)
    assert any(isinstance(error, hdp.Mismatch) for error in errors)
    assert all("call the same operations" in str(error) for error in errors)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_mismatch_of_two_in_a_world_of_both_kinds(pair: tuple[int, int]) -> None:
    """And the third hears of it where it needs one of them."""

    def disagree() -> str:
        comm = hdp.init(timeout=20)
        still_works(comm)
        if comm.rank in pair:
            peer, mine = sum(pair) - comm.rank, pair.index(comm.rank)
            count = 4 + mine
            error = caught(lambda: comm.send(torch.zeros(count), peer) if mine else comm.recv(torch.zeros(4), peer))
        else:
            error = caught(lambda: comm.all_reduce(torch.zeros(3)))
        is_over(comm)
        return str(error)

    for text in ranks(disagree):
        assert "call the same operations" in text


@pytest.mark.parametrize("changed", [0, 2])
def test_a_changed_order_is_named(changed: int) -> None:
    def run() -> str:
        return in_another_order(hdp.init(timeout=20), changed)

    messages = ranks(run)
    assert any("called all_reduce(5 x float32, sum" in message and "subset" in message for message in messages)
    assert all(f"rank {changed} " in message for message in messages), messages


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank(late: int, algorithm: str) -> None:
    def run() -> None:
        comm = hdp.init(timeout=20)
        x = torch.ones(50_000)
        if comm.rank == late:
            time.sleep(0.8)
            error = caught(lambda: comm.all_reduce(x, algorithm=algorithm))
        else:
            error = caught(lambda: comm.all_reduce(x, algorithm=algorithm, async_op=True).wait(timeout=0.3))
        assert isinstance(error, (hdp.CommTimeout, hdp.PeerLost))
        assert "s in all_reduce" in str(error)
        is_over(comm)

    ranks(run)


def test_the_deadline_without_a_wait() -> None:
    def nobody_waits() -> None:
        comm = hdp.init(timeout=0.4)
        if comm.rank == 2:
            time.sleep(1)
            return
        work = comm.all_reduce(torch.zeros(4), algorithm="hierarchical", async_op=True)
        limit = time.monotonic() + 3
        while not work.done() and time.monotonic() < limit:
            time.sleep(0.01)
        with pytest.raises(hdp.CommTimeout, match=r"rank [01] waited"):
            work.wait()

    ranks(nobody_waits)


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves(leaver: int) -> None:
    """All others hear it: one over the board of the host, one over the host world."""

    def leave_early() -> None:
        comm = hdp.init(timeout=20)
        still_works(comm)
        if comm.rank == leaver:
            with pytest.raises(KeyError), comm:
                raise KeyError("no such shard")
            return
        error = caught(lambda: comm.all_reduce(torch.zeros(4), algorithm="hierarchical"))
        assert isinstance(error, hdp.PeerLost)
        assert f"rank {leaver} closed its communicator" in str(error)
        assert "no such shard" in str(error)

    ranks(leave_early)


def test_the_others_go_on_without_a_rank_that_left() -> None:
    def run() -> None:
        comm = hdp.init(timeout=20)
        pair = comm.subset([0, 1])
        if comm.rank == 2:
            comm.close()
            return
        assert pair is not None
        time.sleep(0.2)
        for _ in range(3):
            pair.all_reduce(x := torch.ones(5000))
            assert (x == 2).all()
        comm.close()

    ranks(run)


@pytest.mark.parametrize("aborter", [0, 2])
def test_abort(aborter: int) -> None:
    def aborts() -> None:
        comm = hdp.init(timeout=20)
        if comm.rank == aborter:
            work = comm.all_reduce(torch.zeros(100_000), algorithm="hierarchical", async_op=True)
            comm.abort("the user had enough")
            with pytest.raises(hdp.Aborted, match="the user had enough"):
                work.wait()
            with pytest.raises((hdp.Aborted, hdp.InvalidUsage), match="make a new one"):
                comm.all_reduce(torch.zeros(1))
        else:
            time.sleep(0.3)
            error = caught(lambda: comm.all_reduce(torch.zeros(100_000), algorithm="hierarchical"))
            assert isinstance(error, (hdp.Aborted, hdp.PeerLost))
            assert "the user had enough" in str(error)

    ranks(aborts)


@pytest.mark.parametrize(
    ("function", "algorithm"),
    [
        ("ncclGroupStart", "hierarchical"),
        ("ncclSend", "ring"),
        ("ncclRecv", "hierarchical"),
        ("ncclGroupEnd", "hierarchical"),
    ],
)
def test_a_call_of_nccl_fails_in_the_middle_of_a_step(function: str, algorithm: str) -> None:
    """The step's transfers over links have left for their lanes by then."""
    fake = _testing.FakeNccl(3)

    def fails() -> None:
        comm = hdp.init(timeout=20)
        still_works(comm)
        if comm.rank == 1:
            time.sleep(0.3)  # the others have enqueued theirs, and wait
            fake.fail_next(function, 1, 3)
        error = caught(lambda: comm.all_reduce(torch.zeros(90), algorithm=algorithm))
        assert f"{function} failed on rank 1: internal error (planted in {function})" in str(error)
        if comm.rank == 1:
            assert isinstance(error, hdp.DeviceError)
            streams = comm.streams  # type: ignore[attr-defined]
            streams.device.synchronize_stream(streams.host_stream, 3.0)
        is_over(comm)

    ranks(fails, fake_nccl=fake)
    assert fake.complaints() == []


@pytest.mark.parametrize(("code", "kind"), [(1, hdp.DeviceError), (6, hdp.PeerLost)])
def test_an_asynchronous_error_ends_operations_over_links_too(code: int, kind: type[hdp.Error]) -> None:
    fake = _testing.FakeNccl(3)

    def breaks() -> None:
        comm = hdp.init(timeout=20)
        still_works(comm)
        x = torch.zeros(100)
        if comm.rank == 0:
            work = comm.recv(x, 1, async_op=True)
            fake.set_async_error(0, code)
            error = caught(work.wait)
            assert isinstance(error, kind)
        elif comm.rank == 1:
            time.sleep(0.5)
            error = caught(lambda: comm.send(x, 0))
        else:
            error = caught(lambda: comm.all_reduce(x))
        assert "an operation of NCCL failed on rank 0" in str(error)
        is_over(comm)

    ranks(breaks, fake_nccl=fake)
    assert fake.complaints() == []  # aborted, not destroyed


def test_an_asynchronous_error_with_nothing_running() -> None:
    fake = _testing.FakeNccl(3)

    def breaks() -> None:
        comm = hdp.init(timeout=20)
        nccl_fails_by_itself(comm, fake, 2, algorithm="hierarchical")
        is_over(comm)

    ranks(breaks, fake_nccl=fake)


@pytest.mark.parametrize("stalled", [0, 2])
def test_a_call_in_progress_that_never_ends(stalled: int) -> None:
    fake = _testing.FakeNccl(3)

    def stalls() -> None:
        comm = hdp.init(timeout=3.0)
        still_works(comm)
        if comm.rank == stalled:
            fake.stall_groups(stalled)
        with pytest.raises(hdp.Error, match=r"rank [012] waited 3\.[0-9]+ s in (all_reduce|ncclGroupEnd)"):
            comm.all_reduce(torch.zeros(40), algorithm="hierarchical")
        is_over(comm)

    ranks(stalls, fake_nccl=fake)


def joined(timeout: float = 20) -> None:
    with hdp.init(timeout=timeout) as comm:
        comm.barrier()


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclSend", "ncclRecv"])
def test_joining_fails_on_one_rank(function: str) -> None:
    fake = _testing.FakeNccl(3)
    fake.fail_next(function, -1 if function == "ncclGetUniqueId" else 2, 2)
    with pytest.raises(hdp.DeviceError, match=rf"{function} failed.*system error \(planted"):
        ranks(joined, fake_nccl=fake)
    assert fake.complaints() == []
    run_threads(fresh, 3, transport="cuda+nccl", hosts=HOSTS)


def test_without_nccl_only_worlds_that_need_it_fail() -> None:
    class Missing(_testing.FakeNccl):
        def library(self, rank: int, device: Any) -> Any:
            del rank, device
            raise hdp.DeviceError("NCCL was not found")

    run_threads(fresh, 2, transport="cuda+nccl", fake_nccl=Missing(2))
    with pytest.raises(hdp.DeviceError, match="NCCL was not found"):
        run_threads(fresh, 2, transport="cuda+nccl", hosts=(0, 1), fake_nccl=Missing(2))


def test_bad_arguments() -> None:
    def more() -> None:
        comm = hdp.init()
        x = torch.zeros(1)
        with pytest.raises(hdp.InvalidUsage, match="200 sends and 100 receives; NCCL takes 256"):
            comm.exchange([(x, 1 - comm.rank)] * 200, [(torch.zeros(1), 1 - comm.rank) for _ in range(100)])
        still_works(comm)

    run_threads(bad_arguments, 2, transport="cuda+nccl", hosts=(0, 1))
    run_threads(more, 2, transport="cuda+nccl", hosts=(0, 1))

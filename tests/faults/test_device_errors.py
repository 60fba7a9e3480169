"""Ranks of a device world that disagree, come late, leave or die: the right error on both sides, soon, and no hang."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.testing import run_threads, spawn
from tests.harness.fakes import FakeMachine
from tests.harness.fault_cases import (
    DISAGREEMENTS,
    LONG_S,
    aborted_by_rank_0,
    bad_arguments,
    caught,
    differs_from_rank_1,
    exit_by_exception,
    interrupt_soon,
    late_after_a_timeout,
    still_works,
    sums,
    survives,
    told_mismatch,
    told_survivors,
    until,
    until_it_fails,
    wait_for,
)
from tests.harness.machines import joining_on
from tests.harness.native import _testing


def refuses_device_operations(comm: hdp.Communicator) -> None:
    """After an error the engine says clearly that it is over; a new world works."""
    with pytest.raises(hdp.Error, match=r"streams were released: make a new one with init\(\)|told by") as info:
        comm.all_reduce(torch.zeros(3))
    assert isinstance(info.value, (hdp.Aborted, hdp.Mismatch))


def disagree(name: str) -> str:
    with hdp.init(transport="sim", timeout=LONG_S) as comm:
        still_works(comm)
        told = told_mismatch(comm, lambda: DISAGREEMENTS[name](comm))
        refuses_device_operations(comm)
        return told


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_both_sides_raise_mismatch(name: str) -> None:
    messages = run_threads(disagree, 2, name)
    if name == "size":
        assert all("4 x float32" in message and "5 x float32" in message for message in messages)


def processes_disagree() -> None:
    disagree("large size")
    comm = hdp.init(transport="sim", timeout=LONG_S)
    still_works(comm)


def test_processes_raise_mismatch_and_a_new_world_works(ranks: Any) -> None:
    ranks(2, processes_disagree)


def one_of_three_disagrees() -> None:
    comm = hdp.init(timeout=LONG_S)
    differs_from_rank_1(comm)
    refuses_device_operations(comm)


def test_all_members_hear_of_a_mismatch() -> None:
    run_threads(one_of_three_disagrees, 3, transport="sim")


# One rank's call and the other's; both read the peer's memory by a kernel, or would.
PEER_READS: dict[str, Callable[[hdp.Communicator, torch.Tensor], Any]] = {
    "algorithm": lambda comm, _: comm.all_reduce(torch.ones(9), algorithm=("one_shot", "two_shot")[comm.rank]),
    "messages": lambda comm, _: comm.all_reduce(torch.ones(9), algorithm=("one_shot", "ring")[comm.rank]),
    "count": lambda comm, _: comm.all_reduce(torch.ones(9 + comm.rank), algorithm="one_shot"),
    "place": lambda comm, zone: comm.all_gather(
        torch.zeros(8), (zone[:4], zone[8:12])[comm.rank], algorithm="one_shot"
    ),
    "zone or not": lambda comm, zone: comm.all_reduce((zone[:4], torch.ones(4))[comm.rank], algorithm="two_shot"),
}


def disagree_in_peer_reads(name: str) -> None:
    comm = hdp.init(transport="sim", timeout=LONG_S)
    zone = comm.landing_zone(torch.zeros(1))
    assert zone is not None
    comm.all_reduce(torch.ones(5), algorithm="one_shot")
    told = told_mismatch(comm, lambda: PEER_READS[name](comm, zone.memory.view(torch.float32)))
    if "zone" in name or "place" in name:
        assert "landing at 0" in told
    refuses_device_operations(comm)
    again = hdp.init(transport="sim", timeout=LONG_S)
    again.all_reduce(x := torch.ones(3), algorithm="two_shot")
    assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("name", PEER_READS)
def test_disagreement_in_peer_reads(name: str, ranks: Any) -> None:
    ranks(2, disagree_in_peer_reads, name)


def late_in_peer_reads(algorithm: str, ends: str) -> None:
    """A rank that does not come to a meeting: the others' streams run dry, all raise, and init() works again."""
    comm = hdp.init(transport="sim", timeout=LONG_S)
    x = torch.ones(50_000)
    comm.all_reduce(x, algorithm=algorithm)
    if comm.rank == 0:
        if ends == "abort":
            comm.abort("the user had enough")
        else:
            time.sleep(0.7)
        error = caught(lambda: comm.all_reduce(x, algorithm=algorithm))
    else:
        error = caught(lambda: comm.all_reduce(x, algorithm=algorithm, async_op=True).wait(timeout=0.3))
    kinds = (hdp.CommTimeout,) if ends == "timeout" else (hdp.Aborted, hdp.PeerLost, hdp.InvalidUsage)
    assert isinstance(error, kinds), error
    with pytest.raises(hdp.Error, match=r"make a new one with init\(\)|told by|had enough"):
        comm.all_reduce(x, algorithm=algorithm)
    with hdp.init(transport="sim", timeout=LONG_S) as again:
        again.all_reduce(y := torch.ones(3), algorithm=algorithm)
        assert y.tolist() == [3.0] * 3


@pytest.mark.parametrize("ends", ["timeout", "abort"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_nobody_waits_for_ever_in_peer_reads(algorithm: str, ends: str, ranks: Any) -> None:
    ranks(3, late_in_peer_reads, algorithm, ends)


def cannot_start_a_thread() -> None:
    """The second of two receives cannot be enqueued; the first waits on its stream already."""
    beside = hdp.init(transport="shm", timeout=LONG_S)
    with joining_on(FakeMachine(2, opens=_testing.TestDevice)):
        comm = hdp.init(transport="sim", timeout=LONG_S)
    x, y = torch.ones(4000), torch.ones(4000)  # small ones would need one stream
    if comm.rank == 0:
        comm.streams.device.limit_threads(1)  # type: ignore[attr-defined]
        error = caught(lambda: comm.exchange([], [(x, 1), (y, 1)]))
        assert "rank 0 could not go on with its device operations: no thread for a stream" in str(error)
        assert (error.op, error.ranks) == ("send/recv", (0, 1))
        assert x.eq(0).all()  # what its stream held has run: nobody writes into the tensors any more
        assert y.eq(1).all()
        beside.barrier()  # rank 1 has not sent before, and finds it at once
    else:
        beside.barrier()
        assert "no thread for a stream" in str(caught(lambda: comm.exchange([(x, 0), (y, 0)], [])))
    with pytest.raises(hdp.Error, match=r"streams were released: make a new one with init\(\)|told by"):
        comm.all_reduce(torch.zeros(3))
    with hdp.init(transport="sim", timeout=LONG_S) as again:
        still_works(again)


def test_an_operation_that_fails_while_it_is_enqueued(ranks: Any) -> None:
    ranks(2, cannot_start_a_thread)


def no_time_left() -> None:
    comm = hdp.init(transport="sim", timeout=LONG_S)
    x = torch.zeros(4)
    if comm.rank == 0:
        works = [comm.recv(torch.zeros(4), 1, async_op=True) for _ in range(2)]
        until(lambda: all(work.done() for work in works))
        comm.synchronize(timeout=1e-9)  # what has ended needs no time
        comm.recv(x, 1, async_op=True)
        with pytest.raises(hdp.CommTimeout, match=r"rank 0 waited .* in send/recv"):
            comm.synchronize(timeout=1e-9)
    else:
        for _ in range(2):
            comm.send(x, 0)
        with pytest.raises(hdp.CommTimeout, match="told by rank 0"):
            comm.recv(x, 0)


def test_a_wait_whose_time_is_over(ranks: Any) -> None:
    ranks(2, no_time_left)


def fails_while_its_stream_is_busy() -> None:
    beside = hdp.init(transport="shm", timeout=LONG_S)
    comm = hdp.init(transport="sim", timeout=LONG_S)
    if comm.rank == 0:
        streams = comm.streams  # type: ignore[attr-defined]
        device = streams.device
        flag = device.allocate(4)
        device.store_flag(flag, 0)
        device.wait_value(streams.host_stream, flag, 1)  # the operation stands behind it
        works = [work := comm.recv(torch.zeros(4), 1, async_op=True)]
        beside.barrier()
        with pytest.raises(hdp.Error, match="5 x float32"):
            until_it_fails(lambda: works.append(comm.recv(torch.zeros(4), 1, async_op=True)))
        assert not work.done()
        device.store_flag(flag, 1)
        assert until(lambda: all(each.done() for each in works))
        with pytest.raises(hdp.Mismatch, match="5 x float32"):
            work.wait()
        device.free(flag)
    else:
        beside.barrier()
        assert isinstance(caught(lambda: comm.send(torch.zeros(5), 0)), hdp.Mismatch)


def test_done_means_that_the_streams_are_through(ranks: Any) -> None:
    ranks(2, fails_while_its_stream_is_busy)


def late_rank(folder: str) -> None:
    comm = hdp.init(transport="sim", timeout=LONG_S)
    late_after_a_timeout(comm, folder)
    with hdp.init(transport="sim", timeout=LONG_S) as again:
        still_works(again)


def test_timeout_reaches_the_late_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(2, late_rank, str(tmp_path))


def nobody_waits() -> None:
    """The engine itself looks after the deadline of what is in flight."""
    comm = hdp.init(transport="sim", timeout=0.4)
    if comm.rank == 0:
        work = comm.recv(torch.zeros(4), 1, async_op=True)
        until(work.done)
        with pytest.raises(hdp.CommTimeout, match="rank 0 waited"):
            comm.synchronize()
        with pytest.raises(hdp.CommTimeout, match="rank 0 waited"):
            work.wait()
    else:
        time.sleep(1)


def test_deadline_without_a_wait(ranks: Any) -> None:
    ranks(2, nobody_waits)


def bad_device_arguments() -> None:
    with hdp.init(transport="sim") as comm:
        zone = comm.landing_zone(torch.zeros(1))
        assert zone is not None
        size = zone.memory.numel()
        y = torch.zeros(64, dtype=torch.uint8)
        with pytest.raises(hdp.InvalidUsage, match="HDPCOMM_DEVICE_LANDING_BYTES"):
            comm.exchange([(y, 1 - comm.rank, size - 63)], [])
        with pytest.raises(hdp.InvalidUsage, match="is not at offset 128"):
            comm.exchange([], [(y, 1 - comm.rank, 128)])
        still_works(comm)
    with hdp.init(transport="shm") as comm:
        assert comm.landing_zone(y) is None
        with pytest.raises(hdp.InvalidUsage, match="only device messages have one"):
            comm.exchange([(y, 1 - comm.rank, 0)], [])


def test_bad_arguments(ranks: Any) -> None:
    ranks(2, bad_device_arguments)
    run_threads(bad_arguments, 2, transport="sim")


def aborts() -> None:
    comm = hdp.init(transport="sim", timeout=LONG_S)
    aborted_by_rank_0(comm)
    with hdp.init(transport="sim", timeout=LONG_S) as again:
        still_works(again)


def test_abort(ranks: Any) -> None:
    ranks(2, aborts)


def leave_early() -> None:
    comm = hdp.init(transport="sim", timeout=LONG_S)
    if comm.rank == 1:
        comm.send(torch.arange(4.0), 0)
        comm.close()
        return
    x = torch.zeros(4)
    comm.recv(x, 1)
    assert x.tolist() == [0, 1, 2, 3]
    time.sleep(0.2)  # so that it is known when the next operation begins
    with pytest.raises(
        hdp.PeerLost, match=r"rank 1 closed its communicator while rank 0 .*send/recv\(4 x float"
    ) as info:
        comm.recv(x, 1)
    assert info.value.peer == 1
    with pytest.raises(hdp.PeerLost, match="rank 1 closed its communicator"):
        comm.send(x, 1)


def test_rank_that_leaves(ranks: Any) -> None:
    ranks(2, leave_early)


def test_reason_of_a_rank_that_failed_is_told(ranks: Any) -> None:
    ranks(2, exit_by_exception, "sim")


@pytest.mark.parametrize(("count", "algorithm"), [(4, "ring"), (1_000_000, "ring"), (1_000_000, "two_shot")])
def test_survivors_are_told_who_was_killed(tmp_path: Path, count: int, algorithm: str) -> None:
    call = functools.partial(sums, count=count, algorithm=algorithm)
    with pytest.raises(hdp.PeerLost, match="rank 0 ended by signal SIGKILL"):
        spawn(survives, 3, str(tmp_path), "sim", 0, call, timeout=60)
    assert told_survivors(tmp_path) == {1, 2}


def sends_to_one_that_dies(folder: str) -> None:
    """The message is in the receiver's memory, and the receiver dies before it has called anything."""
    comm = hdp.init(transport="sim", timeout=LONG_S)
    comm.barrier()
    if comm.rank == 1:
        wait_for(Path(folder, "sent"))
        os.kill(os.getpid(), signal.SIGKILL)
    work = comm.send(torch.ones(4), 1, async_op=True)
    time.sleep(0.2)  # for its streams, which need nothing of the receiver
    Path(folder, "sent").touch()
    error = caught(work.wait)
    assert isinstance(error, hdp.PeerLost), error
    assert "rank 1 died while rank 0 waited for it in send/recv(4 x float32)" in str(error)
    assert error.peer == 1
    Path(folder, "0").touch()


def test_the_sender_is_told_of_a_receiver_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 1 ended by signal SIGKILL"):
        spawn(sends_to_one_that_dies, 2, str(tmp_path), timeout=60)
    assert told_survivors(tmp_path) == {0}


def joins_with_one_that_dies(folder: str) -> None:
    """Rank 2 has told the others where its memory is, and is killed before they open it."""
    rank, place = int(os.environ["RANK"]), Path(folder, "process of rank 2")

    def dies_or_waits() -> None:
        if rank == 2:
            place.write_text(f"{os.getpid()} ")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(place)
        assert until(lambda: not _core.comm.process_runs(int(place.read_text() or os.getpid())))

    def opens(ordinal: int, out_of_reach: list[int]) -> _core.device.Device:
        device = _testing.TestDevice(ordinal, out_of_reach)
        device.before_import(dies_or_waits)
        return device

    with joining_on(FakeMachine(3, opens=opens)), pytest.raises(hdp.PeerLost, match="rank 2 died") as info:
        hdp.init(transport="sim", timeout=LONG_S)
    assert info.value.op == "init"
    Path(folder, str(rank)).touch()


def test_one_that_is_killed_while_the_others_open_its_memory(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 2 ended by signal SIGKILL"):
        spawn(joins_with_one_that_dies, 3, str(tmp_path), timeout=60)
    assert told_survivors(tmp_path) == {0, 1}


def reads_of_this_process() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("syscr"))


def waits_for_many() -> int:
    """How many reads this process makes in half a second in which 40 of its operations wait."""
    comm = hdp.init(transport="sim", timeout=LONG_S)
    works = [comm.recv(torch.zeros(4), 1, async_op=True) for _ in range(40)] if comm.rank == 0 else []
    before = reads_of_this_process()
    time.sleep(0.5)
    reads = reads_of_this_process() - before
    if comm.rank == 1:
        for _ in range(40):
            comm.send(torch.ones(4), 0)
    for work in works:
        work.wait()
    return reads


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the kernel does not count reads")
def test_whether_a_peer_lives_is_asked_once_a_pass(ranks: Any) -> None:
    assert ranks(2, waits_for_many)[0] < 200  # two for each of some ten passes; 40 times as many by operation


def interrupted() -> None:
    comm = hdp.init(transport="sim", timeout=LONG_S)
    if comm.rank == 0:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            comm.recv(torch.zeros(1), 1)
    else:
        time.sleep(0.6)
        with pytest.raises(hdp.Aborted, match="interrupted"):
            comm.all_reduce(torch.zeros(1))


def test_ctrl_c_ends_a_wait(ranks: Any) -> None:
    ranks(2, interrupted)


def arenas() -> int:
    """How many arenas this process has on simulated devices: the only blocks of more than 64 MiB."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            count += os.fstat(int(name)).st_size > 64 << 20 and "hdpcomm-sim" in os.readlink(f"/proc/self/fd/{name}")
    return count


def one_world_after_another() -> None:
    beside = hdp.init(transport="shm")
    gc.collect()  # worlds of earlier tests, which their errors hold
    beside.barrier()
    first = hdp.init(transport="sim")
    for rank in range(2):  # rank 0 leaves while rank 1 may still write into its arena
        if first.rank == rank:
            first.close()
        beside.barrier()
    before = arenas()
    second = hdp.init(transport="sim")
    assert arenas() == before + second.rank  # rank 1 had none, and rank 0 that of the first world
    still_works(second)


def test_the_memory_of_a_closed_world_goes_before_the_next_one_comes(ranks: Any) -> None:
    ranks(2, one_world_after_another)


def differently() -> None:
    os.environ["HDPCOMM_DEVICE_SLOTS"] = "4" if os.environ["RANK"] == "0" else "8"
    with pytest.raises(hdp.Mismatch, match="different transports or HDPCOMM_DEVICE_"):
        hdp.init(transport="sim", timeout=LONG_S)
    os.environ["HDPCOMM_DEVICE_SLOTS"] = "3"
    with pytest.raises(hdp.InvalidUsage, match="a multiple of the 2 lanes"):
        hdp.init(transport="sim", timeout=LONG_S)
    del os.environ["HDPCOMM_DEVICE_SLOTS"]


def test_settings_must_agree(ranks: Any) -> None:
    ranks(2, differently)

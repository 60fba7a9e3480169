"""Deadlines from liveness: an operation waits while the awaited ranks move, and the one that does not is named."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm._core import transport
from hdpcomm.comm.communicator import Communicator
from hdpcomm.testing import spawn
from tests.faults.test_unattended import on_threads
from tests.harness.fault_cases import LONG_S, caught, until, wait_for, write_process
from tests.harness.native import _testing

TIMEOUT_S = 1.5
PING, PONG = 5, 6  # kinds of frames
LONG_WORK_S = 4.0


def test_a_busy_rank_is_waited_for() -> None:
    """Several timeouts long, by ranks that wait for it directly and by one that waits for those."""

    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        with comm.liveness_deadlines():
            if comm.rank == 2:
                with comm.busy("reads data"):
                    time.sleep(LONG_WORK_S)
                comm.send(x * 7, 1)
            elif comm.rank == 1:
                comm.recv(x, 2)
                comm.send(x, 0)
            else:
                comm.recv(x, 1)
                assert x.tolist() == [7.0] * 3
            comm.all_reduce(x, async_op=True).wait()

    on_threads([TIMEOUT_S] * 3, program)


def test_one_that_ticks_is_waited_for_in_the_background_too() -> None:
    def program(comm: Communicator) -> None:
        x = torch.ones(5)
        with comm.liveness_deadlines():
            if comm.rank == 0:
                work = comm.all_reduce(x, async_op=True)
                time.sleep(LONG_WORK_S)
                work.wait()
            else:
                for _ in range(40):
                    comm.tick()
                    time.sleep(LONG_WORK_S / 40)
                comm.all_reduce(x)
        assert x.tolist() == [2.0] * 5

    on_threads([TIMEOUT_S] * 2, program)


def at_the_end_of_a_chain() -> Callable[[Communicator], None]:
    """Rank 0 waits for rank 1, and that for rank 2, which does nothing. Rank 1 has the time to wait: had it given up
    first, it would be the one that moved last."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            comm.barrier()
            if comm.rank == 0:
                try:
                    error = caught(lambda: comm.recv(torch.ones(3), 1))
                finally:
                    over.set()
                assert isinstance(error, hdp.CommTimeout)
                assert error.peer == 2
                assert re.search(r"rank 2 has not moved for [\d.]+ s; last: barrier #0 ended: look at", str(error))
            elif comm.rank == 1:
                comm.recv(torch.ones(3), 2)
            else:
                assert over.wait(LONG_S)
                comm.send(torch.ones(3), 1)

    return program


def test_the_rank_at_the_end_of_the_chain_is_named() -> None:
    on_threads([TIMEOUT_S, LONG_S, LONG_S], at_the_end_of_a_chain())


def test_an_activity_over_its_limit_is_told() -> None:
    done = threading.Event()

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            if comm.rank == 1:
                with comm.busy("reads data", limit_s=LONG_WORK_S):
                    assert done.wait(LONG_S)
                return
            started = time.monotonic()
            error = caught(lambda: comm.recv(torch.ones(3), 1))
            done.set()
            assert time.monotonic() - started > LONG_WORK_S / 2
            last = rf"busy \(reads data\) for [\d.]+ s, its limit is {LONG_WORK_S:.1f} s"
            assert re.search(rf"rank 1 has not moved for [\d.]+ s; last: {last}", str(error))

    on_threads([TIMEOUT_S] * 2, program)


@pytest.mark.parametrize("busy", [False, True], ids=["plain", "each says that it is busy"])
def test_ranks_that_wait_for_each_other_keep_nobody_alive(busy: bool) -> None:
    """Two of them, and a third that waits for one. The deadlock finder does not look where two threads call."""
    done = threading.Barrier(3)

    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        awaited = (comm.rank + 1) % 2
        with comm.liveness_deadlines():
            other = threading.Thread(target=comm.barrier)
            other.start()
            other.join()
            if busy and comm.rank < 2:
                with comm.busy("waits"):
                    error = caught(lambda: comm.recv(x, awaited))
            else:
                error = caught(lambda: comm.recv(x, awaited))
            done.wait(LONG_S)
        # Aborted: the other one had given up before.
        assert isinstance(error, hdp.CommTimeout | hdp.Aborted)
        assert re.search(r"rank [01] has not moved for [\d.]+ s", str(error))

    on_threads([TIMEOUT_S] * 3, program)


def test_an_activity_ends_with_its_block_however_that_is_left() -> None:
    over = threading.Event()

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            if comm.rank == 1:
                with contextlib.suppress(KeyError), comm.busy("plans"), comm.busy("reads data"):
                    raise KeyError
                assert over.wait(LONG_S)
                return
            error = caught(lambda: comm.recv(torch.ones(3), 1))
            over.set()
        assert isinstance(error, hdp.CommTimeout)
        assert re.search(r"rank 1 has not moved for [\d.]+ s; last: joined: look at", str(error))

    on_threads([TIMEOUT_S] * 2, program)


# --- between hosts


class Wire:
    """Moves the frames of ranks that are threads, after ``change`` has seen each."""

    def __init__(self, ranks: int, change: Callable[[int, _testing.Frame], None]) -> None:
        self.links = [transport.FrameLink(rank, ranks) for rank in range(ranks)]
        self._change = change
        for source in range(ranks):
            for target in range(ranks):
                if source != target:
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: int, target: int) -> None:
        while (frame := _testing.next_frame(self.links[source], target)) is not None:
            self._change(source, frame)
            _testing.deliver_frame(self.links[target], source, frame)


def on_hosts(
    hosts: list[int],
    program: Callable[[Communicator], None],
    change: Callable[[int, _testing.Frame], None] = lambda *_: None,
    timeout: float = 2 * TIMEOUT_S,
    timeouts: Sequence[float] = (),
    wire: Wire | None = None,
) -> None:
    """Runs it on ranks that are threads: those with one number share a segment, the others exchange frames.

    ``timeout``: of all ranks, or ``timeouts``: of each."""
    wire = wire or Wire(len(hosts), change)
    segments = {host: transport.create_segment(len(hosts)) for host in set(hosts)}

    def run(rank: int) -> None:
        own_s = timeouts[rank] if timeouts else timeout
        world = _core.comm.join_hosts(segments[hosts[rank]], wire.links[rank], hosts, own_s, LONG_S)
        with Communicator(world.communicator(), rank, len(hosts)) as comm:
            program(comm)

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(run, range(len(hosts))))


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]], ids=str)
def test_a_busy_rank_of_another_host_is_waited_for(hosts: list[int]) -> None:
    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        with comm.liveness_deadlines():
            if comm.rank == 2:
                with comm.busy("reads data"):
                    time.sleep(4 * TIMEOUT_S)
                comm.send(x * 7, 1)
            elif comm.rank == 1:
                comm.recv(x, 2)
                comm.send(x, 0)
            else:
                comm.recv(x, 1)
                assert x.tolist() == [7.0] * 3

    on_hosts(hosts, program)


def test_the_stuck_rank_is_named_through_hosts() -> None:
    on_hosts([0, 0, 1], at_the_end_of_a_chain(), timeouts=[2 * TIMEOUT_S, LONG_S, LONG_S])


def test_a_circle_through_hosts_ends() -> None:
    done = threading.Barrier(3)

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            comm.barrier()
            error = caught(lambda: comm.recv(torch.ones(3), (comm.rank + 1) % 3))
            done.wait(LONG_S)
        assert isinstance(error, hdp.CommTimeout | hdp.Aborted)
        assert re.search(r"rank \d has not moved for [\d.]+ s", str(error)), str(error)

    on_hosts([0, 0, 1], program)


def test_a_rank_that_is_asked_all_the_time_asks_too() -> None:
    """Only an answer tells what a rank did last; its questions do not."""
    pings: list[list[bytes]] = [[], []]  # of each rank

    def look(source: int, frame: _testing.Frame) -> None:
        if frame.head[4] == PING:
            pings[source].append(bytes(frame.head))

    wire, asked = Wire(2, look), threading.Event()

    def ask() -> None:
        """In the name of rank 1, many times as often as rank 0 would ask by itself."""
        while not asked.wait(0.05):
            if pings[1]:
                frame = _testing.Frame()
                frame.head[:] = pings[1][0]
                _testing.deliver_frame(wire.links[0], 1, frame)

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            work = comm.recv(torch.ones(3), 1 - comm.rank, async_op=True)
            assert until(lambda: len(pings[0]) > 3)
            comm.send(torch.ones(3), 1 - comm.rank)
            work.wait()

    asks = threading.Thread(target=ask)
    asks.start()
    try:
        on_hosts([0, 1], program, timeout=LONG_S, wire=wire)
    finally:
        asked.set()
        asks.join()


def test_one_that_waits_for_a_rank_that_tells_nothing_says_so() -> None:
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            assert over.wait(LONG_S)
            return
        with comm.liveness_deadlines():
            if comm.rank == 2:
                error = caught(lambda: comm.recv(torch.ones(3), 0))
                assert "rank 1 has not moved" not in str(error)
                return
            error = caught(lambda: comm.recv(torch.ones(3), 2))
            over.set()
        assert isinstance(error, hdp.CommTimeout)
        assert error.peer == 2
        last = "waits for rank 0, which tells nothing: look at"
        assert re.search(rf"rank 2 has not moved for [\d.]+ s; last: {last}", str(error))

    on_threads([LONG_S, TIMEOUT_S, LONG_S], program)


HUGE = 2**63 + 5


@pytest.mark.parametrize(
    ("field", "at", "form", "value"),
    [
        ("detail", 5, "<B", 2),
        ("rank", 6, "<h", 2),
        ("rank", 6, "<h", -2),
        ("age", 16, "<Q", HUGE),
        ("age", 32, "<Q", 2**41),
        ("text length", 40, "<I", 121),
    ],
)
def test_an_answer_that_no_rank_gives_cuts_its_sender_off(field: str, at: int, form: str, value: int) -> None:
    def forge(source: int, frame: _testing.Frame) -> None:
        if source == 1 and frame.head[4] == PONG:
            struct.pack_into(form, frame.head, at, value)

    over = threading.Event()

    def program(comm: Communicator) -> None:
        comm.tick()
        if comm.rank == 1:
            assert over.wait(LONG_S)
            return
        error = caught(lambda: comm.recv(torch.ones(3), 1))
        over.set()
        assert isinstance(error, hdp.PeerLost)
        assert "rank 1 was cut off" in str(error)
        assert f"the {field} of its frame is " in str(error)

    on_hosts([0, 1], program, forge, LONG_S)


def test_what_an_answer_says_is_made_printable() -> None:
    def forge(source: int, frame: _testing.Frame) -> None:
        if source == 1 and frame.head[4] == PONG:
            frame.head[80:84] = b"\x1b[2\n"  # behind the header

    over = threading.Event()

    def program(comm: Communicator) -> None:
        comm.tick()
        if comm.rank == 1:
            assert over.wait(LONG_S)
            return
        with comm.liveness_deadlines():
            error = caught(lambda: comm.recv(torch.ones(3), 1))
        over.set()
        assert isinstance(error, hdp.CommTimeout)
        assert "rank 1 has not moved" in str(error)
        assert "last: ?[2?" in str(error)

    on_hosts([0, 1], program, forge)


# --- what stays as it was


def test_an_explicit_timeout_is_hard() -> None:
    over = threading.Event()

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            if comm.rank == 1:
                with comm.busy("reads data"):
                    assert over.wait(LONG_S)
                return
            error = caught(lambda: comm.recv(torch.ones(3), 1, async_op=True).wait(timeout=0.3))
            over.set()
            assert isinstance(error, hdp.CommTimeout)
            assert "for rank 1: look for a rank that did not call it, or raise timeout=" in str(error)

    on_threads([LONG_S] * 2, program)


def test_who_did_not_ask_has_the_plain_deadline() -> None:
    """Also who has asked before, and also for a rank that tells nothing."""
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            with comm.busy("reads data"):
                assert over.wait(LONG_S)
            return
        with comm.liveness_deadlines(), comm.liveness_deadlines():
            pass
        error = caught(lambda: comm.recv(torch.ones(3), comm.rank + 1))
        assert isinstance(error, hdp.CommTimeout)
        assert "look for a rank that did not call it, or raise timeout=" in str(error)
        over.set()

    on_threads([0.4] * 2, program)


def test_a_rank_that_tells_nothing_is_given_the_timeout() -> None:
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            assert over.wait(LONG_S)
            return
        with comm.liveness_deadlines():
            error = caught(lambda: comm.recv(torch.ones(3), 1))
        over.set()
        assert isinstance(error, hdp.CommTimeout)
        assert error.peer == 1
        assert "for rank 1: look for a rank that did not call it, or raise timeout=" in str(error)

    on_threads([0.4] * 2, program)


def test_no_wait_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_LONGEST_WAIT_S", "2")
    over = threading.Event()

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines():
            if comm.rank == 1:
                with comm.busy("reads data"):
                    assert over.wait(LONG_S)
                return
            error = caught(lambda: comm.recv(torch.ones(3), 1))
            over.set()
        assert isinstance(error, hdp.CommTimeout)
        assert "still move, but no wait is longer than 2.000000 s: raise HDPCOMM_LONGEST_WAIT_S" in str(error)

    on_threads([1.0] * 2, program)


def dies_busy(folder: str) -> str:
    with hdp.init("shm", timeout=LONG_S) as comm, comm.liveness_deadlines():
        comm.barrier()
        if comm.rank == 1:
            with comm.busy("reads data"):
                write_process(Path(folder, "process"))
                time.sleep(LONG_S)
        wait_for(Path(folder, "process"))
        victim = int(Path(folder, "process").read_text())
        os.kill(victim, signal.SIGKILL)
        error = caught(lambda: comm.recv(torch.ones(3), 1))
        assert isinstance(error, hdp.PeerLost)
        Path(folder, "told").write_text(str(error))
        return ""


def stops_busy(folder: str) -> str:
    """Its activity counts while its process runs."""
    with hdp.init("shm", timeout=TIMEOUT_S) as comm, comm.liveness_deadlines():
        comm.barrier()
        if comm.rank == 1:
            with comm.busy("reads data"):
                write_process(Path(folder, "process"))
                wait_for(Path(folder, "over"))
            return ""
        wait_for(Path(folder, "process"))
        victim = int(Path(folder, "process").read_text())
        os.kill(victim, signal.SIGSTOP)
        try:
            error = caught(lambda: comm.recv(torch.ones(3), 1))
        finally:
            os.kill(victim, signal.SIGCONT)
            Path(folder, "over").touch()
        assert isinstance(error, hdp.CommTimeout)
        return str(error)


def test_a_rank_that_dies_while_it_is_busy_is_lost(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="SIGKILL"):
        spawn(dies_busy, 2, str(tmp_path), timeout=60)
    assert "rank 1 died" in (tmp_path / "told").read_text()


def test_a_rank_that_is_stopped_while_it_is_busy_is_named(ranks: Any, tmp_path: Path) -> None:
    told = ranks(2, stops_busy, str(tmp_path))[0]
    assert re.search(r"rank 1 has not moved for [\d.]+ s; last: busy \(reads data\) for ", told)


@pytest.mark.parametrize("what", ["", "a\nb", "\N{SNOWMAN}", "x" * 61, 7, None])
def test_what_no_error_could_show_is_refused(what: Any) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(hdp.InvalidUsage, match="busy"):
            comm.busy(what)

    on_threads([LONG_S], program)


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), float("inf"), "9", True])
def test_a_limit_that_is_none_is_refused(limit_s: Any) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(hdp.InvalidUsage, match="limit_s"):
            comm.busy("reads data", limit_s=limit_s)

    on_threads([LONG_S], program)


def test_a_communicator_that_is_over_refuses_them_and_lets_those_inside_go() -> None:
    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines(), comm.busy("closes"):
            comm.close()
        for call in (comm.tick, comm.busy("reads data").__enter__, comm.liveness_deadlines().__enter__):
            with pytest.raises(hdp.InvalidUsage, match="closed"):
                call()

    on_threads([LONG_S], program)

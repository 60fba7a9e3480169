"""Counters whose owner leaves, dies, does not answer, or answers too late, and ranks that give up a fetch."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm._core import transport
from hdpcomm.comm.communicator import Communicator, SharedCounter
from hdpcomm.testing import spawn
from tests.faults.test_liveness import TIMEOUT_S, Wire, on_hosts
from tests.harness.fault_cases import LONG_S, caught, interrupt_soon, still_works, until, wait_for, write_process
from tests.harness.native import _testing

SHORT_S = 0.3  # is waited for, and nothing else has to happen meanwhile
FETCH, FETCHED = 9, 10
KIND = 4  # its place in a frame's head


class HoldingWire(Wire):
    """Keeps the frames of one kind until :meth:`release`; the others overtake them."""

    def __init__(self, ranks: int, kind: int) -> None:
        self._kind: int | None = kind
        self._held: list[tuple[int, int, _testing.Frame]] = []
        self._lock = threading.Lock()
        super().__init__(ranks, lambda *_: None)

    def _carry(self, source: int, target: int) -> None:
        while (frame := _testing.next_frame(self.links[source], target)) is not None:
            with self._lock:
                if frame.head[KIND] == self._kind:
                    self._held.append((source, target, frame))
                    continue
            _testing.deliver_frame(self.links[target], source, frame)

    def release(self) -> None:
        with self._lock:
            self._kind = None
            for source, target, frame in self._held:
                _testing.deliver_frame(self.links[target], source, frame)


def is_fetch(error: hdp.Error, kind: type[hdp.Error]) -> None:
    assert isinstance(error, kind), error
    assert (error.op, error.rank, error.peer, error.ranks) == ("fetch_add", 1, 0, (0, 1))


# --- the owner is gone


def closes(comm: Communicator) -> None:
    comm.close()


def raises(comm: Communicator) -> None:
    try:
        with comm:
            raise KeyError("no such shard")
    except KeyError:
        pass


def aborts(comm: Communicator) -> None:
    comm.abort("the user had enough")


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=str)
@pytest.mark.parametrize(
    ("leaves", "told"),
    [(closes, "closed its communicator"), (raises, "no such shard"), (aborts, "the user had enough")],
)
def test_an_owner_that_leaves(hosts: list[int], leaves: Callable[[Communicator], None], told: str) -> None:
    left = threading.Event()

    def program(comm: Communicator) -> None:
        counter = comm.counter()
        comm.barrier()
        if comm.rank == 0:
            leaves(comm)
            left.set()
            return
        assert left.wait(LONG_S)
        for _ in range(2):
            error = caught(counter.fetch_add)
            is_fetch(error, hdp.PeerLost)
            assert told in str(error)
        shrunk = comm.shrink()
        with shrunk.counter() as own:
            assert own.fetch_add() == 0
        still_works(shrunk)

    on_hosts(hosts, program, timeout=LONG_S)


def survives_the_owner(folder: str) -> None:
    """Rank 0 dies. Rank 1 shares its memory, and goes on counting; rank 2 does not."""
    with mock.patch.dict(os.environ, HDPCOMM_HOSTID="aab"[int(os.environ["RANK"])]):
        comm = hdp.init(timeout=LONG_S)
    counter = comm.counter()
    taken = counter.fetch_add()
    assert taken in range(3)
    comm.barrier()
    if comm.rank == 0:
        wait_for(Path(folder, "ready 1"))
        wait_for(Path(folder, "ready 2"))
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, f"ready {comm.rank}").touch()
    assert isinstance(caught(lambda: comm.recv(torch.zeros(1), 0)), hdp.PeerLost)
    if comm.rank == 1:
        assert [counter.fetch_add(), counter.fetch_add()] == [3, 4]
    else:
        error = caught(counter.fetch_add)
        assert isinstance(error, hdp.PeerLost)
        assert error.peer == 0
        assert "it owned the counter" in str(error)
    rest = comm.shrink()
    with rest.counter() as new:
        assert new.fetch_add() in (0, 1)
        rest.barrier()
        assert new.fetch_add() in (2, 3)
        still_works(rest)
    Path(folder, str(comm.rank)).touch()


def test_an_owner_that_dies(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 0 ended by signal SIGKILL"):
        spawn(survives_the_owner, 3, str(tmp_path))
    assert (tmp_path / "1").exists()
    assert (tmp_path / "2").exists()


# --- no answer


def test_no_answer_in_time() -> None:
    """The amount was added, nobody knows it; the late answer is not taken for another one."""
    wire, over = HoldingWire(2, FETCHED), threading.Event()

    def program(comm: Communicator) -> None:
        counter = comm.counter()
        if comm.rank == 1:
            try:
                error = caught(lambda: counter.fetch_add(5))
            finally:
                over.set()
            is_fetch(error, hdp.CommTimeout)
            assert re.search(r"waited [\d.]+ s in fetch_add\(\) for rank 0", str(error))
            wire.release()
            assert counter.fetch_add() == 5
        else:
            assert over.wait(LONG_S)
        still_works(comm)

    on_hosts([0, 1], program, timeouts=[LONG_S, SHORT_S], wire=wire)


def test_a_fetch_that_was_given_up_before_it_was_sent_adds_nothing() -> None:
    links = [transport.FrameLink(rank, 2) for rank in range(2)]
    worlds = [_core.comm.join_framed_world(link, SHORT_S) for link in links]
    comms = [Communicator(world.communicator(), world.rank, 2) for world in worlds]
    own = _core.comm.open_counter(comms[0]._core)
    counter = SharedCounter(_core.comm.join_counter(comms[1]._core, own.word, own.generation))
    is_fetch(caught(lambda: counter.fetch_add(5)), hdp.CommTimeout)

    def carry(source: int, target: int) -> None:
        while (frame := _testing.next_frame(links[source], target)) is not None:
            _testing.deliver_frame(links[target], source, frame)

    carriers = [threading.Thread(target=carry, args=pair) for pair in ((0, 1), (1, 0))]
    for carrier in carriers:
        carrier.start()
    assert counter.fetch_add() == 0
    for comm in comms:
        comm.close()
    for carrier in carriers:
        carrier.join()


def test_a_lost_connection() -> None:
    wire, over = HoldingWire(2, FETCH), threading.Event()

    def program(comm: Communicator) -> None:
        counter = comm.counter()
        if comm.rank == 0:
            assert over.wait(LONG_S)
        else:
            threading.Timer(0.1, _testing.lose_peer, (wire.links[1], 0, "the wire was cut")).start()
            error = caught(counter.fetch_add)
            over.set()
            is_fetch(error, hdp.PeerLost)
            assert "the wire was cut" in str(error)

    on_hosts([0, 1], program, timeout=LONG_S, wire=wire)


@pytest.mark.parametrize("leaves", [closes, aborts])
def test_the_own_rank_leaves(leaves: Callable[[Communicator], None]) -> None:
    wire, over = HoldingWire(2, FETCH), threading.Event()

    def program(comm: Communicator) -> None:
        counter = comm.counter()
        if comm.rank == 0:
            assert over.wait(LONG_S)
            return
        with ThreadPoolExecutor(1) as pool:
            fetches = pool.submit(caught, counter.fetch_add)
            time.sleep(0.05)
            leaves(comm)
            over.set()
            error = fetches.result(LONG_S)
        assert isinstance(error, hdp.Aborted | hdp.InvalidUsage), error  # or it had not begun

    on_hosts([0, 1], program, timeout=LONG_S, wire=wire)


def is_stopped(process: int) -> bool:
    """All its threads: until then one of them may answer."""
    return all(
        path.read_text().rpartition(")")[2].split()[0] == "T" for path in Path(f"/proc/{process}/task").glob("*/stat")
    )


def interrupted(folder: str) -> None:
    """Rank 1 stops the owner's process, and is interrupted."""
    with mock.patch.dict(os.environ, HDPCOMM_HOSTID="ab"[int(os.environ["RANK"])]):
        comm = hdp.init(timeout=LONG_S)
    counter = comm.counter()
    comm.barrier()
    owner, over = Path(folder, "owner"), Path(folder, "over")
    if comm.rank == 0:
        write_process(owner)
        wait_for(over)
    else:
        wait_for(owner)
        process = int(owner.read_text())
        os.kill(process, signal.SIGSTOP)
        try:
            assert until(lambda: is_stopped(process))
            interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                counter.fetch_add()
        finally:
            os.kill(process, signal.SIGCONT)
        assert counter.fetch_add() in (0, 1)  # the one that was given up may have been sent
        over.touch()
    still_works(comm)


def test_ctrl_c_ends_a_fetch(tmp_path: Path) -> None:
    spawn(interrupted, 2, str(tmp_path))


# --- deadlines that go by moves


def test_one_that_counts_is_waited_for() -> None:
    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines(), comm.counter() as counter:
            if comm.rank == 0:
                end = time.monotonic() + 2.5 * TIMEOUT_S
                while time.monotonic() < end:
                    counter.fetch_add()
                    time.sleep(TIMEOUT_S / 20)
            comm.barrier()

    on_hosts([0, 0], program, timeout=TIMEOUT_S)


def test_a_fetch_waits_for_an_owner_that_is_busy() -> None:
    wire, counted = HoldingWire(2, FETCHED), threading.Event()

    def program(comm: Communicator) -> None:
        with comm.liveness_deadlines(), comm.counter() as counter:
            comm.tick()
            comm.barrier()
            if comm.rank == 0:
                with comm.busy("compiles"):
                    assert counted.wait(LONG_S)
            else:
                threading.Timer(3 * TIMEOUT_S, wire.release).start()
                assert counter.fetch_add() == 0
                counted.set()
            comm.barrier()

    on_hosts([0, 1], program, timeout=2 * TIMEOUT_S, wire=wire)

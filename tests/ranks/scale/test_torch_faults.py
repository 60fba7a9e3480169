"""What a network adds to the faults: connections that break, hosts that fall silent, foreign bytes, any group."""

from __future__ import annotations

import functools
import os
import queue
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm._core import comm as core
from hdpcomm._core import transport
from hdpcomm.comm import group_carrier
from hdpcomm.comm.addresses import own_address
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.group_carrier import GroupCarrier
from hdpcomm.comm.secret import Secret
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, sums, survives, told_survivors, wait_for
from tests.harness.native import _testing

SECRET = Secret("a secret of the job, long enough")


class UnprovenCarrier(GroupCarrier):
    """Over groups that can prove nothing."""

    def _prove(self, secret: Secret, peer: int) -> None:
        del secret
        self._proven[peer].set()


@pytest.fixture(params=["tcp", "torch"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What carries the frames of the ranks that a test starts; one that is silent is soon lost."""
    monkeypatch.setenv("HDPCOMM_SILENCE_S", "0.6")
    monkeypatch.setenv("HDPCOMM_TRANSPORT", request.param)
    return str(request.param)


@pytest.mark.parametrize("count", [4, 1_000_000])
def test_rank_that_dies_is_named_by_all(count: int, carrier: str, tmp_path: Path) -> None:
    call = functools.partial(sums, count=count, algorithm="ring")
    with pytest.raises(hdp.PeerLost, match="rank 2 ended by signal SIGKILL"):
        spawn(survives, 3, str(tmp_path), carrier, 2, call, timeout=60)
    assert told_survivors(tmp_path) == {0, 1}


def stopped(folder: str) -> str:
    """Rank 1 stops its own process, as a host does that is cut off: no goodbye, and no connection that breaks. It goes
    on when rank 0 has noticed."""
    at_work, noticed = Path(folder, "at work"), Path(folder, "noticed")
    comm = hdp.init(timeout=LONG_S)
    comm.barrier()
    if comm.rank == 1:
        wait_for(at_work)  # this rank's carrier holds nothing of the barrier any more
        pid = os.fork()
        if pid == 0:
            try:
                wait_for(noticed)
            finally:
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(pid, 0)
        return ""
    at_work.touch()
    with pytest.raises(hdp.PeerLost, match="rank 1 gave no sign of life") as info:
        comm.recv(torch.zeros(1), 1)
    assert info.value.peer == 1
    noticed.touch()
    return str(info.value)


@pytest.mark.usefixtures("carrier")
def test_a_silent_peer_is_lost(tmp_path: Any) -> None:
    assert "HDPCOMM_SILENCE_S" in spawn(stopped, 2, str(tmp_path), timeout=30)[0]


def busy() -> None:
    """A peer that computes for longer than the silence allows is alive: its threads answer."""
    comm = hdp.init(timeout=LONG_S)
    if comm.rank == 1:
        time.sleep(2.2)
        comm.send(torch.ones(1), 0)
    else:
        comm.recv(torch.zeros(1), 1)


@pytest.mark.usefixtures("carrier")
def test_a_busy_peer_is_not_lost() -> None:
    spawn(busy, 2, timeout=30)


class QueueWork:
    """Work that :class:`QueueGroup` returns; takes its message from a queue."""

    def __init__(self, source: queue.Queue[torch.Tensor | None] | None = None, target: Any = None) -> None:
        self.source, self.target = source, target

    def wait(self, timeout: timedelta) -> None:
        if self.source is not None:
            message = self.source.get(timeout=timeout.total_seconds())
            if message is None:
                raise RuntimeError("the wire was cut\nsecond line")
            assert message.numel() == self.target.numel()
            self.target.copy_(message)


class Wires(dict[Any, Any]):
    """A queue for each key. Two threads that ask for a new one at once get the same: a defaultdict would give each its
    own, and what was put into one of them would be lost."""

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, queue.Queue())


class QueueGroup:
    """A process group between threads: what any backend of torch offers, and no more."""

    def __init__(self, wires: dict[tuple[int, int, int], Any], rank: int) -> None:
        self.wires, self.rank = wires, rank

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> QueueWork:
        self.wires[self.rank, peer, tag].put(tensors[0].clone())
        return QueueWork()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> QueueWork:
        return QueueWork(self.wires[peer, self.rank, tag], tensors[0])


def pair() -> tuple[list[Communicator], list[GroupCarrier], dict[tuple[int, int, int], Any]]:
    wires: dict[tuple[int, int, int], Any] = Wires()
    links = [transport.FrameLink(rank, 2) for rank in range(2)]
    joined = [core.join_framed_world(link, "torch", 5.0) for link in links]
    worlds = [Communicator(world.communicator(), world.rank, world.size) for world in joined]
    carriers = [
        GroupCarrier([QueueGroup(wires, rank)], link, owned=False, secret=SECRET) for rank, link in enumerate(links)
    ]
    return worlds, carriers, wires


def together(comms: list[Communicator], call: Any) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None] * len(comms)

    def run(comm: Communicator) -> None:
        try:
            call(comm)
        except BaseException as error:
            errors[comm.rank] = error

    threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def test_any_group_with_send_and_recv_carries_frames() -> None:
    comms, carriers, _ = pair()
    for count in (0, 3, 5_000_000):  # the last has more pieces than the window
        x = [torch.full((count,), float(rank + 1)) for rank in range(2)]
        assert together(comms, lambda comm, x=x: comm.all_reduce(x[comm.rank])) == [None, None]
        assert all((each == 3).all() for each in x)
    for comm in comms:
        comm.close()
    assert all(carrier.join() for carrier in carriers)


def test_a_large_unexpected_message_waits_in_its_window() -> None:
    comms, _, wires = pair()
    x = torch.arange(4_000_000.0)  # 16 MB; a window has 8 MiB
    work = comms[0].send(x, 1, async_op=True)
    time.sleep(0.5)
    assert not work.done()
    assert sum(wire.qsize() for wire in wires.values()) == 0  # all that was sent lies at the receiver
    y = torch.zeros_like(x)
    comms[1].recv(y, 0)
    work.wait()
    assert torch.equal(x, y)
    for comm in comms:
        comm.close()


def test_a_broken_connection_is_told_with_its_cause() -> None:
    comms, _, wires = pair()
    assert together(comms, lambda comm: comm.barrier()) == [None, None]
    for key in list(wires):
        if key[:2] == (1, 0):
            wires[key].put(None)
    with pytest.raises(hdp.PeerLost, match="rank 1 was lost while rank 0 waited for it: the wire was cut ") as info:
        comms[0].recv(torch.zeros(3), 1)
    assert info.value.peer == 1
    for comm in comms:
        comm.close()


def test_foreign_bytes_are_no_frame() -> None:
    comms, _, wires = pair()
    wires[1, 0, group_carrier._HEAD_TAG].put(torch.full((_testing.FRAME_HEAD_BYTES,), 7, dtype=torch.uint8))
    with pytest.raises(hdp.PeerLost, match=r"no frame of this version.*same version on all hosts"):
        comms[0].recv(torch.zeros(3), 1)
    for comm in comms:
        comm.close()


class SlowWork(QueueWork):
    """Work that :class:`SlowGroup` returns; waits until the test lets it end."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def wait(self, timeout: timedelta) -> None:
        assert self.ended.wait(timeout.total_seconds())


class SlowGroup(QueueGroup):
    """Each frame from rank 0 takes ``delay_s``, one after the other. A wait that times out cuts the connection, as in
    gloo: what is on its way then is gone."""

    def __init__(self, wires: dict[tuple[int, int, int], Any], rank: int, delay_s: float) -> None:
        super().__init__(wires, rank)
        self.delay_s = 0.0 if rank else delay_s
        self.is_cut = threading.Event()
        self.under_way: queue.Queue[tuple[torch.Tensor, int, int, threading.Event]] = queue.Queue()
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        while not self.is_cut.is_set():
            message, peer, tag, ended = self.under_way.get()
            if not self.is_cut.wait(self.delay_s):
                self.wires[self.rank, peer, tag].put(message)
            ended.set()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> QueueWork:
        ended = threading.Event()
        self.under_way.put((tensors[0].clone(), peer, tag, ended))
        return SlowWork(ended)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> QueueWork:
        if tag == group_carrier._END_TAG:
            self.is_cut.set()
            for source, target, each in list(self.wires):
                if {source, target} == {self.rank, peer}:
                    self.wires[source, target, each].put(None)
        return super().recv(tensors, peer, tag)


def test_what_a_rank_sent_before_it_left_comes_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages of collectives do not wait for their receiver. They take several times the grace, in which one of
    them comes."""
    monkeypatch.setattr(group_carrier, "_GRACE_S", 1.0)
    wires: dict[tuple[int, int, int], Any] = Wires()
    links = [transport.FrameLink(rank, 2) for rank in range(2)]
    joined = [core.join_framed_world(link, "torch", LONG_S) for link in links]
    comms = [Communicator(world.communicator(), world.rank, world.size) for world in joined]
    carriers = [
        UnprovenCarrier([SlowGroup(wires, rank, 0.3)], link, owned=True, secret=SECRET)
        for rank, link in enumerate(links)
    ]
    parts = [[torch.full((3,), float(10 * k + rank)) for k in range(8)] for rank in range(2)]
    gathered = [[torch.empty(6) for _ in range(8)] for _ in range(2)]
    works = [comms[1].all_gather(gathered[1][k], parts[1][k], async_op=True) for k in range(8)]
    for k in range(8):  # each ends with rank 1's part, and its own is on its way
        comms[0].all_gather(gathered[0][k], parts[0][k])
    comms[0].close()
    for k in range(8):
        works[k].wait()
        assert all(torch.equal(each[k], torch.cat([parts[0][k], parts[1][k]])) for each in gathered)
    assert carriers[0].join()  # rank 1 has told it that all has come, and is not closed
    with pytest.raises(hdp.PeerLost, match="rank 0 closed its communicator"):
        comms[1].barrier()
    comms[1].close()
    assert carriers[1].join()


def test_a_peer_that_does_not_tell_that_all_has_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_carrier, "_GRACE_S", 0.2)
    link = transport.FrameLink(0, 2)
    world = core.join_framed_world(link, "torch", LONG_S)
    group = SlowGroup(Wires(), 0, 0.0)
    carrier = UnprovenCarrier([group], link, owned=True, secret=SECRET)
    world.close("")
    assert carrier.join()
    assert group.is_cut.is_set()


def test_no_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    served, other = dist.TCPStore("127.0.0.1", 0, 1, is_master=True), dist.HashStore()
    assert own_address(other) == "127.0.0.1"  # nothing says where the others are
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    with pytest.raises(hdp.Error, match=r"no way .* the address of its own name no-such-name.*GLOO_SOCKET_IFNAME"):
        own_address(other)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address(other) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(hdp.Error, match=r"no way from this host to MASTER_ADDR=no-such-host\.invalid"):
        own_address(other)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", served))) == "127.0.0.1"


def test_unknown_transport_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDPCOMM_TRANSPORT", "smoke")
    with pytest.raises(
        hdp.InvalidUsage, match="'smoke' of HDPCOMM_TRANSPORT is unknown; give one of: auto, shm, tcp, torch"
    ):
        hdp.init()


@pytest.mark.usefixtures("carrier")
def test_bad_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(hdp.Error, match=r"'nosuch0'.*GLOO_SOCKET_IFNAME"):
        spawn(hdp.init, 2, timeout=30)

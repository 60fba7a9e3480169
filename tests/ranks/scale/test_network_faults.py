"""Faults that a network adds: connections that break, hosts that fall silent, addresses that are none."""

from __future__ import annotations

import functools
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm._core import comm as core
from hdpcomm._core import transport
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.machine import allow_sockets, own_address
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, sums, survives, told_survivors, wait_for


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test starts exchange frames; one that is silent is soon lost."""
    monkeypatch.setenv("HDPCOMM_SILENCE_S", "0.6")
    monkeypatch.setenv("HDPCOMM_TRANSPORT", "tcp")


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("count", [4, 1_000_000])
def test_rank_that_dies_is_named_by_all(count: int, tmp_path: Path) -> None:
    call = functools.partial(sums, count=count, algorithm="ring")
    with pytest.raises(hdp.PeerLost, match="rank 2 ended by signal SIGKILL"):
        spawn(survives, 3, str(tmp_path), "tcp", 2, call, timeout=60)
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


@pytest.mark.usefixtures("over_tcp")
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


@pytest.mark.usefixtures("over_tcp")
def test_a_busy_peer_is_not_lost() -> None:
    spawn(busy, 2, timeout=30)


def linked() -> tuple[list[transport.FrameLink], list[Communicator]]:
    links = [transport.FrameLink(rank, 2) for rank in range(2)]
    joined = [core.join_framed_world(link, LONG_S) for link in links]
    return links, [Communicator(world.communicator(), world.rank, world.size) for world in joined]


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
        hdp.InvalidUsage, match="'smoke' of HDPCOMM_TRANSPORT is unknown; give one of: auto, shm, tcp, sim"
    ):
        hdp.init()


@pytest.mark.usefixtures("over_tcp")
def test_bad_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(hdp.Error, match=r"'nosuch0'.*GLOO_SOCKET_IFNAME"):
        spawn(hdp.init, 2, timeout=30)


def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, changed = [(100, 4096)], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, value: changed.append(value))
    allow_sockets(3, 2)
    before = changed[-1][0] if changed else 100
    allow_sockets(3, 1000)
    assert changed[-1][1] == 4096
    assert changed[-1][0] > max(1000, before)
    with pytest.raises(hdp.Error, match=r"rank 3 needs \d+ open files.* may have 4096: raise the hard limit"):
        allow_sockets(3, 5000)
    changed.clear()
    limits[0] = (10_000, 10_000)
    allow_sockets(3, 5000)
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    allow_sockets(3, 10**9)
    limits[0] = (100, resource.RLIM_INFINITY)
    assert changed == []
    allow_sockets(3, 10**6)
    assert changed[0][0] > 10**6

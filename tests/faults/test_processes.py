"""Processes that run, have ended, or cannot be looked at; forked children of a rank."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.testing import spawn
from tests.harness.fault_cases import LONG_S, caught, wait_for
from tests.harness.patience import PATIENCE


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 300), before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_unknown_is_not_dead() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    with no_descriptors():
        assert _core.comm.process_runs(child.pid)
        assert _core.comm.process_runs(os.getpid())
        child.kill()
        child.wait()
        assert not _core.comm.process_runs(child.pid)


def without_descriptors(folder: str) -> float:
    """Nobody is taken for dead while a rank can open nothing; who dies then is."""
    with hdp.init("shm", timeout=LONG_S) as comm:
        x = torch.ones(200_000)
        comm.barrier()
        if comm.rank == 0:
            with no_descriptors():
                comm.recv(x, 1)
                assert isinstance(caught(lambda: comm.recv(x, 1)), hdp.PeerLost)
            return x[-1].item()
        time.sleep(0.7)  # rank 0 has checked several times whether this one lives
        comm.send(x + 1, 0)
        Path(folder, "sent").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def test_a_rank_without_descriptors_knows_who_lives(tmp_path: Path) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 1 ended by signal SIGKILL"):
        spawn(without_descriptors, 2, str(tmp_path), timeout=LONG_S)
    assert (tmp_path / "sent").exists()


def in_a_child(call: Any) -> str:
    """What ``call`` says in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def uses_it_in_a_child(transport: str) -> list[str]:
    comm = hdp.init(transport, timeout=LONG_S)
    work = comm.all_reduce(torch.ones(3), async_op=True)
    x = torch.ones(3)
    calls = [
        lambda: comm.all_reduce(x),
        lambda: comm.send(x, 1 - comm.rank),
        lambda: comm.barrier(),
        lambda: comm.all_reduce(x, async_op=True),
        lambda: comm.subset([0, 1]).all_reduce(x),  # type: ignore[union-attr]
        lambda: comm.empty(3),
        lambda: comm.abort(),
        lambda: comm.stats(),
        lambda: work.done(),
        lambda: work.wait(),
    ]
    told = [in_a_child(call) for call in calls]
    told.append(in_a_child(comm.close))
    work.wait()
    comm.all_reduce(x)
    assert x.tolist() == [2.0] * 3  # the parent's works on
    comm.close()
    return told


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_may_not_use_a_communicator(ranks: Any, transport: str) -> None:
    for told in ranks(2, uses_it_in_a_child, transport):
        assert told.pop() == "nothing"  # close() is the parent's matter
        for text in told:
            assert text.startswith("InvalidUsage: this communicator belongs to process ")
            assert "is a forked child: use it there" in text


FORKS = """
import os, sys
import torch, hdpcomm as hdp
from hdpcomm.comm.connections import Connections

Connections.join.__defaults__ = (600.0,)
comm = hdp.init(timeout=600)
comm.all_reduce(torch.ones(10))
if os.fork() == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
comm.all_reduce(torch.ones(10))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_that_ends_normally_waits_for_nothing_of_its_parent(transport: str) -> None:
    """By sys.exit(), with all handlers of exit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HDPCOMM_TRANSPORT": transport}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", FORKS],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in "01"
    ]
    try:
        for each in started:
            assert (each.communicate(timeout=60 * PATIENCE)[1], each.returncode) == ("", 0)
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)  # with its child


def dies_with_a_child(folder: str, transport: str) -> None:
    comm = hdp.init(transport, timeout=LONG_S)
    comm.barrier()
    if comm.rank == 1:
        wait_for(Path(folder, "met"))  # its last message of the barrier is sent by then
        if os.fork() == 0:
            wait_for(Path(folder, "told"))
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, "met").touch()
    error = caught(lambda: comm.recv(torch.zeros(1), 1))
    assert isinstance(error, hdp.PeerLost), error
    Path(folder, "told").touch()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_children_of_a_dead_rank_do_not_hide_its_death(tmp_path: Path, transport: str) -> None:
    """The child lives until the death was told, and fails else."""
    with pytest.raises(hdp.PeerLost, match="rank 1 ended by signal SIGKILL"):
        spawn(dies_with_a_child, 2, str(tmp_path), transport, timeout=LONG_S)
    assert (tmp_path / "told").exists()

"""The backend over ranks of two hosts, which ``HDPCOMM_HOSTID`` makes of one: what the tests of one host run.

Worlds of real network namespaces: tests/ranks/scale/test_hosts.py.
"""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.testing import spawn
from hdpcomm.torch_backend import BackendLost, BackendTimeout, communicator
from hdpcomm.torch_backend.work import BackendAborted
from tests.harness.fault_cases import LONG_S, told_survivors, wait_for
from tests.harness.torch_groups import data, torch_ranks
from tests.ranks.torch_backend import test_collectives as collectives
from tests.ranks.torch_backend import test_messages as messages

SECRET = "a secret of sixteen characters"


def placed(hosts: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs a rank function where rank r is on host ``hosts[r]``."""
    with mock.patch.dict(os.environ, HDPCOMM_HOSTID=hosts[int(os.environ["RANK"])]):
        return fn(*args)


def where() -> tuple[str, int]:
    """The transport, and the bytes that left this host in a sum over both hosts and one inside of them."""
    with torch_ranks() as (rank, size):
        comm = communicator()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        before = comm.stats()["remote_bytes_sent"]
        x = data(rank, 1000, salt=1)
        dist.all_reduce(x, group=pairs[rank // 2])
        first = rank // 2 * 2
        collectives.equal(x, data(first, 1000, salt=1) + data(first + 1, 1000, salt=1))
        inside = comm.stats()["remote_bytes_sent"] - before
        dist.all_reduce(x)
        assert comm.stats()["remote_bytes_sent"] > before
        return comm.transport, inside


def test_memory_inside_a_host_and_frames_between(ranks: Any) -> None:
    assert ranks(4, placed, "aabb", where) == [("shm+tcp", 0)] * 4


@pytest.mark.parametrize(
    ("hosts", "fn", "args"),
    [
        ("aab", collectives.reduce_everything, ()),
        ("aab", collectives.move_everything, ()),
        ("ab", collectives.ragged, ()),
        ("aab", collectives.strided, ()),
        ("aab", collectives.asynchronous, ()),
        ("abab", collectives.subgroups, ()),
        ("abab", messages.across_groups, ()),
        ("aab", messages.beside_collectives, ()),
        ("abab", messages.random_traffic, (7,)),
        ("ab", messages.mismatches, ("size",)),
        ("ab", messages.mismatches, ("collective",)),
        ("abab", messages.peers_that_leave, ()),
        ("ab", messages.aborts, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_as_on_one_host(ranks: Any, hosts: str, fn: Any, args: tuple[Any, ...]) -> None:
    ranks(len(hosts), placed, hosts, fn, *args)


def deadlines() -> None:
    """A message that is given up puts the pair of ranks out of step."""
    with torch_ranks(timeout=LONG_S) as (rank, _):
        x = torch.empty(3)
        if rank == 0:
            dist.barrier()
            with pytest.raises(dist.DistBackendError, match="rank 1"):  # by the message's size, or told by rank 1
                dist.recv(x, 1)
        else:
            with pytest.raises(BackendTimeout, match="waited"):
                dist.isend(torch.full((3_000_000,), 5.0), 0).wait(datetime.timedelta(seconds=0.3))
            dist.barrier()
            with pytest.raises(BackendAborted, match=messages.REFUSED):
                dist.send(x, 0)


def test_deadlines(ranks: Any) -> None:
    ranks(2, placed, "ab", deadlines)


def dies(folder: str, call: Callable[[], Any]) -> None:
    """The last rank, alone on its host, is killed; each other rank writes what it was told."""
    with torch_ranks(timeout=LONG_S) as (rank, size):
        dist.barrier()
        Path(folder, f"ready {rank}").touch()
        if rank == size - 1:
            for each in range(size):
                wait_for(Path(folder, f"ready {each}"))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(BackendLost) as caught:
            call()
        Path(folder, str(rank)).write_text(str(caught.value))


def receives() -> None:
    dist.recv(torch.empty(3), 2)


def adds() -> None:
    for _ in range(3):  # the first may have all that it needs of the rank
        dist.all_reduce(torch.ones(100_000))


@pytest.mark.parametrize("call", [receives, adds])
def test_a_rank_that_dies_on_another_host(tmp_path: Path, call: Callable[[], Any]) -> None:
    with pytest.raises(hdp.PeerLost, match="rank 2 ended by signal SIGKILL"):
        spawn(placed, 3, "aab", dies, str(tmp_path), call)
    assert told_survivors(tmp_path) == {0, 1}
    assert all("rank 2" in Path(tmp_path, str(rank)).read_text() for rank in range(2))


def secrets_differ() -> None:
    """Rank 1, on another host, has a secret of its own: nobody joins, and all say so in time."""
    own = SECRET if os.environ["RANK"] == "0" else SECRET[::-1]
    with (
        mock.patch.dict(os.environ, HDPCOMM_SECRET=own),
        pytest.raises(BackendTimeout, match="1 " if own == SECRET else "0"),
        torch_ranks(timeout=1.0, key="secrets that differ"),
    ):
        pass


def secrets_agree() -> None:
    with mock.patch.dict(os.environ, HDPCOMM_SECRET=SECRET), torch_ranks(key="secrets that agree") as (rank, size):
        x = data(rank, 1000)
        dist.all_reduce(x)
        collectives.equal(x, collectives.everyone(size, 1000).sum(0))
        dist.isend(x, rank ^ 1).wait() if rank == 0 else dist.recv(x, rank ^ 1)


def test_ranks_prove_that_they_know_the_secret(ranks: Any) -> None:
    ranks(2, placed, "ab", secrets_agree)
    ranks(2, placed, "ab", secrets_differ)

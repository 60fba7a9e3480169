"""Ranks that are killed in the middle of traffic: the others go on with ``shrink()``, right, wherever they were."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from hdpcomm.comm import recovery
from hdpcomm.testing import spawn
from tests.faults.test_hostile_peers import framed_pair
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import LONG_S, caught, still_works, wait_for
from tests.harness.native import _testing

KILLS = int(os.environ.get("SHRINK_KILLS", "6"))  # in all
RANKS = 4
COUNTS = (1, 2, 500, 4000, 60_000, 300_000)


def operation(comm: hdp.Communicator, draw: random.Random, subsets: bool, number: int) -> None:
    """The next one of a program that all ranks draw alike; its result tells the ranks and its number."""
    members = sorted(draw.sample(range(comm.size), draw.randint(1, comm.size))) if subsets else list(range(comm.size))
    draw.shuffle(members)
    kind, count = draw.choice(("all_reduce", "all_gather", "exchange", "broadcast")), draw.choice(COUNTS)
    group = comm.subset(members)
    if group is None:
        return
    values = [1000.0 * comm.ranks[member] + number for member in members]
    x = torch.full((count,), values[group.rank])
    if kind == "all_reduce":
        group.all_reduce(x)
        expected = torch.full((count,), sum(values))
    elif kind == "all_gather":
        gathered = torch.empty(group.size * count)
        group.all_gather(gathered, x)
        x, expected = gathered, torch.tensor(values).repeat_interleave(count)
    elif kind == "exchange":
        received = torch.empty(count)
        group.exchange([(x, (group.rank + 1) % group.size)], [(received, (group.rank - 1) % group.size)])
        x, expected = received, torch.full((count,), values[group.rank - 1])
    else:
        group.broadcast(x, 0)
        expected = torch.full((count,), values[0])
    assert torch.equal(x, expected), (kind, members, number)


def traffic(folder: str, seed: int, subsets: bool, kills: int) -> None:
    """Until ``kills`` ranks have died, which the others answer with shrink()."""
    home = Path(folder)
    comm = hdp.init(timeout=LONG_S)
    comm.barrier()
    me = comm.global_rank
    (home / f"pid {me}").write_text(f"{os.getpid()} ")
    took: list[float] = []
    while comm.size > RANKS - kills:
        try:
            still_works(comm)
            draw = random.Random(100 * seed + comm.size)
            for number in itertools.count():
                operation(comm, draw, subsets, number)
        except hdp.Error:
            start = time.monotonic()
            comm = comm.shrink(timeout=20.0)
            took.append(time.monotonic() - start)
        (home / f"shrunk {comm.size} {me}").write_text(json.dumps(comm.ranks))
    still_works(comm)
    (home / f"over {me}").write_text(json.dumps(took))


def killer(home: Path, seed: int, kills: int, dead: list[int]) -> None:
    """Kills ranks at random points, now and then two of them shortly after each other."""
    draw = random.Random(seed)
    pids = {}
    for rank in range(RANKS):
        path = home / f"pid {rank}"
        while not (path.exists() and path.read_text().endswith(" ")):
            time.sleep(0.01)  # the first ranks of a test run need a while to start; spawn() has a deadline
        pids[rank] = int(path.read_text())
    while len(dead) < kills:
        time.sleep(draw.random() * 0.1)
        for _ in range(min(kills - len(dead), draw.choice((1, 1, 2)))):
            dead.append(draw.choice(sorted(pids)))
            os.kill(pids.pop(dead[-1]), signal.SIGKILL)
            time.sleep(draw.random() ** 3 * 0.03)
        for rank in pids:
            wait_for(home / f"shrunk {len(pids)} {rank}")


@pytest.mark.usefixtures("nothing_left_in_shm")
@pytest.mark.parametrize("subsets", [False, True], ids=["all ranks", "subsets"])
@pytest.mark.parametrize("transport", ["shm", "fragments", "tcp"])
def test_survivors_go_on(transport: str, subsets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == "fragments":
        monkeypatch.setenv("HDPCOMM_SHM_CMA", "0")
    if transport == "tcp":
        monkeypatch.setenv("HDPCOMM_TRANSPORT", "tcp")
    each = max(1, -(-KILLS // 6))  # of the six kinds
    for run in range(-(-each // (RANKS - 1))):
        kills = min(RANKS - 1, each - run * (RANKS - 1))
        home = tmp_path / str(run)
        home.mkdir()
        dead: list[int] = []
        seed = random.Random(f"{transport} {subsets} {run}").randrange(10**6)
        thread = threading.Thread(target=killer, args=(home, seed, kills, dead), daemon=True)
        thread.start()
        with pytest.raises(hdp.PeerLost, match="ended by signal SIGKILL"):
            spawn(traffic, RANKS, str(home), seed, subsets, kills, timeout=60)
        thread.join(20)
        assert len(dead) == kills
        living = set(range(RANKS)) - set(dead)
        assert {int(path.name.split()[1]) for path in home.glob("over *")} == living
        for rank in living:
            assert set(json.loads((home / f"shrunk {RANKS - kills} {rank}").read_text())) == living


def agreements() -> None:
    """Without deaths: in step or not, of all ranks, of some, and of one."""
    with hdp.init(timeout=LONG_S) as comm:
        assert comm.agree(True)
        assert not comm.agree(comm.rank != 1)
        if comm.rank == 0:
            caught(lambda: comm.all_reduce(torch.zeros(3), async_op=True).wait(timeout=0.1))
        if comm.rank < 2:
            pair = comm.subset([1, 0])
            assert pair is not None
            assert pair.agree(True)
            assert pair.shrink().ranks == (1, 0)
        assert comm.agree(True)
        still_works(comm)
        backwards = comm.subset([2, 1, 0])
        assert backwards is not None
        assert backwards.shrink().ranks == (2, 1, 0)
        alone = comm.subset([comm.rank])
        assert alone is not None
        assert alone.shrink().ranks == (comm.rank,)
        assert alone.agree(True)
        assert not alone.agree(False)
        still_works(comm)


def test_agreements(ranks: Any) -> None:
    ranks(3, agreements)


def disagreements() -> None:
    """Ranks that call something else, nothing, or leave."""
    comm = hdp.init(timeout=LONG_S)
    for bad in (0, -1.0, float("nan")):
        with pytest.raises(hdp.InvalidUsage, match=r"shrink\(\) got timeout=.*above 0"):
            comm.shrink(bad)
    if comm.rank == 1:
        time.sleep(0.5)
    else:
        with pytest.raises(
            hdp.CommTimeout, match=r"waited 0.2 s in agree\(\) for ranks \[0, 1, 2\].*must call"
        ) as info:
            comm.agree(True, timeout=0.2)
        assert info.value.op == "agree"
    assert comm.agree(True)
    if comm.rank == 1:
        assert comm.shrink().ranks == (0, 1, 2)
    else:
        with pytest.raises(hdp.Mismatch, match=r"called agree\(\), but ranks \[1\] called shrink\(\)"):
            comm.agree(True)
    still_works(comm)
    if comm.rank == 2:
        comm.close()
        with pytest.raises(hdp.InvalidUsage, match="is closed"):
            comm.shrink()
        return
    rest = comm.shrink()
    assert rest.ranks == (0, 1)
    still_works(rest)
    if comm.rank == 0:
        comm.abort("enough")
        with pytest.raises(hdp.Aborted, match="enough"):
            comm.shrink()
        return
    assert rest.shrink().ranks == (1,)
    comm.close()


def test_disagreements(ranks: Any) -> None:
    ranks(3, disagreements)


def ended_by_shrink() -> None:
    """What is under way between the ranks fails on all of them, also where it could have gone on without the caller."""
    with hdp.init(timeout=LONG_S) as comm:
        if comm.rank > 0:
            error = caught(lambda: comm.recv(torch.zeros(3), 0))
            assert "rank 0 called resync()" in str(error)
        still_works(comm.shrink())


def test_shrink_ends_operations(ranks: Any) -> None:
    ranks(3, ended_by_shrink)


class CutOff:
    """A core communicator whose rank and rank ``far`` have lost each other."""

    def __init__(self, core: Any, far: int) -> None:
        self.core, self.far = core, far
        self.ranks, self.rank, self.size, self.over = core.ranks, core.world.rank, core.world.size, False

    @property
    def world(self) -> CutOff:
        return self

    def communicator(self) -> Any:
        return self.core.world.communicator()

    def has_left(self, rank: int) -> bool:
        return rank == self.far or bool(self.core.world.has_left(rank))


@pytest.mark.parametrize("cut", [(0, 2), (1, 2), (0, 1)])
def test_ranks_that_have_lost_each_other(cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rank reaches both; the lower one stays."""
    monkeypatch.setattr(_core.comm, "subset", _subset_of_the_real)
    given_up = threading.Event()

    def program() -> None:
        comm = hdp.init(timeout=LONG_S)
        core: Any = comm._core
        if comm.rank in cut:
            core = CutOff(core, cut[1 - cut.index(comm.rank)])
        if comm.rank == cut[1]:
            with pytest.raises(hdp.CommTimeout, match=r"waited 1.5 s in shrink\(\)"):
                recovery.agree(core, "shrink", True, 1.5)
            given_up.set()
        else:
            assert recovery.agree(core, "shrink", True, 30.0).living == tuple({0, 1, 2} - {cut[1]})
            assert given_up.wait(20)

    run_threads(program, 3)


_real_subset = _core.comm.subset


def _subset_of_the_real(core: Any, positions: list[int]) -> Any:
    return _real_subset(core.core if isinstance(core, CutOff) else core, positions)


def test_who_said_goodbye_has_left() -> None:
    """Also for a rank that has no operation under way."""
    links, comms = framed_pair()
    assert not comms[1]._core.world.has_left(0)
    comms[0].close()
    frame = _testing.next_frame(links[0], 1)
    assert frame is not None
    _testing.deliver_frame(links[1], 0, frame)
    assert comms[1]._core.world.has_left(0)
    comms[1].close()


def told_by_a_health_check(rounds: int) -> int:
    """Rank 1 waits for a message of rank 0, which calls resync() in place of sending it; returns how often."""
    comm, draw = hdp.init(timeout=20.0), random.Random(0)
    for _ in range(rounds):
        comm.barrier()
        if comm.rank == 0:
            time.sleep(draw.uniform(0.0095, 0.0105))
        else:
            with pytest.raises(hdp.Aborted, match="rank 0 called resync"):
                comm.recv(torch.zeros(1), 0, async_op=True).wait(1e6)
        comm.resync()
    return rounds


def test_what_a_peer_tells_during_a_health_check_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the check is the first to receive it: rank 0 tells it when rank 1 is about to check."""
    monkeypatch.setenv("HDPCOMM_LIVENESS_S", "0.01")
    assert spawn(told_by_a_health_check, 2, 300, timeout=60.0) == [300, 300]

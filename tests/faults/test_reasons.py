"""Ranks that call ``resync()`` at once after an error hide its reason from no rank that has not heard it yet."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import RankPool
from tests.harness.fault_cases import LONG_S, caught, pool_over, wait_for

RANKS = 4
ROUNDS = 4
PROGRAMS = int(os.environ.get("HDPCOMM_REASONS_PROGRAMS", "4"))  # of each transport
KINDS = ("all_reduce", "broadcast", "all_gather", "ring", "exchange")
FIRST_ODD = 70_000  # sizes from here on are in one call of one rank alone
TOO_LARGE = 60 * FIRST_ODD  # floats of a message (17 MB) of which no transport has all under way before it is received


def operation(comm: hdp.Communicator, kind: str, count: int) -> None:
    if kind == "broadcast":
        comm.broadcast(torch.zeros(count), 0)
    elif kind == "all_gather":
        comm.all_gather(torch.zeros(comm.size * count), torch.zeros(count))
    elif kind == "exchange":
        following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.exchange([(torch.zeros(count), following)], [(torch.zeros(count), before)])
    else:
        comm.all_reduce(torch.zeros(count), algorithm="ring" if kind == "ring" else "auto")


def fail(group: hdp.Communicator, mistake: str, wrong: bool, odd: int) -> None:
    """An operation of a group that fails on some of its ranks; the reason has ``odd`` in it."""
    x = torch.zeros(odd, dtype=torch.uint8)
    if mistake == "size":
        group.all_reduce(x) if wrong else group.barrier()
    elif wrong:  # late: one rank alone waits for the others, in vain
        group.all_reduce(x, async_op=True).wait(timeout=0.05)


def program(seed: int) -> list[str]:
    """What this rank was told in each of some rounds. All draw alike, except how long they sleep. In a round one member
    of a random group makes a mistake between operations of all; whoever gets an error calls resync()."""
    draw, own = random.Random(seed), random.Random()
    told = []
    with hdp.init(timeout=LONG_S) as comm:
        for number in range(ROUNDS):
            odd = FIRST_ODD + ROUNDS * seed + number
            group = comm.subset(members := draw.sample(range(RANKS), draw.randint(2, RANKS)))
            wrong, mistake, place = draw.choice(members), draw.choice(["size", "late"]), draw.randrange(3)
            calls = [(draw.choice(KINDS), draw.choice([1, 500, 60_000])) for _ in range(3)]

            def calls_all() -> None:
                for at, call in enumerate(calls):  # noqa: B023
                    time.sleep(own.choice([0.0, 0.0, 0.001, 0.02, 0.2]))
                    if at == place and group is not None:  # noqa: B023
                        fail(group, mistake, comm.rank == wrong, odd)  # noqa: B023
                    operation(comm, *call)
                while True:  # who has not heard of it by now waits for the others
                    comm.barrier()

            told.append(str(caught(calls_all)))
            assert str(odd) in told[-1], (
                f"rank {comm.rank}, round {number}, {mistake} of rank {wrong} in {members}: {told[-1]}"
            )
            time.sleep(own.choice([0.0, 0.0, 0.02]))
            comm.resync()
            for call in calls:
                operation(comm, *call)
    return told


@pytest.fixture(scope="module", params=["shm", "fragments", "tcp"])
def pool(request: pytest.FixtureRequest) -> Any:
    with pool_over(request.param, RANKS) as made:
        yield made


def test_random_programs(pool: RankPool) -> None:
    for seed in range(PROGRAMS):
        for told in pool.run(program, seed, timeout=60):
            assert len(told) == ROUNDS


def third_rank() -> str:
    """Ranks 0 and 1 disagree, which the others learn by resync() alone; the last of them through rank 2."""
    with hdp.init(timeout=LONG_S) as comm:
        if comm.rank < 2:
            pair = comm.subset([0, 1])
            assert pair is not None
            error = caught(lambda: pair.all_reduce(torch.zeros(FIRST_ODD + pair.rank)))
        elif comm.rank == 2:
            error = caught(lambda: comm.recv(torch.zeros(1), 0))
        else:
            error = caught(lambda: comm.recv(torch.zeros(1), 2))
        comm.resync()
        comm.barrier()
        return str(error)


def test_ranks_that_had_no_part_in_it(pool: RankPool) -> None:
    first, second, third, fourth = pool.run(third_rank)
    reason = f"all_reduce({FIRST_ODD} x float32"
    assert all(reason in each for each in (first, second, third, fourth))
    assert "rank 0 called resync() after: rank " in third
    assert fourth.startswith(("rank 3 is out of step with rank 2 since: rank 2", "rank 2 "))
    assert all(each.count("called resync() after") <= 1 for each in (third, fourth))


def full_ring(folder: str) -> str:
    """Rank 0 gives up a send whose beginning fills all that a pair has for messages."""
    with hdp.init(timeout=LONG_S) as comm:
        given_up = Path(folder, "given up")
        if comm.rank == 0:
            send = comm.send(torch.zeros(TOO_LARGE), 1, async_op=True)
            error = caught(lambda: send.wait(timeout=0.05))
            given_up.touch()
        elif comm.rank == 1:
            wait_for(given_up)
            error = caught(lambda: comm.recv(torch.zeros(TOO_LARGE), 0))
        else:
            error = None
        comm.resync()
        comm.barrier()
        return str(error)


def test_a_reason_comes_behind_messages_that_nobody_received(pool: RankPool, tmp_path: Path) -> None:
    told = pool.run(full_ring, str(tmp_path))
    assert all(f"send/recv({TOO_LARGE} x float32)" in each for each in told[:2]), told


def leaves() -> str:
    """Rank 3 leaves with a reason that rank 0 alone needs at first; it calls resync() of those that are left."""
    comm = hdp.init(timeout=LONG_S)
    if comm.rank == 3:
        comm.barrier()
        with pytest.raises(KeyError), comm:
            raise KeyError("no such shard")
        return "no such shard"
    comm.barrier()
    rest = comm.subset([0, 1, 2])
    assert rest is not None
    error = caught(lambda: comm.recv(torch.zeros(1), 3) if comm.rank == 0 else rest.barrier())
    rest.resync()
    rest.barrier()
    comm.close()
    return str(error)


def test_a_rank_that_left(pool: RankPool) -> None:
    assert all("no such shard" in each for each in pool.run(leaves))


def gives_up_quietly(folder: str, ends: str) -> str:
    """Ranks 0 and 2 disagree, and rank 0 ends without a word of its own; the others wait for it."""
    comm = hdp.init(timeout=LONG_S)
    if comm.rank == 2:
        error = caught(lambda: comm.send(torch.zeros(FIRST_ODD), 0))
        wait_for(Path(folder, "told"))
        return str(error)
    if comm.rank == 0:
        error = caught(lambda: comm.recv(torch.zeros(FIRST_ODD + 1), 2))
        if ends == "close":
            comm.close()
        else:
            del comm
        return str(error)
    error = caught(lambda: comm.recv(torch.zeros(1), 0))
    assert isinstance(error, hdp.PeerLost)
    Path(folder, "told").touch()
    return str(error)


@pytest.mark.parametrize("ends", ["close", "dropped"])
def test_who_leaves_after_an_error_tells_it(pool: RankPool, tmp_path: Path, ends: str) -> None:
    told = pool.run(gives_up_quietly, str(tmp_path), ends)[1]
    assert told.startswith("rank 0 closed its communicator while rank 1 waited for it; its last words: "), told
    assert "after an error: rank " in told
    assert f"send/recv({FIRST_ODD + 1} x float32)" in told


def leaves_after_resync() -> str:
    """What resync() has mended is no reason for leaving."""
    comm = hdp.init(timeout=LONG_S)
    if comm.rank < 2:
        pair = comm.subset([0, 1])
        assert pair is not None
        caught(lambda: pair.all_reduce(torch.zeros(FIRST_ODD + pair.rank)))
    comm.resync()
    if comm.rank == 0:
        comm.close()
        return ""
    return str(caught(lambda: comm.recv(torch.zeros(1), 0)))


def test_a_mended_error_is_no_last_word(pool: RankPool) -> None:
    for told in pool.run(leaves_after_resync)[1:]:
        assert re.fullmatch(r"rank 0 closed its communicator while rank \d waited for it", told), told

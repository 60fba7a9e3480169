"""Ranks that call different things: which pairs of calls are named, and that nothing is named which would go on.

The table has all pairs of different calls of two ranks, and kinds that need three. ``HDPCOMM_DESYNC_TABLE=all``
runs all of it, else every seventh row is run, and all of those in which ranks wait for each other.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads
from tests.harness.fault_cases import LONG_S, wait_for, works_again

Call = Callable[[hdp.Communicator], Any]


def zeros(count: int = 8) -> torch.Tensor:
    return torch.zeros(count)


def peer(comm: hdp.Communicator) -> int:
    return (comm.rank + 1) % comm.size


def previous(comm: hdp.Communicator) -> int:
    return (comm.rank - 1) % comm.size


def whole(comm: hdp.Communicator) -> torch.Tensor:
    return zeros(8 * comm.size)


CALLS: dict[str, Call] = {
    "send": lambda comm: comm.send(zeros(), peer(comm)),
    "recv": lambda comm: comm.recv(zeros(), peer(comm)),
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(zeros()),
    "all_gather": lambda comm: comm.all_gather(whole(comm), zeros()),
    "reduce_scatter": lambda comm: comm.reduce_scatter(zeros(), whole(comm)),
    "all_to_all": lambda comm: comm.all_to_all(whole(comm), whole(comm)),
    "broadcast from 0": lambda comm: comm.broadcast(zeros(), 0),
    "reduce to 0": lambda comm: comm.reduce(zeros(), 0),
    "gather to 0": lambda comm: comm.gather(whole(comm) if comm.rank == 0 else None, zeros(), 0),
    "scatter from 0": lambda comm: comm.scatter(zeros(), whole(comm) if comm.rank == 0 else None, 0),
}
"""What rank 0 calls in a row, and rank 1."""

ALSO: dict[str, tuple[Call, ...]] = {
    "sends and waits | sends": (
        lambda comm: comm.send(zeros(), 1, async_op=True).wait(),
        lambda comm: comm.exchange([(zeros(), 0)]),
    ),
    "both send": (CALLS["send"],) * 2,
    "both receive": (CALLS["recv"],) * 2,
    "broadcast, roots": tuple(lambda comm, root=root: comm.broadcast(zeros(), root) for root in (0, 1)),
    "reduce, roots": tuple(lambda comm, root=root: comm.reduce(zeros(), root) for root in (0, 1)),
    "gather, roots": tuple(
        lambda comm, root=root: comm.gather(whole(comm) if comm.rank == root else None, zeros(), root)
        for root in (0, 1)
    ),
    "scatter, roots": tuple(
        lambda comm, root=root: comm.scatter(zeros(), whole(comm) if comm.rank == root else None, root)
        for root in (0, 1)
    ),
    "reduce, no root": tuple(lambda comm, root=root: comm.reduce(zeros(), root) for root in (1, 0)),
    "a circle of receives": (lambda comm: comm.recv(zeros(), peer(comm)),) * 3,
    "a circle of sends": (lambda comm: comm.send(zeros(), peer(comm)),) * 3,
    "a circle of large sends": (lambda comm: comm.send(zeros(100_000), peer(comm)),) * 3,
    "a circle of started receives": (lambda comm: comm.recv(zeros(), previous(comm), async_op=True).wait(),) * 3,
    "a member is elsewhere": (
        lambda comm: comm.all_reduce(zeros()),
        lambda comm: comm.all_reduce(zeros()),
        lambda comm: comm.recv(zeros(), 0),
    ),
    "a member waits for a third": (
        lambda comm: comm.barrier(),
        lambda comm: comm.recv(zeros(), 2),
        lambda comm: comm.barrier(),
    ),
}

TABLE: dict[str, tuple[Call, ...]] = {
    f"{one} | {other}": (CALLS[one], CALLS[other])
    for one, other in itertools.combinations(CALLS, 2)
    if (one, other) != ("send", "recv")
} | ALSO

RANDOM_OPERATIONS = int(os.environ.get("HDPCOMM_DESYNC_OPERATIONS", "300"))


def calls_of(name: str, folder: str) -> tuple[str, str, float]:
    """What a rank is told after its call: the kind of error, its text, and after how many seconds."""
    with hdp.init("shm", timeout=LONG_S) as comm:
        comm.barrier()
        started = time.monotonic()
        try:
            # A second time: the first may end well where nobody waits for an answer.
            for _ in range(2):
                TABLE[name][comm.rank](comm)
        except hdp.Error as error:
            told = (type(error).__name__, str(error), time.monotonic() - started)
        else:
            told = ("", "", 0.0)
        # Whoever calls resync() ends what the others are doing, whatever they have been told by then.
        Path(folder, f"told {comm.rank}").touch()
        for rank in range(comm.size):
            wait_for(Path(folder, f"told {rank}"))
        works_again(comm)
        return told


def rows() -> list[str]:
    if os.environ.get("HDPCOMM_DESYNC_TABLE") == "all":
        return list(TABLE)
    return [*list(TABLE)[: len(TABLE) - len(ALSO) : 7], *ALSO]


def test_the_table_has_all_kinds() -> None:
    assert len(TABLE) == 68


@pytest.mark.parametrize("name", rows())
def test_calls_that_do_not_match_are_named(ranks: Any, tmp_path: Path, name: str) -> None:
    told = ranks(len(TABLE[name]), calls_of, name, str(tmp_path))
    print(name, "|", max(seconds for *_, seconds in told))
    for kind, text, _ in told:
        assert kind in ("Mismatch", "Aborted"), (kind, text)  # Aborted: by the second call, since the first failed
        assert "call the same operations" in text


def circle() -> str:
    """The rank that finds it goes on at once, with resync()."""
    with hdp.init("shm", timeout=LONG_S) as comm:
        comm.all_reduce(zeros())
        with pytest.raises(hdp.Mismatch) as info:
            comm.recv(zeros(5), peer(comm))
        works_again(comm)
        return str(info.value)


def test_the_message_names_all_calls(ranks: Any) -> None:
    for told in (ranks(3, circle), run_threads(circle, 3)):
        for text in told:
            assert "ranks 0, 1, 2 wait for each other and cannot go on: rank 0 waits for rank 1 to send in" in text
            assert "rank 2 waits for rank 0 to send in send/recv(5 x float32)" in text


def waits_for_a_late_rank() -> None:
    """Nobody is blocked for good: rank 2 comes late, by its own time and in a thread."""
    with hdp.init("shm", timeout=LONG_S) as comm:
        x = zeros(3)
        for _ in range(2):
            if comm.rank == 2:
                time.sleep(0.9)
                comm.send(x, 0)
                comm.recv(x, 1)
            elif comm.rank == 0:
                comm.recv(x, 2)
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
                comm.send(x, 2)
        # Two threads of a rank: what the first waits for, the second's message lets the peer send.
        second = comm.subset([0, 1])
        if second is not None:
            works = [comm.send(zeros(4), 1 - comm.rank, async_op=True)]
            other = threading.Thread(target=lambda: comm.recv(zeros(4), 1 - comm.rank))
            other.start()
            other.join()
            works[0].wait()
            late = threading.Timer(0.9, lambda: comm.send(zeros(6), 1 - comm.rank))
            late.start()
            comm.recv(zeros(6), 1 - comm.rank)
            late.join()
        comm.barrier()


def test_who_comes_late_is_waited_for(ranks: Any) -> None:
    ranks(3, waits_for_a_late_rank)


def random_program(seed: int, operations: int) -> None:
    """Correct programs: subsets, directions, sizes and starts by chance, the same on all ranks, with pauses."""
    choice, own = random.Random(seed), random.Random()
    with hdp.init("shm", timeout=LONG_S) as comm:
        started: list[hdp.Work] = []
        for _ in range(operations):
            members = choice.sample(range(comm.size), choice.randint(2, comm.size))
            kind, count = choice.randrange(5), choice.choice([1, 7, 3000, 40_000])
            background, waits = choice.random() < 0.3, choice.random() < 0.2
            if own.random() < 0.02:
                time.sleep(own.random() * 0.5)
            subset = comm.subset(members)
            if subset is None:
                continue
            x = torch.full((count,), 1.0)
            if kind == 0:
                started.append(subset.all_reduce(x, async_op=background))
            elif kind == 1:
                started.append(subset.broadcast(x, 0, async_op=background))
            elif kind == 2:
                started.append(subset.reduce(x, 1, async_op=background))
            elif kind == 3 and subset.rank < 2:
                call = subset.send if subset.rank == 0 else subset.recv
                started.append(call(x, 1 - subset.rank, async_op=background))
            elif kind == 4:
                sends = [(x, (subset.rank + 1) % subset.size)]
                recvs = [(torch.empty(count), (subset.rank - 1) % subset.size)]
                started.append(subset.exchange(sends, recvs, async_op=background))
            if waits:
                for work in started:
                    work.wait()
                started.clear()
        for work in started:
            work.wait()


def test_no_false_alarm(ranks: Any) -> None:
    """On four ranks a core of two. ``HDPCOMM_DESYNC_OPERATIONS``: how many."""
    ranks(8, random_program, 7, RANDOM_OPERATIONS, timeout=60 + RANDOM_OPERATIONS / 5)

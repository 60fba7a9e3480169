"""Every way in which ranks can disagree, leave or die: the right error on the right ranks, soon, and nothing broken."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads, spawn
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
    refused,
    still_works,
    sums,
    survives,
    told_mismatch,
    told_survivors,
    until,
    wait_for,
    works_again,
)


def disagree(name: str) -> str:
    with hdp.init(timeout=LONG_S) as comm:
        told = told_mismatch(comm, lambda: DISAGREEMENTS[name](comm))
        works_again(comm)
        return told


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_both_sides_raise_mismatch(ranks: Any, name: str) -> None:
    messages = ranks(2, disagree, name)
    messages += run_threads(disagree, 2, name)
    if name == "size":
        assert all("4 x float32" in message and "5 x float32" in message for message in messages)


def one_of_three_disagrees() -> None:
    comm = hdp.init(timeout=LONG_S)
    differs_from_rank_1(comm)
    works_again(comm)
    # The operations after a failed one are refused.
    work = comm.all_reduce(torch.zeros(3 + (comm.rank == 2)), async_op=True)
    x = torch.ones(70_000)
    next_work = comm.all_reduce(x, async_op=True)
    assert isinstance(caught(work.wait), hdp.Mismatch)
    refused(caught(next_work.wait), comm)
    comm.resync()
    comm.all_reduce(x.fill_(1))
    assert (x == 3).all()
    works_again(comm)


def test_all_members_hear_of_a_mismatch(ranks: Any) -> None:
    ranks(3, one_of_three_disagrees)
    run_threads(one_of_three_disagrees, 3)


def one_of_many_disagrees() -> None:
    """The operations before it, which are under way at the same time, end well; later ones are refused."""
    with hdp.init(timeout=LONG_S) as comm:
        count, odd = 300, 77
        x = [torch.full((5 + (comm.rank == 1 and i == odd),), float(i)) for i in range(count)]
        if comm.rank == 1:
            works = [comm.send(each, 0, async_op=True) for each in x]
        else:
            works = [comm.recv(each.zero_(), 1, async_op=True) for each in x]
        for i, work in reversed(list(enumerate(works))):
            if i > odd:
                refused(caught(work.wait), comm)
            elif i == odd:
                assert isinstance(caught(work.wait), hdp.Mismatch)
            else:
                work.wait()
                assert (x[i] == i).all()
        works_again(comm)


def test_one_of_many_operations_disagrees(ranks: Any) -> None:
    ranks(2, one_of_many_disagrees)


def late_rank(folder: str) -> None:
    comm = hdp.init(timeout=LONG_S)
    error = late_after_a_timeout(comm, folder)
    assert error.peer == 1 - comm.rank
    assert "for rank 1: look for" in str(error)
    works_again(comm)


def test_timeout_reaches_the_late_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(2, late_rank, str(tmp_path))


def test_bad_arguments(ranks: Any) -> None:
    ranks(2, bad_arguments)


def aborts() -> None:
    comm = hdp.init(timeout=LONG_S)  # stays open on the rank that does not call the operation
    aborted_by_rank_0(comm)
    still_works(hdp.init(timeout=LONG_S))  # a new world


def test_abort(ranks: Any) -> None:
    ranks(3, aborts)


def third_rank_is_absent(folder: str) -> None:
    """Ranks 0 and 1 have nothing to ask of each other any more, and wait for rank 2: one's failure is the other's."""
    comm = hdp.init(timeout=LONG_S)
    for count in (2, 3_000, 100_000):
        for algorithm in ("direct", "ring"):
            heard = Path(folder, f"heard {algorithm} {count}")
            if comm.rank == 0:
                with pytest.raises(hdp.CommTimeout, match="look for a rank that did not call it"):
                    comm.all_reduce(torch.zeros(count), algorithm=algorithm, async_op=True).wait(timeout=0.3)
            elif comm.rank == 1:
                error = caught(lambda: comm.all_reduce(torch.zeros(count), algorithm=algorithm))  # noqa: B023
                heard.touch()
                assert isinstance(error, hdp.CommTimeout), repr(error)
                assert "(told by rank 0)" in str(error)
            else:
                wait_for(heard)
                error = caught(lambda: comm.all_reduce(torch.zeros(count), algorithm=algorithm))  # noqa: B023
                assert isinstance(error, hdp.CommTimeout), repr(error)
            works_again(comm)


def test_failure_while_a_third_rank_is_absent(ranks: Any, tmp_path: Path) -> None:
    ranks(3, third_rank_is_absent, str(tmp_path))


def stale_message() -> None:
    """A message of an operation that its receiver gave up is not taken for one of the next operation."""
    with hdp.init(timeout=LONG_S) as comm:
        x = torch.full((4,), 1.0 + comm.rank)
        if comm.rank == 0:
            time.sleep(0.5)
            with pytest.raises(hdp.CommTimeout, match="told by rank 1"):
                comm.broadcast(x, 0)
            time.sleep(1.0)
            refused(caught(lambda: comm.gather(torch.zeros(8), x, 0)), comm)
            comm.resync()
            out = torch.zeros(8)
            comm.gather(out, x, 0)
            assert out.tolist() == [1.0] * 4 + [2.0] * 4
        else:
            with pytest.raises(hdp.CommTimeout):
                comm.broadcast(x, 0, async_op=True).wait(timeout=0.2)
            time.sleep(0.7)
            # sends only; the late message of the broadcast lies there meanwhile
            refused(caught(lambda: comm.gather(None, x, 0)), comm)
            comm.resync()
            comm.gather(None, x, 0)
        works_again(comm)


def test_stale_message(ranks: Any) -> None:
    ranks(2, stale_message)


def withdrawn_before_another(folder: str) -> None:
    """A send that is given up fails its own receive, and the send behind it is refused on both ranks."""
    with hdp.init(timeout=LONG_S) as comm:
        for count in (100_000, 12_000_000):  # the second is more than may be under way
            gave_up = Path(folder, f"gave up {count}")
            if comm.rank == 0:
                first = comm.send(torch.ones(count), 1, async_op=True)
                second = comm.send(torch.full((3,), 7.0), 1, async_op=True)
                with pytest.raises(hdp.CommTimeout):
                    first.wait(timeout=0.3)
                refused(caught(second.wait), comm)
                gave_up.touch()
            else:
                wait_for(gave_up)
                time.sleep(0.2)  # for the notice, over a network
                with pytest.raises(hdp.CommTimeout, match=r"\(told by rank 0\)"):
                    comm.recv(torch.zeros(count), 0)
                refused(caught(lambda: comm.recv(torch.zeros(3), 0)), comm)
            works_again(comm)


def test_withdrawn_before_another(ranks: Any, tmp_path: Path) -> None:
    ranks(2, withdrawn_before_another, str(tmp_path))


def failure_behind_a_message(folder: str) -> None:
    """Rank 0 learns that rank 1 gave up an operation although a message of a later one is before the notice. That
    message is refused on both ranks."""
    with hdp.init(timeout=LONG_S) as comm:
        x, out = torch.zeros(2), torch.zeros(6)
        if comm.rank == 0:
            error = caught(lambda: comm.all_gather(out, x, algorithm="direct"))
            Path(folder, "heard").touch()
            assert isinstance(error, hdp.CommTimeout)
            assert "(told by rank 1)" in str(error)
            refused(caught(lambda: comm.recv(x, 1)), comm)
        elif comm.rank == 1:
            gathered = comm.all_gather(out, x, algorithm="direct", async_op=True)
            sent = comm.send(torch.full((2,), 5.0), 0, async_op=True)
            with pytest.raises(hdp.CommTimeout):
                gathered.wait(timeout=0.3)
            refused(caught(sent.wait), comm)
        else:
            wait_for(Path(folder, "heard"))
            with contextlib.suppress(hdp.CommTimeout):  # what the others sent to it may be all that it needs
                comm.all_gather(out, x, algorithm="direct")
        works_again(comm)


def test_failure_behind_a_message(ranks: Any, tmp_path: Path) -> None:
    ranks(3, failure_behind_a_message, str(tmp_path))


def leave_early() -> None:
    comm = hdp.init(timeout=LONG_S)
    if comm.rank == 1:
        comm.send(torch.arange(4.0), 0)
        comm.close()
        return
    x = torch.zeros(4)
    comm.recv(x, 1)  # what was sent before the end still arrives
    assert x.tolist() == [0, 1, 2, 3]
    with pytest.raises(hdp.PeerLost, match="rank 1 closed its communicator while rank 0 waited") as info:
        comm.recv(x, 1)
    assert info.value.peer == 1


def test_rank_that_leaves(ranks: Any) -> None:
    ranks(2, leave_early)


def test_reason_of_a_rank_that_failed_is_told(ranks: Any) -> None:
    ranks(2, exit_by_exception, "shm")


@pytest.mark.usefixtures("nothing_left_in_shm")
@pytest.mark.parametrize(("victim", "count"), [(2, 4), (2, 1_000_000), (0, 4)])
def test_survivors_are_told_who_was_killed(tmp_path: Path, victim: int, count: int) -> None:
    call = functools.partial(sums, count=count, algorithm="ring")
    with pytest.raises(hdp.PeerLost, match=f"rank {victim} ended by signal SIGKILL"):
        spawn(survives, 4, str(tmp_path), "shm", victim, call, timeout=60)
    assert told_survivors(tmp_path) == {0, 1, 2, 3} - {victim}


def polls_a_dead_rank(path: str) -> None:
    """Nobody waits for the operation: done() tells that it has ended all the same."""
    comm = hdp.init(timeout=LONG_S)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = comm.recv(torch.zeros(4), 1, async_op=True)
    assert until(work.done)
    with open(path, "w") as file:
        file.write(str(caught(work.wait)))


def test_polling_for_a_dead_rank_ends(tmp_path: Any) -> None:
    with pytest.raises(hdp.PeerLost):
        spawn(polls_a_dead_rank, 2, str(tmp_path / "told"), timeout=60)
    assert "rank 1 died" in (tmp_path / "told").read_text()


def interrupted(folder: str) -> None:
    comm = hdp.init(timeout=LONG_S)
    over, heard = Path(folder, "interrupted"), Path(folder, "heard of it")
    if comm.rank == 0:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            comm.recv(torch.zeros(1), 1)
        over.touch()
        wait_for(heard)  # what follows would say why it is refused, too
    else:
        wait_for(over)
        with pytest.raises(hdp.Aborted, match="interrupted"):
            comm.send(torch.zeros(1), 0)
        heard.touch()
    works_again(comm)


def test_ctrl_c_ends_a_wait(ranks: Any, tmp_path: Any) -> None:
    ranks(2, interrupted, str(tmp_path))

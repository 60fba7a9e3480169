"""Operations that failed and that nobody waits for: a warning tells it, unless the program has heard of it already."""

from __future__ import annotations

import gc
import threading
import warnings

import torch

import hdpcomm as hdp
from hdpcomm.comm.communicator import Communicator, Work
from tests.faults.test_unattended import SHORT_S, on_threads
from tests.harness.fault_cases import LONG_S, caught, until


def warned_of(works: list[Work]) -> list[str]:
    """The warnings when these are let go of, which have ended. Warnings are the process's: one rank at a time."""
    assert until(lambda: all(work.done() for work in works))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        works.clear()
        gc.collect()
    start = "an operation failed whose Work was dropped: "
    return [text.removeprefix(start) for text in (str(each.message) for each in told) if text.startswith(start)]


def receive(comm: Communicator, peer: int, count: int = 3) -> Work:
    return comm.recv(torch.ones(count), peer, async_op=True)


def test_a_death_that_was_raised_is_no_news() -> None:
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 2:
            return
        works = [comm.all_reduce(torch.ones(3), async_op=True), receive(comm, 2), receive(comm, 2)]
        error = caught(lambda: comm.recv(torch.ones(3), 2))
        assert isinstance(error, hdp.PeerLost)
        if comm.rank == 1:
            assert until(lambda: all(work.done() for work in works))
            assert over.wait(LONG_S)
            return
        assert warned_of(works) == []
        over.set()

    on_threads([LONG_S] * 3, program)


def test_what_nobody_has_heard_of_is_told_once() -> None:
    """The death of one rank is no word about another one's."""
    left = threading.Barrier(3)

    def program(comm: Communicator) -> None:
        if comm.rank == 2:
            left.wait(LONG_S)
        if comm.rank == 0:
            assert isinstance(caught(lambda: comm.recv(torch.ones(3), 1)), hdp.PeerLost)
            works = [receive(comm, 2), receive(comm, 2)]
            left.wait(LONG_S)
            (told,) = warned_of(works)
            assert told.startswith("rank 2 closed its communicator")
        if comm.rank == 1:
            comm.close()
            left.wait(LONG_S)

    on_threads([LONG_S] * 3, program)


def test_a_timeout_that_was_raised_is_no_news() -> None:
    """Also on a rank that another one told; after resync() the next one is."""
    heard = threading.Barrier(3)

    def program(comm: Communicator) -> None:
        for _ in range(2):
            if comm.rank < 2:
                works = [comm.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
                error = caught(lambda: comm.all_reduce(torch.ones(3)))
                assert isinstance(error, hdp.CommTimeout | hdp.Aborted)
                for turn in range(2):
                    heard.wait(LONG_S)
                    if turn == comm.rank:
                        assert warned_of(works) == []
            else:
                heard.wait(LONG_S)
                heard.wait(LONG_S)
            heard.wait(LONG_S)
            comm.resync(LONG_S)
        if comm.rank == 0:
            (told,) = warned_of([receive(comm, 2)])
            assert "look for a rank that did not call it" in told
        heard.wait(LONG_S)

    on_threads([SHORT_S, LONG_S, LONG_S], program)


def test_the_same_words_after_resync_are_news() -> None:
    """But not what failed before it, and was heard of before it."""
    warned = threading.Barrier(2)

    def program(comm: Communicator) -> None:
        heard = []
        for raises in (True, False, True):
            if comm.rank == 1:
                assert isinstance(caught(lambda: comm.send(torch.ones(4), 0)), hdp.Mismatch)
            elif raises:
                heard.append(receive(comm, 1))
                assert isinstance(caught(heard[-1].wait), hdp.Mismatch)
            else:
                (told,) = warned_of([receive(comm, 1)])
                assert "3 x float32" in told
                assert "4 x float32" in told
            warned.wait(LONG_S)
            comm.resync(LONG_S)
        assert warned_of(heard) == []

    on_threads([LONG_S] * 2, program)


def test_what_agree_met_is_news() -> None:
    warned = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.rank == 2:
            return
        works = [receive(comm, 2)]
        assert until(works[0].done)
        assert comm.agree(True)
        if comm.rank == 1:
            assert warned.wait(LONG_S)
            assert isinstance(caught(works.pop().wait), hdp.PeerLost)
            return
        (told,) = warned_of(works)
        assert told.startswith("rank 2 closed its communicator")
        warned.set()

    on_threads([LONG_S] * 3, program)

"""Several members of a device operation are gone, in different ways: who needs them is told what explains it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

import hdpcomm as hdp
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import LONG_S, caught


def closes(comm: hdp.Communicator) -> None:
    comm.close()


def raises(comm: hdp.Communicator) -> None:
    with contextlib.suppress(KeyError), comm:
        raise KeyError("no such shard")


def aborts(comm: hdp.Communicator) -> None:
    comm.abort("the user had enough")


def is_told(comm: hdp.Communicator) -> None:
    """By the other one, which has gone before."""
    pair = comm.subset([1, 2])
    assert pair is not None
    caught(lambda: pair.all_reduce(torch.zeros(3)))


@pytest.mark.parametrize("transport", ["sim", "cuda+nccl"])
@pytest.mark.parametrize("telling", [1, 2])
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (raises, closes, "closed its communicator.*no such shard"),
        (aborts, closes, "the user had enough"),
        (aborts, raises, "the user had enough"),
        (aborts, is_told, "the user had enough"),
    ],
)
def test_the_most_telling_end_is_named(
    transport: str,
    telling: int,
    first: Callable[[hdp.Communicator], None],
    then: Callable[[hdp.Communicator], None],
    words: str,
) -> None:
    gone = [threading.Event(), threading.Event()]

    def program() -> None:
        comm = hdp.init(timeout=LONG_S)
        comm.barrier()
        if comm.rank == telling:
            first(comm)
            gone[0].set()
        elif comm.rank != 0:
            assert gone[0].wait(LONG_S)
            then(comm)
            gone[1].set()
        else:
            assert gone[1].wait(LONG_S)
            for order in ([0, 1, 2], [2, 1, 0]):
                members = comm.subset(order)
                assert members is not None
                with pytest.raises((hdp.PeerLost, hdp.Aborted), match=words) as info:
                    members.all_reduce(torch.zeros(3))
                assert info.value.peer == telling

    run_threads(program, 3, transport=transport)

"""Engines that end while streams still have work: nothing that a stream uses is freed before the stream is through."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import _core
from tests.faults.test_device_errors import arenas
from tests.harness.fakes import FakeMachine
from tests.harness.fault_cases import LONG_S, caught, still_works, until
from tests.harness.machines import joining_on
from tests.harness.native import _testing

COUNT = 100_000
"""Elements of a message that each lane of a pair has a part of."""


def sim() -> hdp.Communicator:
    with joining_on(FakeMachine(2, opens=_testing.TestDevice)):
        return hdp.init(transport="sim", timeout=LONG_S)


def hold(comm: hdp.Communicator) -> tuple[Any, int]:
    """The device, and a flag: until it is 1, no stream of this rank copies anything."""
    device = comm.streams.device  # type: ignore[attr-defined]
    flag = device.allocate(4)
    device.store_flag(flag, 0)
    device.hold_copies(flag)
    return device, flag


class Memory(bytearray):
    """The memory of a tensor; unlike the tensor, the collector of cycles does not see who refers to it."""


def message() -> tuple[torch.Tensor, weakref.ref[Memory]]:
    memory = Memory(4 * COUNT)
    return torch.frombuffer(memory, dtype=torch.float32), weakref.ref(memory)


def is_freed(memory: weakref.ref[Memory]) -> bool:
    """Whether the memory has gone, once everybody who may let go of it has looked whether it can."""
    gc.collect()
    _core.comm.free_ended()
    return memory() is None


def held_sender(comm: hdp.Communicator, beside: hdp.Communicator, ending: str) -> tuple[Any, int, weakref.ref[Memory]]:
    """Lets go of everything while its streams have yet to read the tensor of a message."""
    device, flag = hold(comm)
    x, memory = message()
    work = comm.send(x, 1, async_op=True)
    beside.barrier()
    if ending == "mismatch":
        error = caught(lambda: comm.all_reduce(torch.ones(3)))
        assert isinstance(error, hdp.Mismatch)
        assert not work.done()
        comm.close()
    else:
        comm.abort("the user had enough")
    assert not work.done(), "a stream has yet to read the tensor"
    return device, flag, memory


def ends_while_a_stream_is_held(ending: str) -> None:
    beside = hdp.init(transport="shm", timeout=LONG_S)
    gc.collect()
    _core.comm.free_ended()
    comm = sim()
    before = arenas() - 1
    beside.barrier()
    if comm.rank == 1:
        received = comm.recv(torch.zeros(COUNT), 0, async_op=True)
        reduced = comm.all_reduce(torch.ones(4), async_op=True)
        beside.barrier()
        for work in (received, reduced):
            caught(work.wait)
        comm.close()
        del comm, received, reduced, work
    else:
        device, flag, tensor = held_sender(comm, beside, ending)
        del comm
        assert not is_freed(tensor), "the tensor went while a stream had yet to read it"
        assert arenas() == before + 1, "the arena went while a stream had yet to write its flags"
        device.store_flag(flag, 1)
        assert until(lambda: is_freed(tensor))
        device.free(flag)
        del device
    beside.barrier()
    with hdp.init(transport="sim", timeout=LONG_S) as again:
        beside.barrier()
        assert arenas() == before + 1  # its own: that of the world before has gone
        still_works(again)


@pytest.mark.parametrize("ending", ["mismatch", "abort"])
def test_memory_stays_while_a_stream_is_held(ending: str, ranks: Any) -> None:
    ranks(2, ends_while_a_stream_is_held, ending)


def fails_in_the_middle() -> None:
    """The first of two messages has its lane, the second cannot have one: the call fails, and the first is held."""
    beside = hdp.init(transport="shm", timeout=LONG_S)
    comm = sim()
    if comm.rank == 0:
        device, flag = hold(comm)
        device.limit_threads(1)
        x, tensor = message()
        assert "no thread for a stream" in str(caught(lambda: comm.exchange([(x, 1), (x, 1)])))
        del x
        assert not is_freed(tensor), "the tensor went while a stream had yet to read it"
        device.store_flag(flag, 1)
        assert until(lambda: is_freed(tensor))
        device.free(flag)
    else:
        received = [(torch.ones(COUNT), 0) for _ in range(2)]
        assert "no thread for a stream" in str(caught(lambda: comm.exchange([], received)))
    beside.barrier()


def test_an_operation_that_fails_in_the_middle_keeps_its_tensors(ranks: Any) -> None:
    ranks(2, fails_in_the_middle)


AT_THE_END = """
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads


def rank():
    comm = hdp.init(timeout=600.0)
    comm.recv(torch.zeros(3), 1 - comm.rank)  # nobody sends


try:
    run_threads(rank, 2, transport="sim", timeout=0.5)
except hdp.Error as error:
    print(type(error).__name__)
"""


def test_a_program_ends_while_daemon_threads_wait_in_the_core() -> None:
    """Python ends threads that come back to it while the interpreter ends, which must not end the process first."""
    result = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout) == (0, "CommTimeout\n"), result.stderr[-2000:]
    assert "terminate called" not in result.stderr

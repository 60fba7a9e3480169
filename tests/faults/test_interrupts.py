"""Exceptions from signal handlers, which Python raises between any two instructions: memory in flight stays.

HDPCOMM_TEST_INTERRUPTS: signals for each transport (default 100).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import communicator
from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.device import communicator as device_communicator
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.testing import RankPool
from tests.harness.fakes import run_threads
from tests.harness.fault_cases import pool_over
from tests.harness.patience import PATIENCE

SIGNALS = int(os.environ.get("HDPCOMM_TEST_INTERRUPTS", "100"))
COUNT = 5000  # above what is copied at once, so that the peer reads this rank's memory later
GARBAGE = -7.0


class Interrupt(Exception):
    """Raised by a handler."""


def all_reduce(comm: Communicator, x: torch.Tensor) -> Any:
    return comm.all_reduce(x, async_op=True)


STARTS: dict[str, Callable[[Communicator, torch.Tensor], Any]] = {
    "send": lambda comm, x: comm.send(x, 1, async_op=True),
    "send in an exchange": lambda comm, x: comm.exchange(sends=[[x, 1]], async_op=True),
    "recv": lambda comm, x: comm.recv(x, 1, async_op=True),
    "recv in an exchange": lambda comm, x: comm.exchange(recvs=iter([(x, 1)]), async_op=True),
    "all_reduce": all_reduce,
}


def joins_in(comm: Communicator, name: str, number: int) -> None:
    """On rank 1, what an operation needs that rank 0 has begun."""
    x = torch.full((COUNT,), float(number))
    if name.startswith("send"):
        x.zero_()
        comm.recv(x, 0)
        assert (x == number).all(), (name, number, x.unique())
    elif name.startswith("recv"):
        comm.send(x, 0)
    else:
        comm.all_reduce(x)
        assert (x == 2 * number).all(), (name, number, x.unique())


class Begun:
    """Counts the operations that the core has begun for :func:`attempts`. Nothing is raised inside of :meth:`run`."""

    def __init__(self) -> None:
        self.count = 0
        self.counts = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in (communicator, device_communicator):
                for name in ("_send", "_recv", "_exchange", "_collective"):
                    if hasattr(module, name):
                        counting = functools.partial(self.run, getattr(module, name))
                        stack.enter_context(mock.patch.object(module, name, counting))
            yield

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.count += self.counts
        return call(*arguments)


class Channel:
    """Numbers from rank 0 to rank 1 beside the communicator, and 0 at the end; an answer for each."""

    def __init__(self, folder: str, rank: int) -> None:
        own, other = Path(folder, str(rank)), Path(folder, str(1 - rank))
        for path in (own, other):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path)
        self._in, self._out = open(own, "r+b", buffering=0), open(other, "r+b", buffering=0)  # noqa: SIM115

    def put(self, number: int) -> None:
        self._out.write(number.to_bytes(8, "little"))

    def get(self) -> int:
        return int.from_bytes(self._in.read(8), "little")


Interrupts = Callable[[Callable[[], object], int], bool]


def attempts(name: str, folder: str, numbers: range, interrupts: Interrupts, begun: Begun, until_none: bool) -> int:
    """Begins operations that ``interrupts`` ends in some instruction; gives how many it has ended."""
    with hdp.init() as comm, begun.counted():
        channel, ended = Channel(folder, comm.rank), 0
        comm.barrier()
        while comm.rank == 1 and (number := channel.get()):
            joins_in(comm, name, number)
            comm.barrier()
            channel.put(1)
        for number in numbers if comm.rank == 0 else ():
            before, memory = begun.count, [torch.full((COUNT,), float(number))]
            begun.counts = True
            stopped = interrupts(lambda: STARTS[name](comm, memory.pop()), number)  # noqa: B023
            begun.counts, ended = False, ended + stopped
            others = [torch.full((COUNT,), GARBAGE) for _ in range(6)]  # in the memory that was freed last
            if begun.count > before:
                channel.put(number)
                comm.barrier()
                channel.get()
            for each in others:
                assert (each == GARBAGE).all(), (name, number, each.unique())
            if until_none and not stopped:
                break
        channel.put(0)
        return ended


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("transport", ["shm", "sim", "cuda+nccl"])
def test_an_exception_at_any_instruction(name: str, transport: str, tmp_path: Path) -> None:
    hosts = (0, 1) if "nccl" in transport else (0, 0)
    arguments = name, str(tmp_path), range(1, 10_000), at_instruction, Begun(), True
    ended, _ = run_threads(attempts, 2, *arguments, transport=transport, hosts=hosts)
    assert ended > 10


def at_instruction(call: Callable[[], object], at: int) -> bool:
    """Whether a call had an ``at``-th instruction, in whichever function; it was interrupted before that."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code is Begun.run.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0  # a destructor swallows it


def by_signal(call: Callable[[], object], number: int) -> bool:
    """Whether a timer has interrupted a call."""

    armed = True

    def handle(_: int, frame: FrameType | None) -> None:
        nonlocal armed
        if frame is not None and frame.f_code is Begun.run.__code__:
            signal.setitimer(signal.ITIMER_REAL, 1e-6)
        elif armed:
            armed = False
            raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + (number * 7919 % 1000) * 3e-8)
        call()
        stopped, armed = not armed, False
    except Interrupt:
        stopped = True
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    return stopped


@pytest.fixture(params=["shm", "fragments", "tcp", "sim"], scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pool_over(request.param, 2) as made:
        yield made


@pytest.mark.parametrize("name", STARTS)
def test_signals(name: str, pool: RankPool, tmp_path: Path) -> None:
    ended, _ = pool.run(
        attempts, name, str(tmp_path), range(1, SIGNALS + 1), by_signal, Begun(), False, timeout=600.0 * PATIENCE
    )
    assert ended > SIGNALS // 20


def offload_step(layers: torch.nn.Module, offload: ActivationOffload, x: torch.Tensor) -> None:
    with offload.micro_batch(1.0):
        y = layers(x)
    y.sum().backward()


def test_an_exception_in_any_instruction_of_an_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to host memory and back: their tensors stay until the copies have ended, and their blocks come back."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what destructors could not raise
    pool = PinnedPool(1 << 20, device="cpu")
    x = torch.randn(64, 64)

    def interrupted(at: int) -> tuple[bool, list[torch.Tensor | None]]:
        torch.manual_seed(0)  # new layers, as an exception in a clean-up leaves hooks
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        offloads = [ActivationOffload(pool, list(layers), min_bytes=1, resident_layers=0)]
        stopped = at_instruction(lambda: offload_step(layers, offloads.pop(), x), at)
        others = [torch.full((64, 64), GARBAGE) for _ in range(20)]
        gc.collect()
        assert all((each == GARBAGE).all() for each in others), at
        return stopped, [p.grad for p in layers.parameters()]

    number, (stopped, gradients) = 0, (True, [])
    while stopped:
        number += 61
        stopped, gradients = interrupted(number)
    gc.collect()
    assert pool.stats().in_use == 0
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    layers(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), gradients, strict=True))

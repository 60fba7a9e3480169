"""The contract of devices on a GPU: runs the programs that simulated devices pass (tests/unit/device)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from hdpcomm._core.device import Device, open_cuda
from tests.harness.device_contract import PROGRAMS, words
from tests.harness.native import _testing

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_contract(program: Callable[[Device], None]) -> None:
    device = open_cuda(0)
    for _ in range(3):
        program(device)


def _add_twenty_times(handle: bytes, pipe: Connection) -> None:
    device = open_cuda(0)
    theirs = device.import_memory(handle)
    mine = device.allocate(4096)
    device.fill(mine, 0, bytes=4096, stream=0)
    device.synchronize_stream(0)
    pipe.send(device.export_memory(mine))
    stream = device.create_stream()
    for turn in range(1, 21):
        device.wait_value(stream, mine, turn)
        _testing.accumulate(device, theirs + 64, mine + 64, count=16, stream=stream)
        device.write_value(stream, theirs, turn)
    device.synchronize_stream(stream)
    device.close_memory(theirs)
    pipe.recv()


def test_two_ranks_that_are_processes() -> None:
    device = open_cuda(0)
    mine, pinned = device.allocate(4096), device.allocate_pinned(64)
    device.fill(mine, 0, bytes=4096, stream=0)
    device.synchronize_stream(0)
    ours, pipe = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_add_twenty_times, args=(device.export_memory(mine), pipe)
    )
    process.start()
    try:
        theirs = device.import_memory(ours.recv())
        stream = device.create_stream()
        for turn in range(1, 21):
            device.fill(theirs + 64, turn, bytes=64, stream=stream)
            device.write_value(stream, theirs, turn)
            device.wait_value(stream, mine, turn)
        device.copy(pinned, mine + 64, bytes=64, stream=stream)
        device.synchronize_stream(stream)
        assert words(pinned, 16).tolist() == [210 * 0x01010101] * 16
        device.close_memory(theirs)
    finally:
        ours.send("end")
        process.join(60)
    assert process.exitcode == 0

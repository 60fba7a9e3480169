"""SimDevice's fast mode: the contract, ranks that are processes, and what only a simulated device has."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from hdpcomm._core.device import Device, open_sim
from hdpcomm.errors import CommTimeout, DeviceError, InvalidUsage
from tests.harness.device_contract import PROGRAMS, words
from tests.harness.native import _testing


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_contract(program: Callable[[Device], None]) -> None:
    device = open_sim(0)
    for _ in range(3):
        program(device)


def test_handles_of_another_device_are_refused() -> None:
    first, second = open_sim(0), open_sim(1)
    stream, event, memory = first.create_stream(), first.create_event(), first.allocate(64)
    with pytest.raises(InvalidUsage, match="another device"):
        second.synchronize_stream(stream)
    with pytest.raises(InvalidUsage, match="another device"):
        second.record(event, 0)
    with pytest.raises(InvalidUsage, match="no such allocation"):
        second.free(memory)
    with pytest.raises(InvalidUsage, match="0 or more"):
        open_sim(-1)
    assert second.name == "sim"
    assert second.is_sim
    assert second.ordinal == 1
    assert second.can_access_peer(0)


def test_a_stuck_stream_says_where_it_stands_and_does_not_stop_the_end() -> None:
    device = open_sim(0)
    flag = device.allocate_pinned(64)
    device.store_flag(flag, 2)
    stream = device.create_stream()
    device.wait_value(stream, flag, 5)
    with pytest.raises(CommTimeout, match=r">= 5\), called at test_device_fast.py:\d+; the flag holds 2"):
        device.synchronize_stream(stream, 0.5)
    other, event = device.create_stream(), device.create_event()
    device.record(event, stream)
    device.wait(other, event)
    with pytest.raises(CommTimeout, match=r"wait\(event\), called at test_device_fast.py:\d+"):
        device.synchronize_stream(other, 0.5)
    device.destroy_stream(stream)
    del device  # cancels both waits
    gc.collect()


def test_a_fault_is_told_when_the_work_is_through() -> None:
    """What runs while its device fails still uses its memory; what waits is given up."""
    device = open_sim(0)
    flag = device.allocate_pinned(64)
    device.store_flag(flag, 0)
    lasting, waiting, failing = (device.create_stream() for _ in range(3))
    through, waited, idle = (device.create_event() for _ in range(3))
    begun = ctypes.c_uint32.from_address(flag + 4)
    _testing.launch_lasting(device, lasting, flag)
    device.record(through, lasting)
    limit = time.monotonic() + 30
    while not begun.value:
        assert time.monotonic() < limit
        time.sleep(0.001)
    device.wait_value(waiting, flag, 2)  # never
    device.record(waited, waiting)
    _testing.launch_failing(device, failing)
    with pytest.raises(DeviceError, match="kernel failing failed"):
        device.query(idle)
    with pytest.raises(DeviceError, match="kernel failing failed"):
        device.synchronize_event(waited, 30)
    assert not device.query(through)
    device.store_flag(flag, 1)
    with pytest.raises(DeviceError, match="kernel failing failed"):
        device.synchronize_event(through, 30)
    with pytest.raises(DeviceError, match="kernel failing failed"):
        device.query(through)


def test_two_ranks_that_are_threads() -> None:
    turns, count = 50, 5000
    devices = [open_sim(rank) for rank in range(2)]
    memory = [device.allocate(4 * count) for device in devices]
    flags = [device.allocate(4096) for device in devices]  # flag 0: full, flag 1: empty
    handles = [device.export_memory(block) for device, block in zip(devices, memory, strict=True)]
    results: list[int] = []

    def send() -> None:
        device, stream = devices[0], devices[0].create_stream()
        target = device.import_memory(handles[1])
        for turn in range(1, turns + 1):
            device.wait_value(stream, flags[1] + 4, turn - 1)
            device.fill(memory[0], turn, bytes=4 * count, stream=stream)
            device.copy(target, memory[0], bytes=4 * count, stream=stream)
            device.write_value(stream, flags[1], turn)
        device.synchronize_stream(stream)

    def receive() -> None:
        device, stream = devices[1], devices[1].create_stream()
        total = device.allocate(4 * count)
        device.fill(total, 0, bytes=4 * count, stream=stream)
        for turn in range(1, turns + 1):
            device.wait_value(stream, flags[1], turn)
            _testing.accumulate(device, total, memory[1], count=count, stream=stream)
            device.write_value(stream, flags[1] + 4, turn)
        device.synchronize_stream(stream)
        results.extend(words(total, count).tolist())

    threads = [threading.Thread(target=run) for run in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [0x01010101 * (turns * (turns + 1) // 2) % 2**32] * count


def _ping(handle: bytes, pipe: Connection) -> None:
    device = open_sim(1)
    theirs = device.import_memory(handle)
    again = device.import_memory(handle)
    mine = device.allocate(4096)
    pipe.send(device.export_memory(mine))
    stream = device.create_stream()
    for turn in range(1, 21):
        device.wait_value(stream, mine, turn)
        _testing.accumulate(device, theirs + 64, mine + 64, count=16, stream=stream)
        device.write_value(stream, theirs, turn)
    device.synchronize_stream(stream)
    device.close_memory(theirs)
    device.close_memory(again)
    pipe.recv()


def test_two_ranks_that_are_processes() -> None:
    device = open_sim(0)
    mine = device.allocate(4096)
    ours, pipe = multiprocessing.Pipe()
    handle = device.export_memory(mine)
    process = multiprocessing.get_context("spawn").Process(target=_ping, args=(handle, pipe))
    process.start()
    try:
        theirs_handle = ours.recv()
        theirs = device.import_memory(theirs_handle)
        stream = device.create_stream()
        for turn in range(1, 21):
            device.fill(theirs + 64, turn, bytes=64, stream=stream)
            device.write_value(stream, theirs, turn)
            device.wait_value(stream, mine, turn)
        device.synchronize_stream(stream)
        assert words(mine + 64, 16).tolist() == [210 * 0x01010101] * 16
        device.close_memory(theirs)
    finally:
        ours.send("end")
        process.join(30)
    assert process.exitcode == 0
    with pytest.raises(DeviceError, match="no such memory any more"):
        device.import_memory(theirs_handle)


def test_streams_come_and_go() -> None:
    device = open_sim(0)
    memory = device.allocate(1 << 20)
    before = threading.active_count()
    for turn in range(100):
        stream, event = device.create_stream(), device.create_event()
        device.fill(memory, turn, bytes=1 << 20, stream=stream)
        device.record(event, stream)
        device.synchronize_event(event)
        device.destroy_stream(stream)
        device.destroy_event(event)
    assert words(memory, 1)[0] == 99 * 0x01010101
    assert threading.active_count() == before

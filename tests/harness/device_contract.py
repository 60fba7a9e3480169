"""The contract of devices as small programs. Each takes a new device and asserts what it must do.

`test_device_fast.py` and `test_device_check.py` run them on simulated devices, `tests/gpu/test_device_gpu.py` on CUDA.
The host reads device memory only through pinned memory, so that the same program runs on all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from hdpcomm import _core
from hdpcomm._core.device import Device
from hdpcomm.errors import CommTimeout, InvalidUsage
from tests.harness.native import _testing

__all__ = ["PROGRAMS", "words"]

TIMEOUT = 30.0
KIB = 1024


def words(address: int, count: int) -> np.ndarray:
    """uint32 memory at an address, as an array."""
    return np.frombuffer((ctypes.c_uint32 * count).from_address(address), np.uint32)


class Buffers:
    """Device and pinned memory of a device, freed together."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory: list[int] = []
        self._pinned: list[int] = []

    def on_device(self, count: int, value: int | None = None) -> int:
        self._memory.append(self.device.allocate(max(4 * count, 4)))
        if value is not None:
            self.upload(self._memory[-1], np.full(count, value, np.uint32))
        return self._memory[-1]

    def pinned(self, count: int, value: int = 0) -> int:
        self._pinned.append(self.device.allocate_pinned(max(4 * count, 4)))
        words(self._pinned[-1], count)[:] = value
        self.device.annotate_write(self._pinned[-1], 4 * count)
        return self._pinned[-1]

    def upload(self, memory: int, values: np.ndarray) -> None:
        staging = self.pinned(len(values))
        words(staging, len(values))[:] = values
        self.device.annotate_write(staging, 4 * len(values))
        self.device.copy(memory, staging, bytes=4 * len(values), stream=0)
        self.device.synchronize_stream(0, TIMEOUT)

    def download(self, memory: int, count: int, stream: int = 0) -> np.ndarray:
        staging = self.pinned(count)
        self.device.copy(staging, memory, bytes=4 * count, stream=stream)
        self.device.synchronize_stream(stream, TIMEOUT)
        self.device.annotate_read(staging, 4 * count)
        return words(staging, count).copy()

    def close(self) -> None:
        for memory in self._memory:
            self.device.free(memory)
        for memory in self._pinned:
            self.device.free_pinned(memory)


def copies_go_every_way(device: Device) -> None:
    buffers = Buffers(device)
    for count in (1, 3, 1025, 64 * KIB):
        values = np.arange(count, dtype=np.uint32) * 2654435761 % 4294967291
        first, second = buffers.on_device(count), buffers.on_device(count)
        buffers.upload(first, values)
        device.copy(second, first, bytes=4 * count, stream=0)
        np.testing.assert_array_equal(buffers.download(second, count), values)
        other = buffers.pinned(count)
        source = buffers.pinned(count, value=9)
        device.copy(other, source, bytes=4 * count, stream=0)  # host to host
        device.synchronize_stream(0, TIMEOUT)
        device.annotate_read(other, 4 * count)
        assert (words(other, count) == 9).all()
    buffers.close()


def nothing_is_copied_of_no_bytes(device: Device) -> None:
    device.copy(0, 0, bytes=0, stream=0)
    device.fill(0, 1, bytes=0, stream=0)
    if device.is_sim or _core.build_info()["cuda"]:
        _testing.accumulate(device, 0, 0, count=0, stream=0)
    device.synchronize_stream(0, TIMEOUT)


def fill_sets_bytes(device: Device) -> None:
    buffers = Buffers(device)
    memory = buffers.on_device(100, value=1)
    device.fill(memory + 5, 0xAB, bytes=7, stream=0)
    got = buffers.download(memory, 100).view(np.uint8)
    expected = np.ones(100, np.uint32).view(np.uint8).copy()
    expected[5:12] = 0xAB
    np.testing.assert_array_equal(got, expected)
    buffers.close()


def a_stream_runs_in_order(device: Device) -> None:
    buffers = Buffers(device)
    stream = device.create_stream()
    count = 32 * KIB
    total, step = buffers.on_device(count, value=0), buffers.on_device(count)
    for value in range(1, 6):
        device.fill(step, value, bytes=4 * count, stream=stream)
        _testing.accumulate(device, total, step, count=count, stream=stream)
    assert (buffers.download(total, count, stream) == 15 * 0x01010101).all()
    device.destroy_stream(stream)
    buffers.close()


def an_event_orders_two_streams(device: Device) -> None:
    buffers = Buffers(device)
    producer, consumer, event = device.create_stream(-1), device.create_stream(), device.create_event()
    count = 64 * KIB
    source, total = buffers.on_device(count, value=0), buffers.on_device(count, value=0)
    for value in range(1, 5):
        device.wait(producer, event)  # never recorded at first: nothing to wait for
        device.fill(source, value, bytes=4 * count, stream=producer)
        device.record(event, producer)
        device.wait(consumer, event)
        _testing.accumulate(device, total, source, count=count, stream=consumer)
        device.record(event, consumer)
    assert (buffers.download(total, count, consumer) == 10 * 0x01010101).all()
    for stream in (producer, consumer):
        device.destroy_stream(stream)
    device.destroy_event(event)
    buffers.close()


def recording_again_does_not_move_an_older_wait(device: Device) -> None:
    buffers = Buffers(device)
    first, second, event = device.create_stream(), device.create_stream(), device.create_event()
    flag = buffers.on_device(2, value=0)
    device.record(event, first)  # nothing before it
    device.wait(second, event)
    device.wait_value(first, flag, 1)
    device.record(event, first)  # not reached before the flag is set
    assert not device.query(event)
    device.write_value(second, flag, 1)  # would never run if the wait were for the second record
    device.synchronize_event(event, TIMEOUT)
    assert device.query(event)
    device.synchronize_stream(second, TIMEOUT)
    for stream in (first, second):
        device.destroy_stream(stream)
    device.destroy_event(event)
    buffers.close()


def an_event_that_was_never_recorded_is_done(device: Device) -> None:
    event, stream = device.create_event(), device.create_stream()
    assert device.query(event)
    device.synchronize_event(event, TIMEOUT)
    device.wait(stream, event)
    device.synchronize_stream(stream, TIMEOUT)
    device.destroy_event(event)
    device.destroy_stream(stream)


def a_flag_orders_two_streams(device: Device) -> None:
    buffers = Buffers(device)
    producer, consumer = device.create_stream(), device.create_stream()
    count = 64 * KIB
    slot, total, flags = buffers.on_device(count), buffers.on_device(count, value=0), buffers.on_device(2, value=0)
    full, empty = flags, flags + 4
    for turn in range(1, 6):
        device.wait_value(producer, empty, turn - 1)
        device.fill(slot, turn, bytes=4 * count, stream=producer)
        device.write_value(producer, full, turn)
        device.wait_value(consumer, full, turn)
        _testing.accumulate(device, total, slot, count=count, stream=consumer)
        device.write_value(consumer, empty, turn)
    assert (buffers.download(total, count, consumer) == 15 * 0x01010101).all()
    device.synchronize_stream(producer, TIMEOUT)
    for stream in (producer, consumer):
        device.destroy_stream(stream)
    buffers.close()


def a_flag_may_wrap(device: Device) -> None:
    buffers = Buffers(device)
    stream = device.create_stream()
    flag = buffers.on_device(1, value=0xFFFFFFFE)
    device.wait_value(stream, flag, 0xFFFFFFF0)  # smaller: passed already
    device.wait_value(stream, flag, 2)  # larger, beyond the wrap
    device.write_value(0, flag, 3)
    device.synchronize_stream(stream, TIMEOUT)
    assert buffers.download(flag, 1)[0] == 3
    device.destroy_stream(stream)
    buffers.close()


def the_host_sets_flags(device: Device) -> None:
    buffers = Buffers(device)
    stream = device.create_stream()
    flags = buffers.pinned(2)
    device.store_flag(flags, 0)
    device.store_flag(flags + 4, 0)
    device.wait_value(stream, flags, 7)
    device.write_value(stream, flags + 4, 8)
    with pytest.raises(CommTimeout, match="did not end within"):
        device.synchronize_stream(stream, 0.05)
    assert ctypes.c_uint32.from_address(flags + 4).value == 0
    device.store_flag(flags, 7)
    device.synchronize_stream(stream, TIMEOUT)
    assert ctypes.c_uint32.from_address(flags + 4).value == 8
    device.destroy_stream(stream)
    buffers.close()


def destroyed_handles_do_not_disturb_work(device: Device) -> None:
    buffers = Buffers(device)
    stream, other, event = device.create_stream(), device.create_stream(), device.create_event()
    count = 64 * KIB
    memory, flag = buffers.on_device(count), buffers.on_device(1, value=0)
    device.wait_value(stream, flag, 1)
    device.fill(memory, 5, bytes=4 * count, stream=stream)
    device.record(event, stream)
    device.wait(other, event)
    device.destroy_event(event)
    device.destroy_stream(stream)
    device.write_value(0, flag, 1)
    assert (buffers.download(memory, count, other) == 0x05050505).all()
    device.destroy_stream(other)
    buffers.close()


def memory_is_imported_in_its_own_process(device: Device) -> None:
    buffers = Buffers(device)
    memory = device.allocate(4 * KIB)
    handle = device.export_memory(memory)
    assert isinstance(handle, bytes)
    assert device.export_memory(memory) == handle
    first, second = device.import_memory(handle), device.import_memory(handle)
    device.fill(first, 3, bytes=4 * KIB, stream=0)
    assert (buffers.download(second, KIB) == 0x03030303).all()
    assert (buffers.download(memory, KIB) == 0x03030303).all()
    device.close_memory(first)
    device.close_memory(second)
    with pytest.raises(InvalidUsage, match="imported"):
        device.close_memory(second)
    device.free(memory)
    with pytest.raises(InvalidUsage, match="freed"):
        device.import_memory(handle)
    buffers.close()


def host_memory_is_registered_once(device: Device) -> None:
    host = np.zeros(3 * 4096, np.uint8)
    page = (host.ctypes.data + 4095) // 4096 * 4096
    device.register_pinned(page, 4096)
    buffers = Buffers(device)
    memory = buffers.on_device(KIB, value=6)
    device.copy(page, memory, bytes=4096, stream=0)
    device.synchronize_stream(0, TIMEOUT)
    device.annotate_read(page, 4096)
    assert (words(page, KIB) == 6).all()
    with pytest.raises(InvalidUsage, match="registered already"):
        device.register_pinned(page, 4096)
    device.unregister_pinned(page)
    with pytest.raises(InvalidUsage, match="not registered"):
        device.unregister_pinned(page)
    device.annotate_free(page, 4096)
    buffers.close()


def bad_arguments_are_refused(device: Device) -> None:
    buffers = Buffers(device)
    memory = buffers.on_device(KIB, value=1)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("above 0", lambda: device.allocate(0)),
        ("above 0", lambda: device.allocate_pinned(0)),
        ("no such allocation", lambda: device.free(memory + 4)),
        ("no such allocation", lambda: device.free_pinned(memory)),
        ("first byte", lambda: device.export_memory(memory + 512)),
        ("handle", lambda: device.import_memory(b"short")),
        ("handle", lambda: device.import_memory(bytes(128))),
        ("not imported", lambda: device.close_memory(memory)),
        ("needs memory", lambda: device.register_pinned(0, 4096)),
        ("null", lambda: device.copy(0, memory, bytes=4, stream=0)),
        ("overlap", lambda: device.copy(memory, memory + 4, bytes=8, stream=0)),
        ("null", lambda: device.fill(0, 1, bytes=4, stream=0)),
        ("aligned", lambda: device.write_value(0, memory + 2, 1)),
        ("aligned", lambda: device.wait_value(0, 0, 1)),
        ("aligned", lambda: device.store_flag(0, 1)),
        ("stream", lambda: device.destroy_stream(0)),
        ("above 0", lambda: device.synchronize_stream(0, 0.0)),
    ]
    for message, call in bad:
        with pytest.raises(InvalidUsage, match=message):
            call()
    assert (buffers.download(memory, KIB) == 1).all()  # and the device goes on
    buffers.close()


PROGRAMS: tuple[Callable[[Device], None], ...] = (
    copies_go_every_way,
    nothing_is_copied_of_no_bytes,
    fill_sets_bytes,
    a_stream_runs_in_order,
    an_event_orders_two_streams,
    recording_again_does_not_move_an_older_wait,
    an_event_that_was_never_recorded_is_done,
    a_flag_orders_two_streams,
    a_flag_may_wrap,
    the_host_sets_flags,
    destroyed_handles_do_not_disturb_work,
    memory_is_imported_in_its_own_process,
    host_memory_is_registered_once,
    bad_arguments_are_refused,
)

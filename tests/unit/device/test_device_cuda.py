"""CudaDevice without a GPU: no driver, an old driver, and a fake driver that runs everything at once in host memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hdpcomm._core.device import Device, open_cuda
from hdpcomm.errors import CommTimeout, DeviceError, InvalidUsage
from tests.harness import device_contract
from tests.harness.device_contract import words
from tests.harness.native import _testing


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    path = tmp_path_factory.mktemp("fake") / "libcuda_fake.so"
    source = Path(__file__).parent / "fake_cuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def device(library: ctypes.CDLL) -> Device:
    return _testing.open_cuda_from(library._name, 0)


def _fail(library: ctypes.CDLL, name: str, code: int) -> None:
    library.fake_fail(name.encode(), code)


def test_without_a_driver() -> None:
    if torch.cuda.device_count() > 0:
        pytest.skip("there is a driver")
    with pytest.raises(DeviceError, match=r"no NVIDIA driver: libcuda\.so\.1 not found"):
        open_cuda(0)


def test_with_a_library_that_is_no_driver() -> None:
    with pytest.raises(DeviceError, match=r"libm\.so\.6 has no cuInit: .* too old"):
        _testing.open_cuda_from("libm.so.6", 0)


@pytest.mark.parametrize(
    "program",
    [
        device_contract.copies_go_every_way,
        device_contract.nothing_is_copied_of_no_bytes,
        device_contract.fill_sets_bytes,
        device_contract.an_event_that_was_never_recorded_is_done,
        device_contract.memory_is_imported_in_its_own_process,
        device_contract.host_memory_is_registered_once,
        device_contract.bad_arguments_are_refused,
    ],
    ids=lambda program: program.__name__,
)
def test_contract_of_what_is_done_at_once(library: ctypes.CDLL, device: Device, program: Callable[..., None]) -> None:
    program(device)
    assert library.fake_depth() == 0  # the context of the caller is current again


def test_names_and_peers(device: Device) -> None:
    assert device.name == "Fake 0"
    assert (device.is_sim, device.ordinal) == (False, 0)
    assert [device.can_access_peer(ordinal) for ordinal in (-1, 0, 1, 2, 3)] == [False, True, True, False, False]
    stream = device.create_stream(-100)  # clamped
    assert device.is_capturing(stream)
    assert not device.is_capturing(0)
    device.destroy_stream(stream)


def test_a_device_that_is_not_there(library: ctypes.CDLL) -> None:
    with pytest.raises(InvalidUsage, match="there is no CUDA device 7: this process sees 3"):
        _testing.open_cuda_from(library._name, 7)
    _fail(library, "cuDeviceGetCount", 100)  # CUDA_ERROR_NO_DEVICE
    with pytest.raises(InvalidUsage, match="sees 0"):
        _testing.open_cuda_from(library._name, 0)


def test_errors_name_the_call_and_the_driver_s_text(library: ctypes.CDLL, device: Device) -> None:
    _fail(library, "cuMemAlloc_v2", 2)
    with pytest.raises(
        DeviceError, match=r"cuMemAlloc_v2\(.*\) failed at cuda_memory.cpp:\d+: CUDA_ERROR_OUT_OF_MEMORY \(2\): out of"
    ):
        device.allocate(4096)
    assert library.fake_depth() == 0
    memory = device.allocate(4096)  # and the next operation works
    event = device.create_event()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("cuMemcpyAsync", lambda: device.copy(memory, memory + 64, bytes=8, stream=0)),
        ("cuMemsetD8Async", lambda: device.fill(memory, 1, bytes=8, stream=0)),
        ("cuStreamWriteValue32_v2", lambda: device.write_value(0, memory, 1)),
        ("cuStreamWaitValue32_v2", lambda: device.wait_value(0, memory, 1)),
        ("cuStreamBatchMemOp_v2", lambda: _testing.flag_ops(device, 0, waits=[(memory, 1)])),
        ("cuEventQuery", lambda: device.query(event)),
        ("cuEventRecord", lambda: device.record(event, 0)),
        ("cuStreamWaitEvent", lambda: device.wait(0, event)),
        ("cuIpcGetMemHandle", lambda: device.export_memory(memory)),
        ("cuCtxPushCurrent_v2", lambda: device.create_event()),
        ("cuInit", lambda: _testing.open_cuda_from(library._name, 0)),
    ]
    for name, call in calls:
        _fail(library, name, 999)
        with pytest.raises(DeviceError, match=rf"{name}\(.*\) failed at .*: CUDA_ERROR_FAKE \(999\): made up"):
            call()
        call()
    assert library.fake_depth() == 0
    device.free(memory)


def test_waits_have_a_deadline(library: ctypes.CDLL, device: Device) -> None:
    event = device.create_event()
    device.synchronize_event(event, 1.0)
    _fail(library, "cuEventQuery", 600)  # not ready, once: longer than a nanosecond
    with pytest.raises(CommTimeout, match=r"did not end within .* \(synchronize at test_device_cuda.py:\d+, Fake 0\)"):
        device.synchronize_event(event, 1e-9)
    device.synchronize_event(event, 1.0)


def test_flags(library: ctypes.CDLL, device: Device) -> None:
    memory = device.allocate(64)
    device.write_value(0, memory, 0xFFFFFFFF)
    device.wait_value(0, memory, 0xFFFFFFF0)
    assert words(memory, 1)[0] == 0xFFFFFFFF
    pinned = device.allocate_pinned(64)
    device.store_flag(pinned, 5)
    assert words(pinned, 1)[0] == 5
    # Without stream memory operations a kernel is launched, which needs a GPU.
    _fail(library, "cuStreamWriteValue32_v2", 801)
    with pytest.raises(DeviceError, match=r"launch of writeValue failed|no kernels"):
        device.write_value(0, memory, 1)
    before = library.fake_calls(b"cuStreamWriteValue32_v2")
    with pytest.raises(DeviceError, match=r"launch of waitValue failed|no kernels"):
        device.wait_value(0, memory, 1)
    assert library.fake_calls(b"cuStreamWriteValue32_v2") == before
    device.free(memory)
    device.free_pinned(pinned)


def test_many_flags_in_few_calls(library: ctypes.CDLL, device: Device) -> None:
    memory = device.allocate(4096)
    for i in range(600):
        device.write_value(0, memory + 4 * i, 0)
    before = library.fake_calls(b"cuStreamBatchMemOp_v2")
    _testing.flag_ops(device, 0, waits=[(memory, 0)], writes=[(memory + 4 * i, i) for i in range(600)])
    assert library.fake_calls(b"cuStreamBatchMemOp_v2") == before + 3  # a call takes 256
    assert words(memory, 600).tolist() == list(range(600))
    _testing.flag_ops(device, 0)
    with pytest.raises(DeviceError, match="cuStreamBatchMemOp_v2"):  # the fake's stream would wait for ever
        _testing.flag_ops(device, 0, waits=[(memory + 4, 2)])
    # A driver that has no batches: one by one.
    _fail(library, "cuStreamBatchMemOp_v2", 801)
    _testing.flag_ops(device, 0, waits=[(memory + 4, 1)], writes=[(memory, 9)])
    assert words(memory, 1)[0] == 9
    device.free(memory)


def test_memory_of_another_device_of_this_process(library: ctypes.CDLL, device: Device) -> None:
    second, third = _testing.open_cuda_from(library._name, 1), _testing.open_cuda_from(library._name, 2)
    memory = device.allocate(4096)
    handle = device.export_memory(memory)
    before = library.fake_calls(b"cuCtxEnablePeerAccess")
    _fail(library, "cuCtxEnablePeerAccess", 704)  # enabled already
    assert second.import_memory(handle) == memory
    assert library.fake_calls(b"cuCtxEnablePeerAccess") == before + 1
    with pytest.raises(DeviceError, match="device 2 cannot access the memory of device 0"):
        third.import_memory(handle)
    second.close_memory(memory)
    assert library.fake_calls(b"cuIpcOpenMemHandle_v2") == 0
    device.free(memory)


def test_memory_of_another_process(library: ctypes.CDLL, device: Device) -> None:
    memory = device.allocate(4096)
    own = device.export_memory(memory)
    other = own[:8] + bytes(8) + own[16:]  # as if another process had made it
    opened = library.fake_calls(b"cuIpcOpenMemHandle_v2")
    assert device.import_memory(other) == device.import_memory(other) == memory
    assert library.fake_calls(b"cuIpcOpenMemHandle_v2") == opened + 1
    device.close_memory(memory)
    closed = library.fake_calls(b"cuIpcCloseMemHandle")
    device.close_memory(memory)
    assert library.fake_calls(b"cuIpcCloseMemHandle") == closed + 1
    device.free(memory)


def test_memory_that_was_freed_is_not_imported_though_its_address_comes_again(device: Device) -> None:
    memory = device.allocate(4096)
    handle = device.export_memory(memory)
    device.free(memory)
    again = [device.allocate(4096) for _ in range(4)]
    with pytest.raises(InvalidUsage, match="was freed"):
        device.import_memory(handle)
    for block in again:
        device.free(block)


def test_a_closed_device_frees_what_it_left(library: ctypes.CDLL) -> None:
    device = _testing.open_cuda_from(library._name, 0)
    device.allocate(4096)
    device.allocate_pinned(64)
    freed = library.fake_calls(b"cuMemFree_v2"), library.fake_calls(b"cuMemFreeHost")
    del device
    assert (library.fake_calls(b"cuMemFree_v2"), library.fake_calls(b"cuMemFreeHost")) == (freed[0] + 1, freed[1] + 1)

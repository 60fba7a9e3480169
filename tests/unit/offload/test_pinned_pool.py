"""The pinned pool and the copy engine on simulated devices, and the check of host memory."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm._core import offload as core
from hdpcomm._core.device import Device, open_sim
from hdpcomm._core.offload import CopyEngine, PooledCopy
from hdpcomm.errors import CommTimeout, DeviceError, InvalidUsage
from hdpcomm.offload import PinnedPool
from hdpcomm.offload.pool import HostMemory, check_fits, host_memory
from tests.harness.native import _testing

KIB = 1024


class Bench:
    """An engine over a pool of ``size`` bytes, with a compute stream and device memory as numpy sees it."""

    def __init__(self, size: int, *, timeout: float = 20.0) -> None:
        self.device: _testing.TestedDevice = open_sim(0)
        self.pool = PinnedPool(size, device=self.device)
        self.engine = CopyEngine(self.pool.core, timeout=timeout)
        self.compute = self.device.create_stream()

    def memory(self, count: int) -> tuple[int, np.ndarray]:
        address = self.device.allocate(count)
        return address, np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)

    def stored(self, count: int, value: int) -> PooledCopy | None:
        """A finished store of ``count`` bytes of ``value``."""
        address, _ = self.memory(count)
        self.device.fill(address, value, bytes=count, stream=self.compute)
        copy = self.engine.store(address, count, compute=self.compute, owner=None)
        if copy:
            copy.finish_store(compute=self.compute)
            self.device.fill(address, 0xEE, bytes=count, stream=self.compute)  # its next owner
        return copy

    def loaded(self, copy: PooledCopy, count: int) -> np.ndarray:
        address, found = self.memory(count)
        self.device.fill(address, 0xDD, bytes=count, stream=self.compute)  # its last owner
        copy.load(address, compute=self.compute, owner=None)
        copy.finish_load(compute=self.compute)
        self.device.synchronize_stream(self.compute)
        return found


def test_what_goes_out_comes_back() -> None:
    bench = Bench(1 << 20)
    sizes = [1, 3, 255, 256, 257, 4096, 100_000, 300_000]
    copies = [(bench.stored(size, k + 1), size, k + 1) for k, size in enumerate(sizes)]
    for copy, size, value in reversed(copies):
        for _ in range(2):  # a second backward pass
            assert (bench.loaded(copy, size) == value).all()
        copy.drop()
    bench.engine.drain()
    stats = bench.engine.stats()
    assert stats["bytes_stored"] == sum(sizes)
    assert stats["bytes_loaded"] == 2 * sum(sizes)
    assert stats["tickets"] == 0
    assert bench.pool.stats().in_use == 0


def test_copies_that_go_leave_nothing_in_the_pool() -> None:
    """A forward pass that failed leaves copies; the pool may serve others."""
    bench = Bench(1 << 20)
    copies = [bench.stored(size, 1) for size in (1, 4096, 300_000)]
    assert bench.pool.stats().in_use > 300_000
    del bench.engine, copies
    assert bench.pool.stats().in_use == 0
    bench.engine = CopyEngine(bench.pool.core, timeout=20.0)
    assert (bench.loaded(bench.stored(900_000, 7), 900_000) == 7).all()


def test_a_computing_thread_waits_itself() -> None:
    bench = Bench(1 << 20)
    address, memory = bench.memory(200_000)
    for value in range(1, 20):
        memory[:] = value
        copy = bench.engine.store(address, len(memory), compute=None, owner=None)
        copy.finish_store(compute=None)
        memory[:] = 0
        copy.load(address, compute=None, owner=None)
        copy.finish_load(compute=None)
        assert (memory == value).all()
        copy.drop()
    assert bench.engine.stats()["host_wait_s"] > 0


def test_blocks_have_the_size_that_was_asked_for() -> None:
    bench = Bench(64 * KIB)
    copies = [bench.stored(16 * KIB - 200, k) for k in range(4)]  # a power of two each would not leave room
    assert all(copies)
    assert bench.pool.stats().in_use == 64 * KIB
    assert bench.pool.stats().largest_free == 0


def test_a_block_is_used_again_behind_its_last_copy() -> None:
    """A block whose copies still wait for a flag can be used again: the next copy is queued behind them."""
    bench = Bench(64 * KIB)
    copy = bench.stored(60 * KIB, 1)
    flag = bench.device.allocate_pinned(4096)
    bench.device.store_flag(flag, 0)
    bench.device.wait_value(bench.compute, flag, 1)
    target, found = bench.memory(60 * KIB)
    copy.load(target, compute=bench.compute, owner=None)
    copy.drop()
    assert bench.pool.stats().retiring == 60 * KIB
    again = bench.stored(60 * KIB, 2)
    assert again
    assert bench.pool.stats().stream_waits == 1
    bench.device.store_flag(flag, 1)
    bench.engine.drain()
    assert (found == 1).all()
    assert (bench.loaded(again, 60 * KIB) == 2).all()


def test_a_full_pool_refuses_and_goes_on() -> None:
    bench = Bench(64 * KIB)
    copy = bench.stored(60 * KIB, 1)
    assert bench.stored(8 * KIB, 2) is None
    assert bench.pool.stats().refusals == 1
    copy.drop()
    assert (bench.loaded(bench.stored(64 * KIB, 3), 64 * KIB) == 3).all()


def test_the_order_of_calls_is_checked() -> None:
    bench = Bench(64 * KIB)
    address, _ = bench.memory(KIB)
    copy = bench.engine.store(address, KIB, compute=bench.compute, owner=None)
    with pytest.raises(InvalidUsage, match="call finish_store first"):
        copy.load(address, compute=bench.compute, owner=None)
    copy.finish_store(compute=bench.compute)
    copy.finish_store(compute=bench.compute)
    copy.drop()
    for call in (copy.finish_store, copy.finish_load):
        with pytest.raises(InvalidUsage, match="was dropped"):
            call(compute=bench.compute)
    with pytest.raises(InvalidUsage, match="was dropped"):
        copy.drop()
    with pytest.raises(InvalidUsage, match="0 bytes"):
        bench.engine.store(address, 0, compute=bench.compute, owner=None)
    with pytest.raises(InvalidUsage, match="timeout is 0"):
        CopyEngine(bench.pool.core, timeout=0)
    assert (bench.loaded(bench.stored(KIB, 5), KIB) == 5).all()


def test_a_copy_that_does_not_end_keeps_the_memory() -> None:
    bench = Bench(64 * KIB, timeout=0.2)
    flag = bench.device.allocate_pinned(4096)
    bench.device.store_flag(flag, 0)
    bench.device.wait_value(bench.compute, flag, 1)
    address, _ = bench.memory(40 * KIB)
    copy = bench.engine.store(address, 40 * KIB, compute=bench.compute, owner=None)
    with pytest.raises(CommTimeout):
        bench.engine.drain(0.05)
    del bench.engine, copy
    pool = bench.pool
    del bench.pool, pool  # the arena stays: this must not crash
    bench.device.store_flag(flag, 1)
    bench.device.synchronize_stream(bench.compute)


def test_the_arena_is_locked_in_chunks() -> None:
    device: Device = open_sim(0)
    pool = core.PinnedPool(device, 40_000, numa_node=-1, chunk_bytes=16384)
    assert pool.stats()["capacity"] == 40_960
    assert pool.stats()["chunks"] == 3
    with pytest.raises(InvalidUsage, match="at least a page"):
        core.PinnedPool(device, 40_000, numa_node=-1, chunk_bytes=100)
    del pool
    assert core.PinnedPool(device, 40_000, numa_node=0, chunk_bytes=1 << 20).stats()["largest_free"] == 40_960
    with pytest.raises(InvalidUsage, match="node"):
        core.PinnedPool(device, 4096, numa_node=5000, chunk_bytes=1 << 20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20_000), st.booleans(), st.integers(0, 5)), max_size=60))
def test_blocks_never_overlap_and_all_comes_back(steps: list[tuple[int, bool, int]]) -> None:
    bench = Bench(96 * KIB)
    held: list[tuple[PooledCopy, int, int]] = []
    for number, (size, free, which) in enumerate(steps):
        if free and held:
            copy, count, value = held.pop(which % len(held))
            assert (bench.loaded(copy, count) == value).all()
            copy.drop()
        value = number % 200 + 1
        if copy := bench.stored(size, value):
            held.append((copy, size, value))
        stats = bench.pool.stats()
        assert stats.in_use == sum(-(-count // 256) * 256 for _, count, _ in held)
    for copy, count, value in held:
        assert (bench.loaded(copy, count) == value).all()
        copy.drop()
    bench.engine.drain()
    assert bench.stored(96 * KIB, 7)  # one piece again


def test_too_little_host_memory_says_what_fits() -> None:
    memory = HostMemory(available=100 << 30, limit_left=20 << 30)
    check_fits(19 << 30, memory=memory)
    with pytest.raises(InvalidUsage, match=r"pool of 10\.7 GB for each of 2 ranks .* 107\.4 GB .* 21\.5 GB left"):
        check_fits(10 << 30, sharers=2, memory=memory)
    with pytest.raises(InvalidUsage, match=r"no cgroup limit.* What fits: 102\.0 GB a rank \(102005473280 bytes\)"):
        check_fits(96 << 30, memory=HostMemory(100 << 30, None))
    with pytest.raises(InvalidUsage, match="What fits"):
        PinnedPool(1 << 60, device="cpu")


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_limits_of_both_versions(tmp_path: Path) -> None:
    _write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert host_memory(str(tmp_path)) == HostMemory(5000 * 1024, None)
    _write(tmp_path, "proc/self/cgroup", "0::/jobs/mine\n")
    _write(tmp_path, "sys/fs/cgroup/jobs/mine/memory.max", "max\n")
    _write(tmp_path, "sys/fs/cgroup/jobs/memory.max", "3000000\n")
    _write(tmp_path, "sys/fs/cgroup/jobs/memory.current", "1000000\n")
    _write(tmp_path, "sys/fs/cgroup/jobs/memory.stat", "anon 5\ninactive_file 250000\n")
    assert host_memory(str(tmp_path)).limit_left == 2_250_000
    _write(tmp_path, "proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/a\n")
    _write(tmp_path, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712")
    _write(tmp_path, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", "5")
    assert host_memory(str(tmp_path)).limit_left is None
    _write(tmp_path, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096")
    assert host_memory(str(tmp_path)).lockable == int(4091 * 0.95)


def test_bad_devices_and_sizes() -> None:
    with pytest.raises(InvalidUsage, match="cuda and, simulated, on cpu"):
        PinnedPool(4096, device="meta")
    with pytest.raises(InvalidUsage, match="size is 0"):
        PinnedPool(0, device="cpu")
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA device"):
            PinnedPool(4096, device="cuda")


def test_other_threads_run_while_an_engine_ends() -> None:
    bench = Bench(1 << 16, timeout=5.0)
    flag, (address, _) = bench.device.allocate(4), bench.memory(64)
    bench.device.store_flag(flag, 0)
    bench.device.wait_value(bench.compute, flag, 1)
    assert bench.engine.store(address, 64, compute=bench.compute, owner=None)
    freed = []

    def free_the_copy() -> None:
        time.sleep(0.1)
        freed.append(True)
        bench.device.store_flag(flag, 1)

    thread = threading.Thread(target=free_the_copy)
    thread.start()
    del bench.engine  # waits for the copy
    assert freed
    thread.join()


MAKING = """
import sys, threading
from hdpcomm._core import offload, transport
from hdpcomm.offload.pool import open_device

sys.setswitchinterval(1e-6)
device, over = open_device("cpu"), threading.Event()

def make_links():
    kept = []
    while not over.is_set():
        kept.append(transport.FrameLink(0, 1))
        if len(kept) > 500:
            kept.clear()

def make_pools():
    for _ in range(2500):
        offload.PinnedPool(device, 4096)

links = [threading.Thread(target=make_links) for _ in range(2)]
pools = [threading.Thread(target=make_pools) for _ in range(4)]
for thread in links + pools:
    thread.start()
for thread in pools:
    thread.join()
over.set()
"""


def test_threads_may_make_pools_while_others_make_other_objects() -> None:
    """The core's map of Python's objects is changed under the GIL alone: a factory that gives it up under a guard of
    pybind11 ended processes by "Tried to deallocate unregistered instance"."""
    done = subprocess.run([sys.executable, "-c", MAKING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_factory_of_the_bindings_is_called_under_a_guard() -> None:
    found = 0
    for path in sorted((Path(__file__).parents[3] / "csrc").rglob("*_py.cpp")):
        for text in re.split(r"\.def(?:_\w+)?\(", re.sub("//.*", "", path.read_text()))[1:]:
            if text.lstrip().startswith("py::init("):
                found += 1
                assert not re.search(r"\bRelease\(\)|\bUnlocked\(\)|call_guard", text), path
    assert found > 5

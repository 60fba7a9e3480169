"""``PinnedPool``: host memory for offload, page-locked once at the start; how much there is; its device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hdpcomm._core import device as devices
from hdpcomm._core import offload as core
from hdpcomm._core.device import Device
from hdpcomm._core.offload import CopyEngine
from hdpcomm.arguments import check_whole, size_text
from hdpcomm.comm import Communicator
from hdpcomm.comm.launchers import local_place
from hdpcomm.errors import DeviceError, InvalidUsage

__all__ = [
    "HostMemory",
    "PinnedPool",
    "PoolStats",
    "check_fits",
    "compute_stream",
    "host_memory",
    "measure_copies",
    "rank_pool",
]


def open_device(device: torch.device | str) -> Device:
    """The core's device for ``cuda:i`` (in torch's context), or a simulated one for ``cpu``.

    Raises:
        InvalidUsage: the device is of another type.
        DeviceError: this build or this machine has no CUDA.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidUsage(f"device is {device!r}; give cuda, cuda:i or, simulated, cpu") from error
    if place.type == "cpu":
        return devices.open_sim(place.index or 0)
    if place.type != "cuda":
        raise InvalidUsage(f"device is {device}; offload works on cuda and, simulated, on cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"device is {device}, and torch finds no CUDA device on this machine; give cpu to simulate")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return devices.open_cuda(torch.cuda.current_device() if place.index is None else place.index)


def compute_stream(device: Device) -> int | None:
    """torch's current stream on the device; ``None`` for a simulated device, where this thread computes."""
    return None if device.is_sim else int(torch.cuda.current_stream(device.ordinal).cuda_stream)


def numa_node_of(device: Device) -> int:
    """NUMA node that the device is attached to; -1 for a simulated device, or where the kernel does not say."""
    if device.is_sim:
        return -1
    found: Any = torch.cuda.get_device_properties(device.ordinal)  # torch's stub lacks the PCI fields
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        return int((Path("/sys/bus/pci/devices") / place / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


_KEEP_FREE = 0.05
"""Share of the free memory that is never locked, since locked pages cannot be swapped out."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of this process, in bytes.

    Attributes:
        available: free on the whole host without swapping (``MemAvailable``).
        limit_left: what the cgroup of this process (a container, a job) may still allocate; ``None``: no limit.
    """

    available: int
    limit_left: int | None

    @property
    def lockable(self) -> int:
        """Bytes that may be locked: the smaller of both, less a twentieth."""
        room = self.available if self.limit_left is None else min(self.available, self.limit_left)
        return max(0, int(room * (1 - _KEEP_FREE)))


def host_memory(root: str = "/") -> HostMemory:
    """Host memory as the kernel reports it now. ``root``: folder of proc and sys (tests give another one)."""
    base = Path(root)
    available = 0
    for line in _read(base / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            available = int(rest.split()[0]) * 1024
    return HostMemory(available, _limit_left(base))


def check_fits(bytes: int, *, sharers: int = 1, memory: HostMemory | None = None) -> None:
    """Raises InvalidUsage, which says what fits, when host memory is too small for ``sharers`` pools of ``bytes``."""
    memory = memory or host_memory()
    if bytes * sharers <= memory.lockable:
        return
    limit = "no cgroup limit"
    if memory.limit_left is not None:
        limit = f"{size_text(memory.limit_left)} left under the cgroup's limit"
    shared = f" for each of {sharers} ranks on this host" if sharers > 1 else ""
    raise InvalidUsage(
        f"a pinned pool of {size_text(bytes)}{shared} does not fit: {size_text(memory.available)} of host memory "
        f"are available, {limit}, and a twentieth stays free. What fits: {size_text(memory.lockable // sharers)} "
        f"a rank ({memory.lockable // sharers} bytes)"
    )


def _limit_left(base: Path) -> int | None:
    """The smallest rest that a cgroup of this process leaves (v2, then v1); inactive page cache counts as free."""
    left: list[int] = []
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = base / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = base / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            found = _left_of(folder.joinpath(*parts[:depth]), *names)
            if found is not None:
                left.append(found)
    return min(left, default=None)


def _left_of(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= 1 << 60:  # no limit: "max", or v1's large number
        return None
    cache = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name:
            cache = int(value)
    return max(0, int(limit) - int(usage) + cache)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pool at one moment; sizes in bytes.

    Attributes:
        capacity: size of the pool.
        in_use: bytes in blocks that hold activations.
        retiring: bytes in freed blocks whose last copy may still run.
        largest_free: size of the largest free block.
        peak_in_use: the most that was in use since the start.
        allocations: number of blocks allocated so far.
        stream_waits: how often a copy waited, on the device, for a block's last copy.
        refusals: how often no free block was large enough.
        chunks: registrations that lock the arena.
        on_node: whether the pages are on the NUMA node that was asked for.
    """

    capacity: int
    in_use: int
    retiring: int
    largest_free: int
    peak_in_use: int
    allocations: int
    stream_waits: int
    refusals: int
    chunks: int
    on_node: bool


class PinnedPool:
    """One arena of page-locked host memory, allocated once, from which offload takes blocks of exact size.

    Local; each rank makes its own. Creating a pool takes 0.2 to 1 s per GB; nothing later allocates or locks host
    memory. A freed block can be used again at once, even if its last copy still runs: the next copy waits for that one
    on the device, and the host does not wait.

    Args:
        size: bytes of the pool.
        device: the device of the activations: ``cuda:i``, or ``cpu`` (simulated, see docs/device.md), or an open device
            of the core.
        sharers: number of ranks of this host that each create a pool of this size; all have to fit.

    Raises:
        InvalidUsage: the size is below 1 or does not fit into host memory (says what fits).
        DeviceError: there is no such device, or it cannot lock the memory.

    Examples:
        >>> pool = PinnedPool(1 << 20, device="cpu")
        >>> pool.stats().capacity
        1048576
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | Device = "cuda",
        sharers: int = 1,
    ) -> None:
        for name, value in (("size", size), ("sharers", sharers)):
            check_whole("PinnedPool", name, value, least=1)
        check_fits(size, sharers=sharers)
        self.device = device if isinstance(device, Device) else open_device(device)
        self.core = core.PinnedPool(self.device, size, numa_node=numa_node_of(self.device))

    def stats(self) -> PoolStats:
        """The state of the pool now."""
        found = self.core.stats()
        return PoolStats(**found)


def rank_pool(comm: Communicator, size: int, device: torch.device | None = None) -> PinnedPool | None:
    """Pool of ``size`` bytes for this rank's activations, beside one of each other rank of its host; ``None`` for 0.

    ``device``: of the activations; default: that of ``comm``.
    """
    if not size:
        return None
    return PinnedPool(size, device=device or comm.device, sharers=local_place(comm.rank, comm.size)[1])


def measure_copies(pool: PinnedPool, size: int, *, iterations: int = 10, warmup: int = 2) -> float:
    """Bytes/s of copies of ``size`` bytes between the pool and its device in each direction, while the other one runs;
    the best of three rounds. Local.

    Raises:
        InvalidUsage: the size is below 1, or the pool has no room for three blocks of it.
    """
    if size < 1 or iterations < 1 or warmup < 0:
        raise InvalidUsage(f"size is {size}, iterations {iterations}, warmup {warmup}; give at least 1, 1 and 0")
    stats = pool.stats()
    room = stats.capacity - stats.in_use
    if room < 3 * (-(-size // 256) * 256):
        raise InvalidUsage(
            f"copies of {size} bytes need three blocks of the pool, of which {room} bytes are not in use; make it "
            "larger or the copies smaller"
        )
    engine, compute = CopyEngine(pool.core, timeout=60.0), compute_stream(pool.device)
    place = torch.device("cpu") if pool.device.is_sim else torch.device("cuda", pool.device.ordinal)
    out, back = (torch.ones(size, dtype=torch.uint8, device=place) for _ in range(2))
    stored = engine.store(out.data_ptr(), size, compute=compute, owner=None)
    assert stored is not None  # the pool has room for three
    stored.finish_store(compute=compute)

    def both(times: int) -> float:
        """Seconds of so many copies in each direction."""
        engine.drain()
        started = time.perf_counter()
        for _ in range(times):
            copy = engine.store(out.data_ptr(), size, compute=compute, owner=None)
            assert copy is not None
            copy.drop()
            stored.load(back.data_ptr(), compute=compute, owner=None)
        engine.drain()
        return time.perf_counter() - started

    try:
        both(warmup)
        return iterations * size / min(both(iterations) for _ in range(3))
    finally:
        engine.drain()
        stored.drop()

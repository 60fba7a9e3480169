"""``PinnedPool``: host memory for offload, locked once at the start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdpcomm._core import offload as core
from hdpcomm._core.device import Device
from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.devices import numa_node_of, open_device
from hdpcomm.offload.host_memory import check_fits

__all__ = ["PinnedPool", "PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pool at one moment; sizes in bytes.

    Attributes:
        capacity: of the arena.
        in_use: in blocks that hold activations.
        retiring: in blocks whose last copy may still run.
        largest_free: the largest piece that is neither.
        peak_in_use: the most that was in use since the start, or :meth:`PinnedPool.reset_peak`.
        allocations: blocks given out so far.
        stream_waits: how often a copy waited, on the device, for a block to become free.
        refusals: how often nothing fitted.
        chunks: registrations that lock the arena.
        on_node: the pages were put on the asked NUMA node.
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
    """One arena of page-locked host memory, reserved here and never again: blocks of exact size come from it.

    Local; each rank makes its own. Making it takes 0.2 to 1 s per GB; nothing later allocates or locks host memory. A
    block whose last copy still runs is given out again at once: the next copy waits for it on the device, not the host.

    Args:
        size: bytes.
        device: ``cuda:i`` or ``cpu``, where the activations are (a ``cpu`` device is simulated, see docs/device.md), or
            an open device of the core.
        numa_node: where the pages lie; ``None``: the node that the device hangs on, where the kernel says so.
        chunk_bytes: most that is locked by one call.
        sharers: ranks of this host that make a pool of this size each; all have to fit.

    Raises:
        InvalidUsage: the size is below 1 or more than host memory has room for (says what fits), or there is no such
            NUMA node.
        DeviceError: there is no such device, or it refuses to lock the memory.

    Example:
        >>> pool = PinnedPool(1 << 20, device="cpu")
        >>> pool.stats().capacity
        1048576
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | Device = "cuda",
        numa_node: int | None = None,
        chunk_bytes: int = 64 << 30,
        sharers: int = 1,
    ) -> None:
        if size < 1 or sharers < 1 or chunk_bytes < 1:
            raise InvalidUsage(f"size is {size}, sharers {sharers}, chunk_bytes {chunk_bytes}; each must be at least 1")
        check_fits(size, sharers=sharers)
        self.device = device if isinstance(device, Device) else open_device(device)
        node = numa_node_of(self.device) if numa_node is None else numa_node
        self.core = core.PinnedPool(self.device, size, numa_node=node, chunk_bytes=chunk_bytes)

    def stats(self) -> PoolStats:
        """The pool now."""
        found = self.core.stats()
        return PoolStats(**found)

    def reset_peak(self) -> None:
        """Lets ``peak_in_use`` begin again from what is in use."""
        self.core.reset_peak()

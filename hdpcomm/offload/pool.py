"""``PinnedPool``: host memory for offload, page-locked once at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hdpcomm._core import offload as core
from hdpcomm._core.device import Device
from hdpcomm.arguments import check_whole
from hdpcomm.comm.launchers import local_place
from hdpcomm.offload.devices import numa_node_of, open_device
from hdpcomm.offload.host_memory import check_fits

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["PinnedPool", "PoolStats", "rank_pool"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pool at one moment; sizes in bytes.

    Attributes:
        capacity: size of the pool.
        in_use: bytes in blocks that hold activations.
        retiring: bytes in freed blocks whose last copy may still run.
        largest_free: size of the largest free block.
        peak_in_use: the most that was in use since the start, or since :meth:`PinnedPool.reset_peak`.
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
        numa_node: NUMA node of the pages; ``None``: the node that the device is attached to, where the kernel says so.
        chunk_bytes: the most bytes that one call locks.
        sharers: number of ranks of this host that each create a pool of this size; all have to fit.

    Raises:
        InvalidUsage: the size is below 1 or does not fit into host memory (says what fits), or there is no such NUMA
            node.
        DeviceError: there is no such device, or it cannot lock the memory.

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
        for name, value in (("size", size), ("sharers", sharers), ("chunk_bytes", chunk_bytes)):
            check_whole("PinnedPool", name, value, least=1)
        if numa_node is not None:
            check_whole("PinnedPool", "numa_node", numa_node, least=-1, most=1 << 16)
        check_fits(size, sharers=sharers)
        self.device = device if isinstance(device, Device) else open_device(device)
        node = numa_node_of(self.device) if numa_node is None else numa_node
        self.core = core.PinnedPool(self.device, size, numa_node=node, chunk_bytes=chunk_bytes)

    def stats(self) -> PoolStats:
        """The state of the pool now."""
        found = self.core.stats()
        return PoolStats(**found)

    def reset_peak(self) -> None:
        """Sets ``peak_in_use`` to what is in use now."""
        self.core.reset_peak()


def rank_pool(comm: Communicator, size: int, device: torch.device | None = None) -> PinnedPool | None:
    """Pool of ``size`` bytes for this rank's activations, beside one of each other rank of its host; ``None`` for 0.

    ``device``: of the activations; default: that of ``comm``.
    """
    if not size:
        return None
    return PinnedPool(size, device=device or comm.device, sharers=local_place(comm.rank, comm.size)[1])

"""Device streams beside a host world: the engine that runs the operations of a rank's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdpcomm import _core
from hdpcomm.comm.costs import cost_names, link_costs, load_costs
from hdpcomm.comm.device.paths import Devices
from hdpcomm.comm.machine import machine

__all__ = ["AUTOMATIC", "DEVICE_TRANSPORTS", "arena_bytes", "join_devices"]

DEVICE_TRANSPORTS = ("sim", "cuda", "nccl", "cuda+nccl")

#: The device transport that ``auto`` adds where every rank sees a GPU.
AUTOMATIC = "cuda+nccl"


def join_devices(transport: str, world: _core.comm.World) -> Devices:
    """Collective over the world, on its host transport. Raises: InvalidUsage, Mismatch, DeviceError, CommTimeout."""
    comm, join, here, rank = world.communicator(), _core.comm.StreamEngine, machine(), world.rank
    device = here.device(transport, rank, world.size)
    if "nccl" not in transport:
        return Devices(join.join_links(comm, device, _links(transport)))
    nccl = _nccl(lambda: here.nccl(rank, device))
    if transport == "nccl":
        return Devices(join.join_nccl(comm, device, nccl))
    return Devices(join.join_paths(comm, device, _links("cuda"), nccl))


def arena_bytes(num_ranks: int) -> int:
    """Device memory that each of so many ranks of a host takes for messages by links (``cuda``, ``sim``). Local."""
    return _links("cuda").arena_bytes(num_ranks)


def _links(transport: str) -> _core.comm.LinkJoining:
    settings = _core.settings()
    return _core.comm.LinkJoining(
        slot_bytes=settings.device_slot_bytes,
        num_slots=settings.device_slots,
        num_lanes=settings.device_lanes,
        landing_bytes=settings.device_landing_bytes,
        window_bytes=settings.device_window_bytes,
        small_bytes=settings.device_small_bytes,
        costs=_core.collective.DeviceTransportCosts(**load_costs(transport)),  # rank 0's count
    )


def _nccl(library: Callable[[], Any]) -> _core.comm.NcclJoining:
    settings = _core.settings()
    inside, between = (link_costs(load_costs(name)) for name in cost_names("nccl"))  # rank 0's count
    return _core.comm.NcclJoining(
        library=library,
        connect_distance=settings.nccl_connect,
        inside=inside,
        between=between,
    )

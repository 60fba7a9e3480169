"""Device streams beside a host world: which device a rank gets, and the engine that runs its operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm.costs import cost_names, link_costs, load_costs
from hdpcomm.comm.device.nccl_library import load as load_nccl
from hdpcomm.comm.device.paths import Devices
from hdpcomm.comm.launchers import local_place
from hdpcomm.comm.settings import setting
from hdpcomm.errors import InvalidUsage

__all__ = ["DEVICE_TRANSPORTS", "AUTOMATIC", "NcclSource", "has_gpu", "join_devices"]

#: Gives a rank's device, and what opens the NCCL that works on it.
NcclSource = Callable[[_core.comm.World], tuple[Any, Callable[[], Any]]]


def _sim(world: _core.comm.World) -> Any:
    return _core.device.open_sim(world.rank)


def _cuda(world: _core.comm.World) -> Any:
    """The current CUDA device if the program has chosen one, else the local rank's, modulo their number."""
    # A pair of ranks has streams that wait for each other's. Streams that share one of the device's queues wait for
    # whatever is ahead of them; the default of 8 queues is soon used up. Read when CUDA is initialised.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    count = torch.cuda.device_count()
    if count == 0:
        raise InvalidUsage(
            f"rank {world.rank} asked for a transport of CUDA devices, but torch sees no CUDA device: look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or take transport='sim' to try the same on the CPU",
            rank=world.rank,
        )
    if torch.cuda.current_device() == 0:
        torch.cuda.set_device(local_place(world.rank, world.size)[0] % count)
    return _core.device.open_cuda(torch.cuda.current_device())


#: Opens a rank's device, by the name of the transport.
DEVICE_TRANSPORTS: dict[str, Callable[[_core.comm.World], Any]] = {
    "sim": _sim,
    "cuda": _cuda,
    "nccl": _cuda,
    "cuda+nccl": _cuda,
}


def has_gpu() -> bool:
    """Whether torch sees a GPU here."""
    return torch.cuda.is_available()


#: The device transport that ``auto`` adds where every rank sees a GPU.
AUTOMATIC = "cuda+nccl"


def join_devices(transport: str, world: _core.comm.World, nccl_source: NcclSource | None = None) -> Devices:
    """Collective over the world, on its host transport. ``nccl_source``: of what uses NCCL, if not the real one.

    Raises: InvalidUsage, Mismatch, DeviceError, CommTimeout.
    """
    comm, join = world.communicator(), _core.comm.StreamEngine
    if "nccl" not in transport:
        return Devices(join.join_links(comm, DEVICE_TRANSPORTS[transport](world), _links(transport)))
    device, library = (nccl_source or _real_nccl)(world)
    if transport == "nccl":
        return Devices(join.join_nccl(comm, device, _nccl(library, device)))
    links, nccl = _links("sim" if device.is_sim else "cuda"), _nccl(library, device)
    return Devices(join.join_paths(comm, device, links, nccl))


def _links(transport: str) -> _core.comm.LinkJoining:
    settings = {name: int(value) for name, value, _, _ in _core.environment() if name.startswith("HDPCOMM_DEVICE_")}
    return _core.comm.LinkJoining(
        slot_bytes=settings["HDPCOMM_DEVICE_SLOT_BYTES"],
        num_slots=settings["HDPCOMM_DEVICE_SLOTS"],
        num_lanes=settings["HDPCOMM_DEVICE_LANES"],
        landing_bytes=settings["HDPCOMM_DEVICE_LANDING_BYTES"],
        window_bytes=settings["HDPCOMM_DEVICE_WINDOW_BYTES"],
        costs=_core.collective.DeviceTransportCosts(**load_costs(transport)),  # rank 0's count
    )


_ONE_SIDED = {
    "0": _core.comm.OneSided.OFF,
    "1": _core.comm.OneSided.ON,
    "auto": _core.comm.OneSided.MEASURE,
}

#: The oldest driver on which NCCL puts messages (NCCL's src/enqueue.cc): that of CUDA 12.5.
_DRIVER_FOR_PUTS = 12050


def _nccl(library: Callable[[], Any], device: Any) -> _core.comm.NcclJoining:
    distance = setting("HDPCOMM_NCCL_CONNECT")
    if not distance.isdecimal():
        raise InvalidUsage(f"HDPCOMM_NCCL_CONNECT={distance!r}; give a distance between ranks, 0 or more")
    one_sided = setting("HDPCOMM_NCCL_ONE_SIDED")
    if one_sided not in _ONE_SIDED:
        raise InvalidUsage(f"HDPCOMM_NCCL_ONE_SIDED={one_sided!r}; give 0, 1 or auto")
    driver = _DRIVER_FOR_PUTS if device.is_sim else _core.device.cuda_driver_version()
    inside, between = (link_costs(load_costs(name)) for name in cost_names("nccl"))  # rank 0's count
    return _core.comm.NcclJoining(
        library=library,
        connect_distance=int(distance),
        inside=inside,
        between=between,
        one_sided=_ONE_SIDED[one_sided],
        landing_bytes=int(setting("HDPCOMM_DEVICE_LANDING_BYTES")),
        no_puts="" if driver >= _DRIVER_FOR_PUTS else "the driver is older than that of CUDA 12.5",
    )


def _real_nccl(world: _core.comm.World) -> tuple[Any, Callable[[], Any]]:
    return _cuda(world), load_nccl

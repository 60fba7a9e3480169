"""The core's device for a torch device, and the NUMA node that the device is attached to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hdpcomm._core import device as core
from hdpcomm._core.device import Device
from hdpcomm.errors import DeviceError, InvalidUsage

__all__ = ["compute_stream", "numa_node_of", "open_device"]


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
        return core.open_sim(place.index or 0)
    if place.type != "cuda":
        raise InvalidUsage(f"device is {device}; offload works on cuda and, simulated, on cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"device is {device}, and torch finds no CUDA device on this machine; give cpu to simulate")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return core.open_cuda(torch.cuda.current_device() if place.index is None else place.index)


def compute_stream(device: Device) -> int | None:
    """torch's current stream on the device; ``None`` for a simulated device, where this thread computes."""
    return None if device.is_sim else int(torch.cuda.current_stream(device.ordinal).cuda_stream)


def numa_node_of(device: Device, *, sysfs: str = "/sys") -> int:
    """NUMA node that the device is attached to; -1 for a simulated device, or where the kernel does not say."""
    if device.is_sim:
        return -1
    found: Any = torch.cuda.get_device_properties(device.ordinal)  # torch's stub lacks the PCI fields
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        return int((Path(sysfs) / "bus/pci/devices" / place / "numa_node").read_text())
    except (OSError, ValueError):
        return -1

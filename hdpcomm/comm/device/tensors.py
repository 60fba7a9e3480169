"""Tensors in device memory: what crosses to the core of one, and on which stream torch works; with a simulated device,
host tensors stand for device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hdpcomm.comm.tensors import Buffer, describe, describe_torch
from hdpcomm.errors import InvalidUsage

__all__ = ["CudaTensors", "SimTensors", "Tensors"]


@dataclass(frozen=True, slots=True)
class SimTensors:
    """Host tensors as the device memory of a SimDevice; ``host_stream`` stands for the host's own work.

    ``blocking``: they have no streams, so the host must wait.
    """

    host_stream: int
    blocking: bool = True

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer:
        return describe(x, what, writable=writable)

    def stream(self) -> int:
        return self.host_stream


@dataclass(frozen=True, slots=True)
class CudaTensors:
    """Tensors on CUDA device ``ordinal``, on torch's current stream."""

    ordinal: int
    blocking: bool = False

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer:
        del writable  # torch's tensors are
        if not isinstance(x, torch.Tensor) or x.device.type != "cuda" or x.device.index != self.ordinal:
            where = x.device if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidUsage(
                f"{what} is on {where}, the communicator's device operations run on cuda:{self.ordinal}; give tensors "
                "of that device, all of one operation"
            )
        return describe_torch(x, what)

    def stream(self) -> int:
        # Its handle alone, as torch's own generated code asks for it: torch.cuda.current_stream() makes objects.
        return torch._C._cuda_getCurrentRawStream(self.ordinal)


Tensors: TypeAlias = SimTensors | CudaTensors

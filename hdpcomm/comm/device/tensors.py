"""Tensors in device memory: what crosses to the core of one, and on which stream its library works.

torch tensors, CuPy arrays and anything else with ``__cuda_array_interface__`` (Numba, ...) or ``__dlpack__`` on the
GPU; with a simulated device, host tensors stand for device memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from hdpcomm.comm.tensors import Buffer, code_of, describe
from hdpcomm.errors import InvalidUsage

__all__ = ["CudaArrays", "CudaTensors", "SimTensors", "Tensors", "on_cuda"]

_DLPACK_CUDA = 2
_LEGACY_STREAM = 1  # cudaStreamLegacy: the default stream by a name that is not 0


class Tensors(Protocol):
    """The tensors of one library on one device."""

    @property
    def blocking(self) -> bool:
        """Whether their library has no streams, so that the host must wait."""
        ...

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer: ...
    def stream(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SimTensors:
    """Host tensors as the device memory of a SimDevice; ``host_stream`` stands for the host's own work."""

    host_stream: int
    blocking: bool = True

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer:
        return describe(x, what, writable=writable)

    def stream(self) -> int:
        return self.host_stream


@dataclass(frozen=True, slots=True)
class CudaTensors:
    """torch tensors (and what gives them by DLPack) on CUDA device ``ordinal``, on torch's current stream."""

    ordinal: int
    blocking: bool = False

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer:
        if not isinstance(x, torch.Tensor):
            if not on_cuda(x):
                raise _not_here(x, what, self.ordinal)
            if not hasattr(x, "__dlpack__"):
                return CudaArrays(self.ordinal, self.stream()).describe(x, what, writable=writable)
            return self.describe(from_dlpack(x), what, writable=writable)
        if x.device.type != "cuda" or x.device.index != self.ordinal:
            raise _not_here(x, what, self.ordinal)
        code = code_of(x.dtype)
        if code is None:
            raise InvalidUsage(f"{what} has dtype {x.dtype}, which the core does not know; pass a view of another type")
        if not x.is_contiguous():
            raise InvalidUsage(
                f"{what} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()}); pass x.contiguous(), and "
                "for an output copy the result back"
            )
        if x.is_neg():
            raise InvalidUsage(f"{what} is a lazily negated view (is_neg()); pass x.resolve_neg()")
        return x.data_ptr(), x.numel(), code

    def stream(self) -> int:
        # Its handle alone, as torch's own generated code asks for it: torch.cuda.current_stream() makes objects.
        return torch._C._cuda_getCurrentRawStream(self.ordinal)


@dataclass(frozen=True, slots=True)
class CudaArrays:
    """Objects with ``__cuda_array_interface__`` on CUDA device ``ordinal``, on a stream of their library."""

    ordinal: int
    handle: int
    blocking: bool = False

    def describe(self, x: Any, what: str, *, writable: bool = False) -> Buffer:
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is None:
            return CudaTensors(self.ordinal).describe(x, what, writable=writable)
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        code = code_of(interface["typestr"])
        if code is None:
            raise InvalidUsage(f"{what} has the type {interface['typestr']}, which the core does not know")
        count = 1
        for extent in shape:
            count *= extent
        if strides is not None and count > 0 and tuple(strides) != _packed(shape, int(interface["typestr"][2:])):
            raise InvalidUsage(f"{what} is not contiguous (shape {shape}, strides {tuple(strides)}); pass a copy")
        address, read_only = interface["data"]
        if writable and read_only:
            raise InvalidUsage(f"{what} is read-only, but the operation writes to it; pass a writable array")
        return address, count, code

    def stream(self) -> int:
        return self.handle


def arrays_of(x: Any, ordinal: int) -> CudaArrays:
    """The library of an object with ``__cuda_array_interface__``.

    Its stream: CuPy's current one for CuPy arrays, else the one that the object names, else torch's current one.
    """
    if type(x).__module__.split(".")[0] == "cupy":
        return CudaArrays(ordinal, sys.modules["cupy"].cuda.get_current_stream().ptr)
    named = x.__cuda_array_interface__.get("stream")
    if named is None:
        return CudaArrays(ordinal, torch.cuda.current_stream(ordinal).cuda_stream)
    return CudaArrays(ordinal, 0 if named == _LEGACY_STREAM else int(named))


def on_cuda(x: Any) -> bool:
    """Whether an object says that its memory is a CUDA device's."""
    if isinstance(x, torch.Tensor):
        return x.is_cuda
    if hasattr(x, "__cuda_array_interface__"):
        return True
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == _DLPACK_CUDA


def _packed(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(item)
        item *= extent
    return tuple(reversed(strides))


def _not_here(x: Any, what: str, ordinal: int) -> InvalidUsage:
    where = x.device if isinstance(x, torch.Tensor) else type(x).__name__
    return InvalidUsage(
        f"{what} is on {where}, the communicator's device operations run on cuda:{ordinal}; give tensors of that "
        "device, all of one operation"
    )

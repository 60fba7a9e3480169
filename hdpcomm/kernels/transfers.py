"""How tensors get to kernels: type code, device and stream; and small ones between the host and a device, without the
host waiting for what the device has yet to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdpcomm._core import DTYPES
from hdpcomm.errors import InvalidUsage

__all__ = ["HostNumbers", "autocast_type", "dtype_code", "launch", "to_device"]


class HostNumbers:
    """Numbers of a tensor on their way to the host. Local.

    On a GPU the copy goes to pinned memory by the current stream: the device goes on with what is issued before
    :meth:`get`, and the host waits for the copy only.

    Args:
        numbers: any shape.
        on_meta: the numbers where those are on the meta device, and have no values.
    """

    def __init__(self, numbers: Tensor, on_meta: Sequence[Any] = ()) -> None:
        self._found: Sequence[Any] | None = on_meta if numbers.is_meta else None
        self._ready: torch.cuda.Event | None = None
        self._copy = numbers
        if numbers.is_cuda:
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(numbers.device))

    def get(self) -> Sequence[Any]:
        """The numbers, flat. The first call waits for the copy."""
        if self._found is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._found = self._copy.flatten().tolist()
            self._copy, self._ready = torch.empty(0), None
        return self._found


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x.to(device)`` for a tensor of the host; to a GPU by pinned memory on the current stream, since copies of other
    memory may wait for all that was issued before. Local."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


_CODES = {getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)}


def autocast_type(tensor: torch.Tensor) -> str:
    """The device type for ``torch.autocast``, which knows no meta device."""
    return "cpu" if tensor.is_meta else tensor.device.type


def dtype_code(tensor: torch.Tensor, known: Sequence[torch.dtype] | None = None) -> int:
    """The core's code of the element type; ``known``: the types that the kernel takes (default: all).

    Raises: InvalidUsage for another type.
    """
    if tensor.dtype not in (_CODES if known is None else known):
        names = sorted(_CODES, key=str) if known is None else known
        raise InvalidUsage(f"{tensor.dtype} was given; expected {', '.join(str(x)[6:] for x in names)}")
    return _CODES[tensor.dtype]


def launch(kernel: Callable[..., None], tensor: torch.Tensor, *args: object) -> None:
    """Calls ``kernel(*args, cuda, stream)`` for the device of ``tensor``, on CUDA with its current stream.

    Raises: InvalidUsage for a tensor that is neither on the CPU nor on CUDA.
    """
    if tensor.device.type == "cpu":
        kernel(*args, False, 0)
    elif tensor.device.type == "cuda":
        with torch.cuda.device(tensor.device):
            kernel(*args, True, torch.cuda.current_stream().cuda_stream)
    elif tensor.device.type != "meta":  # there sizes are all that counts
        raise InvalidUsage(f"tensors on {tensor.device} were given; expected cpu or cuda")

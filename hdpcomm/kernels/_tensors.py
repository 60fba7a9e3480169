"""How tensors are passed to the kernels: type code, device and stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hdpcomm._core import DTYPES
from hdpcomm.errors import InvalidUsage

__all__ = ["autocast_type", "dtype_code", "launch"]

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

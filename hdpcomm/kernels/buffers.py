"""Reductions of flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdpcomm._core import kernels as _core
from hdpcomm._core.comm import REDOPS
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import dtype_code, launch

__all__ = ["accumulate", "reduce"]

_PIECE_ELEMENTS = 1 << 20


def accumulate(sums: Tensor, addend: Tensor) -> None:
    """``sums += addend`` for contiguous tensors of one shape.

    On CPUs torch copies an addend of a narrower type whole, in the type of the sums; here it copies a piece at a time.
    """
    if sums.dtype == addend.dtype or sums.device.type != "cpu":
        sums.add_(addend)
        return
    for own, other in zip(*(torch.split(x.view(-1), _PIECE_ELEMENTS) for x in (sums, addend)), strict=True):
        own.add_(other)


def reduce(out: Tensor, a: Tensor, b: Tensor, *, op: str = "sum") -> None:
    """``out = a op b`` by elements; ``op``: sum, prod, min, max, or avg, which sums.

    Contiguous tensors of one shape, type and device, at any multiple of their element's size; ``out`` may be ``a`` or
    ``b``. 16-bit floats are computed in fp32 and rounded once; integers wrap; NaN stays. The CPU and CUDA give the same
    bits.

    Raises: InvalidUsage.
    """
    _check_same((out, a, b))
    if op not in REDOPS:
        raise InvalidUsage(f"no reduction {op!r}; expected {', '.join(REDOPS)}")
    launch(_core.reduce, out, out.data_ptr(), a.data_ptr(), b.data_ptr(), out.numel(), dtype_code(out), REDOPS[op])


def _check_same(tensors: Sequence[Tensor]) -> None:
    """Raises InvalidUsage unless all tensors are contiguous, have one shape and type, and are on one device."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise InvalidUsage(
                f"the tensors of a reduction differ: {tuple(first.shape)} of {first.dtype} and {tuple(tensor.shape)} "
                f"of {tensor.dtype}; expected one shape and type"
            )
        if not tensor.is_contiguous():
            raise InvalidUsage(f"a tensor of a reduction is not contiguous: strides {tensor.stride()}; copy it")
        if tensor.device != first.device:
            raise InvalidUsage(f"the tensors of a reduction lie on {first.device} and on {tensor.device}; move one")

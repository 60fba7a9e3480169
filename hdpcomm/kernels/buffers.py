"""Reductions of flat buffers, and kernels that read the buffers of several ranks in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdpcomm._core import kernels as _core
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels._tensors import check_same, dtype_code, launch

__all__ = ["collect", "divide", "fold", "put", "reduce"]


def _op(name: str) -> int:
    if name not in _core.OPS:
        raise InvalidUsage(f"no reduction {name!r}; expected {', '.join(_core.OPS)}")
    return _core.OPS[name]


def reduce(out: Tensor, a: Tensor, b: Tensor, *, op: str = "sum") -> None:
    """``out = a op b`` by elements; ``op``: sum, prod, min, max, or avg, which sums (:func:`divide` divides).

    Contiguous tensors of one shape, type and device, at any multiple of their element's size; ``out`` may be ``a`` or
    ``b``. 16-bit floats are computed in fp32 and rounded once; integers wrap; NaN stays. The CPU and CUDA give the same
    bits.

    Raises: InvalidUsage.
    """
    check_same("reduction", (out, a, b))
    launch(_core.reduce, out, out.data_ptr(), a.data_ptr(), b.data_ptr(), out.numel(), dtype_code(out), _op(op))


def divide(x: Tensor, divisor: float) -> None:
    """``x /= divisor`` in place, for floating types; 16-bit floats are divided in fp32.

    Raises: InvalidUsage for another type or a tensor that is not contiguous.
    """
    check_same("division", (x,))
    launch(_core.divide, x, x.data_ptr(), x.numel(), divisor, dtype_code(x))


def fold(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, op: str = "sum") -> None:
    """Every output = ``inputs[0] op inputs[1] op ...``, from left to right; avg divides by the number of inputs.

    Ranks that list the same inputs in the same order compute bitwise equal results. 16-bit floats are accumulated in
    fp32 and rounded once. Up to 64 inputs and outputs; an output may be an input. On CUDA the tensors may be on several
    devices with peer access; the kernel runs on the first output's device, on its current stream.

    Raises: InvalidUsage.
    """
    if not outputs or not inputs:
        raise InvalidUsage(f"{len(inputs)} inputs and {len(outputs)} outputs of a fold; expected at least one of each")
    check_same("fold", (*outputs, *inputs), device=False)
    launch(
        _core.fold, outputs[0], [x.data_ptr() for x in outputs], [x.data_ptr() for x in inputs], outputs[0].numel(),
        dtype_code(outputs[0]), _op(op),
    )  # fmt: skip


def collect(out: Tensor, inputs: Sequence[Tensor], *, first: int = 0) -> None:
    """``out[p] = inputs[p]`` for every p: ``out`` is [len(inputs), \\*shape of an input], of one type.

    Inputs and rows of ``out`` are contiguous; there may be gaps between rows.

    The input ``first`` is read first: with each rank's own number, not all ranks read the same peer at the same time.
    An input that already is its row of ``out`` is not copied.

    Raises: InvalidUsage.
    """
    if not inputs:
        raise InvalidUsage("no inputs of a collect; expected at least one")
    if out.dim() == 0 or out.shape[0] != len(inputs):
        raise InvalidUsage(f"{len(inputs)} inputs do not fit an output of shape {tuple(out.shape)}")
    check_same("collect", (out[0], *inputs), device=False)
    row_bytes = inputs[0].numel() * out.element_size()
    stride = out.stride(0) * out.element_size() if len(inputs) > 1 else row_bytes
    launch(_core.collect, out, out.data_ptr(), [x.data_ptr() for x in inputs], row_bytes, stride, first)


def put(dst: Tensor, src: Tensor, flag: Tensor, value: int) -> None:
    """Copies ``src`` to ``dst`` and then stores ``value`` in ``flag`` (int32, one element) with release order.

    A reader that waits for the flag with acquire order sees the bytes. Uses one block on CUDA, so it is meant for
    messages up to some ten KiB.

    Raises: InvalidUsage.
    """
    check_same("put", (dst, src), device=False)
    if flag.dtype != torch.int32 or flag.numel() != 1:
        raise InvalidUsage(f"the flag of a put is one int32; got {flag.numel()} of {flag.dtype}")
    num_bytes = src.numel() * src.element_size()
    launch(_core.put, src, dst.data_ptr(), src.data_ptr(), num_bytes, flag.data_ptr(), value)

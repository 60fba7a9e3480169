"""Kernels over several buffers that the core's transports call, on tensors, beside ``reduce``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hdpcomm._core import kernels as _core
from hdpcomm._core.comm import REDOPS
from hdpcomm.kernels import reduce
from hdpcomm.kernels.transfers import dtype_code, launch

__all__ = ["collect", "divide", "fold", "put", "reduce"]


def divide(x: Tensor, divisor: float) -> None:
    """``x /= divisor`` in place, for floating types; 16-bit floats are divided in fp32."""
    launch(_core.divide, x, x.data_ptr(), x.numel(), divisor, dtype_code(x))


def fold(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, op: str = "sum") -> None:
    """Every output = ``inputs[0] op inputs[1] op ...``, from left to right; avg divides by the number of inputs.

    Ranks that list the same inputs in the same order compute bitwise equal results. 16-bit floats are accumulated in
    fp32 and rounded once. Up to 64 inputs and outputs; an output may be an input. On CUDA the tensors may be on several
    devices with peer access; the kernel runs on the first output's device, on its current stream.
    """
    launch(
        _core.fold, outputs[0], [x.data_ptr() for x in outputs], [x.data_ptr() for x in inputs], outputs[0].numel(),
        dtype_code(outputs[0]), REDOPS[op],
    )  # fmt: skip


def collect(out: Tensor, inputs: Sequence[Tensor], *, first: int = 0) -> None:
    """``out[p] = inputs[p]`` for every p: ``out`` is [len(inputs), \\*shape of an input], of one type.

    Inputs and rows of ``out`` are contiguous; there may be gaps between rows.

    The input ``first`` is read first: with each rank's own number, not all ranks read the same peer at the same time.
    An input that already is its row of ``out`` is not copied.
    """
    row_bytes = inputs[0].numel() * out.element_size()
    stride = out.stride(0) * out.element_size() if len(inputs) > 1 else row_bytes
    launch(_core.collect, out, out.data_ptr(), [x.data_ptr() for x in inputs], row_bytes, stride, first)


def put(dst: Tensor, src: Tensor, flag: Tensor, value: int) -> None:
    """Copies ``src`` to ``dst`` and then stores ``value`` in ``flag`` (int32, one element) with release order.

    A reader that waits for the flag with acquire order sees the bytes. Uses one block on CUDA, so it is meant for
    messages up to some ten KiB.
    """
    num_bytes = src.numel() * src.element_size()
    launch(_core.put, src, dst.data_ptr(), src.data_ptr(), num_bytes, flag.data_ptr(), value)

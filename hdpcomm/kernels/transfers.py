"""How tensors get to kernels: type code, device and stream; small ones between the host and a device, without the host
waiting for what the device has yet to run; reductions of flat buffers; and backward passes that have no derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdpcomm._core import DTYPES
from hdpcomm._core import kernels as _core
from hdpcomm._core.comm import REDOPS
from hdpcomm.errors import InvalidUsage

__all__ = [
    "HostNumbers",
    "accumulate",
    "autocast_type",
    "dtype_code",
    "launch",
    "reduce",
    "refuse_second_derivative",
    "to_device",
    "without_second_derivative",
]


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


def refuse_second_derivative() -> None:
    """Raises InvalidUsage inside a backward pass that is to be differentiated itself (``create_graph=True``).

    torch's ``once_differentiable`` alone does so only where the incoming gradient has a graph; the gradient of a plain
    sum has none, and then the second derivative would lack these terms in silence.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InvalidUsage(
            "a backward pass through hdpcomm was asked for with create_graph=True (gradient penalty, Hessian product); "
            "its operations have first derivatives only: call backward() or torch.autograd.grad() without create_graph"
        )


def without_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the ``backward`` of a torch.autograd.Function that has none; see :func:`refuse_second_derivative`."""
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        return once(ctx, *grads)

    return refusing

"""Between torch and the core: passes tensors, as address, element count and element type, of which no copy is ever
made; and keeps torch.compile out of what communicates, and of plans made on the host.

Neither can be a part of a graph. The compiler would follow a call through the package down to the core; meanwhile it
makes example objects without their ``__init__``, and fails at some uses of numpy. A call of a marked function is a
graph break: the function and what it calls run as they are. Outside of compiled code it costs nothing. torch's own
``torch.compiler.disable`` imports the compiler at once and wraps each call.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hdpcomm import _core
from hdpcomm.arguments import check_type, check_whole
from hdpcomm.errors import InvalidUsage

__all__ = ["Buffer", "check_shape", "describe", "describe_torch", "plain_tensors", "untraced", "wraps_tensors"]

_CODES = _core.DTYPES
_TORCH = {getattr(torch, name): code for name, code in _CODES.items() if hasattr(torch, name)}
_NUMPY = {np.dtype(name): code for name, code in _CODES.items() if name != "bfloat16"}

_describe_torch = _core.comm.describe_torch
if (_api := getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)) is not None:  # torch 2.10 and later
    _core.comm.use_exchange_api(_api, torch.Tensor, torch.nn.Parameter)

Buffer = tuple[int, int, int]  # address, elements, dtype code


def describe(x: Any, what: str, *, writable: bool = False) -> Buffer:
    """The address, element count and dtype code of a tensor, checked.

    ``x``: a CPU tensor of torch, or an array of numpy; contiguous. ``what`` names it in messages. The caller keeps
    ``x`` alive while the core uses the address.

    Raises: InvalidUsage for another object, device, layout or type.
    """
    plain = _describe_torch(x)
    if plain is not None:
        return plain
    if isinstance(x, torch.Tensor):
        if not x.is_cpu:
            raise InvalidUsage(
                f"{what} is on {x.device}; the shm transport moves host memory: copy it to the CPU first (x.cpu())"
            )
        return describe_torch(x, what)
    if isinstance(x, np.ndarray):
        return _describe_numpy(x, what, writable=writable)
    raise InvalidUsage(
        f"{what} is a {type(x).__name__}; give a torch tensor or a numpy array (torch.from_dlpack(x) makes a tensor of "
        "another library's array, without a copy)"
    )


def describe_torch(x: torch.Tensor, what: str) -> Buffer:
    """As :func:`describe`, of a tensor of torch on any device."""
    code = None if wraps_tensors(x) else _TORCH.get(x.dtype)
    if code is not None and x.is_contiguous() and not x.is_neg():
        return x.data_ptr(), x.numel(), code
    raise _bad_torch(x, what)


def _describe_numpy(x: np.ndarray[Any, Any], what: str, *, writable: bool) -> Buffer:
    code = _NUMPY.get(x.dtype)
    if code is None:
        raise InvalidUsage(f"{what} has dtype {x.dtype}; known are: {', '.join(sorted(_CODES))}")
    if not x.flags.c_contiguous:
        raise InvalidUsage(f"{what} is not contiguous (strides {x.strides}); pass numpy.ascontiguousarray(x)")
    if writable and not x.flags.writeable:
        raise InvalidUsage(f"{what} is read-only, but the operation writes to it; pass a writable array")
    return x.__array_interface__["data"][0], x.size, code


def wraps_tensors(x: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own, but others with its values, as torchao's quantised ones. Local."""
    return bool(is_traceable_wrapper_subclass(x))


def plain_tensors(x: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold the values of one: itself, or those that it wraps. Local."""
    if not wraps_tensors(x):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(x, name))


def _bad_torch(x: Any, what: str) -> InvalidUsage:
    if wraps_tensors(x):
        return InvalidUsage(
            f"{what} is a {type(x).__name__}, whose values lie in the tensors {x.__tensor_flatten__()[0]}; give those, "
            "one by one (of a DTensor to_local())"
        )
    if x.layout != torch.strided:
        return InvalidUsage(f"{what} is a tensor of layout {x.layout}; give a dense one (x.to_dense())")
    if x.dtype not in _TORCH:
        return InvalidUsage(f"{what} has dtype {x.dtype}; known are: {', '.join(sorted(_CODES))}")
    if x.is_contiguous():
        return InvalidUsage(f"{what} is a lazily negated view (is_neg()); pass x.resolve_neg()")
    return InvalidUsage(
        f"{what} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()}); pass x.contiguous(), and for an "
        "output copy the result back"
    )


_MOST_BYTES = 1 << 47  # addresses of a process


def check_shape(call: str, shape: Sequence[Any], dtype: Any) -> int:
    """The elements of a tensor of this shape. Raises InvalidUsage for sizes that no tensor has, and for another dtype
    than one of torch."""
    check_type(call, "dtype", dtype, torch.dtype)
    count = math.prod(check_whole(call, f"shape[{i}]", size, least=0) for i, size in enumerate(shape))
    if count * dtype.itemsize >= _MOST_BYTES:
        raise InvalidUsage(
            f"{call} got the shape {tuple(shape)}, {count * dtype.itemsize:,} bytes; no process has so much memory"
        )
    return count


Marked = TypeVar("Marked", bound=Callable[..., Any])


def _skipping() -> Callable[[types.CodeType], None] | None:
    """A function that keeps the compiler from code and all that it calls; None: this torch has no such thing."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return None
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    return lambda code: frames.set_code_exec_strategy(code, strategy)


_skip = _skipping()


def untraced(marked: Marked) -> Marked:
    """A function, or all methods that a class itself defines. Local."""
    functions = vars(marked).values() if isinstance(marked, type) else (marked,)
    for function in functions:
        if isinstance(function, types.FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            function._torchdynamo_disable_msg = "it communicates, or plans on the host"  # type: ignore[attr-defined]
            if _skip is not None:
                _skip(function.__code__)
    return marked

"""torch's reduce operations in terms of the core's, and the bitwise ones that the core does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from hdpcomm.errors import InvalidUsage

__all__ = ["Bitwise", "reduction"]

Bitwise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# By the number of the RedOpType, which is found faster than the object.
_CORE: dict[int, str] = {
    kind.value: name
    for kind, name in (
        (ReduceOp.SUM, "sum"),
        (ReduceOp.AVG, "avg"),
        (ReduceOp.PRODUCT, "prod"),
        (ReduceOp.MIN, "min"),
        (ReduceOp.MAX, "max"),
    )
}
_BITWISE: dict[int, Bitwise] = {
    ReduceOp.BAND.value: torch.bitwise_and,
    ReduceOp.BOR.value: torch.bitwise_or,
    ReduceOp.BXOR.value: torch.bitwise_xor,
}


def reduction(op: Any, dtype: torch.dtype, call: str) -> str | Bitwise:
    """The core's name of a reduce operation, or the function of two tensors that is applied after a gather.

    Raises: NotImplementedError naming an operation that neither has; InvalidUsage for a type that it does not take.
    """
    kind = getattr(op, "op", op)  # ReduceOp or RedOpType
    in_core = _CORE.get(kind.value)
    if in_core is not None:
        if dtype.is_complex and in_core not in ("sum", "avg"):
            raise InvalidUsage(f"{call}() got op={in_core} for {dtype}; complex tensors can be added and averaged")
        return in_core
    name = getattr(kind, "name", str(kind))
    bitwise = _BITWISE.get(kind.value)
    if bitwise is None:
        raise NotImplementedError(f"hdpcomm backend: {call} with ReduceOp.{name}")
    if dtype.is_floating_point or dtype.is_complex:
        raise InvalidUsage(f"{call}() got op={name} for {dtype}; bitwise operations take integers and bool")
    return bitwise

"""The checks of torch's arguments that several operations share, and its reduce operations in terms of the core's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from hdpcomm.errors import InvalidUsage
from hdpcomm.torch_backend.staging import Operation

__all__ = [
    "Lists",
    "Tensors",
    "check_count",
    "check_equal",
    "check_pairs",
    "check_types",
    "elements_of",
    "one",
    "op_of",
    "reduction",
    "root_of",
    "tensor_of_each_rank",
]

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
Tensors = torch.Tensor | Sequence[torch.Tensor]
Lists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


def op_of(options: Any) -> Any:
    """The reduce operation in torch's options, or what stands in their place."""
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """The root in torch's options, or what stands in their place."""
    return options if isinstance(options, int) else int(getattr(options, "rootRank", 0))


def one(tensors: Any, call: str, what: str) -> Any:
    """The only element of the lists that torch's calls take (they were made for several devices a process)."""
    if type(tensors) is list and len(tensors) == 1:
        return tensors[0]
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidUsage(f"{call}() got {len(tensors)} {what}; give a list of one")
    return tensors[0]


def tensor_of_each_rank(operation: Operation, lists: Any, what: str) -> Sequence[torch.Tensor]:
    """The list of one tensor a rank, from the lists of lists that torch's calls take."""
    tensors = lists
    if len(lists) == 0 or not isinstance(lists[0], torch.Tensor):
        tensors = one(lists, operation.call, f"{what} lists")
    check_count(operation, tensors, what)
    return list(tensors)


def check_count(operation: Operation, tensors: Sequence[torch.Tensor], what: str) -> None:
    """There must be one tensor for each rank."""
    size = operation.comm.size
    if len(tensors) != size:
        raise InvalidUsage(f"{operation.call}() got {len(tensors)} {what}s; give one for each of the {size} ranks")


def check_types(operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
    """All tensors must have one type."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) != 1:
        names = ", ".join(sorted(map(str, types)))
        raise InvalidUsage(f"{operation.call}() got tensors of {names}; give all one type")


def check_equal(operation: Operation, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """The parts must have the type and the size of the tensor."""
    check_types(operation, [*parts, tensor])
    sizes = {part.numel() for part in parts}
    if sizes != {tensor.numel()}:
        raise InvalidUsage(
            f"{operation.call}() got a list of {sorted(sizes)} elements a rank and a tensor of {tensor.numel()}; "
            "give equal sizes"
        )


def check_pairs(operation: Operation, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor]) -> None:
    """Each tensor of the first list must be one of the second list for each rank."""
    if len(large) != len(small):
        raise InvalidUsage(f"{operation.call}() got {len(large)} and {len(small)} tensors; give pairs")
    size = operation.comm.size
    for many, few in zip(large, small, strict=True):
        check_types(operation, [many, few])
        if many.numel() != few.numel() * size:
            raise InvalidUsage(
                f"{operation.call}() got tensors of {many.numel()} and {few.numel()} elements; on {size} ranks one has "
                f"{size} times the elements of the other"
            )


def elements_of(operation: Operation, tensor: torch.Tensor, rows: Sequence[int] | None, what: str) -> list[int]:
    """The elements for each rank, from rows of dimension 0."""
    size = operation.comm.size
    num_rows = tensor.shape[0] if tensor.dim() > 0 else 1
    row = math.prod(tensor.shape[1:])
    if rows is None or len(rows) == 0:
        if num_rows % size:
            raise InvalidUsage(
                f"{operation.call}() got an {what} of {num_rows} rows without splits; they must be divisible by the "
                f"{size} ranks"
            )
        return [num_rows // size * row] * size
    if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
        raise InvalidUsage(
            f"{operation.call}() got {what} splits {list(rows)}; give {size} counts, none below 0, that sum up to the "
            f"tensor's {num_rows} rows"
        )
    return [count * row for count in rows]


def reduction(op: Any, dtype: torch.dtype, call: str) -> str:
    """The core's name of a reduce operation.

    Raises: NotImplementedError naming an operation that it has not; InvalidUsage for a type that it does not take.
    """
    kind = getattr(op, "op", op)  # ReduceOp or RedOpType
    in_core = _CORE.get(kind.value)
    if in_core is None:
        raise NotImplementedError(f"hdpcomm backend: {call} with ReduceOp.{getattr(kind, 'name', str(kind))}")
    if dtype.is_complex and in_core not in ("sum", "avg"):
        raise InvalidUsage(f"{call}() got op={in_core} for {dtype}; complex tensors can be added and averaged")
    return in_core

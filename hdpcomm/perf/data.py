"""Element types by the names of nccl-tests (``-d``), and test data whose reductions are exact in every one of them, so
that one wrong bit counts as wrong.

All values are small integers from a pattern of prime length: what a rank must hold after an operation is known
without communicating, and a block that lands in the wrong place or comes from the wrong rank differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hdpcomm.errors import InvalidUsage

__all__ = ["ALL", "ElementType", "contribution", "element_type", "reduced", "values"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type; ``name`` is that of nccl-tests, and all integers up to ``exact`` are represented exactly."""

    name: str
    dtype: torch.dtype
    exact: int

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def floating(self) -> bool:
        """Whether it has fractions, so that ``avg`` exists."""
        return self.dtype.is_floating_point


_TYPES = (
    ElementType("int8", torch.int8, 127),
    ElementType("uint8", torch.uint8, 255),
    ElementType("int32", torch.int32, 2**31 - 1),
    ElementType("uint32", torch.uint32, 2**32 - 1),
    ElementType("int64", torch.int64, 2**62),
    ElementType("uint64", torch.uint64, 2**62),
    ElementType("half", torch.float16, 2**11),
    ElementType("float", torch.float32, 2**24),
    ElementType("double", torch.float64, 2**53),
    ElementType("bfloat16", torch.bfloat16, 2**8),
)
_ALIASES = {"float16": "half", "float32": "float", "float64": "double"}
_BY_NAME = {kind.name: kind for kind in _TYPES}

ALL = tuple(_BY_NAME)


def element_type(name: str) -> ElementType:
    """The type called ``name``. Raises: InvalidUsage for an unknown name."""
    kind = _BY_NAME.get(_ALIASES.get(name, name))
    if kind is None:
        raise InvalidUsage(f"-d {name}: unknown element type; give one of: {', '.join(ALL)}, all")
    return kind


_PERIOD = 4093
_Pattern = np.ndarray[Any, np.dtype[np.int64]]
_INDEX = np.arange(_PERIOD, dtype=np.int64)


def _hash(seed: int, modulus: int) -> _Pattern:
    mixed = (_INDEX * 2654435761 + (seed + 1) * 2246822519) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    pattern: _Pattern = (mixed >> 9) % modulus
    return pattern


def _pattern(kind: ElementType, redop: str, rank: int, ranks: int) -> _Pattern:
    """The contribution of a rank; sums of all ranks stay in the range in which ``kind`` is exact."""
    if redop in ("min", "max"):
        return _hash(rank, 127)
    if redop == "prod":  # at most 2 ** 3
        return np.where((_INDEX + rank) % ranks < _INDEX % 4, 2, 1)
    if redop == "avg":  # the average is i % m: deviations of the ranks cancel out
        shared: _Pattern = _INDEX % max(1, min(16, kind.exact // ranks))
        shared[_INDEX % ranks == rank] += 1
        shared[(_INDEX + 1) % ranks == rank] -= 1
        return shared
    if rank >= kind.exact:
        return np.zeros_like(_INDEX)
    return _hash(rank, max(2, min(127, kind.exact // ranks + 1)))


def _tensor(pattern: _Pattern, kind: ElementType, count: int, first: int) -> torch.Tensor:
    one = torch.from_numpy(pattern).to(kind.dtype)
    first %= _PERIOD
    return one.repeat(-(-(first + count) // _PERIOD))[first : first + count]


def values(kind: ElementType, seed: int, count: int, *, first: int = 0) -> torch.Tensor:
    """``count`` elements of the stream of ``seed`` from element ``first``: data that is only moved."""
    return _tensor(_hash(seed, 127), kind, count, first)


def contribution(kind: ElementType, redop: str, rank: int, ranks: int, count: int) -> torch.Tensor:
    """The input of ``rank`` to a reduction."""
    return _tensor(_pattern(kind, redop, rank, ranks), kind, count, 0)


def reduced(kind: ElementType, redop: str, ranks: int, count: int, *, first: int = 0) -> torch.Tensor:
    """``count`` elements from ``first`` on of the reduction of all ranks' contributions, computed in int64."""
    stack = np.stack([_pattern(kind, redop, rank, ranks) for rank in range(ranks)])
    if redop == "avg":
        result = stack.sum(axis=0) // ranks  # exact by construction
    else:
        ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[redop]
        result = ufunc.reduce(stack, axis=0)
    return _tensor(result, kind, count, first)

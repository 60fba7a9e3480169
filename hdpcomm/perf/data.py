"""Test data whose reductions are exact in every element type, so that one wrong bit counts as wrong.

All values are small integers from a pattern of prime length: what a rank must hold after an operation is known
without communicating, and a block that lands in the wrong place or comes from the wrong rank differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hdpcomm.perf.dtypes import ElementType

__all__ = ["contribution", "reduced", "values"]

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

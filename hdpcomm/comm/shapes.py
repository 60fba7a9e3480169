"""Checks of the shape and the type of a tensor that is to be made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm.arguments import check_type, check_whole
from hdpcomm.errors import InvalidUsage

__all__ = ["check_shape"]

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

"""Which tensors torch has sharded, told without the second that importing torch.distributed.tensor takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "is_fully_sharded"]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a ``torch.distributed.tensor.DTensor``: none is before something has imported that module."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_fully_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of the parameters is a shard of FSDP2."""
    return any(is_dtensor(parameter) for parameter in parameters)

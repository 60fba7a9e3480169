"""The type names of ``-d`` (those of nccl-tests), their torch types, and their largest exact integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdpcomm.errors import InvalidUsage

__all__ = ["ALL", "ElementType", "element_type"]


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
    """The type called ``name``. Raises NotImplementedError for the 8-bit floats, InvalidUsage for an unknown name."""
    kind = _BY_NAME.get(_ALIASES.get(name, name))
    if kind is not None:
        return kind
    if name in ("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"):
        raise NotImplementedError(f"-d {name}: the library does not reduce 8-bit floats; give one of: {', '.join(ALL)}")
    raise InvalidUsage(f"-d {name}: unknown element type; give one of: {', '.join(ALL)}, all")

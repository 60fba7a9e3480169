"""Which parameters are reduced together, and where their gradients lie in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Bucket", "make_buckets", "trained_parameters"]

_ALIGNED = 16
"""Elements to whose multiple a rank's part is rounded up, so that parts begin at whole cache lines."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one type, one optimizer group and one kind, one after the other, cut into equal parts.

    Attributes:
        kind: what its parameters have in common besides; ranks that hold the same ones have the same kinds.
        comm: the ranks that hold the same parameters.
        parts, own: into how many parts it is cut, and which one is this rank's.
        start: place of its first element in the flat buffer of all buckets.
        offsets: of each parameter, from ``start``.
        part: elements of one part; the last part ends with padding.
    """

    group: int
    dtype: torch.dtype
    kind: Hashable
    comm: Communicator
    parts: int
    own: int
    start: int = 0
    part: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    elements: int = 0

    @property
    def length(self) -> int:
        """Elements, with the padding."""
        return self.part * self.parts

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``[length]``: a view."""
        return whole[self.own * self.part : (self.own + 1) * self.part]

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.offsets.append(self.elements)
        self.elements += parameter.numel()


def trained_parameters(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those with ``requires_grad``, each once.

    Raises:
        InvalidUsage: nothing to train, several devices, a parameter that is not a plain real floating-point tensor.
    """
    found = list({id(p): p for p in parameters if p.requires_grad}.values())
    if not found:
        raise InvalidUsage("the model has no parameter with requires_grad; there is nothing to train")
    devices = sorted({str(p.device) for p in found})
    if len(devices) > 1:
        raise InvalidUsage(f"the parameters are on {', '.join(devices)}; a rank's model must be on one device")
    if wrong := [p.dtype for p in found if not p.dtype.is_floating_point]:
        raise InvalidUsage(f"a parameter has dtype {wrong[0]}; real floating-point parameters were expected")
    return found


def make_buckets(
    parameters: Sequence[nn.Parameter],
    groups: Sequence[dict[str, object]],
    *,
    dtype: torch.dtype | None,
    elements: int,
    zero: int,
    kind_of: Callable[[nn.Parameter], Hashable],
    comm_of: Callable[[Hashable], Communicator],
) -> list[Bucket]:
    """Buckets of about ``elements`` elements, in the order in which a backward pass ends them: from the last parameter.

    Args:
        groups: the optimizer's ``param_groups``.
        dtype: the type that the parameters will have; None: their own.
        zero: 1: a bucket is cut into a part for each of the ranks that hold its parameters; 0: it is one part.
        kind_of: parameters of different kinds are never in one bucket.
        comm_of: by the kind, the ranks that hold the same parameters.

    Raises:
        InvalidUsage: the optimizer does not hold exactly these parameters.
    """
    group_of = {id(p): place for place, group in enumerate(groups) for p in group["params"]}  # type: ignore[attr-defined]
    missing = sum(id(p) not in group_of for p in parameters)
    others = len(group_of) + missing - len(parameters)
    if missing or others:
        raise InvalidUsage(
            f"the optimizer lacks {missing} of the model's {len(parameters)} parameters with requires_grad, and holds "
            f"{others} others (frozen, or not the model's); make it over exactly those with requires_grad"
        )
    open_buckets: dict[tuple[int, torch.dtype, Hashable], Bucket] = {}
    buckets: list[Bucket] = []
    for parameter in reversed(parameters):
        key = group_of[id(parameter)], dtype or parameter.dtype, kind_of(parameter)
        if key not in open_buckets:
            comm = comm_of(key[2])
            open_buckets[key] = Bucket(*key, comm, *((comm.size, comm.rank) if zero else (1, 0)))
        bucket = open_buckets[key]
        bucket.add(parameter)
        if bucket.elements >= elements:
            buckets.append(open_buckets.pop(key))
    buckets += open_buckets.values()
    start = 0
    for bucket in buckets:
        bucket.start = start
        bucket.part = -(-bucket.elements // (bucket.parts * _ALIGNED)) * _ALIGNED
        start += bucket.length
    return buckets

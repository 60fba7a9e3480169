"""Which parameters are reduced together, and where their gradients lie in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage

__all__ = ["Bucket", "make_buckets", "trained_parameters"]

_ALIGNED = 16
"""Elements to whose multiple a rank's part is rounded up, so that parts begin at whole cache lines."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one type and one optimizer group, one after the other, cut into equal parts.

    Attributes:
        start: place of its first element in the flat buffer of all buckets.
        offsets: of each parameter, from ``start``.
        part: elements of one part; the last part ends with padding.
    """

    group: int
    dtype: torch.dtype
    start: int = 0
    part: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    elements: int = 0

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
    parts: int,
    elements: int,
) -> list[Bucket]:
    """Buckets of about ``elements`` elements, in the order in which a backward pass ends them: from the last parameter.

    Args:
        groups: the optimizer's ``param_groups``.
        dtype: the type that the parameters will have; None: their own.
        parts: into how many a bucket is cut.

    Raises:
        InvalidUsage: the optimizer does not hold exactly these parameters.
    """
    group_of = {id(p): place for place, group in enumerate(groups) for p in group["params"]}  # type: ignore[attr-defined]
    missing = sum(id(p) not in group_of for p in parameters)
    if missing or len(group_of) != len(parameters):
        raise InvalidUsage(
            f"the optimizer holds {len(group_of)} parameters, and of the model's {len(parameters)} with requires_grad "
            f"{missing} are not among them; make it over exactly these"
        )
    open_buckets: dict[tuple[int, torch.dtype], Bucket] = {}
    buckets: list[Bucket] = []
    for parameter in reversed(parameters):
        key = group_of[id(parameter)], dtype or parameter.dtype
        bucket = open_buckets.setdefault(key, Bucket(*key))
        bucket.add(parameter)
        if bucket.elements >= elements:
            buckets.append(open_buckets.pop(key))
    buckets += open_buckets.values()
    start = 0
    for bucket in buckets:
        bucket.start = start
        bucket.part = -(-bucket.elements // (parts * _ALIGNED)) * _ALIGNED
        start += bucket.part * parts
    return buckets

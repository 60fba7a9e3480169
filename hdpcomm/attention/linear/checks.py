"""Checks that the linear layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention.api import check_finite
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import Pack
from hdpcomm.attention.tree_layout import TokenLayout
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["check_all_finite", "check_linear", "check_states", "summary_of", "token_layouts"]

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def token_layouts(pack: Pack, comm: Communicator | None) -> tuple[TokenLayout, TokenLayout]:
    """The layouts of a call's tokens, and of these and the tokens of earlier slices that they see. Raises InvalidUsage,
    also for a mask."""
    layouts = pack.token_layouts(1 if comm is None else comm.size)
    layouts[0].check_attended()
    return layouts


def check_linear(tensors: dict[str, Tensor], layout: Layout, comm: Communicator | None) -> None:
    """Checks the types, devices and tokens of a call's tensors, [T_local, ...] each. Raises InvalidUsage."""
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.dtype not in _TYPES:
            raise InvalidUsage(f"{name} has type {x.dtype}; expected float64, float32, bfloat16 or float16")
        if x.device != first.device or x.device.type not in ("cpu", "cuda"):
            raise InvalidUsage(
                f"{', '.join(tensors)} must be on one device, cpu or cuda; got "
                f"{', '.join(str(other.device) for other in tensors.values())}"
            )
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    for name, x in tensors.items():
        if x.shape[0] != layout.rows(rank):
            raise InvalidUsage(
                f"{name} has {x.shape[0]} tokens; under cu_seqlens, rank {rank} of {size} holds {layout.rows(rank)} "
                "(see shard())"
            )


def check_states(out: Tensor) -> InvalidUsage | None:
    """The error for an output that is not a number."""
    if bool(torch.isfinite(out.detach().sum(dtype=torch.float64))):
        return None
    bad = ~torch.isfinite(out.detach()).flatten(1).all(1)
    if not bool(bad.any()):
        return None
    return InvalidUsage(
        f"the output of {int(bad.sum())} of {len(bad)} local tokens is not a number (first: local token "
        f"{int(bad.nonzero()[0])}): the state overflows; check that g is not above 0, that keys are normalised and "
        "that beta is at most 2 / |k|^2"
    )


def check_all_finite(tensors: dict[str, Tensor]) -> None:
    """Raises InvalidUsage for NaN or infinity in a tensor [tokens, heads(, dim)]."""
    for name, x in tensors.items():
        check_finite(name, x[..., None] if x.ndim == 2 else x)


def summary_of(layout: Layout, settings: str) -> tuple[str, str]:
    """(all that must be the same on all ranks, a summary of it for messages)."""
    pack = layout.facts
    return f"{pack[0]} {settings}", f"{pack[1]}, {settings}"

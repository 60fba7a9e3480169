"""Recomputation: layers that keep only their input and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdpcomm.attention import carry_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.routing import Routings
from hdpcomm.offload.layers import find_layers

__all__ = ["is_recomputed", "recomputed_layers", "set_recompute"]


class _Recomputed:
    """A layer's forward inside an activation checkpoint.

    Only ``forward`` is inside, so that the layer's hooks (offload, FSDP2) run once, as they would without.
    """

    def __init__(self, forward: Callable[..., Any], own: bool) -> None:
        self.forward = forward
        self.own = own
        """The layer had a forward of its own before, beside that of its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=_carry, **kwargs)


class _Both:
    """Two blocks at once; may be entered again and again, as each of them may."""

    def __init__(self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        self._outer.__exit__(kind, error, trace)


def _carry() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a layer's forward pass and its recomputation run in: one pack, and one routing of each layer of experts."""
    (first, again), routings = carry_pack(), Routings()
    return _Both(first, routings.forward()), _Both(again, routings.again())


def recomputed_layers(model: nn.Module) -> int:
    """How many layers :func:`set_recompute` has last made recompute. Local."""
    return sum(is_recomputed(module) for module in model.modules())


def is_recomputed(layer: nn.Module) -> bool:
    """Whether :func:`set_recompute` has made this layer recompute. Local."""
    return isinstance(vars(layer).get("forward"), _Recomputed)


def set_recompute(model: nn.Module, recompute: str | int) -> int:
    """Chooses which layers of a model are computed again in the backward pass; returns how many.

    A recomputed layer keeps its input only and costs one more forward pass. The last call counts; ``"none"`` leaves the
    model as it was. Attention that is computed again communicates again: choose alike on all ranks. Local.

    Args:
        model: its layers are those of its largest ``nn.ModuleList``, as for :class:`hdpcomm.offload.ActivationOffload`.
        recompute: ``"none"``, ``"full"``, or the number of layers, counted from the first one.

    Raises:
        InvalidUsage: another value, more layers than there are, or a model without a list of layers.
    """
    if recompute == "none" and not recomputed_layers(model):
        return 0
    layers = find_layers(model)
    wanted = {"none": 0, "full": len(layers)}.get(recompute, recompute) if isinstance(recompute, str) else recompute
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(layers):
        raise InvalidUsage(
            f"recompute is {recompute!r}; give 'none', 'full' or a number of layers from 0 to {len(layers)}"
        )
    for place, layer in enumerate(layers):
        current = vars(layer).get("forward")
        if place < wanted and not isinstance(current, _Recomputed):
            layer.forward = _Recomputed(layer.forward, own=current is not None)
        elif place >= wanted and isinstance(current, _Recomputed):
            if current.own:
                layer.forward = current.forward
            else:
                del layer.forward
    return wanted

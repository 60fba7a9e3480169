"""An exponential moving average of the weights, in the optimizer's state: cut, kept and moved with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage

__all__ = ["AVERAGE", "average_weights", "first_average", "swap_averages"]

AVERAGE = "average"
"""The decay among a group's options, and the tensor in a parameter's state."""
_COUNT = "averaged"


def average_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """From now on each step of the optimizer moves an average of its parameters: average = d average + (1 - d) weights,
    with d = min(decay, (1 + n) / (10 + n)) after n steps, and the weights themselves after the first. It is a part of
    the optimizer's state, so that a trainer cuts it with ``zero``, and keeps it in checkpoints and in other ranks'
    memory; :meth:`hdpcomm.train.Trainer.averaged` puts it in the place of the weights. Local; before the trainer is
    made.

    Raises: InvalidUsage for a decay that is not between 0 and 1, and an optimizer that has one or has made a step.
    """
    if not 0 < decay < 1:
        raise InvalidUsage(f"the decay of an average is {decay}; give a number between 0 and 1, like 0.999")
    if any(optimizer.state.values()) or any(AVERAGE in group for group in optimizer.param_groups):
        raise InvalidUsage("the optimizer has made a step, or averages already; call average_weights() once, before")
    for group in optimizer.param_groups:
        group[AVERAGE], group[_COUNT] = decay, 0
    optimizer.register_step_post_hook(_move)


def _move(optimizer: torch.optim.Optimizer, *_: object) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            count = group[_COUNT]
            group[_COUNT] = count + 1
            pairs = [(first_average(optimizer.state[p], p), p.detach()) for p in group["params"] if p.requires_grad]
            if not pairs:
                continue
            averages, weights = map(list, zip(*pairs, strict=True))
            if count == 0:
                torch._foreach_copy_(averages, weights)
            else:
                torch._foreach_lerp_(averages, weights, 1 - min(group[AVERAGE], (1 + count) / (10 + count)))


def first_average(state: dict[str, Any], parameter: Tensor) -> Tensor:
    """The average of a parameter; made in ``state``, of the weights of now, if there is none. Local."""
    if AVERAGE not in state:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise InvalidUsage(
                f"an average of weights in {parameter.dtype} does not move; give the trainer dtype=, whose master "
                "weights are in fp32"
            )
        state[AVERAGE] = parameter.detach().clone()
    found: Tensor = state[AVERAGE]
    return found


@torch.no_grad()
def swap_averages(optimizer: torch.optim.Optimizer) -> None:
    """Exchanges weights and averages in place. Local."""
    for weights, average in _pairs(optimizer):
        kept = weights.clone()
        weights.copy_(average)
        average.copy_(kept)


def _pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for group in optimizer.param_groups:
        if group.get(_COUNT):
            yield from ((p.detach(), optimizer.state[p][AVERAGE]) for p in group["params"] if p.requires_grad)

"""How evenly a step's tokens went to the experts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.models.expert_group import ExpertLoad
from hdpcomm.train.metrics import StepMetrics

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["add_expert_load", "expert_loads"]


def expert_loads(model: nn.Module) -> list[ExpertLoad]:
    """Those of the model's layers with experts. Local."""
    return [load for module in model.modules() if isinstance(load := getattr(module, "load", None), ExpertLoad)]


def add_expert_load(
    metrics: StepMetrics, loads: Sequence[ExpertLoad], tokens: Sequence[Communicator], everyone: Communicator
) -> StepMetrics:
    """The metrics with those of the experts. Collective over ``everyone``, if there are experts.

    Args:
        loads: of the layers on this rank, since the step began.
        tokens: communicators over all of which together the tokens of a batch lie.
    """
    if not loads:
        return metrics
    table = torch.stack([torch.stack((load.routed, load.computed)) for load in loads]).cpu()
    for comm in tokens:
        comm.all_reduce(table)
    routed, computed = table.unbind(1)  # [layers, experts]
    dropped = (routed.sum(1) - computed.sum(1)).max()
    most = torch.stack((computed.double().mean(), computed.max().double(), dropped.double()))
    everyone.all_reduce(most, "max")
    mean, busiest, dropped = most.tolist()
    return replace(metrics, expert_tokens_mean=mean, expert_tokens_max=int(busiest), expert_tokens_dropped=int(dropped))

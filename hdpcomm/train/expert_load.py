"""How evenly a step's tokens went to the experts of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.models.expert_group import ExpertLoad
from hdpcomm.train.metrics import StepMetrics

if TYPE_CHECKING:
    from hdpcomm.comm.mesh import Mesh

__all__ = ["add_expert_load", "expert_loads", "uncounted"]


def expert_loads(model: nn.Module) -> list[ExpertLoad]:
    """Loads of the model's layers with experts. Local."""
    return [load for module in model.modules() if isinstance(load := getattr(module, "load", None), ExpertLoad)]


@contextmanager
def uncounted(loads: Sequence[ExpertLoad]) -> Iterator[None]:
    """Context of passes that will run again. Local."""
    for load in loads:
        load.counts = False
    try:
        yield
    finally:
        for load in loads:
            load.counts = True


def add_expert_load(metrics: StepMetrics, loads: Sequence[ExpertLoad], mesh: Mesh) -> StepMetrics:
    """The metrics with those of the experts. Collective over the mesh, if there are experts.

    Args:
        loads: of the layers on this rank, since the step began; none where another stage has all layers with experts.
    """
    if not loads and mesh.expert == 1:
        return metrics
    most = torch.zeros(3, dtype=torch.float64)
    if loads:
        table = torch.stack([torch.stack((load.routed, load.computed)) for load in loads]).cpu()
        for comm in (mesh.hdp_comm, mesh.tensor_comm):  # over both together lie the tokens of a batch
            comm.all_reduce(table)
        routed, computed = table.unbind(1)  # [layers, experts]
        dropped = (routed.sum(1) - computed.sum(1)).max()
        most = torch.stack((computed.double().mean(), computed.max().double(), dropped.double()))
    mesh.comm.all_reduce(most, "max")
    mean, busiest, dropped = most.tolist()
    return replace(metrics, expert_tokens_mean=mean, expert_tokens_max=int(busiest), expert_tokens_dropped=int(dropped))

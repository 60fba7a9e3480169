"""Planners of the ranks at hand, by what steps of a model take on them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.costs import profile_cost_model
from hdpcomm.measure.memory import profile_activations
from hdpcomm.models.recompute import recomputed_layers
from hdpcomm.plan import CostModel, MemoryModel, ModelSpec, Planner

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.offload import ActivationOffload

__all__ = ["measured_planner"]


def measured_planner(
    model: nn.Module,
    comm: Communicator | Mesh,
    *,
    capacity: int,
    longest: int,
    policy: str = "balanced",
    queue: bool = False,
    slices: int = 1,
    spec: ModelSpec | None = None,
    offload: ActivationOffload | None = None,
    cost_model: CostModel | None = None,
) -> Planner:
    """See :meth:`hdpcomm.plan.Planner.measured`; ``cost_model``: known, so that it is not measured."""
    mesh = comm if isinstance(comm, Mesh) else Mesh(comm, placement=range(comm.size))
    if mesh.pipeline > 1:
        raise InvalidUsage(
            f"Planner.measured() runs whole models, and the mesh has pipelines of {mesh.pipeline} stages; measure a "
            "model of one stage's layers by profile_cost_model() and give it to Planner(None, mesh.cluster(...))"
        )
    if slices > 1 and spec is None:
        raise InvalidUsage(
            f"slices={slices}: it is not known how much slices of this model keep for later ones; give spec=, a "
            "ModelSpec, or slices=1 and more ranks, a larger capacity or offload="
        )
    cluster = mesh.cluster(capacity=capacity)
    longest = min(longest, capacity)
    if cost_model is None:
        cost_model = profile_cost_model(model, mesh.hdp_comm, longest=longest, everyone=mesh.comm)
    memory = MemoryModel(capacity)
    if offload is not None:
        memory = profile_activations(model, offload, mesh.comm, tokens=max(2, longest), capacity=capacity)
    if slices > 1 and spec is not None:
        spec = replace(spec, dtype_bytes=next(model.parameters()).element_size())
        whole = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())  # of transformers
        recompute = spec.layers if whole else recomputed_layers(model)
        memory = memory.with_kept(spec, cluster, recompute=recompute)
    return Planner(None, cluster, policy, cost_model, memory=memory, queue=queue, slices=slices)

"""The part of a run whose ranks share a model: pipelines, and ranks that share layers or experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import nn

from hdpcomm.comm import Mesh
from hdpcomm.models import compile_layers, use_float8
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.offload.activations import SMALLEST_OFFLOAD
from hdpcomm.run.config import RunConfig
from hdpcomm.run.model import new_part
from hdpcomm.run.optimizers import new_optimizer
from hdpcomm.train import Trainer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.models import Weights
    from hdpcomm.plan import Planner

__all__ = ["device_recompute", "mesh_of", "new_trainer", "recompute_by_device", "stage_recompute", "trained_part"]


def mesh_of(comm: Communicator, config: RunConfig) -> Mesh:
    """The mesh of a run: without pipelines, tensor and expert ranks, those of ``comm`` in their order. Local."""
    placement = None if config.on_mesh else range(comm.size)
    return Mesh(comm, **config.mesh_sizes, placement=placement)


def new_trainer(
    comm: Communicator,
    config: RunConfig,
    planner: Planner,
    pool: PinnedPool | None,
    weights: Callable[[nn.Module], Weights],
) -> Trainer:
    """The trainer of this rank's part of the model. Collective over ``comm``.

    Args:
        pool: for offloaded activations; ``None``: none are.
    """
    mesh = mesh_of(comm, config)
    options: dict[str, Any] = {
        "max_grad_norm": config.max_grad_norm,
        "zero": int(config.zero),
        "dtype": config.dtype_with_masters,
        "optimizer_offload": config.optimizer_offload,
    }
    parts = trained_part(config, mesh, weights)
    model: Any = parts if mesh.pipeline > 1 else parts[0]
    layers = model if mesh.pipeline == 1 else [block for stage in model for block in stage.blocks]
    offload = None if pool is None else ActivationOffload(pool, layers, min_bytes=SMALLEST_OFFLOAD)
    optimizer = new_optimizer(config, nn.ModuleList(parts) if mesh.pipeline > 1 else parts[0], mesh)
    return Trainer(model, optimizer, planner, mesh, offload=offload, **options)


def trained_part(config: RunConfig, mesh: Mesh, weights: Callable[[nn.Module], Weights] | None) -> list[nn.Module]:
    """The parts of :func:`hdpcomm.run.model.new_part` as a trainer runs them: in FP8, and compiled. Collective."""
    recompute, zero = stage_recompute(config), int(config.zero)
    parts = new_part(config.model, mesh, weights=weights, recompute=recompute, layers=config.stage_layers, zero=zero)
    for part in parts:
        if config.fp8 != "none":
            use_float8(part, config.fp8, exclude=config.fp8_exclude)
        if config.compile:
            compile_layers(part)
    return parts


def stage_recompute(config: RunConfig) -> list[str | int]:
    """Argument of :func:`hdpcomm.models.set_recompute` for each stage; one value without pipelines."""
    stages, count = config.stage_layers, config.recompute
    if isinstance(count, str):
        return [count] * len(stages)
    if isinstance(count, tuple):
        return list(count)
    before = accumulate(stages, initial=0)
    return [min(layers, max(0, count - first)) for layers, first in zip(stages, before, strict=False)]


def device_recompute(config: RunConfig) -> str | int:
    """Argument of :func:`hdpcomm.models.set_recompute` for the layers on the device of a pipeline that recomputes
    most."""
    if isinstance(config.recompute, str):
        return config.recompute
    return max(recompute_by_device(config))


def recompute_by_device(config: RunConfig) -> list[int]:
    """How many layers are recomputed on each device of a pipeline; one number without pipelines."""
    counts = [
        {"none": 0, "full": layers}[each] if isinstance(each, str) else each
        for each, layers in zip(stage_recompute(config), config.stage_layers, strict=True)
    ]
    return [sum(counts[device :: config.pipeline]) for device in range(config.pipeline)]

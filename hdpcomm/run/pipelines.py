"""The part of a run whose ranks are pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.models import Llama, LlamaConfig, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import Mesh, PipelineTrainer, split_llama
from hdpcomm.run.config import RunConfig

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import Planner

__all__ = ["SMALLEST_OFFLOAD", "pipeline_trainer", "stage_recompute"]

SMALLEST_OFFLOAD = 4096  # bytes; smaller tensors are not worth a copy


def pipeline_trainer(
    comm: Communicator,
    config: RunConfig,
    planner: Planner,
    pool: PinnedPool | None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> PipelineTrainer:
    """The trainer of this rank's stage. Collective over ``comm``.

    Args:
        pool: for offloaded activations; ``None``: none are.
    """
    assert isinstance(config.model, LlamaConfig)  # the configuration was checked
    mesh = Mesh(comm, pipeline=config.pipeline)
    model = Llama(config.model, seed=config.seed).to(comm.device)
    stage = split_llama(model, mesh.pipeline)[mesh.stage]
    set_recompute(stage, stage_recompute(config)[mesh.stage])
    offload = None if pool is None else ActivationOffload(pool, stage, min_bytes=SMALLEST_OFFLOAD)
    optimizer = make_optimizer(stage)
    return PipelineTrainer(
        stage, optimizer, planner, mesh, max_grad_norm=config.max_grad_norm, offload=offload,
        check_replicas=config.check_replicas,
    )  # fmt: skip


def stage_recompute(config: RunConfig) -> list[str | int]:
    """Of each stage of a pipeline, what :func:`hdpcomm.models.set_recompute` is to be told; one, without."""
    if isinstance(config.recompute, str):
        return [config.recompute] * config.pipeline
    layers = config.stage_model.layers
    return [min(layers, max(0, config.recompute - stage * layers)) for stage in range(config.pipeline)]

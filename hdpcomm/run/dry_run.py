"""A run without training: what the first steps would take, and the memory of a full device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, cast

import torch

from hdpcomm.comm.launchers import local_place
from hdpcomm.comm.topology import by_host, domains_of
from hdpcomm.data import BatchReader, Corpus, GlobalBatch
from hdpcomm.models import NewWeights
from hdpcomm.plan import Planner
from hdpcomm.plan.memory import StepMemory
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import make_planner, measure_costs
from hdpcomm.run.limits import batch_sampler, check_limits
from hdpcomm.run.memory import (
    MemoryBeside,
    free_models,
    measure_memory,
    memory_beside,
    within_memory,
)
from hdpcomm.run.model import model_on_meta
from hdpcomm.run.pipelines import mesh_of, new_trainer, recompute_by_device
from hdpcomm.sim import StepReport, simulate_step
from hdpcomm.train.step.items import encoding_s, items_on_devices

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.models.media import MediaEncoder
    from hdpcomm.offload import PinnedPool

__all__ = ["DryRun", "dry_run"]

STEPS = 4
_SHORT, _SHORT_STEPS = 8, 3


@dataclass(frozen=True, slots=True)
class DryRun:
    """Outcome of :func:`dry_run`, equal on every rank.

    Attributes:
        reports: by policy, the simulated steps.
        devices: what a step takes on each device of a pipeline, or on each rank where there is none.
        recompute: layers that each of them recomputes.
        beside: what each rank takes beside that, for offload and messages.
    """

    ranks: int
    parameters: int
    reports: dict[str, list[StepReport]]
    devices: tuple[StepMemory, ...]
    recompute: tuple[int, ...]
    beside: MemoryBeside


def dry_run(comm: Communicator, corpus: Corpus, config: RunConfig, *, elastic: bool = False) -> DryRun:
    """Measures the model as a run would, and plans and simulates its first steps. Collective over ``comm``.

    Nothing is trained or written. ``elastic``: the run would go on when ranks die. Raises: InvalidUsage as
    :func:`hdpcomm.run.train`.
    """
    comm = by_host(comm, domains_of(comm))
    check_limits(corpus, config, ranks=comm.size)
    config, capacity, found = within_memory(comm, config)
    devices = found or measure_memory(comm, config)
    costs = measure_costs(comm, config, longest=corpus.longest, capacity=capacity)
    planners = {policy: make_planner(comm, corpus, config, costs, policy) for policy in config.policies}
    after_s = _after_passes_s(comm, config, planners, costs.pool)
    _, on_host = local_place(comm.rank, comm.size)
    elastic_ranks = comm.size if elastic else 0
    beside = memory_beside(config, on_host, on_devices=comm.device.type == "cuda", elastic_ranks=elastic_ranks)
    recompute = recompute_by_device(config)
    sampler = batch_sampler(corpus, config)
    model, mesh = model_on_meta(config.model), mesh_of(comm, config)
    batches = [sampler.batch(step) for step in range(min(STEPS, config.steps))]

    def beside_passes_s(planner: Planner, batch: GlobalBatch) -> float:
        items = BatchReader(corpus, batch.ids).items
        if not any(items):
            return after_s
        encoder = cast("MediaEncoder", model.media)
        placed = items_on_devices(items, batch.lengths, encoder, planner, mesh)
        return after_s + encoding_s(placed, encoder, planner)

    reports = {
        policy: [simulate_step(planner, each.lengths).followed_by(beside_passes_s(planner, each)) for each in batches]
        for policy, planner in planners.items()
    }
    return DryRun(
        ranks=comm.size,
        parameters=sum(p.numel() for p in model.parameters()),
        reports=reports,
        devices=devices,
        recompute=tuple(recompute),
        beside=beside,
    )


def _after_passes_s(
    comm: Communicator, config: RunConfig, planners: Mapping[str, Planner], pool: PinnedPool | None
) -> float:
    """Seconds of a step outside its passes: agreement, sums of gradients, clipping, optimizer. Collective; the median
    of some steps of one short sequence a rank."""
    free_models()
    planner = next((each for policy, each in planners.items() if policy != "ddp"), None)
    if planner is None:
        return 0.0
    trainer = new_trainer(comm, config, planner, pool, partial(NewWeights, seed=config.seed))
    tokens = torch.zeros(min(_SHORT, config.capacity), dtype=torch.int64)
    found = []
    for _ in range(_SHORT_STEPS + 1):
        metrics = trainer.step([len(tokens)] * planner.cluster.ranks, lambda _: tokens)
        ended = [span.end_s for span in trainer.timeline.spans if span.phase == "micro-batch"]
        passes = torch.tensor([max(ended, default=0.0)])
        comm.all_reduce(passes, "max")
        found.append(metrics.seconds - metrics.plan_wait_s - float(passes))
    return max(0.0, median(found[1:]))

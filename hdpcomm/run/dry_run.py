"""A run without training: what the first steps would take, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch

from hdpcomm.comm import Mesh
from hdpcomm.comm.absent import AbsentRanks
from hdpcomm.comm.launchers import local_place
from hdpcomm.comm.topology import by_host, domains_of
from hdpcomm.data import Corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import NewWeights
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner
from hdpcomm.plan.memory import StepMemory
from hdpcomm.plan.presets import NODE_DEVICES, device_in
from hdpcomm.run.batches import batch_sampler
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import make_planner, measure_costs, planner_of
from hdpcomm.run.limits import check_limits
from hdpcomm.run.memory import (
    MemoryBeside,
    fit_recompute,
    fit_zero,
    free_models,
    measure_memory,
    memory_beside,
    predict_memory,
    within_memory,
)
from hdpcomm.run.model import model_on_meta, model_spec
from hdpcomm.run.pipelines import new_trainer, recompute_by_device
from hdpcomm.sim import StepReport, simulate_step

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.offload import PinnedPool

__all__ = ["DryRun", "RankMemory", "cluster_elsewhere", "dry_run", "dry_run_elsewhere", "planners_elsewhere"]

STEPS = 4
_SHORT, _SHORT_STEPS = 8, 3


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Predicted most bytes of a rank over the planned steps; of a pipeline, on the device that is fullest.

    Attributes:
        states: parameters, gradients, master weights and the optimizer.
        activations: the most that a pass over the tokens that the rank holds at a time adds.
    """

    tokens: int
    states: float
    activations: float


@dataclass(frozen=True, slots=True)
class DryRun:
    """Outcome of :func:`dry_run`, equal on every rank.

    Attributes:
        reports: by policy, the simulated steps.
        memory: by policy, by rank.
        token_bytes: activations of a token, as measured.
        devices: what a step takes on each device of a pipeline, or on each rank where there is none.
        recompute: layers that each of them recomputes.
        beside: what each rank takes beside that, for offload and messages.
        elsewhere: the kind of device that the ranks are, which are not here; ``None``: all was measured on them.
    """

    ranks: int
    parameters: int
    token_bytes: float
    reports: dict[str, list[StepReport]]
    memory: dict[str, list[RankMemory]]
    devices: tuple[StepMemory, ...] = ()
    recompute: tuple[int, ...] = ()
    beside: MemoryBeside | None = None
    elsewhere: str | None = None


def dry_run(comm: Communicator, corpus: Corpus, config: RunConfig, *, elastic: bool = False) -> DryRun:
    """Measures the model as a run would, and plans and simulates its first steps. Collective over ``comm``.

    Nothing is trained or written. ``elastic``: the run would go on when ranks die. Raises: InvalidUsage as
    :func:`hdpcomm.run.train`.
    """
    comm = by_host(comm, domains_of(comm))
    check_limits(corpus, config, ranks=comm.size)
    config, capacity, found = within_memory(comm, config)
    devices = found or measure_memory(comm, config)
    costs = measure_costs(comm, config, longest=int(corpus.lengths.max()), capacity=capacity)
    planners = {policy: make_planner(comm, corpus, config, costs, policy) for policy in config.policies}
    after_s = _after_passes_s(comm, config, planners, costs.pool)
    _, on_host = local_place(comm.rank, comm.size)
    elastic_ranks = comm.size if elastic else 0
    beside = memory_beside(config, on_host, on_devices=comm.device.type == "cuda", elastic_ranks=elastic_ranks)
    return replace(_dry_run(corpus, config, comm.size, planners, devices, after_s), beside=beside)


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


def dry_run_elsewhere(corpus: Corpus, config: RunConfig, ranks: int, device: str) -> DryRun:
    """A dry run for ranks that are not here, of a kind of device (``hdpcomm.plan.DEVICES``): nothing is measured and
    nothing allocated, so models and ranks may be of any number. Local.

    Steps are simulated with the device's preset, in the run's type and with its recomputation, for models that it can
    be told (:func:`hdpcomm.run.model.model_spec`).

    Raises: InvalidUsage as :func:`hdpcomm.run.train`; the ranks cannot be such a mesh, or the device is not known.
    """
    check_limits(corpus, config, ranks=ranks)
    if "ddp" in config.policies or config.calibration is not None:
        raise InvalidUsage("ranks elsewhere have no calibration and do not run DDP; leave out --calibration and ddp")
    cluster = cluster_elsewhere(config, ranks, device)
    if config.zero == "auto":
        most = 1 if cluster.ranks > 1 and cluster.ranks_per_node == 1 else 3
        zero = fit_zero(None, config, ranks, cluster.ranks_per_node, most=most)
        config = replace(config, zero=zero, memory=config.memory if config.recompute == "auto" else 0)
    devices = predict_memory(config, ranks, cluster.ranks_per_node)
    if config.recompute == "auto":
        config, _ = fit_recompute(config, devices)
    planners = planners_elsewhere(config, cluster, devices, context=corpus.longest)
    beside = memory_beside(config, min(ranks, NODE_DEVICES), on_devices=True)
    return replace(_dry_run(corpus, config, ranks, planners, devices), beside=beside, elsewhere=device)


def cluster_elsewhere(config: RunConfig, ranks: int, device: str) -> ClusterSpec:
    """The HDP ranks that so many devices of a kind make, on nodes of :data:`hdpcomm.plan.presets.NODE_DEVICES`. Local.

    Raises: InvalidUsage: they cannot be such a mesh, cannot be cut so, or the kind is not known.
    """
    sizes: dict[str, Any] = {"pipeline": config.pipeline, "tensor": config.tensor, "expert": config.expert}
    cluster = ClusterSpec(
        ranks=Mesh(cast("Communicator", AbsentRanks(ranks)), placement=range(ranks), **sizes).hdp,
        capacity=config.capacity,
        ranks_per_node=max(1, NODE_DEVICES // (config.pipeline * config.tensor)),
        chunks=config.chunks,
        split_backward=config.split_backward,
        offload=config.offload > 0,
        device=device_in(device, config.parameter_dtype.itemsize),
        stage_work=config.stage_work,
        **sizes,
    )
    if config.zero in (2, 3) and cluster.ranks > 1 and cluster.ranks_per_node == 1:
        raise InvalidUsage(
            f"zero {config.zero} cuts weights and gradients among the HDP ranks of a host, and pipeline and tensor "
            f"ranks take all {NODE_DEVICES} {device}s of one; give --zero 1, or fewer of them"
        )
    return cluster


def planners_elsewhere(
    config: RunConfig, cluster: ClusterSpec, devices: Sequence[StepMemory], *, context: int
) -> dict[str, Planner]:
    """By policy, planners with the costs of the cluster's preset; none for a model that is no plain decoder. Local.

    Args:
        devices: memory of a step on each device of a pipeline.
        context: the longest sequence.
    """
    spec = model_spec(config.model)
    if spec is None:
        return {}
    spec = replace(spec, dtype_bytes=config.parameter_dtype.itemsize)
    recompute = recompute_by_device(config)
    share = max(count / memory.layers for count, memory in zip(recompute, devices, strict=True))
    head = 2 * spec.hidden * spec.vocab / spec.linear_flops_per_token
    costs = CostModel.analytic(spec, cluster).with_recompute(share, head)
    memory = MemoryModel.of(spec, cluster).with_kept(spec, cluster, min(_token_bytes(devices, recompute)))
    return {
        policy: planner_of(config, cluster, policy, costs, memory, context=context, spec=spec)
        for policy in config.policies
    }


def _dry_run(
    corpus: Corpus,
    config: RunConfig,
    ranks: int,
    planners: Mapping[str, Planner],
    devices: tuple[StepMemory, ...],
    after_s: float = 0.0,
) -> DryRun:
    recompute = recompute_by_device(config)
    sampler = batch_sampler(corpus, config)
    batches = [sampler.batch(step).lengths for step in range(min(STEPS, config.steps))]
    reports: dict[str, list[StepReport]] = {}
    memory: dict[str, list[RankMemory]] = {}
    for policy, planner in planners.items():
        reports[policy] = [simulate_step(planner, lengths).followed_by(after_s) for lengths in batches]
        most = [
            max(float(report.rank_peak_tokens[rank]) for report in reports[policy])
            for rank in range(planner.cluster.ranks)
        ]
        memory[policy] = [rank_memory(tokens, config.capacity, devices, recompute) for tokens in most]
    return DryRun(
        ranks=ranks,
        parameters=sum(p.numel() for p in model_on_meta(config.model).parameters()),
        token_bytes=max(_token_bytes(devices, recompute)),
        reports=reports,
        memory=memory,
        devices=devices,
        recompute=tuple(recompute),
    )


def _token_bytes(devices: Sequence[StepMemory], recompute: Sequence[int]) -> list[float]:
    """Activations of a token on each device."""
    return [each.line(count).token for each, count in zip(devices, recompute, strict=True)]


def rank_memory(tokens: float, capacity: int, devices: Sequence[StepMemory], recompute: Sequence[int]) -> RankMemory:
    """Memory of the fullest device of a rank. Local.

    Args:
        tokens: the most that the first device holds at once, of all micro-batches in flight.
        capacity: the most of one micro-batch.
        devices, recompute: of each device, what it takes and how many layers it recomputes.
    """
    found = []
    one = min(tokens, float(capacity))
    for memory, count in zip(devices, recompute, strict=True):
        held = tokens * memory.in_flight / devices[0].in_flight
        here = replace(
            memory,
            in_flight=max(1.0, held / one if one else 1.0),
            owing=memory.owing * tokens / devices[0].in_flight / one if one else 0.0,
        )
        found.append(RankMemory(round(held), memory.states, here.activation_bytes(one, count)))
    return max(found, key=lambda each: each.states + each.activations)

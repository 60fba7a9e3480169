"""Costs of steps on this machine, measured once, when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.comm import Mesh
from hdpcomm.comm.topology import domains_of, node_block
from hdpcomm.data import Corpus
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.measure.costs import profile_samples, weights_share
from hdpcomm.measure.memory import profile_activations
from hdpcomm.measure.timing import slowest_s
from hdpcomm.models import NewWeights
from hdpcomm.offload import ActivationOffload, PinnedPool, rank_pool
from hdpcomm.offload.activations import SMALLEST_OFFLOAD
from hdpcomm.plan import Calibration, ClusterSpec, CostModel, CostSample, MemoryModel, ModelSpec, Planner
from hdpcomm.plan.stage_cut import mean_work
from hdpcomm.run.config import RunConfig
from hdpcomm.run.memory import PROFILE_TOKENS, free_models
from hdpcomm.run.model import FolderModel, check_model, fewest_layers, model_facts, model_spec, new_part
from hdpcomm.run.pipelines import device_recompute, recompute_by_device
from hdpcomm.train.step.data_parallel import WholeSequencePlanner

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.run.checkpoints import Checkpoint
    from hdpcomm.run.peer_saves import KeptCheckpoint

__all__ = [
    "Costs",
    "calibration_facts",
    "calibration_of_run",
    "check_calibration",
    "make_planner",
    "measure_costs",
    "measure_offload",
    "planner_of",
    "same_mesh",
    "weights_put_off",
]

_MOVED = 1 << 22
"""Elements whose copies and additions are measured."""
_ONE_DEVICE = {"pipeline": 1, "chunks": 1, "tensor": 1, "expert": 1}


@dataclass(frozen=True, slots=True)
class Costs:
    """Inputs of the planner.

    Attributes:
        capacity: tokens that a rank holds without offload.
        memory: with offload only.
        pool: pinned host memory of this rank, with offload only.
        nics: network interfaces of a host, by a calibration; ``None``: none that its ranks share, or nobody has looked.
    """

    cost_model: CostModel
    capacity: int
    memory: MemoryModel | None = None
    pool: PinnedPool | None = None
    nics: int | None = None


def measure_costs(
    comm: Communicator,
    config: RunConfig,
    *,
    longest: int,
    capacity: int,
    found: Checkpoint | KeptCheckpoint | None = None,
) -> Costs:
    """As measured now, or as the checkpoint or a calibration has them: plans follow them, and so does the order of
    sums. Collective.

    Costs are those of one device, so those of a checkpoint with another mesh are measured anew.

    Args:
        config, capacity: from :func:`hdpcomm.run.memory.within_memory`.
        longest: tokens of the longest sequence; at most ``PROFILE_TOKENS`` and the capacity are measured on a rank.

    Raises: InvalidUsage for a calibration of another model.
    """
    pool = rank_pool(comm, config.offload)
    if found is not None and same_mesh(found, config):
        facts: dict[str, Any] = dict(found.facts)
        memory = facts.get("memory_model")
        return Costs(
            CostModel.from_dict(facts["cost_model"]),
            capacity,
            MemoryModel(**memory) if memory else None,
            pool,
            facts.get("nics"),
        )
    if config.calibration is not None:
        return _calibrated(comm, config, config.calibration, capacity, pool)
    mesh = Mesh(comm, tensor=config.tensor, expert=config.expert)
    check_model(config.model, mesh, seed=config.seed, stages=config.pipeline > 1)
    free_models()
    longest = min(longest, config.capacity, PROFILE_TOKENS)
    split = config.split_backward
    domains = domains_of(mesh.hdp_comm)

    def measured(layers: int) -> tuple[list[CostSample], MemoryModel | None]:
        weights, recompute = partial(NewWeights, seed=config.seed), device_recompute(config)
        few = recompute if isinstance(recompute, str) else round(recompute * layers / config.stage_model.layers)
        (part,) = new_part(replace(config.stage_model, layers=layers), mesh, weights=weights, recompute=[few])
        model = part.to(config.parameter_dtype)
        samples = profile_samples(
            model, mesh.hdp_comm, longest=longest, everyone=comm, split_backward=split, domains=domains
        )
        return samples, None if pool is None else measure_offload(comm, config, model, pool, capacity)

    layers, few = config.stage_model.layers, 0 if config.zero != 3 else fewest_layers(config.stage_model)
    if pool is not None or not 0 < 2 * few < layers:
        samples, memory = measured(layers)
    else:  # a rank may have no room for all of them
        (one, memory), (two, _) = measured(few), measured(2 * few)
        samples = [_of_more_layers(*pair, layers / few) for pair in zip(one, two, strict=True)]
    costs = CostModel.fit(samples)
    if config.zero in (2, 3):
        costs = replace(costs, fixed=costs.fixed + _sharing_s(comm, config, mesh))
    if split:
        costs = replace(costs, weights=weights_put_off(config, weights_share(samples, costs)))
    if isinstance(config.model, FolderModel) and config.model.mtp_weight:  # each depth is a layer more
        costs = costs.at_work(*(1.0 + config.model.depths / layers,) * 3)
    if config.pipeline > 1:
        costs, memory = _of_mean_stage(config, costs, memory)
    if comm.rank == 0:
        LOG.debug(f"measured {len(samples)} micro-batches: {costs}")
    return Costs(costs, capacity, memory, pool)


def _of_mean_stage(
    config: RunConfig, costs: CostModel, memory: MemoryModel | None
) -> tuple[CostModel, MemoryModel | None]:
    """Costs that were measured on the layers of the largest stage with the head, of the mean stage."""
    measured = config.stage_model.layers
    work = mean_work(model_spec(config.model), config.model.layers, config.pipeline, measured)
    if memory is not None:
        memory = replace(memory, copy_s=memory.copy_s * work[2])
    return costs.at_work(*work), memory


def _of_more_layers(one: CostSample, two: CostSample, times: float) -> CostSample:
    """Extrapolates samples of some layers, and of twice as many, to ``times`` as many."""
    more = {
        name: max(0.0, getattr(one, name) + (times - 1) * (getattr(two, name) - getattr(one, name)))
        for name in ("seconds", "processor_s", "weights_s")
    }
    return replace(two, **more | {"seconds": max(two.seconds, more["seconds"])})


def _sharing_s(comm: Communicator, config: RunConfig, mesh: Mesh) -> float:
    """Seconds that each micro-batch takes to pull weights twice (ZeRO-3), and to add its gradients to those of their
    owners (ZeRO-2), while all ranks do. Collective. On GPUs none: copies run beside the passes."""
    if comm.device.type != "cpu":
        return 0.0
    (part,) = new_part(config.stage_model, mesh, weights=None, recompute=["none"])
    elements = sum(p.numel() for p in part.parameters())
    source, target = torch.ones(_MOVED, dtype=config.parameter_dtype), torch.zeros(_MOVED)
    narrow = torch.empty_like(source)

    def share() -> None:
        target.add_(source)
        if config.zero == 3:
            narrow.copy_(source)
            narrow.copy_(source)

    return slowest_s(comm, share) * elements / _MOVED


def measure_offload(
    comm: Communicator, config: RunConfig, model: torch.nn.Module, pool: PinnedPool, capacity: int
) -> MemoryModel:
    """Measures the bytes and the speed of offload into ``pool``, for ranks that hold ``capacity`` tokens without it.
    Collective."""
    offload = ActivationOffload(pool, model, min_bytes=SMALLEST_OFFLOAD)
    tokens = max(2, min(config.capacity, PROFILE_TOKENS // 8))
    return profile_activations(model, offload, comm, tokens=tokens, capacity=capacity)


def _calibrated(
    comm: Communicator, config: RunConfig, calibration: Calibration, capacity: int, pool: PinnedPool | None
) -> Costs:
    check_calibration(calibration, config, ranks=comm.size, ranks_per_node=node_block(comm))
    host_tokens = config.offload / (calibration.memory.token_bytes or 1.0)
    memory = replace(calibration.memory, capacity=capacity, host_tokens=host_tokens) if pool else None
    return Costs(calibration.cost_model, capacity, memory, pool, calibration.cluster.nics)


def calibration_facts(config: RunConfig) -> dict[str, Any]:
    """Facts that a calibration and a run must have in common."""
    recompute = config.recompute
    if isinstance(recompute, int):
        recompute = {0: "none", config.model.layers: "full"}.get(recompute, recompute)
    mesh = {name: getattr(config, name) for name in _ONE_DEVICE}
    return {"model": model_facts(config.model), "dtype": config.dtype, "recompute": recompute, "mesh": mesh}


def calibration_of_run(config: RunConfig, planner: Planner, transport: str) -> Calibration:
    """Calibration of a run's plans, as ``simulate --calibration`` takes it. Local.

    The model is left out: a run's own steps tell what follows their passes.
    """
    facts = calibration_facts(config) | {"transport": transport, "date": date.today().isoformat()}
    return Calibration(planner.cost_model, planner.cluster, planner.memory, facts=facts)


def check_calibration(calibration: Calibration, config: RunConfig, *, ranks: int, ranks_per_node: int) -> None:
    """Raises InvalidUsage if the calibration is of another model, or knows no links or offload that the run needs."""
    for name, value in calibration_facts(config).items():
        known = calibration.facts.get(name, _ONE_DEVICE if name == "mesh" else None)
        if known == value:
            continue
        if isinstance(value, dict) and isinstance(known, dict):
            name = next(key for key in {**value, **known} if value.get(key) != known.get(key))
            known, value = known.get(name), value.get(name)
        raise InvalidUsage(
            f"the calibration was made with {name} {known!r} and this run has {value!r}: calibrate this model, or "
            "leave out --calibration"
        )
    if config.offload and not calibration.memory.offloadable:
        raise InvalidUsage("the calibration knows no offload: make it with --offload, or leave out --calibration")
    calibration.with_ranks(ranks, ranks_per_node)


def make_planner(comm: Communicator, corpus: Corpus, config: RunConfig, costs: Costs, policy: str) -> Planner:
    """The planner of a policy. Collective over ``comm``: ranks that share processors tell each other."""
    mesh = Mesh(comm, **config.mesh_sizes)
    cluster = replace(
        mesh.cluster(
            capacity=costs.capacity,
            nics=costs.nics,
            chunks=config.chunks,
            split_backward=config.split_backward,
            offload=config.offload > 0,
        ),
        stage_work=config.stage_work,
    )
    memory, slices = costs.memory, config.slices if policy == "balanced" else 1
    if slices > 1 and (spec := config.spec) is not None:
        known, recompute = memory or MemoryModel(costs.capacity), max(recompute_by_device(config))
        memory = known.with_kept(spec, cluster, recompute=recompute)
    planner = planner_of(config, cluster, policy, costs.cost_model, memory, context=corpus.longest)
    if planner.slices > 1 or config.offload:
        planner.plan([corpus.longest])  # says so now where it fits in no number of slices
    return planner


def planner_of(
    config: RunConfig,
    cluster: ClusterSpec,
    policy: str,
    cost_model: CostModel,
    memory: MemoryModel | None,
    *,
    context: int,
    spec: ModelSpec | None = None,
) -> Planner:
    """The planner of a policy with the options of a run. Local; ``spec``: for simulators, what follows the passes."""
    if policy == "ddp":
        return WholeSequencePlanner(cluster, cost_model)
    balanced = policy == "balanced"
    return Planner(
        spec, cluster, policy, cost_model, context=context, memory=memory,
        queue=config.queue and balanced, slices=config.slices if balanced else 1,
    )  # fmt: skip


def weights_put_off(config: RunConfig, measured: float) -> float:
    """:attr:`CostModel.weights` of all devices together. Local.

    ``measured``: of as many layers as the largest device has, where as many are recomputed, and put nothing off, as on
    the device that recomputes most. If those are all, it tells nothing, and each other layer counts a third.
    """
    by_device, layers = recompute_by_device(config), config.device_layers
    kept = max(layers) - max(by_device)
    mean = (sum(layers) - sum(by_device)) / sum(layers)
    return measured * mean * max(layers) / kept if kept else mean / 3


def same_mesh(found: Checkpoint | KeptCheckpoint, config: RunConfig) -> bool:
    """Whether a checkpoint's run had devices with as much of the model each, so that its costs are those of this one.
    Local."""
    return _mesh_sizes(found.facts["config"]) == _mesh_sizes(asdict(config))


def _mesh_sizes(config: Mapping[str, Any]) -> list[int]:
    return [config.get(name, 1) for name in _ONE_DEVICE]

"""Which settings bring a model's step within the memory of devices that are not here, and how long it takes then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hdpcomm.comm import Mesh
from hdpcomm.comm.mesh import AbsentRanks
from hdpcomm.errors import InvalidUsage
from hdpcomm.log import LOG
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner
from hdpcomm.plan.memory import StepMemory
from hdpcomm.plan.specs import NODE_DEVICES, device_in
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import planner_of
from hdpcomm.run.memory import fit_recompute, memory_beside, predict_memory
from hdpcomm.run.pipelines import recompute_by_device
from hdpcomm.sim import simulate_step

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Setting", "best_setting", "fit_settings"]

_ALIKE = 1.01
"""Times that differ by less than one in a hundred are the same."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train a model, and what it takes.

    Attributes:
        config: with what is recomputed; all layers where that is not enough.
        device: memory by its parts, of the fullest device.
        recomputed: layers that it recomputes.
        activations: bytes that a pass adds to the states.
        taken: bytes of all of it, with messages.
        limit: bytes that there are.
        step_s: of the simulated step; ``None`` where it does not fit, or the model is no plain decoder.
    """

    config: RunConfig
    device: StepMemory
    recomputed: int
    activations: float
    taken: float
    limit: float
    step_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is as much memory as it takes."""
        return self.taken <= self.limit


def _cluster(config: RunConfig, ranks: int, device: str) -> ClusterSpec:
    """The HDP ranks that so many devices of a kind make, on nodes of :data:`hdpcomm.plan.specs.NODE_DEVICES`. Local.

    Raises: InvalidUsage: they cannot be such a mesh, cannot be cut so, or the kind is not known.
    """
    sizes = config.mesh_sizes
    cluster = ClusterSpec(
        ranks=Mesh(cast("Communicator", AbsentRanks(ranks)), placement=range(ranks), **sizes).hdp,
        capacity=config.capacity,
        ranks_per_node=max(1, NODE_DEVICES // (config.pipeline * config.tensor)),
        chunks=config.chunks,
        split_backward=config.split_backward,
        offload=config.offload > 0,
        device=device_in(device, config.parameter_dtype.itemsize),
        stage_work=config.stage_work,
        **{name: size for name, size in sizes.items() if name != "expert_replicas"},
    )
    if config.zero in (2, 3) and cluster.ranks > 1 and cluster.ranks_per_node == 1:
        raise InvalidUsage(
            f"zero {config.zero} cuts weights and gradients among the HDP ranks of a host, and pipeline and tensor "
            f"ranks take all {NODE_DEVICES} {device}s of one; give --zero 1, or fewer of them"
        )
    return cluster


def _planner(config: RunConfig, cluster: ClusterSpec, devices: Sequence[StepMemory], *, context: int) -> Planner | None:
    """A planner with the costs of the cluster's preset; ``None`` for a model that is no plain decoder. Local.

    Args:
        devices: memory of a step on each device of a pipeline.
        context: the longest sequence.
    """
    spec = config.spec
    if spec is None:
        return None
    recompute = recompute_by_device(config)
    share = max(count / memory.layers for count, memory in zip(recompute, devices, strict=True))
    head = 2 * spec.hidden * spec.vocab / spec.linear_flops_per_token
    costs = CostModel.analytic(spec, cluster).with_recompute(share, head)
    token_bytes = min(memory.line(count).token for memory, count in zip(devices, recompute, strict=True))
    memory = MemoryModel.of(spec, cluster).with_kept(spec, cluster, token_bytes)
    return planner_of(config, cluster, config.policies[0], costs, memory, context=context, spec=spec)


def fit_settings(
    config: RunConfig, lengths: Sequence[int], ranks: int, device: str, *, tensor: Sequence[int], zero: Sequence[int]
) -> Iterator[Setting]:
    """Each number of tensor ranks with each stage of ZeRO, and as few layers recomputed as fit. Local; allocates
    nothing. A combination that cannot be is left out with a warning.

    Args:
        config: with ``memory``, the bytes of a device that a step may take.
        lengths: tokens of the sequences of one step.
        ranks: devices, of the kind ``device`` (``hdpcomm.plan.DEVICES``).

    Raises: InvalidUsage: none of them can be.
    """
    limit, found, refused = config.memory, False, InvalidUsage("no setting was given; give one at least")
    for shared in tensor:
        known: tuple[StepMemory, ...] = ()
        for stage in zero:
            try:
                tried = replace(config, tensor=shared, zero=stage, recompute="auto", memory=limit)
                cluster = _cluster(tried, ranks, device)
                tried = replace(tried, capacity=max(config.capacity, -(-max(lengths) // cluster.ranks)))
                cluster = replace(cluster, capacity=tried.capacity)
                known = predict_memory(tried, ranks, cluster.ranks_per_node, known)
            except InvalidUsage as error:
                if str(refused) != str(error):
                    LOG.warning(f"tensor {shared}, zero {stage} is left out: {error}")
                refused = error
                continue
            found = True
            beside = memory_beside(tried, min(ranks, NODE_DEVICES), on_devices=True).device
            try:
                fitted, _ = fit_recompute(replace(tried, memory=limit - beside), known)
            except InvalidUsage:
                yield _setting(replace(tried, recompute="full", memory=0), known, beside, limit)
                continue
            planner = _planner(fitted, cluster, known, context=max(lengths))
            step_s = None if planner is None else simulate_step(planner, lengths).step_s
            yield replace(_setting(fitted, known, beside, limit), step_s=step_s)
    if not found:
        raise refused


def _setting(config: RunConfig, devices: Sequence[StepMemory], beside: int, limit: float) -> Setting:
    ratio = config.offload_ratio
    _, full, count = max(
        (each.peak_bytes(config.capacity, count, ratio), place, count)
        for place, (each, count) in enumerate(zip(devices, recompute_by_device(config), strict=True))
    )
    device = devices[full]
    activations = device.activation_bytes(config.capacity, count, ratio)
    return Setting(config, device, count, activations, device.peak_bytes(config.capacity, count, ratio) + beside, limit)


def best_setting(settings: Sequence[Setting]) -> Setting | None:
    """The fastest one of those that fit; if several are as fast, the one that cuts least. Local."""
    able = [each for each in settings if each.fits]
    fastest = min((each.step_s or 0.0 for each in able), default=0.0)
    alike = [each for each in able if (each.step_s or 0.0) <= _ALIKE * fastest]
    return min(alike, key=lambda each: (each.recomputed, each.config.zero, each.config.tensor), default=None)

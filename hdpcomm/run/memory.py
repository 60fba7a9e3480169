"""Memory of a step on the devices of a run, and how many layers to recompute so that it fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from hdpcomm._core.transport import segment_bytes
from hdpcomm.arguments import size_text
from hdpcomm.comm import Mesh
from hdpcomm.comm.device.paths import arena_bytes
from hdpcomm.comm.mesh import AbsentRanks
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.memory import Replicas, profile_memory, with_states
from hdpcomm.models import NewWeights, Weights
from hdpcomm.parallel.stages import DeviceStages
from hdpcomm.plan.memory import Line, StepMemory, most_in_flight
from hdpcomm.plan.stage_cut import by_layer
from hdpcomm.run.config import RunConfig
from hdpcomm.run.model import model_on_meta, model_spec, new_part
from hdpcomm.run.optimizers import elementwise_optimizer, is_for_matrices, matrix_optimizer
from hdpcomm.run.pipelines import mesh_of, recompute_by_device
from hdpcomm.train.step.runner import StepSettings
from hdpcomm.train.zero.buckets import Sharding
from hdpcomm.train.zero.matrix_owners import matrix_memory

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = [
    "PROFILE_TOKENS",
    "MemoryBeside",
    "fit_recompute",
    "fit_zero",
    "free_models",
    "measure_memory",
    "memory_beside",
    "predict_memory",
    "within_memory",
]

PROFILE_TOKENS = 4096  # the longest sequence of the profile; enough to see the square in a few seconds


@dataclass(frozen=True, slots=True)
class MemoryBeside:
    """Bytes of a rank beside what a step takes.

    Attributes:
        pool: pinned host memory for offloaded activations.
        shared: the rank's share of the memory through which the ranks of its host send; pages are taken when they are
            first used, so it is the most.
        device: device memory for messages of the ranks of its host; 0: the ranks are on CPUs.
        copies: host memory for what ``--elastic`` keeps of this rank and of others
            (``hdpcomm.train.state.peer_copies``); 0: without it. A rank sends at most a quarter of it a step, and
            nothing where ranks hold the same.
    """

    pool: int
    shared: float
    device: int
    copies: float = 0.0


def memory_beside(config: RunConfig, ranks_on_host: int, *, on_devices: bool, elastic_ranks: int = 0) -> MemoryBeside:
    """Memory beside the model of each of so many ranks of a host, by the settings (``HDPCOMM_*``) here. Local.

    Args:
        elastic_ranks: ranks of a run that goes on when some die; 0: it does not.
    """
    return MemoryBeside(
        pool=config.offload,
        shared=segment_bytes(ranks_on_host) / ranks_on_host,
        device=arena_bytes(ranks_on_host) if on_devices else 0,
        copies=4 * _state_bytes(config) / elastic_ranks if elastic_ranks else 0.0,
    )


def _state_bytes(config: RunConfig) -> float:
    """Weights, masters and the optimizer's state of the whole model, each element once, but tied weights by each of
    their names, as a checkpoint has them."""
    alone = replace(
        config, pipeline=1, tensor=1, expert=1, expert_replicas=0, chunks=1, split_backward=False,
        zero=1 if config.zero else 0, optimizer_offload=False,
    )  # fmt: skip
    (found,) = predict_memory(alone, 1)
    model = model_on_meta(config.model)
    named, once = (sum(p.numel() for _, p in model.named_parameters(remove_duplicate=each)) for each in (False, True))
    return found.states - found.gradients + (named - once) * config.parameter_dtype.itemsize


def free_models() -> None:
    """Gives back the memory of models that nobody uses any more. Local.

    Layers that are cut hold themselves in circles, which Python looks for when many objects were made, whatever their
    size; a weight that a graph of autograd has held goes with the second look.
    """
    for _ in range(2):
        gc.collect()


def within_memory(comm: Communicator, config: RunConfig) -> tuple[RunConfig, int, tuple[StepMemory, ...]]:
    """The configuration with ``recompute="auto"`` resolved, the tokens that a rank then holds without offload, and the
    memory of each device of a pipeline that says so (nothing without "auto"). Collective.

    Raises: InvalidUsage if the capacity does not fit whatever is recomputed.
    """
    if config.zero == "auto":
        limit = config.memory if config.recompute == "auto" else 0
        config = replace(config, zero=fit_zero(comm, config), memory=limit)
    if config.recompute != "auto":
        return config, config.capacity, ()
    memory = measure_memory(comm, config)
    return *fit_recompute(config, memory), memory


def fit_zero(
    comm: Communicator | None,
    config: RunConfig,
    ranks: int = 0,
    ranks_per_node: int | None = None,
    *,
    most: int = 3,
) -> int:
    """The least stage of ZeRO with which ``config.memory`` is enough, by :func:`predict_memory`. Local.

    Args:
        comm: the ranks; ``None``: ``ranks`` that are not here, of which ``ranks_per_node`` HDP ranks share a host.
        most: the last stage that they can have.

    Raises: InvalidUsage: there is none.
    """
    if comm is not None:
        ranks, ranks_per_node = comm.size, owners_on_host(mesh_of(comm, config))
    memory: tuple[StepMemory, ...] = ()
    for zero in range(most + 1):
        try:
            tried = replace(config, zero=zero, memory=config.memory if config.recompute == "auto" else 0)
        except InvalidUsage as error:  # such a run cannot have it
            needs = f"zero {zero - 1} needs more than {size_text(config.memory)}"
            raise InvalidUsage(f"--zero auto: {needs}; {error}") from None
        memory = predict_memory(tried, ranks, ranks_per_node, memory)
        if config.recompute != "auto":
            needed = max(
                each.peak_bytes(config.capacity, count, config.offload_ratio)
                for each, count in zip(memory, recompute_by_device(tried), strict=True)
            )
            if needed <= config.memory:
                return zero
            continue
        try:
            fit_recompute(tried, memory)
        except InvalidUsage:
            continue
        return zero
    limit, states = size_text(config.memory), size_text(max(each.states for each in memory))
    raise InvalidUsage(
        f"--zero auto: no stage of ZeRO brings a step within {limit} a rank; with zero {most} it takes {states} "
        "without activations. Give more ranks on each host, or a lower --capacity"
    )


def owners_on_host(mesh: Mesh) -> int:
    """Among how many HDP ranks ZeRO-2 and 3 cut. Local."""
    return Sharding.of(mesh.hdp_comm, 2).parts


def fit_recompute(config: RunConfig, memory: Sequence[StepMemory]) -> tuple[RunConfig, int]:
    """The configuration with ``recompute="auto"`` resolved, and the tokens that a rank then holds without offload.
    Local.

    Each device of a pipeline recomputes as few layers as it has to: the first one, which holds the activations of most
    micro-batches, the most.

    Raises: InvalidUsage if the capacity does not fit whatever is recomputed.
    """
    limit, ratio = config.memory, config.offload_ratio
    fewest = [each.fewest_recomputed(limit, config.capacity, ratio) for each in memory]
    fitting = [each.capacity(limit, recompute) for each, recompute in zip(memory, fewest, strict=True)]
    recompute = fewest[0] if config.pipeline == 1 else _by_stage(fewest, config)
    return replace(config, recompute=recompute, memory=0), min(config.capacity, *fitting)


def _by_stage(by_device: Sequence[int], config: RunConfig) -> tuple[int, ...]:
    """Layers that each stage of the model recomputes, from those of each device, which counts from its first stage's
    first layer."""
    left, found = list(by_device), []
    for stage, layers in enumerate(config.stage_layers):
        found.append(min(layers, left[stage % config.pipeline]))
        left[stage % config.pipeline] -= found[-1]
    return tuple(found)


def measure_memory(comm: Communicator, config: RunConfig) -> tuple[StepMemory, ...]:
    """Measures the memory of a step on each device of a pipeline, or on each rank where there is none, whatever
    is recomputed: the most among the ranks that have the same layers; equal on every rank. Collective.

    With ``zero=3``, where a rank may have no room for the whole model, it is predicted (:func:`predict_memory`)."""
    mesh = Mesh(comm, **config.mesh_sizes)
    owners = owners_on_host(mesh) if config.zero in (2, 3) else mesh.hdp
    if config.zero == 3:
        return predict_memory(config, comm.size, owners)
    profiled = _profiled(config, mesh, partial(NewWeights, seed=config.seed), Replicas(mesh.hdp, owners))
    rows = gather_json(comm, asdict(profiled))
    return tuple(
        _of_device(_largest([rows[rank] for rank in ranks]), config, device)
        for device, ranks in enumerate(mesh.positions.flatten(1).tolist())
    )


_RING = 8
"""HDP ranks of the passes that are predicted: rings of more have sequences so long that KV is passed round, with the
same buffers."""


def predict_memory(
    config: RunConfig, ranks: int, ranks_per_node: int | None = None, known: Sequence[StepMemory] = ()
) -> tuple[StepMemory, ...]:
    """Predicts the memory of a step for ``ranks`` ranks that are not here. Local; allocates nothing, so models and
    ranks may be any number.

    Experts get equal numbers of tokens.

    Args:
        ranks_per_node: HDP ranks that share a host; ``None``: all do.
        known: of a configuration that differs in ``zero`` and what is recomputed only, which takes much less time.

    Raises: InvalidUsage: the ranks cannot be such a mesh.
    """
    hdp = Mesh(cast("Communicator", AbsentRanks(ranks)), placement=range(ranks), **config.mesh_sizes).hdp
    fewer = min(hdp, -(-_RING // config.expert) * config.expert)
    rows: dict[Hashable, dict[str, Any]] = {}
    found = []
    for device in range(config.pipeline):
        ends = device == 0, device == config.pipeline - 1, _kinds_of_device(config, device)
        absent = AbsentRanks(config.pipeline * fewer * config.tensor, device * fewer * config.tensor)
        mesh = Mesh(cast("Communicator", absent), placement=range(absent.size), **config.mesh_sizes)
        if ends not in rows:
            owners, before = min(hdp, ranks_per_node or hdp), known[device] if known else None
            rows[ends] = asdict(_profiled(config, mesh, None, Replicas(hdp, owners), known=before))
        found.append(_of_device(dict(rows[ends]), config, device))
    return tuple(found)


def _kinds_of_device(config: RunConfig, device: int) -> Hashable:
    """Equal for devices of a pipeline with layers of the same kinds, and as many."""
    spec = model_spec(config.model)
    if spec is None:
        return device if config.pipeline > 1 else 0
    layers = iter(by_layer(spec))
    of_stages = [tuple(islice(layers, count)) for count in config.stage_layers]
    return tuple(of_stages[device :: config.pipeline])


def _profiled(
    config: RunConfig,
    mesh: Mesh,
    weights: Callable[[nn.Module], Weights] | None,
    replicas: Replicas,
    *,
    known: StepMemory | None = None,
) -> StepMemory:
    """A device's part of the model as it will be trained, by itself; arguments of
    :func:`hdpcomm.measure.memory.profile_memory`. Collective over the mesh."""
    recompute = ["none"] * config.pipeline * config.chunks
    parts: list[Any] = list(
        new_part(config.model, mesh, weights=weights, recompute=recompute, layers=config.stage_layers)
    )
    model: nn.Module = DeviceStages(parts) if mesh.pipeline > 1 else parts[0]
    model = model.to(config.parameter_dtype)
    matrices = None
    if is_for_matrices(config):
        own = nn.ModuleList(parts) if mesh.pipeline > 1 else model
        make = partial(matrix_optimizer, config)
        matrices = matrix_memory(own, mesh, make, replicas=replicas.all)
    optimizer = partial(elementwise_optimizer, config)
    settings = StepSettings(int(config.zero), config.dtype_with_masters, optimizer_offload=config.optimizer_offload)
    options: dict[str, Any] = {"settings": settings, "matrices": matrices, "replicas": replicas}
    if known is not None:
        return with_states(known, model, optimizer, **options)
    return profile_memory(
        model,
        mesh.hdp_comm,
        optimizer,
        tokens=max(8, min(config.capacity, PROFILE_TOKENS // 8)),
        everyone=mesh.comm,
        split_backward=config.split_backward,
        **options,
    )


def _of_device(row: dict[str, Any], config: RunConfig, device: int) -> StepMemory:
    """A device by itself, and what it holds as one of a pipeline."""
    lines = {name: Line(**row[name]) for name in ("forward", "backward", "recomputed")}
    neighbours = 2 if config.chunks > 1 else (device > 0) + (device < config.pipeline - 1)
    first = config.slices > 1  # slices of a sequence are in flight together, on all devices as on the first one
    row["in_flight"] = most_in_flight(config.pipeline, config.chunks, 0 if first else device)
    if config.split_backward:  # each device may hold as many as the first one, the others when they owe gradients
        row["owing"] = most_in_flight(config.pipeline, config.chunks, 0) - row["in_flight"]
    row["messages"] = row["layer_input"] * neighbours
    return StepMemory(**row | lines)


def _largest(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest value of each figure over all rows."""
    return {
        name: _largest([row[name] for row in rows]) if isinstance(value, Mapping) else max(row[name] for row in rows)
        for name, value in rows[0].items()
    }

"""Measures the costs of a model on these ranks once, for planner, simulator and runs: :func:`calibrate`."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.comm import Mesh
from hdpcomm.comm.topology import (
    by_host,
    domain_block,
    node_block,
    shared_cores,
)
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.costs import profile_samples
from hdpcomm.measure.timing import call_s, slowest_s
from hdpcomm.measure.topology import Topology, measure_topology
from hdpcomm.models import NewWeights
from hdpcomm.offload import PinnedPool, measure_copies, rank_pool
from hdpcomm.plan import Calibration, ClusterSpec, CostModel, DeviceSpec, MemoryModel, ModelSpec
from hdpcomm.run.config import RunConfig
from hdpcomm.run.costs import calibration_facts, measure_offload
from hdpcomm.run.memory import measure_memory
from hdpcomm.run.model import check_model, new_part
from hdpcomm.run.optimizers import elementwise_optimizer
from hdpcomm.run.pipelines import device_recompute
from hdpcomm.sim import optimizer_seconds, reduction_seconds

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["calibrate"]

_REPEATS = 5
_MOST_REDUCED = 1 << 26  # gradients that are reduced to measure it; more take proportionally longer
_COPY_BYTES = 4 << 20


def calibrate(world: Communicator, config: RunConfig) -> Calibration:
    """Measures the model of ``config`` on these ranks. Collective over the whole world; equal on every rank.

    Links, and how many network interfaces the ranks of a host share; ring exchange inside hosts, inside domains
    (``HDPCOMM_DOMAIN``) and between them, with compute beside it, by micro-batches of up to ``config.capacity`` tokens
    a rank; activations; copies to and from host memory; the reduction of the gradients and
    the optimizer. All ranks work at once, as in training. Takes about as long as 20 micro-batches of that capacity.

    Args:
        config: model, capacity, dtype, recompute, zero and offload count.

    Raises:
        InvalidUsage: ``recompute`` is auto, or ``world`` is not what init() returned.
    """
    if config.recompute == "auto" or config.pipeline > 1:
        raise InvalidUsage(
            f"recompute is {config.recompute!r} and pipeline {config.pipeline}; a calibration is that of one number of "
            "recomputed layers (none, full or N) on ranks without pipelines"
        )
    topology = measure_topology(world)
    domains = topology.domain_of_rank
    comm = by_host(world, domains)
    near = None if domains is None else [domains[rank] for rank in comm.ranks]
    mesh = Mesh(comm, placement=range(comm.size))
    check_model(config.model, mesh, seed=config.seed)
    weights = partial(NewWeights, seed=config.seed)
    (model,) = new_part(config.model, mesh, weights=weights, recompute=[device_recompute(config)])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    samples = tuple(
        profile_samples(model.to(config.parameter_dtype), comm, longest=config.capacity, repeats=_REPEATS, domains=near)
    )
    cost = CostModel.fit(samples)
    reduction_s, optimizer_s = _reduction_and_update_s(comm, config, model)
    spec = config.spec
    cluster = ClusterSpec(
        ranks=comm.size,
        ranks_per_node=node_block(comm),
        ranks_per_domain=domain_block(comm, near),
        capacity=config.capacity,
        offload=config.offload > 0,
        cores=shared_cores(comm) if comm.device.type == "cpu" else None,
        nics=topology.nics,
    )
    device = _device(comm, config, topology, spec, cost)
    device = _as_measured(device, spec, cluster, reduction_s, optimizer_s)
    facts = calibration_facts(config) | {
        "parameters": parameters,
        "longest": config.capacity,
        "transport": topology.transport,
        "hosts": len(topology.hosts),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    memory = _memory(comm, config, model)
    cluster = replace(cluster, device=device)
    return Calibration(cost, cluster, memory, spec, facts, reduction_s, optimizer_s, samples)


def _reduction_and_update_s(comm: Communicator, config: RunConfig, model: torch.nn.Module) -> tuple[float, float]:
    """Seconds of the all-reduce of fp32 gradients, and of the optimizer over all parameters. Collective."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    gradients = comm.empty(min(elements, _MOST_REDUCED), dtype=torch.float32).zero_()
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = elementwise_optimizer(config, trained)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    reduction = slowest_s(comm, lambda: comm.all_reduce(gradients)) * elements / gradients.numel()
    update = slowest_s(comm, optimizer.step)
    model.zero_grad(set_to_none=True)
    return reduction, update


def _memory(comm: Communicator, config: RunConfig, model: torch.nn.Module) -> MemoryModel:
    if (pool := rank_pool(comm, config.offload)) is not None:
        return measure_offload(comm, config, model, pool, config.capacity)
    (step,) = measure_memory(comm, config)
    recompute = config.recompute if isinstance(config.recompute, int) else step.layers * (config.recompute == "full")
    line = step.line(recompute)
    return MemoryModel(config.capacity, token_bytes=line.token, state_bytes=step.states + line.fixed)


def _device(
    comm: Communicator, config: RunConfig, topology: Topology, spec: ModelSpec | None, cost: CostModel
) -> DeviceSpec:
    """The device with the rates that were measured, means over the ranks. Collective."""
    pool = PinnedPool(8 * _COPY_BYTES, device=comm.device)
    copied = measure_copies(pool, _COPY_BYTES)
    peak = _matmul_flops(comm.device, config.parameter_dtype)
    shared = torch.tensor([copied, peak, float(_device_bytes(comm))], dtype=torch.float64)
    comm.all_reduce(shared)
    copied, peak, memory = (shared / comm.size).tolist()
    near = topology.intra or topology.inter
    far = topology.inter or topology.intra

    def rate(flops: float, passes: float, seconds: float) -> float:
        return float(min(peak, passes * flops / seconds)) if seconds > 0 else float(peak)

    return DeviceSpec(
        name=_device_name(comm.device),
        linear_flops=rate(spec.linear_flops_per_token, 3.0, cost.linear + cost.piece) if spec else peak,
        attention_flops=rate(spec.attention_flops_per_token_squared, 3.5, cost.attention) if spec else peak,
        peak_flops=peak,
        short_piece=cost.piece / cost.attention if cost.attention else 0.0,
        memory_bytes=memory,
        hbm_bandwidth=copied,
        intra_bandwidth=near.bandwidth if near else copied,
        inter_bandwidth=far.bandwidth if far else copied,
        intra_latency_s=near.latency_s if near else 0.0,
        inter_latency_s=far.latency_s if far else 0.0,
        d2h_bandwidth=copied,
        h2d_bandwidth=copied,
        host_bytes=float(config.offload),
        step_overhead_s=cost.ring_step / (2 * config.model.layers),
        domain_bandwidth=topology.domain.bandwidth if topology.domain else None,
        domain_latency_s=topology.domain.latency_s if topology.domain else None,
    )


def _as_measured(
    device: DeviceSpec, spec: ModelSpec | None, cluster: ClusterSpec, reduction_s: float, optimizer_s: float
) -> DeviceSpec:
    """The device with links and memory for which the simulator's formulas give the seconds that were measured."""
    if spec is None:
        return device
    found = replace(cluster, device=device)
    if cluster.ranks > 1 and reduction_s > 0:
        factor = reduction_seconds(spec, found) / reduction_s
        links: dict[str, Any] = {}
        for link in ("intra", "inter", "domain"):
            if (bandwidth := getattr(device, f"{link}_bandwidth")) is not None:
                links[f"{link}_bandwidth"] = bandwidth * factor
                links[f"{link}_latency_s"] = getattr(device, f"{link}_latency_s") / factor
        device = replace(device, **links)
    return replace(device, hbm_bandwidth=device.hbm_bandwidth * optimizer_seconds(spec, found) / optimizer_s)


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product while the other ranks run theirs. Local."""
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / min(call_s(device, lambda: a @ b) for _ in range(_REPEATS))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def _device_bytes(comm: Communicator) -> int:
    """Memory of this rank's device; of a host's, the share of one of its ranks. Local."""
    if comm.device.type == "cuda":
        return int(torch.cuda.get_device_properties(comm.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // node_block(comm)

"""Times of what follows the last micro-batch of a step: the reduction of the gradients and the optimizer."""

from __future__ import annotations

from hdpcomm.plan import ClusterSpec, CostModel, ModelSpec, StepPlan
from hdpcomm.plan.waves import passes_without_tokens

__all__ = ["optimizer_seconds", "processor_seconds", "reduction_seconds"]

_GRADIENT_BYTES = 4  # fp32, reduce-scattered over all ranks
_OPTIMIZER_BYTES = 28  # read weight, gradient and two moments, write the weight and the moments; fp32


def reduction_seconds(model: ModelSpec, cluster: ClusterSpec) -> float:
    """Seconds of the reduce-scatter of the gradients and the all-gather of the weights (ZeRO-1 over all ranks).

    Both are hierarchical: first inside a node over the fast link, then each device sends its part of the node's sum
    over its own NIC, or its part of the node's (``ClusterSpec.nics``), first inside a domain where there are any
    (``ClusterSpec.ranks_per_domain``, whose ranks share its ``uplinks``). Nothing is hidden behind compute.
    """
    device = cluster.hardware
    volume = model.params / (cluster.tensor * cluster.pipeline)
    volume *= _GRADIENT_BYTES + model.dtype_bytes  # weights are gathered back
    local = cluster.node_ranks
    near = cluster.domain_ranks // local if cluster.ranks_per_domain else 1  # nodes of a domain
    far = -(-cluster.ranks // (near * local))
    domain, domain_latency = device.domain_link if near > 1 else device.inter_link
    inside = (local - 1) / local * volume / max(device.intra_bandwidth, domain)
    nics = local if cluster.nics is None else min(cluster.nics, local)
    between = (near - 1) / near * volume / nics / domain
    uplinks = nics * near if cluster.uplinks is None else min(cluster.uplinks, nics * near)
    beyond = (far - 1) / far * volume / uplinks / device.inter_bandwidth
    latency = (local - 1) * device.intra_latency_s + (near - 1) * domain_latency + (far - 1) * device.inter_latency_s
    return inside + between + beyond + 2 * latency


def optimizer_seconds(model: ModelSpec, cluster: ClusterSpec) -> float:
    """Seconds of AdamW on a rank's share of the parameters, bound by memory bandwidth."""
    share = model.params / (cluster.tensor * cluster.pipeline) / cluster.ranks
    return share * _OPTIMIZER_BYTES / cluster.hardware.hbm_bandwidth


def processor_seconds(plan: StepPlan, costs: CostModel, cluster: ClusterSpec) -> float:
    """Processor seconds of all ranks together for forward and backward of a plan without trees. Local.

    Other than the time of a step, it does not depend on who waits for whom, or shares processors with whom.

    Args:
        costs: ``Calibration.processor_model``, of one device.
    """
    total = costs.fixed * passes_without_tokens(plan.micro_batches, cluster.expert, plan.slices)
    for batch in plan.micro_batches:
        lengths = [sequence.length for sequence in batch.sequences]
        total += len(batch.ranks) * costs.seconds(lengths, len(batch.ranks))
    return total * cluster.pipeline * cluster.tensor

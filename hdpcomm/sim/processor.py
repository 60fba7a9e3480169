"""Processor time of a planned step, for ranks that compute on processors: :func:`processor_seconds`."""

from __future__ import annotations

from hdpcomm.plan import ClusterSpec, CostModel, StepPlan
from hdpcomm.plan.waves import passes_without_tokens

__all__ = ["processor_seconds"]


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

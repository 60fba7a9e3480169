"""Simulation of planned steps on a cluster, which need not exist: one, or many that are planned in the background.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.arguments import check_has
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, ModelSpec, Planner, StepPlan, Tree, TreeFragment
from hdpcomm.plan.fragments import squares_by_id
from hdpcomm.plan.tree import tree_of

__all__ = [
    "StepReport",
    "StreamReport",
    "optimizer_seconds",
    "reduction_seconds",
    "simulate_step",
    "simulate_stream",
]

_GRADIENT_BYTES = 4  # fp32, reduce-scattered over all ranks
_OPTIMIZER_BYTES = 28  # read weight, gradient and two moments, write the weight and the moments; fp32


def reduction_seconds(model: ModelSpec, cluster: ClusterSpec) -> float:
    """Seconds of the reduce-scatter of the gradients and the all-gather of the weights (ZeRO-1 over all ranks).

    Both are hierarchical: first inside a node over the fast link, then each device sends its part of the node's sum
    over its own NIC, or its part of the node's (``ClusterSpec.nics``), first inside a domain where there are any
    (``ClusterSpec.ranks_per_domain``). Nothing is hidden behind compute.
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
    beyond = (far - 1) / far * volume / (nics * near) / device.inter_bandwidth
    latency = (local - 1) * device.intra_latency_s + (near - 1) * domain_latency + (far - 1) * device.inter_latency_s
    return inside + between + beyond + 2 * latency


def optimizer_seconds(model: ModelSpec, cluster: ClusterSpec) -> float:
    """Seconds of AdamW on a rank's share of the parameters, bound by memory bandwidth."""
    share = model.params / (cluster.tensor * cluster.pipeline) / cluster.ranks
    return share * _OPTIMIZER_BYTES / cluster.hardware.hbm_bandwidth


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one simulated step. Shares are of ranks x stages x step time.

    Attributes:
        plan: the plan that was run.
        step_s: seconds from the start to the end of the optimizer.
        compute_s: seconds until the last backward pass of any rank ends.
        sync_s, optimizer_s: seconds of the gradients' reduction and of the optimizer after that (0 without a model).
        tokens_per_s: throughput of the whole cluster.
        mfu: model FLOPs over the data sheet's peak of all devices; ``None`` without a model.
        idle_share: share spent waiting for other ranks, in pipeline bubbles, and at the end of the step.
        exposed_share: share in which rings wait for KV.
        stalled_share: share in which compute waits for copies to or from host memory.
        peak_tokens: most tokens whose activations one rank keeps on the device.
        peak_bytes: activations, weights, gradients and optimizer on that rank; ``None`` without a model.
        spans: int32 [passes, 3]: micro-batch, stage; 0 for forward, 1 for backward, 2 for the gradients of weights that
            split backward passes leave.
        alone: int32 [passes]: the rank that computes gradients of weights, -1 for other passes.
        times: float64 [passes, 2]: start and end.
        rank_end: by rank, seconds until it is done.
        rank_busy: by rank, seconds of compute, summed over its stages.
        rank_peak_tokens: by rank, most tokens on the device.
    """

    plan: StepPlan
    step_s: float
    compute_s: float
    sync_s: float
    optimizer_s: float
    tokens_per_s: float
    mfu: float | None
    idle_share: float
    exposed_share: float
    stalled_share: float
    peak_tokens: float
    peak_bytes: float | None
    spans: NDArray[np.int32]
    alone: NDArray[np.int32]
    times: NDArray[np.float64]
    rank_end: NDArray[np.float64]
    rank_busy: NDArray[np.float64]
    rank_peak_tokens: NDArray[np.float64]

    def followed_by(self, seconds: float) -> StepReport:
        """The step with more seconds after its passes, as they were measured."""
        step = self.step_s + seconds
        share = self.step_s / step if step > 0 else 0.0
        return replace(
            self,
            step_s=step,
            optimizer_s=self.optimizer_s + seconds,
            tokens_per_s=self.tokens_per_s * share,
            idle_share=self.idle_share * share,
            exposed_share=self.exposed_share * share,
            stalled_share=self.stalled_share * share,
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python objects, without the passes and the figures by rank."""
        names = ["step_s", "compute_s", "sync_s", "optimizer_s", "tokens_per_s", "mfu", "idle_share", "exposed_share"]
        names += ["stalled_share", "peak_tokens", "peak_bytes"]
        plan = self.plan
        head = {"policy": plan.policy, "ranks": plan.num_ranks, "tokens": plan.tokens, "planning_s": plan.planning_s}
        head |= {"predicted_s": plan.makespan_s, "lower_bound_s": plan.lower_bound_s}
        return head | {name: getattr(self, name) for name in names}


def simulate_step(
    planner: Planner, plan_or_lengths: StepPlan | Sequence[int | Tree], *, items: Sequence[int | Tree] = ()
) -> StepReport:
    """Simulates a plan (or plans the lengths first) under the planner's cost model. Local.

    The events are passes of micro-batches through the stages of their ranks. A pass starts when all ranks of its group
    are free; its ring steps take ``max(compute, slowest transfer)`` in the forward and the backward pass each, longer
    while other rings use the same links (``ClusterSpec.nics``);
    offloaded activations are copied by one stream per direction and rank, and a pass ends no earlier than its copies.
    Pipelines run 1F1B, with split backward passes where the cluster has them. The gradients are reduced at the end.

    Args:
        planner: gives the model, the cluster and the cost model.
        plan_or_lengths: a plan of any policy for as many ranks, or the lengths of a step (and its trees).
        items: what the plan was made for; needed where it has trees, which cost less than their tokens tell.

    Raises:
        InvalidUsage: the plan is for another number of ranks, or cannot run; or it has fragments of trees, and no
            ``items`` are given.
    """
    check_has("simulate_step()", "planner", planner, "plan", "a Planner")
    if isinstance(plan_or_lengths, StepPlan):
        plan = plan_or_lengths
        planner.validate(plan, items or None)
        if any(isinstance(each, TreeFragment) for each in plan.fragments) and not items:
            raise InvalidUsage("the plan has fragments of trees; give items=, what the plan was made for")
    else:
        items = plan_or_lengths
        plan = planner.plan(items)
    all_keys = _squares_by_id(items, plan, CostModel(attention=0.0, linear=0.0))
    sequences = zip(plan.table.ids.tolist(), plan.table.lengths.tolist(), strict=True)
    total = sum(all_keys.get(number, float(length) ** 2) for number, length in sequences)
    return _report(planner, plan, planner.simulate(plan, _squares_by_id(items, plan, planner.cost_model)), total)


def _squares_by_id(items: Sequence[int | Tree], plan: StepPlan, cost: CostModel) -> dict[int, float]:
    """The sum of squares that tells the cost of attention, of each tree and fragment by its id in the plan."""
    numbers = range(len(items) + len(plan.fragments)) if items else ()
    trees = ((number, tree_of(number, items, plan.fragments)) for number in numbers)
    return squares_by_id(plan, {number: tree for number, tree in trees if tree is not None}, cost)


def _report(planner: Planner, plan: StepPlan, found: dict[str, Any], squares: float) -> StepReport:
    model, cluster = planner.model, planner.cluster
    sync = reduction_seconds(model, cluster) if model else 0.0
    optimizer = optimizer_seconds(model, cluster) if model else 0.0
    step = found["makespan"] + sync + optimizer
    busy, exposed, stalled = (float(found[name].sum()) for name in ("busy", "exposed", "stalled"))
    area = cluster.ranks * cluster.pipeline * step
    peak_tokens = float(found["peak_tokens"].max(initial=0.0))
    after = cluster.ranks * cluster.pipeline * (sync + optimizer)
    idle = area - busy - exposed - stalled - after
    return StepReport(
        plan=plan,
        step_s=step,
        compute_s=found["makespan"],
        sync_s=sync,
        optimizer_s=optimizer,
        tokens_per_s=plan.tokens / step if step > 0 else 0.0,
        mfu=_mfu(planner, plan, step, squares) if step > 0 else None,
        idle_share=max(0.0, idle / area) if area > 0 else 0.0,
        exposed_share=exposed / area if area > 0 else 0.0,
        stalled_share=stalled / area if area > 0 else 0.0,
        peak_tokens=peak_tokens,
        peak_bytes=planner.memory.bytes_held(peak_tokens),
        spans=found["which"],
        alone=found["alone"],
        times=found["times"],
        rank_end=found["end"],
        rank_busy=found["busy"],
        rank_peak_tokens=found["peak_tokens"],
    )


def _mfu(planner: Planner, plan: StepPlan, step: float, squares: float) -> float | None:
    model, cluster = planner.model, planner.cluster
    if model is None:
        return None
    devices = cluster.ranks * cluster.tensor * cluster.pipeline
    return float(model.training_flops(plan.tokens, squares) / (step * devices * cluster.hardware.peak_flops))


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Result of several simulated steps, each planned while the one before runs.

    Attributes:
        steps: the report of each step.
        waits_s: by step, seconds that it waits for its plan; the first step always waits.
        total_s: seconds of all steps and waits.
    """

    steps: tuple[StepReport, ...]
    waits_s: tuple[float, ...]
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the whole cluster."""
        return sum(step.plan.tokens for step in self.steps) / self.total_s if self.total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python objects."""
        return {
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "waits_s": list(self.waits_s),
            "steps": [step.to_dict() for step in self.steps],
        }


def simulate_stream(planner: Planner, batches: Iterable[Sequence[int]]) -> StreamReport:
    """Plans and simulates a step for each list of lengths; plan n + 1 is made while step n runs."""
    steps: list[StepReport] = []
    waits: list[float] = []
    now = 0.0  # when the previous step ends
    begun = 0.0  # when the previous step began, and with it the planning of this one
    for lengths in batches:
        report = simulate_step(planner, lengths)
        waits.append(max(0.0, begun + report.plan.planning_s - now))
        begun = now + waits[-1]
        now = begun + report.step_s
        steps.append(report)
    return StreamReport(steps=tuple(steps), waits_s=tuple(waits), total_s=now)

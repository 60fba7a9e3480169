"""Simulation of one step on a cluster that need not be at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm._core import planner as core
from hdpcomm.plan import Planner, StepPlan
from hdpcomm.plan.cost import core_cost
from hdpcomm.sim.sync import optimizer_seconds, reduction_seconds

__all__ = ["StepReport", "simulate_step"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one simulated step did. Shares are of ranks x stages x step time.

    Attributes:
        plan: that was run.
        step_s: seconds from the start to the end of the optimizer.
        compute_s: seconds until the last backward pass; the longest rank.
        sync_s, optimizer_s: seconds after that (0 without a model).
        tokens_per_s: of the whole cluster.
        mfu: model FLOPs over the data sheet's peak of all devices; ``None`` without a model.
        idle_share: waiting for other ranks, pipeline bubbles, and the tail of the step.
        exposed_share: rings that wait for KV.
        stalled_share: compute that waits for copies from or to host memory.
        peak_tokens: most tokens whose activations one rank keeps on the device.
        peak_bytes: activations, weights, gradients and optimizer on that rank; ``None`` without a model.
        spans: (micro-batch, stage, 1 for backward) by row, int32 [passes, 3].
        times: start and end of each, float64 [passes, 2].
        rank_end: seconds at which each rank is done.
        rank_busy: seconds that each rank computes, summed over its stages.
        rank_peak_tokens: by rank.
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
    times: NDArray[np.float64]
    rank_end: NDArray[np.float64]
    rank_busy: NDArray[np.float64]
    rank_peak_tokens: NDArray[np.float64]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python objects, without spans and per-rank lists."""
        names = ["step_s", "compute_s", "sync_s", "optimizer_s", "tokens_per_s", "mfu", "idle_share", "exposed_share"]
        names += ["stalled_share", "peak_tokens", "peak_bytes"]
        plan = self.plan
        head = {"policy": plan.policy, "ranks": plan.num_ranks, "tokens": plan.tokens, "planning_s": plan.planning_s}
        head |= {"predicted_s": plan.makespan_s, "lower_bound_s": plan.lower_bound_s}
        return head | {name: getattr(self, name) for name in names}


def simulate_step(planner: Planner, plan_or_lengths: StepPlan | Sequence[int]) -> StepReport:
    """Runs a plan (or plans the lengths first) under the planner's cost model. Local.

    Discrete events: passes of micro-batches through the stages of their ranks. A pass starts when all ranks of its
    group are free; its ring steps take ``max(compute, slowest transfer)`` in the forward and the backward pass each;
    offloaded activations are copied by one stream per direction and rank, and a pass ends no earlier than its copies.
    Pipelines run 1F1B. The gradients are reduced at the end.

    Args:
        planner: whose model, cluster and cost model hold.
        plan_or_lengths: any plan for as many ranks, of any policy.

    Raises:
        InvalidUsage: the plan is for another number of ranks, or impossible.
    """
    if isinstance(plan_or_lengths, StepPlan):
        plan = plan_or_lengths
        planner.validate(plan)
    else:
        plan = planner.plan(plan_or_lengths)
    batches = [
        (batch.ranks, [sequence.length for sequence in batch.sequences], batch.offload_ratio)
        for batch in plan.micro_batches
    ]
    cost = core_cost(planner.cost_model, planner.memory, planner.cluster)
    return _report(planner, plan, core.simulate(cost, batches))


def _report(planner: Planner, plan: StepPlan, found: dict[str, Any]) -> StepReport:
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
        mfu=_mfu(planner, plan, step) if step > 0 else None,
        idle_share=max(0.0, idle / area) if area > 0 else 0.0,
        exposed_share=exposed / area if area > 0 else 0.0,
        stalled_share=stalled / area if area > 0 else 0.0,
        peak_tokens=peak_tokens,
        peak_bytes=planner.memory.bytes_held(peak_tokens),
        spans=found["which"],
        times=found["times"],
        rank_end=found["end"],
        rank_busy=found["busy"],
        rank_peak_tokens=found["peak_tokens"],
    )


def _mfu(planner: Planner, plan: StepPlan, step: float) -> float | None:
    model, cluster = planner.model, planner.cluster
    if model is None:
        return None
    lengths = [sequence.length for batch in plan.micro_batches for sequence in batch.sequences]
    squares = float(sum(length * length for length in lengths))
    flops = 3 * (model.linear_flops * sum(lengths) + model.attention_flops * squares)
    devices = cluster.ranks * cluster.tensor * cluster.pipeline
    return float(flops / (step * devices * cluster.hardware.peak_flops))

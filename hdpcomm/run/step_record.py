"""Record of a step on all ranks: where the time and the bytes went, and the spans of a step that is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.step_times import rank_speeds, rank_times, slowest_rank, times_of
from hdpcomm.plan import CostModel, Planner, StepPlan, Tree
from hdpcomm.run.model import known_device
from hdpcomm.train.step.metrics import Span

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Mesh
    from hdpcomm.plan import ModelSpec, RankTimes
    from hdpcomm.train.step.passes import Passes

__all__ = ["memory_bytes", "other_policies", "planned_rows", "step_costs", "timeline_row"]


def step_costs(
    spans: Sequence[Span],
    plan: StepPlan,
    comm: Communicator,
    *,
    seconds: float,
    spec: ModelSpec | None,
    beside: Mapping[str, float],
    cost_model: CostModel,
    passes: Passes,
    mesh: Mesh | None = None,
) -> tuple[dict[str, float], list[RankTimes], dict[str, list[float]]]:
    """Figures of a step beside those of StepMetrics, what its micro-batches took on each rank, and the seconds of each
    rank for each of :data:`hdpcomm.run.watch.CAUSES`; equal on all ranks. Collective over ``comm``: one all-gather.

    ``beside``: seconds of this rank for its ``data`` and ``garbage``, both in its compute, for the ``plan``, and in
    which it waited for copies of offloaded activations, ``stall``.

    ``idle_s``, ``exposed_s``: seconds of a rank (on average) as :class:`hdpcomm.train.step.metrics.Span` defines them;
    ``stall_s``: of the above; ``compute_s``, ``optimizer_s``: what is left of these phases;
    ``ranks``: how many there were;
    ``ring_bytes``, ``gradient_bytes``: sent by all ranks together;
    ``device_bytes``: most memory of a rank; ``mfu``: model FLOPs over the peak, only where both are known;
    ``stage_bytes``: between the stages of pipelines, and ``pipeline``, ``tensor``, ``expert``, only on a ``mesh``;
    ``measured_s``: until the last rank had done its micro-batches, which is what ``predicted_s`` promises;
    ``passes_processor_s``: processor time of all ranks together up to there (on a GPU that of launches);
    ``slowest_rank``, ``slowest_speed``: see :func:`hdpcomm.measure.step_times.slowest_rank`; on a mesh the HDP rank;
    not of DDP.
    """
    groups = dict(zip(plan.table.index.tolist(), plan.table.group_sizes().tolist(), strict=True))
    compute = optimizer = processor = 0.0
    idle, exposed = sum(span.idle_s for span in spans), sum(span.exposed_s for span in spans)
    ring_bytes, gradient_bytes = 0, passes.bytes_elsewhere
    passed = max(place for place, span in enumerate(spans) if span.phase == "wait for others")  # come before
    for place, span in enumerate(spans):
        if place <= passed:
            processor += span.processor_s
        if place >= passed:  # reductions begin while others still run their micro-batches
            optimizer += span.busy_s
            gradient_bytes += span.bytes_sent
            continue
        compute += span.busy_s
        if mesh is not None or groups.get(span.index, 2) > 1:  # on a mesh, passes without tokens send, too
            ring_bytes += span.bytes_sent
        else:  # buckets of gradients that leave while the last micro-batch runs
            gradient_bytes += span.bytes_sent
    ring_bytes = max(0, ring_bytes - passes.bytes_sent)
    alone = compute - beside["data"] - beside["garbage"]
    waited = max(0.0, alone - processor) if comm.device.type == "cpu" else 0.0
    seconds_of = {**beside, "messages": exposed, "optimizer": optimizer, "compute": alone - waited, "processor": waited}
    own = [*seconds_of.values(), idle, compute, ring_bytes, gradient_bytes, passes.bytes_sent, processor]
    own.append(memory_bytes(comm.device))
    told = times_of(spans, plan, comm.rank if mesh is None else mesh.hdp_rank)
    sent = torch.tensor([*own, *told], dtype=torch.float64)
    everything = sent.new_empty(comm.size, len(sent))
    comm.all_gather(everything, sent)
    rows = everything[:, : len(own)]
    figures = everything[:, len(own) :]
    ranks = rank_times(figures, plan, None if mesh is None else mesh.positions)
    size = comm.size
    idle, compute, ring_bytes, gradient_bytes, between, processor, _ = rows[:, len(seconds_of) :].sum(0).tolist()
    by_rank = dict(zip(seconds_of, rows.T.tolist(), strict=False))
    exposed, optimizer, stall_s = (sum(by_rank[name]) for name in ("messages", "optimizer", "stall"))
    # A rank waits for messages as well where the sender is late; where all wait, none is.
    waits = zip(by_rank["messages"], rows[:, len(seconds_of)].tolist(), strict=True)
    by_rank["messages"] = [min(map(sum, waits))] * size
    costs = {
        "exposed_s": exposed / size,
        "exposed_share": min(1.0, exposed / size / seconds) if seconds else 0.0,
        "idle_s": idle / size,
        "compute_s": compute / size,
        "optimizer_s": optimizer / size,
        "ring_bytes": ring_bytes,
        "gradient_bytes": gradient_bytes,
        "stall_s": stall_s / size,
        "ranks": size,
        "device_bytes": float(rows[:, -1].max()),
        "measured_s": float(everything[:, -1].max()),
        "passes_processor_s": processor,
    }
    if mesh is not None:
        costs["stage_bytes"] = between
        costs |= {"pipeline": mesh.pipeline, "tensor": mesh.tensor, "expert": mesh.expert}
    if plan.policy != "ddp":  # whose ranks have other sequences, so what the costs are wrong by would be a rank's speed
        costs["slowest_rank"], costs["slowest_speed"] = slowest_rank(rank_speeds(plan, ranks, cost_model))
    device = known_device(comm.device)
    if spec is not None and device is not None and seconds:
        lengths = plan.sequences()[0].astype(float)
        costs["mfu"] = spec.training_flops(lengths.sum(), (lengths**2).sum()) / (seconds * size * device.peak_flops)
    return costs, ranks, by_rank


def memory_bytes(device: torch.device) -> int:
    """Most bytes of the device's allocator since the last call, or, on the CPU, what the process holds now. Local."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def planned_rows(plan: StepPlan) -> list[dict[str, Any]]:
    """The plan's micro-batches with their predicted times, for files."""
    return [
        {
            "index": batch.index,
            "ranks": list(batch.ranks),
            "lengths": [sequence.length for sequence in batch.sequences],
            "start_s": start,
            "end_s": start + batch.predicted_s,
            "offload_ratio": batch.offload_ratio,
        }
        for batch, start in zip(plan.micro_batches, plan.timeline(), strict=True)
    ]


def other_policies(planner: Planner, lengths: Sequence[int | Tree]) -> dict[str, dict[str, float]]:
    """Prediction of each policy for a step under the same costs; those that cannot plan it are left out. Local."""
    found = {}
    for policy in ("balanced", "naive", "static"):
        with contextlib.suppress(InvalidUsage):
            other = Planner(
                planner.model,
                planner.cluster,
                policy,
                planner.cost_model,
                context=planner.context,
                memory=planner.memory,
                queue=planner.queue and policy == "balanced",
                slices=planner.slices if policy == "balanced" else 1,
            )
            plan = other.plan(lengths)
            found[policy] = {
                "makespan_s": plan.makespan_s,
                "idle_share": plan.idle_share,
                "lower_bound_s": plan.lower_bound_s,
                "micro_batches": len(plan.table),
            }
    return found


def timeline_row(
    facts: Mapping[str, Any],
    plan: StepPlan,
    spans: Sequence[Span],
    comm: Communicator,
    *,
    origin: float,
) -> dict[str, Any]:
    """One line of ``timeline.jsonl``: a step as planned, and as measured on every rank. Collective over ``comm``.

    Times count from the moment at which the first rank of a host began: ranks of a host share a clock, and hosts have
    agreed on the plan just before.

    Args:
        origin: where the times of ``spans`` count from, by ``time.perf_counter()``.
    """
    own = {"origin": origin, "host": _host(), "spans": [asdict(span) for span in spans]}
    everyone = gather_json(comm, own)
    begun: dict[str, float] = {}
    for each in everyone:
        begun[each["host"]] = min(each["origin"], begun.get(each["host"], each["origin"]))
    measured = []
    for each in everyone:
        later = each["origin"] - begun[each["host"]]
        spans = [row | {name: row[name] + later for name in ("start_s", "end_s")} for row in each["spans"]]
        measured.append({"spans": spans})
    return {
        **facts,
        "policy": plan.policy,
        "ranks": plan.num_ranks,
        "planned": planned_rows(plan),
        "measured": measured,
    }


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

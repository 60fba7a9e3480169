"""Traces of plans, of simulated and of measured steps for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hdpcomm.plan import ClusterSpec, MicroBatch, StepPlan
from hdpcomm.plan.step import format_ranks
from hdpcomm.sim import StepReport

__all__ = ["TraceFile", "batch_name", "named", "span", "write_events", "write_plan_trace", "write_stream_trace"]


_PLANNER = 0  # process id of the planner's track; nodes follow


def batch_name(index: int, lengths: Sequence[int], ranks: int) -> str:
    """A micro-batch of sequences of these lengths on so many ranks, for its spans."""
    packed = f" + {len(lengths) - 1}" if len(lengths) > 1 else ""
    return f"#{index} {max(lengths):,}{packed} on {ranks}"


def _describe(batch: MicroBatch) -> tuple[str, dict[str, Any]]:
    lengths = [sequence.length for sequence in batch.sequences]
    arguments = {
        "index": batch.index,
        "tokens": batch.tokens,
        "sequences": len(lengths),
        "longest": max(lengths),
        "ranks": format_ranks(batch.ranks),
        "offload_ratio": batch.offload_ratio,
    }
    return batch_name(batch.index, lengths, len(batch.ranks)), arguments


def _names(cluster: ClusterSpec) -> list[dict[str, Any]]:
    events = [named("planner", _PLANNER)]
    for rank in range(cluster.ranks):
        node = rank // cluster.node_ranks
        if rank % cluster.node_ranks == 0:
            events.append(named(f"node {node}", node + 1))
        for stage in range(cluster.pipeline):
            label = f"rank {rank}" if cluster.pipeline == 1 else f"rank {rank} stage {stage}"
            events.append(named(label, node + 1, rank * cluster.pipeline + stage))
    return events


def named(name: str, pid: int, tid: int | None = None) -> dict[str, Any]:
    """Trace event that gives a process its name, or one of its threads."""
    kind, place = ("process_name", {}) if tid is None else ("thread_name", {"tid": tid})
    return {"ph": "M", "name": kind, "pid": pid, **place, "args": {"name": name}}


def span(name: str, start: float, end: float, pid: int, tid: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Trace event of something that lasts; times in seconds."""
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "args": dict(arguments)}
    return event | {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}


def _step_events(report: StepReport, cluster: ClusterSpec, offset_s: float) -> list[dict[str, Any]]:
    """Trace events of a simulated step: one span for each rank of each pass, and the reduction of the gradients."""
    events = []
    described = [_describe(batch) for batch in report.plan.micro_batches]
    passes = zip(report.spans.tolist(), report.alone.tolist(), report.times.tolist(), strict=True)
    for (which, stage, kind), alone, (start, end) in passes:
        batch = report.plan.micro_batches[which]
        name, arguments = described[which]
        name = f"{'FBW'[kind]} {name}"
        for rank in batch.ranks if alone < 0 else (alone,):
            thread = rank * cluster.pipeline + stage % cluster.pipeline
            pid = rank // cluster.node_ranks + 1
            events.append(span(name, offset_s + start, offset_s + end, pid, thread, arguments))
    if report.sync_s > 0:
        begin, end = offset_s + report.compute_s, offset_s + report.step_s
        for rank in range(cluster.ranks):
            pid = rank // cluster.node_ranks + 1
            events.append(span("gradients and optimizer", begin, end, pid, rank * cluster.pipeline, {}))
    return events


def write_events(path: str | Path, events: list[dict[str, Any]]) -> None:
    """Writes a trace of these events."""
    with Path(path).open("w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def write_plan_trace(path: str | Path, plan: StepPlan, cluster: ClusterSpec) -> None:
    """Writes the trace of a plan's predicted timeline: a process for each node, a thread for each rank."""
    events = _names(cluster)
    for batch, start in zip(plan.micro_batches, plan.timeline(), strict=True):
        name, arguments = _describe(batch)
        for rank in batch.ranks:
            place = rank // cluster.node_ranks + 1, rank * cluster.pipeline
            events.append(span(name, start, start + batch.predicted_s, *place, arguments))
    write_events(path, events)


def write_stream_trace(
    path: str | Path, steps: Sequence[StepReport], waits_s: Sequence[float], cluster: ClusterSpec
) -> None:
    """Writes the trace of simulated steps; the planner's track shows plan n + 1 above step n."""
    events = _names(cluster)
    begun = now = 0.0
    for number, (report, waited) in enumerate(zip(steps, waits_s, strict=True)):
        planned = report.plan.planning_s
        name = {"waited_s": waited, "sequences": sum(len(b.sequences) for b in report.plan.micro_batches)}
        events.append(span(f"plan step {number}", begun, begun + planned, _PLANNER, 0, name))
        begun = now + waited
        events.extend(_step_events(report, cluster, begun))
        now = begun + report.step_s
    write_events(path, events)


_PLANNED, _MEASURED = 0, 1


def _events(row: Mapping[str, Any], offset_s: float) -> list[dict[str, Any]]:
    """Trace events of one line of ``timeline.jsonl`` (:func:`hdpcomm.run.step_record.timeline_row`), which begins at
    ``offset_s`` in the trace. Each rank has a thread of the plan, and one of what it did."""
    events: list[dict[str, Any]] = []
    names = {
        batch["index"]: batch_name(batch["index"], batch["lengths"], len(batch["ranks"])) for batch in row["planned"]
    }
    for batch in row["planned"]:
        for rank in batch["ranks"]:
            start, end = offset_s + batch["start_s"], offset_s + batch["end_s"]
            events.append(span(names[batch["index"]], start, end, rank, _PLANNED, batch))
    for rank, measured in enumerate(row["measured"]):
        for each in measured["spans"]:
            name = names.get(each["index"], each["phase"])
            about = {"phase": each["phase"], "waited_s": each["wait_s"], "bytes_sent": each["bytes_sent"]}
            events.append(span(name, offset_s + each["start_s"], offset_s + each["end_s"], rank, _MEASURED, about))
    return events


class TraceFile:
    """Collects steps and writes one merged trace when it is left. With ``None`` it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._events: list[dict[str, Any]] = []
        self._ranks = 0
        self._now = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """A step, which the trace shows after the ones before."""
        if self._path is None:
            return
        title = {"ph": "i", "s": "g", "name": f"step {row['step']} ({row['policy']})", "pid": 0, "tid": _MEASURED}
        self._events += [title | {"ts": round(1e6 * self._now, 3)}, *_events(row, self._now)]
        self._ranks = max(self._ranks, int(row["ranks"]))
        ends = [span["end_s"] for rank in row["measured"] for span in rank["spans"]]
        self._now += 1.05 * max([row["seconds"], *ends, *(batch["end_s"] for batch in row["planned"])])

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is None or not self._events:
            return
        names: list[dict[str, Any]] = []
        for rank in range(self._ranks):
            names += [named(f"rank {rank}", rank), named("planned", rank, _PLANNED), named("measured", rank, _MEASURED)]
        write_events(self._path, names + self._events)

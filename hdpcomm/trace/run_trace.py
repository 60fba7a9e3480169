"""Traces of measured steps for Perfetto: a process for each rank, arrows from each send of a ring to its receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hdpcomm.trace.chrome import span, write_events

__all__ = ["TraceFile", "timeline_events"]

_PLANNED, _MEASURED, _SENT, _RECEIVED = 0, 1, 2, 3
_THREADS = {_PLANNED: "planned", _MEASURED: "measured", _SENT: "sends", _RECEIVED: "receives"}


def timeline_events(row: Mapping[str, Any], *, offset_s: float = 0.0, first_flow: int = 0) -> list[dict[str, Any]]:
    """Trace events of one line of ``timeline.jsonl`` (:func:`hdpcomm.run.step_record.timeline_row`).

    Each rank has a thread of the plan, one of what it did, and one each of the messages that it sent and received. The
    n-th message that a rank sent to another is the n-th that this one received from it.

    Args:
        offset_s: where the step begins in the trace.
        first_flow: number of the first arrow; numbers must differ between the steps of a trace.
    """
    events: list[dict[str, Any]] = []
    names = {batch["index"]: _name(batch) for batch in row["planned"]}
    for batch in row["planned"]:
        for rank in batch["ranks"]:
            start, end = offset_s + batch["start_s"], offset_s + batch["end_s"]
            events.append(span(names[batch["index"]], start, end, rank, _PLANNED, batch))
    sends: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for rank, measured in enumerate(row["measured"]):
        for each in measured["spans"]:
            name = names.get(each["index"], each["phase"])
            about = {"phase": each["phase"], "waited_s": each["wait_s"], "bytes_sent": each["bytes_sent"]}
            events.append(span(name, offset_s + each["start_s"], offset_s + each["end_s"], rank, _MEASURED, about))
        for message in measured["messages"]:
            if "to" in message:
                sends[rank, message["to"]].append(message)
            else:
                receives[message["from"], rank].append(message)
    flow = first_flow
    for (source, target), sent in sorted(sends.items()):
        for message, received in zip(sent, receives[source, target], strict=False):
            events += _arrow(source, target, message, received, offset_s, flow)
            flow += 1
    return events


def _arrow(
    source: int, target: int, sent: Mapping[str, Any], received: Mapping[str, Any], offset_s: float, flow: int
) -> list[dict[str, Any]]:
    about = {"from": source, "to": target, "bytes": sent["bytes"]}
    size = f"{sent['bytes']:,} B"
    ends = {"cat": "message", "name": size, "id": flow}
    return [
        span(size, offset_s + sent["start"], offset_s + sent["end"], source, _SENT, about),
        span(size, offset_s + received["start"], offset_s + received["end"], target, _RECEIVED, about),
        {"ph": "s", **ends, "pid": source, "tid": _SENT, "ts": _us(sent["start"] + offset_s)},
        {"ph": "f", "bp": "e", **ends, "pid": target, "tid": _RECEIVED, "ts": _us(received["end"] + offset_s)},
    ]


def _name(batch: Mapping[str, Any]) -> str:
    packed = f" + {len(batch['lengths']) - 1}" if len(batch["lengths"]) > 1 else ""
    return f"#{batch['index']} {max(batch['lengths']):,}{packed} on {len(batch['ranks'])}"


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


class TraceFile:
    """Collects steps and writes one merged trace when it is left. With ``None`` it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._events: list[dict[str, Any]] = []
        self._ranks = self._flows = 0
        self._now = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """A step, which the trace shows after the ones before."""
        if self._path is None:
            return
        events = timeline_events(row, offset_s=self._now, first_flow=self._flows)
        title = {"ph": "i", "s": "g", "name": f"step {row['step']} ({row['policy']})", "pid": 0, "tid": _MEASURED}
        self._events += [title | {"ts": _us(self._now)}, *events]
        self._flows += sum(event["ph"] == "s" for event in events)
        self._ranks = max(self._ranks, int(row["ranks"]))
        ends = [span["end_s"] for rank in row["measured"] for span in rank["spans"]]
        self._now += 1.05 * max([row["seconds"], *ends, *(batch["end_s"] for batch in row["planned"])])

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is None or not self._events:
            return
        names: list[dict[str, Any]] = []
        for rank in range(self._ranks):
            names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            for thread, label in _THREADS.items():
                names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": label}})
        write_events(self._path, names + self._events)

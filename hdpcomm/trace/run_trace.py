"""Traces of measured steps for Perfetto: a process for each rank, the plan above what it did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdpcomm.trace.chrome import batch_name, named, span, write_events

__all__ = ["TraceFile"]

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

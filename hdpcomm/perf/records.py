"""Results in machine-readable form: CSV and JSON lines, with one record per configuration, and the -J file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from hdpcomm import __version__
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.results import Report, Row, Side

__all__ = ["COLUMNS", "RecordWriter", "json_document", "recorded", "records", "time_key"]

COLUMNS = (
    "library",
    "op",
    "ranks",
    "transport",
    "algorithm",
    "size",
    "count",
    "type",
    "redop",
    "root",
    "placement",
    "time_us",
    "algbw_gb_s",
    "busbw_gb_s",
    "wrong",
    "min_us",
    "max_us",
    "avg_us",
    "p50_us",
    "p95_us",
    "p99_us",
    "stdev_us",
    "cv_pct",
    "create_us",
    "ratio",
)
"""The columns of a record. ``ranks``: as 0-1-2; bandwidths in GB/s (1e9); ``ratio``: a peer's time over hdpcomm's."""

_STATS = ("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct")
JSON_VERSION = 4


def records(row: Row, config: PerfConfig, report: Report) -> list[dict[str, Any]]:
    """The records of a row, one for each side; fields that do not apply are ``None``."""
    ours = next((dict(mine.sides()) for mine in reversed(report.rows) if mine.key == row.key), {})
    made = []
    for placement, side in row.sides():
        peer = row.library != "hdpcomm"
        record: dict[str, Any] = dict.fromkeys(COLUMNS)
        record |= {
            "library": row.library,
            "op": row.op,
            "ranks": "-".join(map(str, row.ranks)),
            "transport": None if peer else report.transport,
            "algorithm": None if peer else config.algorithm,
            "size": row.size,
            "count": row.count,
            "type": row.type,
            "redop": row.redop,
            "root": row.root,
            "placement": placement,
            "time_us": side.time_us,
            "algbw_gb_s": side.algbw,
            "busbw_gb_s": side.busbw,
            "wrong": side.wrong,
            "create_us": side.details.get("create_us"),
        }
        if side.stats is not None:
            record |= {name: getattr(side.stats, name) for name in _STATS}
        if peer and placement in ours:
            record["ratio"] = side.time_us / ours[placement].time_us
        made.append(record)
    return made


class RecordWriter:
    """Writer of ``--format csv`` and ``--format jsonl``: writes only records to ``stream``, one row at a time."""

    def __init__(self, config: PerfConfig, stream: TextIO, form: str) -> None:
        self._config, self._stream, self._report = config, stream, Report("")
        self._csv = csv.DictWriter(stream, COLUMNS, lineterminator="\n") if form == "csv" else None

    def start(self, report: Report) -> None:
        """Writes the line with the names of the columns, for CSV."""
        self._report = report
        if self._csv is not None:
            self._csv.writeheader()
            self._stream.flush()

    def row(self, row: Row) -> None:
        """Writes the records of a row."""
        for record in records(row, self._config, self._report):
            if self._csv is not None:
                self._csv.writerow(record)
            else:
                self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def finish(self, report: Report) -> None:
        """Writes nothing, since records have no footer."""


def json_document(config: PerfConfig, report: Report) -> dict[str, Any]:
    """The -J file: the keys of nccl-tests' version 3; truth values are the strings "true" and "false" as there."""
    c = config
    step = {"step_factor": c.step_factor} if c.step_factor > 1 else {"step_bytes": c.step_bytes}
    document: dict[str, Any] = {
        "version": JSON_VERSION,
        "start_time": report.start_time,
        "args": list(c.args),
        "env": recorded(os.environ),
        "hdpcomm_version": __version__,
        "nccl_version": None,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": c.min_bytes,
            "maximum_bytes": c.max_bytes,
            **step,
            "warmup_iters": c.warmup,
            "iterations": c.iters,
            "aggregated_iterations": c.agg,
            "validation": c.check,
            "graph": 0,
            "blocking_collectives": _bool_text(bool(c.blocking)),
            "per_iter_timing": _bool_text(c.per_iter),
            "per_iter_skip": c.per_iter_skip,
            "parallel_init": _bool_text(False),
            "unalign": c.unalign,
            "local_register": int(c.register),
            "transport": report.transport,
            "algorithm": c.algorithm,
            "subsets": [list(subset) for subset in c.subsets],
            "devices": [asdict(device) for device in report.devices],
        },
        "results": [_result(row, c) for row in report.rows],
        "out_of_bounds": {"count": report.wrong, "okay": _bool_text(report.wrong == 0)},
        "average_bus_bandwidth": {"bandwidth": report.bus_bandwidth, "okay": "unchecked"},
        "errors": list(report.errors),
        "end_time": report.end_time,
    }
    if report.memory_bytes:
        document["memory_bytes"] = dict(report.memory_bytes)
    if report.peers:
        document["compare"] = [_result(row, c) for row in report.peers]
    return document


def recorded(environment: Mapping[str, str]) -> list[str]:
    """``NAME=value`` for each variable that may be written to a file; all others stay private."""
    names = [name for name in environment if name.startswith(("HDPCOMM_", "NCCL_")) or name == "CUDA_VISIBLE_DEVICES"]
    return [f"{name}={environment[name]}" for name in sorted(names)]


def _bool_text(value: bool) -> str:
    return "true" if value else "false"


def _result(row: Row, config: PerfConfig) -> dict[str, Any]:
    result: dict[str, Any] = {
        "size": row.size,
        "count": row.count,
        "type": row.type,
        "redop": row.redop,
        "root": str(row.root),
    }
    for name, side in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        result[name] = None if side is None else _side(side, config)
        if side is not None and side.stats is not None:
            result[f"{name}_per_iter"] = asdict(side.stats)
    return result | {
        "actual_iterations": row.iterations,
        "experiment_name": row.op,
        "library": row.library,
        "ranks": list(row.ranks),
        **({"note": row.note} if row.note else {}),
    }


def time_key(config: PerfConfig) -> str:
    """The key of a side's time in the -J file; with -C another one, since the time is that of starting an operation."""
    return "cpu_time" if config.cpu_time else "time"


def _side(side: Side, config: PerfConfig) -> dict[str, Any]:
    return {
        time_key(config): side.time_us,
        "alg_bw": side.algbw,
        "bus_bw": side.busbw,
        "nwrong": side.wrong,
        **side.details,
    }

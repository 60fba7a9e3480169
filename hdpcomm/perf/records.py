"""The -J file: results in machine-readable form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hdpcomm import __version__
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.results import Report, Row, Side

__all__ = ["json_document", "recorded"]

JSON_VERSION = 4


def json_document(config: PerfConfig, report: Report) -> dict[str, Any]:
    """The -J file: the keys of nccl-tests' version 3; truth values are the strings "true" and "false" as there."""
    c = config
    step = {"step_factor": c.step_factor} if c.step_factor > 1 else {"step_bytes": c.step_bytes}
    return {
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
            "aggregated_iterations": 1,
            "validation": c.check,
            "graph": 0,
            "blocking_collectives": _bool_text(False),
            "per_iter_timing": _bool_text(c.per_iter),
            "per_iter_skip": 0,
            "parallel_init": _bool_text(False),
            "unalign": c.unalign,
            "local_register": int(c.register),
            "transport": report.transport,
            "algorithm": c.algorithm,
            "subsets": [list(subset) for subset in c.subsets],
            "devices": [asdict(device) for device in report.devices],
        },
        "results": [_result(config, row) for row in report.rows],
        "out_of_bounds": {"count": report.wrong, "okay": _bool_text(report.wrong == 0)},
        "average_bus_bandwidth": {"bandwidth": report.bus_bandwidth, "okay": "unchecked"},
        "errors": list(report.errors),
        "end_time": report.end_time,
    }


def recorded(environment: Mapping[str, str]) -> list[str]:
    """``NAME=value`` for each variable that may be written to a file; all others stay private."""
    names = [name for name in environment if name.startswith(("HDPCOMM_", "NCCL_")) or name == "CUDA_VISIBLE_DEVICES"]
    return [f"{name}={environment[name]}" for name in sorted(names)]


def _bool_text(value: bool) -> str:
    return "true" if value else "false"


def _result(config: PerfConfig, row: Row) -> dict[str, Any]:
    point = row.point
    result: dict[str, Any] = {
        "size": point.size,
        "count": point.shape.count,
        "type": point.kind.name,
        "redop": point.redop,
        "root": str(point.root),
    }
    for name, side in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        result[name] = None if side is None else _side(side)
        if side is not None and side.stats is not None:
            result[f"{name}_per_iter"] = asdict(side.stats)
    return result | {
        "actual_iterations": config.iters,
        "experiment_name": config.op,
        "library": "hdpcomm",
        "ranks": list(point.ranks),
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "time": side.time_us,
        "alg_bw": side.algbw,
        "bus_bw": side.busbw,
        "nwrong": side.wrong,
    }

"""The table of nccl-tests: the same header, columns and footer, so that programs that read theirs can read ours."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from hdpcomm import __version__
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.ops import operation
from hdpcomm.perf.results import IterationStats, Report, Row, Side

__all__ = ["TableWriter", "fixed", "json_document", "recorded"]


def fixed(value: float, width: int) -> str:
    """``value`` right-aligned in ``width`` with as many of 2 decimals as fit; else with an exponent."""
    digits = max(0, math.floor(math.log10(value)) + 1) if value > 0 else 0
    for decimals, room in ((2, width - 3), (1, width - 2), (0, width)):
        if digits <= room:
            return f"{value:{width}.{decimals}f}"
    return f"{value:{width}.0e}"


class TableWriter:
    """Writes the table to ``stream``, one row at a time."""

    def __init__(self, config: PerfConfig, stream: TextIO) -> None:
        self._config, self._stream = config, stream

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def start(self, report: Report) -> None:
        """Writes the header. ``report``: must have its devices."""
        c = self._config
        self._line(f"# hdpcomm version {__version__} (options and output of nccl-tests)")
        self._line(f"# Collective test starting: {c.op}")
        step, way = (c.step_factor, "factor") if c.step_factor > 1 else (c.step_bytes, "bytes")
        self._line(
            f"# nThread 1 nGpus 1 minBytes {c.min_bytes} maxBytes {c.max_bytes} step: {step}({way}) "
            f"warmup iters: {c.warmup} iters: {c.iters} agg iters: 1 validation: {c.check} graph: 0 "
            f"unalign: {c.unalign} register: {int(c.register)}"
        )
        self._line(f"# transport: {report.transport} algorithm: {c.algorithm} time: mean of the ranks")
        if c.per_iter:
            self._line("# Per-Iteration Report: host timing; i_* uses max over process rows ")
        note = operation(c.op).note
        if note:
            self._line(f"# {note}")
        self._line("#")
        self._line("# Using devices")
        for d in report.devices:
            self._line(
                f"#  Rank {d.rank:2d} Group {d.group:2d} Pid {d.pid:6d} on {d.hostname:>10} device {d.device:2d} "
                f"[{d.device_hex}] {d.device_info}"
            )
        self._columns()

    def _columns(self) -> None:
        left = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}"
        names = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        units = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        side = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
        unit = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
        title = ("out-of-place", "in-place")
        if self._config.per_iter:
            side += f"  {'i_min':>7}  {'i_max':>7}  {'i_p99':>7}  {'i_cv%':>7}"
            unit += f"  {'(us)':>7}  {'(us)':>7}  {'(us)':>7}  {'(%)':>7}"
            title = ("out-of-place (+ per-iteration)", "in-place (+ per-iteration)")
        self._line("#")
        self._line(left + "".join(f"{text:^{len(side)}}" for text in title))
        self._line(names + side + side)
        self._line(units + unit + unit)

    def row(self, row: Row) -> None:
        """Writes a row."""
        p = row.point
        text = f"{p.size:12d}  {p.shape.count:12d}  {p.kind.name:>8}  {p.redop:>6}  {p.root:6d}"
        self._line(text + self._side(row.out_of_place) + self._side(row.in_place))

    def _side(self, side: Side | None) -> str:
        if side is None:
            blank = f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
            return blank + "".join(f"  {'N/A':>7}" for _ in range(4)) if self._config.per_iter else blank
        wrong = "N/A" if side.wrong is None else f"{float(side.wrong):g}"
        text = f"  {fixed(side.time_us, 7)}  {fixed(side.algbw, 6)}  {fixed(side.busbw, 6)}  {wrong:>6}"
        if self._config.per_iter and isinstance(side.stats, IterationStats):
            columns = (side.stats.min_us, side.stats.max_us, side.stats.p99_us, side.stats.cv_pct)
            text += "".join(f"  {fixed(value, 7)}" for value in columns)
        return text

    def finish(self, report: Report) -> None:
        """Writes the footer."""
        wrong = report.wrong
        self._line(f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}")
        self._line(f"# {'Avg bus bandwidth':<20} : {report.bus_bandwidth:g} ")
        self._line("#")
        self._line(f"# Collective test concluded: {self._config.op}")


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

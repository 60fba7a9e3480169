"""The table of nccl-tests: the same header, columns and footer, so that programs that read theirs can read ours."""

from __future__ import annotations

import math
from typing import TextIO

from hdpcomm import __version__
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.ops import operation
from hdpcomm.perf.results import IterationStats, Report, Row, Side

__all__ = ["TableWriter", "fixed"]


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

"""The results of a run: a row for each size, type, operator and root, and the statistics of its columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hdpcomm.perf.data import ElementType
from hdpcomm.perf.ops import Shape

__all__ = ["Device", "IterationStats", "Point", "Report", "Row", "Side"]


@dataclass(frozen=True, slots=True)
class Point:
    """The configuration of a row. ``ranks``: positions in the world."""

    ranks: tuple[int, ...]
    shape: Shape
    kind: ElementType
    redop: str  # "none" if the operation has none
    root: int  # -1 if the operation has none

    @property
    def size(self) -> int:
        """Column size(B)."""
        return self.shape.total * self.kind.bytes


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Microseconds of the iterations (``-I``), of the slowest rank in each; percentiles by the nearest-rank method."""

    min_us: float
    max_us: float
    avg_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    stdev_us: float
    cv_pct: float
    times_us: tuple[float, ...]
    per_process_max_times_us: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(times_us: Sequence[Sequence[float]]) -> IterationStats:
        """``times_us[rank][iteration]``."""
        slowest = [max(column) for column in zip(*times_us, strict=True)]
        ordered = sorted(slowest)
        number = len(ordered)
        mean, deviation = statistics.fmean(ordered), statistics.pstdev(ordered)

        def percentile(percent: int) -> float:
            return float(ordered[min(number - 1, -(-number * percent // 100) - 1)])

        return IterationStats(
            min_us=ordered[0],
            max_us=ordered[-1],
            avg_us=mean,
            p50_us=ordered[number // 2],
            p95_us=percentile(95),
            p99_us=percentile(99),
            stdev_us=deviation,
            cv_pct=100 * deviation / mean if mean > 0 else 0.0,
            times_us=tuple(slowest),
            per_process_max_times_us=tuple(tuple(row) for row in times_us),
        )


@dataclass(frozen=True, slots=True)
class Side:
    """The out-of-place or the in-place half of a row. Bandwidths in GB/s (1e9); ``wrong`` is ``None`` if unchecked."""

    time_us: float
    algbw: float
    busbw: float
    wrong: int | None
    stats: IterationStats | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    point: Point
    out_of_place: Side | None
    in_place: Side | None

    def sides(self) -> list[tuple[str, Side]]:
        """The sides that were measured, by name."""
        named = (("out_of_place", self.out_of_place), ("in_place", self.in_place))
        return [(name, side) for name, side in named if side is not None]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank runs, for the header."""

    rank: int
    group: int
    pid: int
    hostname: str
    device: int
    device_hex: str
    device_info: str


@dataclass(slots=True)
class Report:
    """The results of a whole run, filled row by row."""

    start_time: str
    end_time: str = ""
    devices: list[Device] = field(default_factory=list)
    transport: str = ""
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows."""
        return sum(side.wrong or 0 for row in self.rows for _, side in row.sides())

    @property
    def bus_bandwidth(self) -> float:
        """The mean of all busbw columns, GB/s."""
        values = [side.busbw for row in self.rows for _, side in row.sides()]
        return sum(values) / len(values) if values else 0.0

"""The regression gate: compares this run's times with those in an older -J file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.records import time_key
from hdpcomm.perf.results import Report, Side

__all__ = ["Slowdown", "compare", "parse_percent", "read"]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The times of a side in both runs."""

    ranks: tuple[int, ...]
    size: int
    type: str
    redop: str
    root: str
    side: str
    before_us: float
    now_us: float

    @property
    def percent(self) -> float:
        """How much slower it is now, in percent of the time before; below 0: faster."""
        return 100 * (self.now_us / self.before_us - 1)


def parse_percent(text: str) -> float:
    """``5%``, ``5`` or ``2.5%``, in percent. Raises InvalidUsage for anything else."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidUsage(f"--max-slowdown {text}: give a percentage of at least 0, like 5%")
    return value


def read(path: Path) -> dict[str, Any]:
    """The content of an older run's file. Raises InvalidUsage for a file that -J did not write."""
    try:
        document = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidUsage(f"--baseline {path}: cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise InvalidUsage(f"--baseline {path}: is no result of -J (it has no list 'results')")
    return document


def compare(config: PerfConfig, report: Report, document: dict[str, Any]) -> list[Slowdown]:
    """All sides that both runs measured. Raises InvalidUsage where they have none in common.

    From a run of several cycles the best one is taken. With -I in both runs medians are compared, else means. Times of
    starting an operation (-C) are compared only with such times, and rows of a subset with rows of the same ranks.
    """
    kind = time_key(config)
    before = _best(_old_times(document))
    now: dict[tuple[Any, ...], list[tuple[float, float | None]]] = {}
    for row in report.rows:
        for name, side in row.sides():
            key = (row.op, row.ranks, row.size, row.type, row.redop, str(row.root), kind, name)
            now.setdefault(key, []).append(_times(side))
    compared = []
    for key, (mean, median) in _best(now).items():
        if key in before:
            old_mean, old_median = before[key]
            use_median = median is not None and old_median is not None
            then, here = (old_median, median) if use_median else (old_mean, mean)
            assert then is not None
            assert here is not None
            compared.append(Slowdown(*key[1:6], side=key[7], before_us=then, now_us=here))
    if not compared:
        raise InvalidUsage(
            f"--baseline: it has no row in common with this run of {config.op} (operation, ranks, size, type, redop, "
            "root, and -C or not); measure the same sweep"
        )
    return compared


def _times(side: Side) -> tuple[float, float | None]:
    return side.time_us, None if side.stats is None else side.stats.p50_us


def _old_times(document: dict[str, Any]) -> dict[tuple[Any, ...], list[tuple[float, float | None]]]:
    found: dict[tuple[Any, ...], list[tuple[float, float | None]]] = {}
    try:
        for row in document["results"]:
            for name in ("out_of_place", "in_place"):
                side = row.get(name)
                if side is None:
                    continue
                ranks = row.get("ranks") or range(len(document["config"]["devices"]))
                kind = "time" if "time" in side else "cpu_time"
                key = (
                    row["experiment_name"],
                    tuple(ranks),
                    row["size"],
                    row["type"],
                    row["redop"],
                    str(row["root"]).strip(),
                    kind,
                )
                time = float(side[kind])
                median = row.get(f"{name}_per_iter", {}).get("p50_us")
                if time > 0:
                    found.setdefault((*key, name), []).append((time, median))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidUsage(f"--baseline: a result has no or a bad {error}; write the file with -J") from error
    return found


def _best(
    times: dict[tuple[Any, ...], list[tuple[float, float | None]]],
) -> dict[tuple[Any, ...], tuple[float, float | None]]:
    return {key: min(values, key=lambda value: value[0]) for key, values in times.items()}

"""Timing on the device, and the rows of the table that main.py prints."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

import hdpcomm as hdp

CUDA = torch.device("cuda")
Row = dict[str, object]
Rows = Callable[[], list[Row]]


def row(name: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> Row:
    """One figure and, if it has a limit, whether that is met."""
    target, met = "", None
    if at_least is not None:
        target, met = f">= {at_least:g}", value >= at_least
    elif at_most is not None:
        target, met = f"<= {at_most:g}", value <= at_most
    return {"name": name, "value": float(value), "unit": unit, "target": target, "met": met}


def seconds(call: Callable[[int], object], *, rounds: int = 15, inner: int = 4, warmup: int = 3) -> float:
    """Median seconds of ``call(i)`` on the current stream by device events; ``i`` numbers the calls, to vary inputs."""
    for i in range(warmup):
        call(i)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(inner):
            call(i)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times)


def host_seconds(comm: hdp.Communicator, call: Callable[[], object]) -> float:
    """The host's seconds for one call; waits for the streams after every ten, so that no queue is full."""
    total = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        comm.barrier()
        started = time.perf_counter()
        for _ in range(10):
            call()
        total += time.perf_counter() - started
    torch.cuda.synchronize()
    return total / 100


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes read plus written per second by a large device-to-device copy; the kernels are compared with it."""
    a, b = (torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=CUDA) for _ in range(2))
    return 2 * num_bytes / seconds(lambda i: (a if i % 2 else b).copy_(b if i % 2 else a))


def collect(groups: Sequence[Rows], keep: Callable[[list[Row]], None]) -> tuple[list[Row], int]:
    """The rows of all groups, and how many groups failed; ``keep`` is called with all rows so far after each group."""
    rows: list[Row] = []
    failed = 0
    for group in groups:
        try:
            rows += group()
        except Exception:  # the other groups are still measured
            traceback.print_exc()
            failed += 1
        keep(rows)
        torch.cuda.empty_cache()
    return rows, failed


def processes_kind() -> tuple[str, bool]:
    """What ranks that are processes are called in the table, and whether they run at the same time (with_mps.py)."""
    together = os.environ.get("HDPCOMM_MPS") == "1"
    return "processes, MPS" if together else "processes", together


def main(description: str, groups: Sequence[Rows] | Mapping[str, Sequence[Rows]]) -> None:
    """Runs a benchmark script: prints its rows, and writes them to ``--json``. Groups with names: those named by
    ``--groups``, else all. Exit code 1: a group failed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    if isinstance(groups, Mapping):
        parser.add_argument("--groups", nargs="+", choices=list(groups), default=list(groups))
    arguments = parser.parse_args()
    if isinstance(groups, Mapping):
        groups = [each for name in arguments.groups for each in groups[name]]
    if not torch.cuda.is_available():
        parser.exit(3, "no GPU: torch sees no CUDA device\n")

    def keep(rows: list[Row]) -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    rows, failed = collect(groups, keep)
    for line in rows:
        print(f"{line['name']:<58} {line['value']:>12.4g} {line['unit']:<7} {line['target']}")
    sys.exit(1 if failed else 0)

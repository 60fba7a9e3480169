"""Planning time, gap to the lower bound, and how both grow with the ranks. One core.

Usage: ``python benchmarks/planner.py [--seeds 20] [--json FILE]``. Pipelines: ``benchmarks/planner_families.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner
from hdpcomm.plan.distributions import sample_lengths

COSTS = ("compute", "h100", "offload")
MILLION = 2**20
CAPACITY = 8192
# Seconds of 32 layers by Fig. 6a of ByteScale (single device; backward taken as twice the forward pass), no transfers.
COMPUTE_ONLY = CostModel(attention=1.02e-11 * 32 * 3, linear=2.2e-7 * 32 * 3, fixed=1e-3)


def make_planner(kind: str, ranks: int, stages: int = 1, policy: str = "balanced") -> Planner:
    """A planner; ``compute``: only a s^2 + b s + c; ``h100``: with links and kernels; ``offload``: also host memory."""
    cluster = ClusterSpec(ranks=ranks, capacity=CAPACITY, ranks_per_node=8, offload=kind == "offload", pipeline=stages)
    return Planner(MODELS["llama-7b"], cluster, policy, COMPUTE_ONLY if kind == "compute" else None)


def measure(kind: str, ranks: int, batches: list[list[int]], repeat: int = 3) -> dict[str, float]:
    """Gap and planning time of the batches; processor time, the best of some runs."""
    planner = make_planner(kind, ranks)
    ratios, times, bound_by_longest = [], [], 0
    for lengths in batches:
        seconds = []
        for _ in range(repeat):
            started = time.process_time()
            plan = planner.plan(lengths)
            seconds.append(time.process_time() - started)
        planner.validate(plan, lengths)
        if planner.lower_bound([max(lengths)]) >= plan.lower_bound_s * (1 - 1e-6):
            bound_by_longest += 1
        ratios.append(plan.makespan_s / plan.lower_bound_s)
        times.append(min(seconds))
    return {
        "ranks": ranks,
        "mean_ratio": statistics.mean(ratios),
        "worst_ratio": max(ratios),
        "mean_s": statistics.mean(times),
        "worst_s": max(times),
        "longest_is_the_bound": bound_by_longest,
    }


def growth(rows: list[dict[str, float]]) -> float:
    """Exponent p of time ~ ranks^p, least squares on logarithms."""
    x = [math.log(row["ranks"]) for row in rows]
    y = [math.log(row["mean_s"]) for row in rows]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result: dict[str, object] = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
    }
    print("| cost | lengths | ranks | mean / bound | worst / bound | mean ms | worst ms | longest is the bound |")
    print("|---|---|---|---|---|---|---|---|")

    def show(kind: str, name: str, row: dict[str, float]) -> None:
        print(
            f"| {kind} | {name} | {row['ranks']:,} | {row['mean_ratio']:.4f} | {row['worst_ratio']:.4f} | "
            f"{1e3 * row['mean_s']:.1f} | {1e3 * row['worst_s']:.1f} | "
            f"{row['longest_is_the_bound']} of {options.seeds} |",
            flush=True,
        )

    tables: dict[str, list[dict[str, float]]] = {}
    for kind in COSTS:
        for name in ("byted", "github"):
            batches = [
                sample_lengths(name, tokens=32 * MILLION, context=2 * MILLION, seed=seed)
                for seed in range(options.seeds)
            ]
            rows = tables[f"{kind} {name}"] = []
            for ranks in (256, 1024, 4096, 16384):
                rows.append(measure(kind, ranks, batches))
                show(kind, name, rows[-1])
        rows = tables[f"{kind} lognormal"] = []
        for ranks in (8, 16, 32):
            batches = [
                sample_lengths("lognormal:6.5:1.6", count=256, context=CAPACITY * ranks, seed=seed)
                for seed in range(options.seeds)
            ]
            rows.append(measure(kind, ranks, batches))
            show(kind, "256 lognormal", rows[-1])
    for name, rows in tables.items():
        if len(rows) == 4:
            print(f"planning time of {name}: ranks^{growth(rows):.2f} from 256 to 16,384 ranks")
    result["tables"] = tables
    result["growth"] = {name: growth(rows) for name, rows in tables.items() if len(rows) == 4}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Planning time of the steps that take longest to plan: large clusters that are pipelines, have speeds or a queue.

Seconds are processor time of ``Planner.plan``, the median of ``--runs``, with the costs of LLaMA-7B on H100 and the
steps of ``benchmarks/planner_families.py`` (seed 0); ``byted 4G`` are 32,768 tokens a rank. ``--before FILE`` adds the
times and the gaps that another build had written with ``--json``. Usage: ``python benchmarks/planning_time.py [--only
KINDS] [--runs 3] [--before FILE] [--json FILE]``; a run of all takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from planner import CAPACITY, MILLION, make_planner
from planner_families import lengths_of

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner
from hdpcomm.plan.distributions import sample_lengths

KINDS = ("one stage", "4 stages", "8 stages", "speeds", "queue")
PIPELINES = ("lognormal", "long", "bimodal", "equal", "middle")
LARGEST = 131_072
LARGE = 16_384


def cases(kind: str) -> Iterator[tuple[str, int]]:
    """Names of lengths and numbers of ranks."""
    if kind.endswith("stages") or kind == "speeds":
        yield from ((name, LARGE) for name in PIPELINES)
    elif kind == "one stage":
        yield from ((name, LARGEST) for name in ("byted 4G", *PIPELINES))
    else:
        yield from ((name, LARGEST) for name in ("byted 4G", "middle"))


def planner_of(kind: str, ranks: int) -> Planner:
    if kind.endswith(("stage", "stages")):
        return make_planner("h100", ranks, 1 if kind == "one stage" else int(kind.split()[0]))
    rng = random.Random(0)
    speeds = tuple(rng.uniform(0.5, 1) for _ in range(ranks)) if kind == "speeds" else None
    cluster = ClusterSpec(ranks=ranks, capacity=CAPACITY, ranks_per_node=8, speeds=speeds)
    costs = CostModel.analytic(MODELS["llama-7b"], cluster)
    return Planner(MODELS["llama-7b"], cluster, "balanced", costs, queue=kind == "queue")


def measure(kind: str, name: str, ranks: int, runs: int) -> dict[str, Any]:
    if name == "byted 4G":
        lengths = sample_lengths("byted", tokens=ranks * 32_768, context=2 * MILLION, seed=0)
    else:
        lengths = lengths_of(name, ranks, 0)
    planner = planner_of(kind, ranks)
    times = []
    for _ in range(runs):
        started = time.process_time()
        plan = planner.plan(lengths)
        times.append(time.process_time() - started)
    seconds = statistics.median(times)
    row = {"kind": kind, "lengths": name, "ranks": ranks, "sequences": len(lengths), "seconds": seconds}
    return row | {"makespan_s": plan.makespan_s, "bound_s": plan.lower_bound_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS), metavar="KINDS", help="which (default %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="of each step (default %(default)s)")
    parser.add_argument("--before", type=Path, metavar="FILE", help="what another build wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}, expected at least 1")
    kinds = options.only.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only has {unknown[0]!r}, expected some of {', '.join(KINDS)}")
    before = json.loads(options.before.read_text())["rows"] if options.before else []
    known = {(row["kind"], row["lengths"], row["ranks"]): row for row in before}
    print("| ranks | lengths | sequences | s before | s | gap before | gap |")
    print("|---" * 7 + "|")
    rows = []
    for kind in kinds:
        for name, ranks in cases(kind):
            row = measure(kind, name, ranks, options.runs)
            if old := known.get((kind, name, ranks)):
                row |= {"before_s": old["seconds"], "before_makespan_s": old["makespan_s"]}
            rows.append(row)
            print(table_row(row), flush=True)
    if options.json:
        about = {"date": date.today().isoformat(), "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


def table_row(row: dict[str, Any]) -> str:
    """Gaps in percent."""
    gap, was = (
        f"{100 * (row[key] / row['bound_s'] - 1):.2f}" if key in row else ""
        for key in ("makespan_s", "before_makespan_s")
    )
    seconds = f"{row['before_s']:.2f}" if "before_s" in row else ""
    where = f"{row['ranks']:,}, {row['kind']}"
    return f"| {where} | {row['lengths']} | {row['sequences']:,} | {seconds} | {row['seconds']:.2f} | {was} | {gap} |"


if __name__ == "__main__":
    sys.exit(main())

"""Plans for stages of different work beside those for a model of the same work whose stages are alike.

    python benchmarks/uneven_stages.py --json benchmarks/results/uneven_stages.json

A model of 61 layers on pipelines of 4, 8 and 16 stages, cut by :func:`hdpcomm.plan.stage_layers`, with the costs of an
H100. ``alike`` has the same work in all, as if layers could be divided. Prints for each length of context how far plans
are above the lower bound, means over some steps, and how much longer the steps of whole layers are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, Planner, StepPlan, stage_layers, stage_work
from hdpcomm.plan.distributions import sample_lengths

MODEL = replace(MODELS["llama-7b"], layers=61)
RANKS, CAPACITY, TOKENS = 8, 8192, 1 << 19


def plans_of(cluster: ClusterSpec, context: int, seeds: Sequence[int]) -> list[StepPlan]:
    """Plans of some steps."""
    planner = Planner(
        None, cluster, cost_model=CostModel.analytic(MODEL, cluster), memory=MemoryModel(CAPACITY), context=context
    )
    drawn = [sample_lengths("byted", tokens=TOKENS, context=context, seed=seed) for seed in seeds]
    return [planner.plan(lengths) for lengths in drawn]


def row_of(stages: int, context: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Figures of one number of stages and one context."""
    cut = stage_layers(MODEL, stages)
    alike = ClusterSpec(ranks=RANKS, ranks_per_node=8, capacity=CAPACITY, pipeline=stages)
    found = {
        "alike": plans_of(alike, context, seeds),
        "layers": plans_of(replace(alike, stage_work=stage_work(MODEL, cut)), context, seeds),
    }
    gaps = {name: mean(plan.makespan_s / plan.lower_bound_s - 1 for plan in plans) for name, plans in found.items()}
    longer = mean(a.makespan_s / b.makespan_s - 1 for a, b in zip(found["layers"], found["alike"], strict=True))
    seconds = {name: mean(plan.planning_s for plan in plans) for name, plans in found.items()}
    return {
        "stages": stages, "cut": cut, "context": context, "gaps": gaps, "longer": longer,
        "largest_stage": max(cut) * stages / MODEL.layers - 1, "planning_s": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of each row (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    print(f"{MODEL.layers} layers on {RANKS} ranks, steps of {TOKENS:,} tokens, {options.steps} of each row\n")
    print("| stages | layers of each | context | gap, stages alike | gap, whole layers | step | largest stage |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for stages in (4, 8, 16):
        for context in (8192, 65536):
            rows.append(found := row_of(stages, context, range(options.steps)))
            cut, gaps = " ".join(map(str, found["cut"])), found["gaps"]
            print(
                f"| {stages} | {cut} | {context:,} | {gaps['alike']:.1%} | {gaps['layers']:.1%} | "
                f"{found['longer']:+.1%} | {found['largest_stage']:+.1%} |",
                flush=True,
            )
    if options.json:
        about = {"date": date.today().isoformat(), "layers": MODEL.layers, "ranks": RANKS, "tokens": TOKENS}
        options.json.write_text(json.dumps(about | {"steps": options.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

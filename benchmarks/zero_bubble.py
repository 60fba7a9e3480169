"""What split backward passes (zero-bubble pipelines) save: the schedule that runs, and the most that could be saved.

    python benchmarks/zero_bubble.py --json benchmarks/results/zero_bubble.json       about half a minute

A backward pass gives the gradients of its inputs, which the stage before waits for, and those of the weights, which can
come later (Qi et al., arXiv 2401.10241): a third of the work of linear layers.

``runs``: plans and simulated schedules with ``ClusterSpec(split_backward=True)`` beside those without. A device owes
gradients of no more micro-batches than the first device of a pipeline does under 1F1B. ``most``: each device runs the
passes of the 1F1B schedule in their order, as soon as it can, and its gaps are filled by weight gradients, cut as
finely as a gap needs and kept as long as need be: the most that this order of passes can gain, memory not counted.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from hdpcomm.data.distributions import sample_lengths
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, ModelSpec, Planner, StepPlan

SMALL = CostModel(attention=5e-8, linear=2e-5, fixed=3e-3)  # of a stage of benchmarks/meshes.py on a CPU core
PASSES_OF_LINEAR = 3  # forward, and backward for inputs and weights: as much work each


def split_seconds(planner: Planner, plan: StepPlan, *, split: bool) -> float:
    """When the last device is done; without ``split`` that of the simulated 1F1B."""
    found, schedule, costs = planner.simulate(plan), planner.schedule(plan), planner.cost_model
    took = {
        tuple(which): float(end - start)
        for which, (start, end) in zip(found["which"].tolist(), found["times"], strict=True)
    }
    places = {batch.index: place for place, batch in enumerate(plan.micro_batches)}
    free: dict[tuple[int, int], float] = defaultdict(float)  # by rank and device
    kept: dict[tuple[int, int], float] = defaultdict(float)  # seconds of weight gradients that are still to come
    ended: dict[tuple[int, int, int], float] = {}
    for index, stage, backward in schedule.passes.tolist():
        batch = plan.micro_batches[places[index]]
        seconds, later = took[places[index], stage, backward], 0.0
        if split and backward:
            later = costs.linear * batch.tokens / len(batch.ranks) / PASSES_OF_LINEAR / schedule.chunks
            later = min(later, seconds)
            seconds -= later
        needed = [(index, stage, 0)] if backward else []
        beside = stage + (1 if backward else -1)
        needed += [(index, beside, backward)] if 0 <= beside < schedule.stages else []
        devices = [(rank, stage % schedule.devices) for rank in batch.ranks]
        start = max(max(free[device] for device in devices), max((ended[each] for each in needed), default=0.0))
        for device in devices:
            kept[device] += later - min(kept[device], start - free[device])
            free[device] = start + seconds
        ended[index, stage, backward] = start + seconds
    return max((seconds + kept[device] for device, seconds in free.items()), default=0.0)


def measure(
    model: ModelSpec | None, cluster: ClusterSpec, costs: CostModel | None, *, tokens: int, context: int, seeds: int
) -> dict[str, Any]:
    """Of byted-like and GitHub-like steps: how much longer 1F1B takes than with split backward passes."""
    planner, splitting = (
        Planner(model, replace(cluster, split_backward=split), cost_model=costs, context=context)
        for split in (False, True)
    )
    row: dict[str, Any] = {"ranks": cluster.ranks, "pipeline": cluster.pipeline, "tokens": tokens, "context": context}
    for name in ("byted", "github"):
        gains: dict[str, list[float]] = {"runs": [], "most": []}
        held = []
        for seed in range(seeds):
            lengths = sample_lengths(name, tokens=tokens, context=context, seed=seed)
            plan, split = planner.plan(lengths), splitting.plan(lengths)
            plain = split_seconds(planner, plan, split=False)
            gains["most"].append(plain / split_seconds(planner, plan, split=True) - 1)
            gains["runs"].append(plan.makespan_s / split.makespan_s - 1)
            peaks = [each.simulate(made)["peak_tokens"].max() for each, made in ((planner, plan), (splitting, split))]
            held.append(float(peaks[1] / peaks[0]))
        row[name] = {key: {"mean": mean(of), "least": min(of), "most": max(of)} for key, of in gains.items()}
        row[name]["memory"] = mean(held)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="steps of each kind (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="the small meshes only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    rows = []
    print("| model | HDP ranks | PP | tokens | context | byted, runs | most | github, runs | most |")
    print("|" + "---|" * 9)
    large = [] if options.small else [(ranks, stages) for stages in (4, 8) for ranks in (16, 64, 256)]
    for ranks, stages in [*large, (1, 2), (2, 2), (2, 4), (4, 4)]:
        if (ranks, stages) in large:
            name, model, costs = "70B, TP 8", MODELS["llama-70b"], None
            cluster = ClusterSpec(ranks, tensor=8, pipeline=stages, ranks_per_node=1)
            tokens, context = (ranks << 16, 1 << 18) if ranks < 256 else (ranks << 15, 1 << 20)
        else:
            name, model, costs = "small", None, SMALL
            cluster = ClusterSpec(ranks, capacity=1024, pipeline=stages)
            tokens, context = 8192 * ranks, 1024 * min(2, ranks)
        row = measure(model, cluster, costs, tokens=tokens, context=context, seeds=options.seeds)
        rows.append({"model": name} | row)
        shown = " | ".join(
            f"{row[kind][which]['mean']:.1%}" for kind in ("byted", "github") for which in ("runs", "most")
        )
        print(f"| {name} | {ranks} | {stages} | {tokens:,} | {context:,} | {shown} |", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"date": date.today().isoformat(), "seeds": options.seeds, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What split backward passes (zero-bubble pipelines) save: the schedule that runs, and the most that could be saved.

    python benchmarks/zero_bubble.py --json benchmarks/results/zero_bubble.json       about half a minute
    python benchmarks/zero_bubble.py --run 6 --json benchmarks/results/zero_bubble_run.json     about a minute

A backward pass gives the gradients of its inputs, which the stage before waits for, and those of the weights, which can
come later (Qi et al., arXiv 2401.10241): a third of the work of linear layers.

``runs``: plans and simulated schedules with ``ClusterSpec(split_backward=True)`` beside those without. A device owes
gradients of no more micro-batches than the first device of a pipeline does under 1F1B. ``most``: each device runs the
passes of the 1F1B schedule in their order, as soon as it can, and its gaps are filled by weight gradients, cut as
finely as a gap needs and kept as long as need be: the most that this order of passes can gain, memory not counted.

``--run STEPS`` trains on two processes, a stage each, by turns with whole and with split backward passes, and takes the
least processor time of each pass. A machine that other programs use tells nothing by its clock, so the steps' seconds
are those of the schedules with these times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.comm.launch import run_ranks
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel import split_model
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, ModelSpec, Pass, Planner, StepPlan
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.train import Trainer

SMALL = CostModel(attention=5e-8, linear=2e-5, fixed=3e-3)  # of a stage of benchmarks/meshes.py on a CPU core
MODEL = LlamaConfig(layers=4, hidden=256, heads=4, kv_heads=2, ffn=768)  # of --run
TOKENS = 512  # of a micro-batch of --run
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
    """How much longer 1F1B takes than split backward passes, for byted-like and GitHub-like steps."""
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


class Timed(Trainer):
    """Remembers the processor time of each pass of a step."""

    def step(self, *arguments: Any) -> Any:
        self.took: dict[Pass, float] = {}
        self.began = time.process_time()
        return super().step(*arguments)

    def _after_pass(self, done: Pass) -> None:
        now = time.process_time()
        self.took[done] = now - self.began
        super()._after_pass(done)
        self.began = time.process_time()


def time_passes(steps: int, count: int) -> list[dict[Pass, float]]:
    """On each of two ranks: the least seconds of each pass of ``count`` equal micro-batches, whole and split."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        mesh, least = Mesh(comm, pipeline=2), ({}, {})
        trainers = []
        for split in (False, True):
            (stage,) = split_model(Llama(MODEL), 2)[mesh.stage :: 2]
            trainers.append(Timed(stage, torch.optim.SGD(stage.parameters(), lr=0.0), planner_of(split), mesh))
        tokens = torch.arange(count * TOKENS).view(count, TOKENS) % MODEL.vocabulary
        losses = set()
        for _ in range(steps):
            for known, trainer in zip(least, trainers, strict=True):
                losses.add(trainer.step([TOKENS] * count, lambda i: tokens[i]).loss)
                for done, seconds in trainer.took.items():
                    known[done] = min(seconds, known.get(done, seconds))
        assert len(losses) == 1
        return list(least)


def planner_of(split: bool, work: float = 1.0, **measured: float) -> Planner:
    """``work``: of the passes, in those of whole ones."""
    cluster = ClusterSpec(1, capacity=TOKENS, pipeline=2, split_backward=split)
    return Planner(None, cluster, cost_model=CostModel(attention=1e-9, linear=work * 1e-4, **measured))


def replay(planner: Planner, count: int, took: dict[Pass, float]) -> float:
    """When the schedule ends where its passes take so long, and messages no time."""
    schedule = planner.schedule(planner.plan([TOKENS] * count))
    free, ended = [0.0, 0.0], {}
    for row in schedule.passes.tolist():
        done = Pass.of_row(row)
        beside = done.stage + (1 if done.backward else -1)
        start = max(free[done.stage], 0.0 if done.weights else ended.get(replace(done, stage=beside), 0.0))
        free[done.stage] = ended[done] = start + took[done]
    return max(free)


def measure_run(steps: int) -> list[dict[str, float]]:
    """Seconds of a step of 2, 4 and 8 micro-batches, with whole and with split backward passes, as replayed."""
    rows = []
    print(
        "| micro-batches | whole, s | split, s | gain | of the plan | with measured weights | work of split passes |\n"
        + "|---" * 7
        + "|"
    )
    for count in (2, 4, 8):
        ranks = run_ranks(time_passes, 2, steps, count)
        planners = [planner_of(split) for split in (False, True)]
        took = [{**ranks[0][kind], **ranks[1][kind]} for kind in (0, 1)]
        whole, split = (replay(planner, count, each) for planner, each in zip(planners, took, strict=True))
        plans = [planner.plan([TOKENS] * count).makespan_s for planner in planners]
        row = {"micro_batches": count, "whole_s": whole, "split_s": split, "planned": plans[0] / plans[1] - 1}
        row["work"] = sum(took[1].values()) / sum(took[0].values())
        row["weights"] = sum(s for done, s in took[1].items() if done.weights) / sum(took[1].values())
        measured = planner_of(True, row["work"], weights=row["weights"])
        row["planned_as_measured"] = plans[0] / measured.plan([TOKENS] * count).makespan_s - 1
        rows.append(row)
        print(
            f"| {count} | {whole:.3f} | {split:.3f} | {whole / split - 1:.1%} | {row['planned']:.1%} | "
            f"{row['planned_as_measured']:.1%} | {row['work']:.3f} |",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="steps of each kind (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="the small meshes only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--run", type=int, metavar="STEPS", help="train on two processes, so many steps of each kind")
    options = parser.parse_args()
    if options.run:
        write(options.json, {"steps": options.run, "model": asdict(MODEL), "rows": measure_run(options.run)})
        return 0
    rows: list[dict[str, Any]] = []
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
    write(options.json, {"seeds": options.seeds, "rows": rows})
    return 0


def write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"date": date.today().isoformat()} | found, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

"""The paper's rows with pipelines (70B and the two MoE models, GitHub at 2M: 3.42x to 4.28x) beside the simulator.

Steps run in the order of :meth:`Planner.schedule`, which is what the pipeline runtime runs. Inputs are those of
``benchmarks/paper.py``, whose ranks are two devices: a device has half of a rank's rates. Tensor and pipeline sizes are
ours: those that make the paper's number of devices with CP = 256 (2M tokens of 8K a rank).

Usage: ``python benchmarks/paper_pipelines.py [--seeds 5] [--slices] [--json FILE]``. Prints tables of
docs/paper.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from paper import CAPACITY, CONTEXTS, DEVICE, TOKENS, M, cost_model, deciles, table

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, DeviceSpec, MicroBatch, Planner, SequenceInfo, StepPlan
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.sim import simulate_step

RANKS, TENSOR = 256, 8
STAGES = {"llama-70b": 4, "mistral-8x7b": 4, "mistral-8x22b": 8}  # 8,192, 8,192 and 16,384 devices
CHUNKS = {"llama-70b": 5, "mistral-8x7b": 4, "mistral-8x22b": 7}  # of a device, with the interleaved schedule
PAPER = {"llama-70b": "4.28x", "mistral-8x7b": "3.42x to 4.13x", "mistral-8x22b": "3.42x to 4.13x"}
NAMES = {"github": "GitHub", "byted": "Byted"}


def device_of(inputs: str) -> DeviceSpec:
    """A device of a rank of two, its share of the link included."""
    rank = DEVICE[inputs]
    return replace(
        rank,
        attention_flops=rank.attention_flops / 2,
        linear_flops=rank.linear_flops / 2,
        inter_bandwidth=rank.inter_bandwidth / 2,
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """What a row assumes."""

    model: str
    inputs: str
    offload: bool = True
    gradient_bytes: int = 4
    free_links: bool = False
    chunks: int = 1
    slices: int = 1

    def planner(self, policy: str, context: int) -> Planner:
        model = MODELS[self.model]
        cluster = ClusterSpec(
            RANKS,
            CAPACITY,
            ranks_per_node=1,  # 8 devices
            offload=self.offload and policy != "static",
            device=device_of(self.inputs),
            tensor=TENSOR,
            pipeline=STAGES[self.model],
            chunks=self.chunks,
        )
        cost = cost_model(model, cluster, self.gradient_bytes)
        if self.free_links:
            cost = replace(cost, kv_intra=0.0, kv_inter=0.0, latency_intra=0.0, latency_inter=0.0)
        slices = self.slices if policy == "balanced" else 1
        return Planner(model, cluster, policy, cost, context=context, slices=slices)


def packs_as_they_come(planner: Planner, lengths: Sequence[int]) -> StepPlan:
    """The static mesh of one group with packs filled in the order of the data, not by length."""
    packs: list[list[SequenceInfo]] = [[]]
    held = 0
    for i, length in enumerate(lengths):
        shard = -(-length // RANKS)
        if held + shard > CAPACITY:
            packs.append([])
            held = 0
        packs[-1].append(SequenceInfo(i, length))
        held += shard
    ring = planner.plan([RANKS * CAPACITY]).micro_batches[0].ranks
    batches = tuple(MicroBatch(i, ring, tuple(pack), 0.0, 0.0) for i, pack in enumerate(packs))
    return StepPlan("static", RANKS, batches, 0.0, 0.0, 0.0, 0.0)


def even_split_seconds(cost: CostModel, lengths: Sequence[int]) -> float:
    """All work as if each sequence were on one rank, in full packs, dealt evenly to ranks that never wait."""
    squares, tokens = sum(float(s) * s for s in lengths), sum(lengths)
    return cost.load_seconds(squares, tokens) / RANKS + (tokens / CAPACITY / RANKS - 1) * cost.fixed


def measure(setup: Setup, lengths_of: str, context: int, seeds: int) -> dict[str, float]:
    """Means over the batches: seconds, and the speed-up with its first and ninth decile. ``*_pass_s`` are without the
    reduction of the gradients and the optimizer."""
    rows: dict[str, list[float]] = {}
    for seed in range(seeds):
        lengths = sample_lengths(lengths_of, tokens=TOKENS, context=context, seed=seed)
        static, balanced = setup.planner("static", context), setup.planner("balanced", context)
        free = replace(setup, free_links=True).planner("static", context)
        before, after = simulate_step(static, lengths), simulate_step(balanced, lengths)
        found = {
            "static_s": before.step_s,
            "balanced_s": after.step_s,
            "static_pass_s": before.compute_s,
            "balanced_pass_s": after.compute_s,
            "bound_s": after.plan.lower_bound_s,
            "even_s": even_split_seconds(balanced.cost_model, lengths),
            "static_free_links_s": simulate_step(free, lengths).compute_s,
            "static_unsorted_s": simulate_step(static, packs_as_they_come(static, lengths)).step_s,
        }
        for key, value in found.items():
            rows.setdefault(key, []).append(value)
    by_batch = [a / b for a, b in zip(rows["static_s"], rows["balanced_s"], strict=True)]
    low, high = deciles(by_batch)
    return {key: statistics.mean(values) for key, values in rows.items()} | {"low": low, "high": high}


def ratio(row: dict[str, float]) -> float:
    return row["static_s"] / row["balanced_s"]


def speedup(row: dict[str, float]) -> str:
    return f"{ratio(row):.2f}x ({row['low']:.2f} to {row['high']:.2f})"


def speedups_table(result: dict[str, Any]) -> str:
    rows = []
    for key, row in result["rows"].items():
        model, inputs, lengths = key.split()
        paper = PAPER[model] if lengths == "github" else "-"
        cells = [model, inputs, NAMES[lengths], paper, speedup(row), speedup(result["bf16_gradients"][key])]
        rows.append([*cells, f"{row['static_s']:.0f} s", f"{row['balanced_s']:.0f} s"])
    header = ["model", "inputs", "lengths", "paper", "fp32 KV gradients", "bf16", "static step", "balanced step"]
    return table(header, rows)


def parts_table(result: dict[str, Any]) -> str:
    rows = []
    for key, row in result["rows"].items():
        model, inputs, lengths = key.split()
        links = row["static_pass_s"] / row["static_free_links_s"]
        packs = row["static_free_links_s"] / row["even_s"]
        bound, plan = row["bound_s"] / row["even_s"], row["balanced_pass_s"] / row["bound_s"]
        cells = [model, inputs, NAMES[lengths], f"{row['even_s']:.1f} s", f"{links:.2f}", f"{packs:.2f}"]
        rows.append([*cells, f"{bound:.2f}", f"{plan:.3f}", f"{row['static_pass_s'] / row['bound_s']:.2f}x"])
    header = ["model", "inputs", "lengths", "even split", "links", "packs", "bound", "plan", "static / bound"]
    return table(header, rows)


def measure_slices(setup: Setup, lengths_of: str, seeds: int) -> dict[str, float]:
    """Means over the batches of 2M context: seconds of a step and over the even split, without and with slices, the
    gain with its first and ninth decile, slices of a step, and seconds of planning."""
    rows: dict[str, list[float]] = {}
    for seed in range(seeds):
        lengths = sample_lengths(lengths_of, tokens=TOKENS, context=2 * M, seed=seed)
        static, plain, sliced = (
            each.planner(policy, 2 * M)
            for each, policy in ((setup, "static"), (setup, "balanced"), (replace(setup, slices=16), "balanced"))
        )
        before, after = simulate_step(plain, lengths), simulate_step(sliced, lengths)
        even = even_split_seconds(plain.cost_model, lengths)
        found = {
            "static_s": simulate_step(static, lengths).step_s,
            "plain_s": before.step_s,
            "sliced_s": after.step_s,
            "plain_over_even": before.compute_s / even,
            "sliced_over_even": after.compute_s / even,
            "slices": len(after.plan.slices),
            "plain_planning_s": before.plan.planning_s,
            "planning_s": after.plan.planning_s,
        }
        for key, value in found.items():
            rows.setdefault(key, []).append(value)
    low, high = deciles([a / b for a, b in zip(rows["plain_s"], rows["sliced_s"], strict=True)])
    return {key: statistics.mean(values) for key, values in rows.items()} | {"low": low, "high": high}


def slices_table(result: dict[str, Any]) -> str:
    rows = []
    for key, row in result["slices"].items():
        model, inputs, lengths = key.split()
        speedups = (row["static_s"] / row[name] for name in ("plain_s", "sliced_s"))
        gain = f"{row['plain_s'] / row['sliced_s']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"
        cells = [model, inputs, NAMES[lengths], PAPER[model] if lengths == "github" else "-"]
        cells += [*(f"{speedup:.2f}x" for speedup in speedups), gain]
        over = (f"{row[name]:.2f}" for name in ("plain_over_even", "sliced_over_even"))
        rows.append(
            [*cells, *over, f"{row['slices']:.0f}", f"{row['plain_planning_s']:.1f}, {row['planning_s']:.1f} s"]
        )
    header = [
        "model",
        "inputs",
        "lengths",
        "paper",
        "whole",
        "slices",
        "gain",
        "over even",
        "with slices",
        "slices a step",
    ]
    return table([*header, "planning"], rows)


def variants_table(result: dict[str, Any]) -> str:
    rows = []
    for key, row in result["rows"].items():
        model, inputs, lengths = key.split()
        if lengths != "github":
            continue
        others = [row, *(result[name][key] for name in ("no_offload", "interleaved"))]
        others += [result["contexts"][key][str(size)] for size in CONTEXTS[:-1]]
        unsorted, ratios = row["static_unsorted_s"] / row["balanced_s"], [ratio(each) for each in others]
        rows.append([model, inputs, *(f"{value:.2f}x" for value in (ratios[0], unsorted, *ratios[1:]))])
    header = ["model", "inputs", "2M", "packs as the data come", "no offload", "interleaved", "256K", "512K", "1M"]
    return table(header, rows)


SECTIONS = {
    "Speed-up of balanced HDP, 2M context, 32M tokens": speedups_table,
    "What the speed-up is made of": parts_table,
    "Other assumptions, GitHub": variants_table,
    "Long sequences in slices": slices_table,
}


def run(models: Sequence[str], seeds: int, result: dict[str, Any], *, slices: bool) -> None:
    """Fills in the rows of these models. ``slices``: those of slices alone."""
    few = max(1, seeds // 6)
    for model in models:
        for inputs in DEVICE:
            for lengths in ("github", "byted"):
                key, setup = f"{model} {inputs} {lengths}", Setup(model, inputs)
                result["slices"][key] = measure_slices(setup, lengths, seeds)
                if slices:
                    continue
                result["rows"][key] = measure(setup, lengths, 2 * M, seeds)
                result["bf16_gradients"][key] = measure(replace(setup, gradient_bytes=2), lengths, 2 * M, seeds)
                if lengths == "byted":
                    continue
                result["no_offload"][key] = measure(replace(setup, offload=False), lengths, 2 * M, few)
                result["interleaved"][key] = measure(replace(setup, chunks=CHUNKS[model]), lengths, 2 * M, few)
                result["contexts"][key] = {str(c): measure(setup, lengths, c, few) for c in CONTEXTS[:-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", default=",".join(STAGES), metavar="M,M", help="which (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written; its rows of other models are kept")
    parser.add_argument("--slices", action="store_true", help="only the table of slices")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    models = options.models.split(",")
    if unknown := [name for name in models if name not in STAGES]:
        parser.error(f"--models has {unknown[0]}, expected some of {', '.join(STAGES)}")
    result = {"rows": {}, "bf16_gradients": {}, "no_offload": {}, "interleaved": {}, "contexts": {}, "slices": {}}
    if options.json and options.json.exists():
        result |= json.loads(options.json.read_text())
    if not options.slices:
        result |= {
            "date": date.today().isoformat(),
            "command": f"python benchmarks/paper_pipelines.py --seeds {options.seeds}",
        }
    run(models, options.seeds, result, slices=options.slices)
    for title, make in SECTIONS.items():
        if options.slices and make is not slices_table:
            continue
        print(f"\n## {title}\n\n{make(result)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

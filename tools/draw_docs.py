"""Draws docs/pictures: plans by the planner itself, figures from benchmarks/results, the rest as sketches.

usage: python tools/draw_docs.py [--run FOLDER]

--run: of a run of hdpcomm train --out FOLDER --compare static, the step with a sequence on the most ranks and all times
become benchmarks/results/gallery_run.json, which measured.svg, time.svg and lengths.svg are drawn from.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

TOP = Path(__file__).resolve().parents[1]
OUT = TOP / "docs/pictures"
COLOURS = ["#3b6fb6", "#e08a2e", "#4f9d5d", "#a4508b", "#c8553d"]
RUN = TOP / "benchmarks/results/gallery_run.json"


def save(figure: Any, name: str) -> None:
    figure.savefig(OUT / f"{name}.svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)
    text = (OUT / f"{name}.svg").read_text()
    (OUT / f"{name}.svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def bare(width: float, height: float, x: float, y: float) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(0, x)
    axes.set_ylim(y, 0)
    axes.axis("off")
    return figure, axes


def box(axes: Any, x: float, y: float, w: float, h: float, text: str, colour: str, **options: Any) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=1.2))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", color="white", fontsize=9, **options)


def plan() -> None:
    """The batch of the first page under two policies, drawn by the product."""
    from hdpcomm.plan import MODELS, ClusterSpec, Planner
    from hdpcomm.plan.distributions import sample_lengths
    from hdpcomm.trace import plot_plans

    lengths = sample_lengths("byted", tokens=1 << 20, context=128 << 10, seed=3)
    plans = [
        Planner(MODELS["llama-7b"], ClusterSpec(ranks=16, capacity=32 << 10), policy, context=128 << 10).plan(lengths)
        for policy in ("static", "balanced")
    ]
    plot_plans(plans, OUT / "plan.svg")


def slices() -> None:
    """One long sequence among short ones in pipelines, whole and in slices, drawn by the product."""
    import random

    from hdpcomm.plan import MODELS, ClusterSpec, Planner
    from hdpcomm.trace import plot_plans

    rng = random.Random(3)
    lengths = [96 << 10, *(rng.randint(500, 9000) for _ in range(60))]
    cluster = ClusterSpec(ranks=16, capacity=8 << 10, ranks_per_node=8, pipeline=4)
    planners = [Planner(MODELS["llama-7b"], cluster, slices=most) for most in (1, 16)]
    plot_plans([planner.plan(lengths) for planner in planners], OUT / "slices.svg", planners)


def trees() -> None:
    """24 prompts with 8 answers each: as sequences, and every prompt once."""
    import random

    from hdpcomm.plan import MODELS, ClusterSpec, Planner, trees_of_prompts
    from hdpcomm.trace import plot_plans

    rng = random.Random(5)
    prompts, lengths = [], []
    for name in range(24):
        prompt = rng.choice((2000, 6000, 12000, 24000))
        for _ in range(8):
            prompts.append((name, prompt))
            lengths.append(prompt + int(rng.lognormvariate(6.8, 0.9)))
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=16, capacity=32 << 10))
    folded = [each.tree for each in trees_of_prompts(lengths, prompts)]
    plot_plans([planner.plan(lengths), planner.plan(folded)], OUT / "trees.svg")


def take_run(folder: Path) -> None:
    """Writes those figures of a run that the pictures of a report need."""
    from hdpcomm.run import read_lines, read_metrics

    metrics = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in read_lines(folder / "timeline.jsonl") if row["policy"] == "balanced"]
    step = max(steps, key=lambda row: max(len(each["ranks"]) for each in row["planned"]))
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    content = {
        "date": date.today().isoformat(),
        "machine": {"cpu": cpu[1] if cpu else "unknown"},
        "step": step,
        "metrics": [
            {name: value for name, value in row.items() if name in ("policy", "seconds") or name.endswith("_s")}
            for row in metrics
        ],
        "lengths": json.loads((folder / "lengths.json").read_text()),
    }
    RUN.write_text(json.dumps(content, indent=1) + "\n")


def run() -> None:
    """Three figures of the report of a run."""
    from hdpcomm.trace import gantt
    from hdpcomm.trace.run_report import _shares

    content = json.loads(RUN.read_text())
    policies = dict.fromkeys(row["policy"] for row in content["metrics"])
    rows = {policy: [row for row in content["metrics"] if row["policy"] == policy] for policy in policies}
    figures = {
        "measured": gantt.step_gantt(content["step"]),
        "time": gantt.time_shares({policy: _shares(own) for policy, own in rows.items()}),
        "lengths": gantt.lengths(content["lengths"]["octaves"]),
    }
    for name, text in figures.items():
        (OUT / f"{name}.svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def zigzag() -> None:
    figure, axes = bare(7.6, 2.3, 8.9, 3.1)
    for chunk in range(8):
        rank = min(chunk, 7 - chunk)
        box(axes, chunk + 0.8, 0.3, 1, 0.7, f"chunk {chunk}\nrank {rank}", COLOURS[rank])
        for k in range(chunk + 1):
            axes.add_patch(
                Rectangle((chunk + 0.83, 2.75 - 0.19 * (k + 1)), 0.94, 0.16, facecolor=COLOURS[rank], alpha=0.55)
            )
    axes.text(0.72, 0.65, "tokens", ha="right", va="center", fontsize=9)
    axes.text(0.72, 2.3, "work", ha="right", va="center", fontsize=9)
    axes.text(4.8, 3.0, "each rank: 1 + 8 = 2 + 7 = 3 + 6 = 4 + 5 parts of work", ha="center", va="center", fontsize=9)
    save(figure, "zigzag")


def chosen() -> None:
    """Which tokens the queries of each rank choose in one sequence, as the indexer chooses, and whose they are."""
    import torch

    from hdpcomm.attention import index_top_k, shard

    tokens, ranks, top_k = 256, 4, 12
    draw = torch.Generator().manual_seed(5)
    near = torch.stack([torch.cos(torch.arange(tokens) / 9 + part) for part in (0.0, 1.6)], 1)  # neighbours are alike
    keys = torch.cat((2 * near, torch.randn(tokens, 6, generator=draw)), 1)
    queries = (keys + 0.5 * torch.randn(tokens, 8, generator=draw))[:, None]
    found = index_top_k(queries, keys, torch.ones(tokens, 1), top_k=top_k, comm=None, cu_seqlens=[0, tokens])
    own = [shard(torch.arange(tokens), [0, tokens], rank=rank, size=ranks) for rank in range(ranks)]
    owner = torch.empty(tokens, dtype=torch.int64)
    for rank, places in enumerate(own):
        owner[places] = rank
    figure, (axes, counts) = plt.subplots(1, 2, figsize=(8.6, 2.5), width_ratios=[3.2, 1])
    for rank, places in enumerate(own):
        chose = sorted({int(token) for token in found[places].flatten() if token >= 0})
        axes.text(-4, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
        for other in range(ranks):
            theirs = [token for token in chose if int(owner[token]) == other]
            first = [token for token in theirs if token - 1 not in theirs]
            last = [token for token in theirs if token + 1 not in theirs]
            spans = [(a, b + 1 - a) for a, b in zip(first, last, strict=True)]
            colour = "#dddddd" if other == rank else COLOURS[other]
            axes.broken_barh(spans, (rank + 0.1, 0.8), facecolor=colour, edgecolor="none")
        for other in range(ranks):
            rows = sum(int(owner[token]) == other for token in chose)
            text = "held" if other == rank else str(rows)
            shade = "#dddddd" if other == rank else COLOURS[other]
            box(counts, other, rank, 1, 1, text, shade)
    axes.set_xlim(0, tokens)
    axes.set_ylim(ranks, 0)
    axes.set_title("tokens that a rank's queries chose, in the colour of who holds and sends them", fontsize=9)
    axes.set_xlabel(f"token of a sequence of {tokens}; grey: held by the rank itself", fontsize=8)
    axes.set_yticks([])
    axes.tick_params(labelsize=8)
    counts.set_xlim(0, ranks)
    counts.set_ylim(ranks, 0)
    counts.set_title(f"rows that come (in a ring {tokens // ranks})", fontsize=9)
    counts.set_xticks([rank + 0.5 for rank in range(ranks)], [str(rank) for rank in range(ranks)], fontsize=8)
    counts.set_xlabel("from rank", fontsize=8)
    counts.set_yticks([])
    save(figure, "chosen")


def step() -> None:
    figure, axes = bare(8.4, 2.2, 10.4, 2.6)
    stages = [
        ("lengths", "of the batch,\nsame on all ranks"),
        ("plan", "ranks, offload,\nplace in time"),
        ("shards", "each rank reads\nits own tokens"),
        ("micro-batches", "ring attention\non subsets"),
        ("gradients", "one sum over\nall ranks"),
    ]
    for k, (name, text) in enumerate(stages):
        x = 0.1 + 2.08 * k
        axes.add_patch(
            FancyBboxPatch(
                (x, 0.5), 1.7, 1.5, boxstyle="round,pad=0.02,rounding_size=0.12", facecolor=COLOURS[k], edgecolor="none"
            )
        )
        axes.text(x + 0.85, 0.85, name, ha="center", va="center", color="white", fontsize=9, fontweight="bold")
        axes.text(x + 0.85, 1.5, text, ha="center", va="center", color="white", fontsize=7.5)
        if k:
            axes.add_patch(
                FancyArrowPatch(
                    (x - 0.36, 1.25), (x - 0.02, 1.25), arrowstyle="-|>", mutation_scale=12, color="#555555"
                )
            )
    save(figure, "step")


def offload() -> None:
    figure, axes = bare(8.4, 2.4, 12.6, 3.7)
    for row, name in enumerate(("compute", "to the host", "from the host")):
        axes.text(1.4, 0.75 + row, name, ha="right", va="center", fontsize=9)
        axes.add_patch(Rectangle((1.5, 0.35 + row), 11, 0.8, facecolor="#f0f0f0", edgecolor="none"))
    for k in range(4):
        box(axes, 1.5 + k, 0.35, 1, 0.8, f"fwd {k}", COLOURS[0])
    for k in range(4):
        box(axes, 5.5 + 1.7 * k, 0.35, 1.7, 0.8, f"backward {3 - k}", COLOURS[1])
    for k in range(2):
        box(axes, 2.5 + k, 1.35, 0.8, 0.8, f"layer {k}", COLOURS[2])
    box(axes, 5.6, 2.35, 0.8, 0.8, "layer 1", COLOURS[3])
    box(axes, 7.3, 2.35, 0.8, 0.8, "layer 0", COLOURS[3])
    axes.text(7, 3.5, "time; the last two layers stay on the device", ha="center", va="center", fontsize=9)
    save(figure, "offload")


def collectives() -> None:
    """Small and large messages beside other libraries, from benchmarks/results/collectives-2.json."""
    content = json.loads((TOP / "benchmarks/results/collectives-2.json").read_text())
    rows = [row for row in content["rows"] if row["language"] == "python" and row["op"] == "all_reduce"]
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for colour, library in zip(COLOURS, ("hdpcomm", "gloo", "Open MPI", "MPICH"), strict=False):
        points = sorted((row["bytes"], row["median_us"]) for row in rows if row["library"] == library)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=colour, label=library)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("us, median")
    axes.set_title(f"all_reduce on 2 ranks, from Python ({content['machine']['cpu']}, {content['date']})", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, "collectives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FOLDER")
    if (folder := parser.parse_args().run) is not None:
        take_run(folder)
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hdpcomm"  # the same file each time
    OUT.mkdir(parents=True, exist_ok=True)
    for draw in (plan, slices, trees, run, zigzag, chosen, step, offload, collectives):
        draw()
    print(*sorted(path.name for path in OUT.iterdir()))


if __name__ == "__main__":
    main()

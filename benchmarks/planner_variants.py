"""Which parts of the planner make the best plans, over a sample of all families, sizes, costs and options.

Each option of ``OPTIONS`` is planned for all lengths of ``benchmarks/planner_families.py``, those that no part was made
for included, on numbers of ranks that follow each other. Prints how often each part is in the name of the plan that was
best (``StepPlan.made_by``), and with ``--against FILE`` how much longer plans are than those that another build, or one
without a part, has written with ``--json``. Usage: ``python benchmarks/planner_variants.py [--kinds KINDS] [--every N]
[--seed SEED] [--json FILE] [--against FILE]``; the whole takes four minutes, with ``--every 3`` one and a half.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from planner import CAPACITY, COMPUTE_ONLY, MILLION
from planner_families import FAMILIES, UNSEEN, lengths_of, unseen_lengths

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner, Tree
from hdpcomm.plan.distributions import sample_lengths

Row = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """How steps are planned, and on which numbers of ranks in turn."""

    kind: str
    name: str
    ranks: tuple[int, ...]
    cluster: dict[str, Any]
    planner: dict[str, Any]


def _option(kind: str, name: str, ranks: tuple[int, ...], **values: Any) -> Option:
    planner = {key: values.pop(key) for key in ("slices", "queue") if key in values}
    return Option(kind, name, ranks, values, planner)


SIZES, FEW, SLICED, SMALL = (32, 256, 1024, 4096), (32, 128, 512), (32, 128, 16, 256), (2, 4, 8, 16, 1)
OPTIONS = (
    _option("flat", "compute", SIZES),
    _option("flat", "h100", (256, 1024, 4096, 32)),
    _option("flat", "offload", (1024, 32, 256), offload=True),
    _option("flat", "speeds", FEW),
    _option("flat", "trees", FEW),
    _option("flat", "shared interfaces", FEW, nics=2),
    _option("flat", "domains", FEW, ranks_per_domain=32),
    _option("flat", "experts", FEW, expert=8),
    _option("flat", "shared cores", (16, 32), cores=8),
    _option("flat", "queue", FEW, queue=True),
    _option("small", "compute on few ranks", SMALL),
    _option("small", "h100 on few ranks", SMALL),
    _option("small", "offload on few ranks", SMALL, offload=True),
    _option("small", "speeds on few ranks", SMALL),
    _option("small", "trees on few ranks", SMALL),
    _option("small", "queue on few ranks", SMALL, queue=True),
    _option("small", "PP 2 on few ranks", SMALL, pipeline=2),
    _option("small", "PP 4 on few ranks", SMALL, pipeline=4),
    _option("small", "PP 4, slices, on few ranks", SMALL, pipeline=4, slices=16),
    _option("pipeline", "PP 4, compute", (256, 32, 1024), pipeline=4),
    _option("pipeline", "PP 2", FEW, pipeline=2),
    _option("pipeline", "PP 4", (32, 256, 1024), pipeline=4),
    _option("pipeline", "PP 8", (256, 1024), pipeline=8),
    _option("pipeline", "PP 4, offload", FEW, pipeline=4, offload=True),
    _option("pipeline", "PP 4, speeds", FEW, pipeline=4),
    _option("pipeline", "PP 4, trees", FEW, pipeline=4),
    _option("pipeline", "PP 4, 2 chunks", FEW, pipeline=4, chunks=2),
    _option("pipeline", "PP 4, split backward", (16, 64), pipeline=4, split_backward=True),
    _option("slices", "PP 2, slices", SLICED, pipeline=2, slices=16),
    _option("slices", "PP 4, slices", (32, 128, 1024, 16), pipeline=4, slices=16),
    _option("slices", "PP 4, 64 slices", SLICED, pipeline=4, slices=64),
    _option("slices", "PP 4, slices, offload", (32, 128), pipeline=4, slices=16, offload=True),
    _option("slices", "PP 4, slices, 2 chunks", (32, 64), pipeline=4, slices=16, chunks=2),
    _option("slices", "PP 4, slices, speeds", (32, 64), pipeline=4, slices=16),
)


def planner_of(option: Option, ranks: int) -> Planner:
    rng = random.Random(ranks)
    cluster = ClusterSpec(ranks=ranks, capacity=CAPACITY, ranks_per_node=min(8, ranks), **option.cluster)
    if "speeds" in option.name:
        cluster = replace(cluster, speeds=tuple(rng.uniform(0.7, 1) for _ in range(ranks)))
    model = MODELS["mistral-8x7b" if option.name == "experts" else "llama-7b"]
    costs = COMPUTE_ONLY if "compute" in option.name else CostModel.analytic(model, cluster)
    return Planner(model, cluster, cost_model=costs, **option.planner)


def step_of(option: Option, name: str, ranks: int, seed: int) -> list[int | Tree]:
    """A step of at most 32M tokens; each eighth sequence is a tree where the option says so."""
    if name in ("byted", "github"):
        tokens = min(32 * MILLION, 4 * CAPACITY * ranks)
        lengths = sample_lengths(name, tokens=tokens, context=min(2 * MILLION, CAPACITY * ranks), seed=seed)
    else:
        lengths = (unseen_lengths if name in UNSEEN else lengths_of)(name, ranks, seed)
    lengths = [min(length, CAPACITY * ranks) for length in lengths]
    if "trees" not in option.name:
        return list(lengths)
    return [
        Tree([-1, 0, 0, 0, 0], [length // 2, *[max(1, length // 8)] * 4]) if place % 8 == 0 and length > 64 else length
        for place, length in enumerate(lengths)
    ]


def rows_of(kinds: list[str], every: int, seed: int) -> Iterator[Row]:
    for place, option in enumerate(OPTIONS):
        if option.kind not in kinds:
            continue
        for name, ranks in zip((*FAMILIES, *UNSEEN)[place % every :: every], cycle(option.ranks), strict=False):
            planner, lengths = planner_of(option, ranks), step_of(option, name, ranks, seed)
            started = time.process_time()
            plan = planner.plan(lengths)
            seconds = time.process_time() - started
            planner.validate(plan, lengths)
            yield {
                "kind": option.kind,
                "option": option.name,
                "lengths": name,
                "ranks": ranks,
                "made_by": plan.made_by,
                "makespan_s": plan.makespan_s,
                "bound_s": plan.lower_bound_s,
                "seconds": seconds,
            }


def parts(made_by: str) -> set[str]:
    return {part for word in made_by.split(",") for part in map(str.strip, word.split("+"))}


def wins(rows: list[Row]) -> Iterator[str]:
    """A line for each part: in how many plans of each kind it is."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    counts = {
        kind: Counter(part for row in rows if row["kind"] == kind for part in parts(row["made_by"])) for kind in kinds
    }
    steps = Counter(row["kind"] for row in rows)
    yield "| part | " + " | ".join(f"{kind}, {steps[kind]} steps" for kind in kinds) + " |"
    yield "|" + "---|" * (1 + len(kinds))
    for part, _ in sum(counts.values(), Counter()).most_common():
        yield f"| {part} | " + " | ".join(f"{100 * counts[kind][part] / steps[kind]:.1f}%" for kind in kinds) + " |"


def key(row: Row) -> tuple[str, str, int]:
    return row["option"], row["lengths"], row["ranks"]


def losses(rows: list[Row], others: list[Row]) -> Iterator[str]:
    """A line for each kind: how much longer its plans are than those of ``others``, and processor time."""
    before = {key(row): row for row in others}
    yield "| kind | steps | longer | mean loss | worst | mean gap | before | s | before |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        own = [row for row in rows if kind in (row["kind"], "all") and key(row) in before]
        if not own:
            continue
        loss = [row["makespan_s"] / before[key(row)]["makespan_s"] - 1 for row in own]
        gaps = [
            statistics.mean(each["makespan_s"] / each["bound_s"] - 1 for each in some)
            for some in (own, [before[key(row)] for row in own])
        ]
        seconds = [sum(each["seconds"] for each in some) for some in (own, [before[key(row)] for row in own])]
        worst = own[loss.index(max(loss))]
        yield (
            f"| {kind} | {len(own)} | {sum(one > 1e-4 for one in loss)} | {statistics.mean(loss):+.3%} | "
            f"{max(loss):+.2%}: {', '.join(map(str, key(worst)))} | {gaps[0]:.2%} | {gaps[1]:.2%} | "
            f"{seconds[0]:.0f} | {seconds[1]:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="flat,small,pipeline,slices", help="which (default %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="of so many lengths one, other ones for each option")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default %(default)s)")
    parser.add_argument("--against", type=Path, metavar="FILE", help="what another build has written")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = list(rows_of(options.kinds.split(","), options.every, options.seed))
    print("\n".join(wins(rows)))
    if options.against:
        print("\n" + "\n".join(losses(rows, json.loads(options.against.read_text())["rows"])))
    if options.json:
        lines = ",\n".join(map(json.dumps, rows))
        options.json.write_text(f'{{"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

"""Gaps of plans to their bound for all kinds of steps, costs, pipelines and numbers of ranks, beside other policies.

Costs are those of ``benchmarks/planner.py``: ``compute`` alone, ``h100`` with links inside and between hosts of 8,
``offload`` with host memory, too. Rows can be measured in pieces, each of which keeps the rows that the file has:
``python benchmarks/planner_families.py --families byted,equal --stages 1,8 --ranks 32,256 --json FILE``.
Prints the table of docs/planner-figures.md; the whole takes about half an hour. With ``--slices 16`` that of
docs/slices.md: steps of pipelines with and without slices of long sequences, and a table of gaps to their bound;
``--chunks 2``: with so many stages on each device, and a table of what these gain. ``--unseen``: gaps and processor
time of one step of each family and of lengths that no part of the planner was made for, for one stage, 4 stages, and 4
with 16 slices.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from planner import CAPACITY, COSTS, MILLION, make_planner

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import Planner
from hdpcomm.plan.distributions import sample_lengths

FAMILIES = ("byted", "github", "lognormal", "long", "bimodal", "equal", "middle")
UNSEEN = (
    *(f"pareto {index}" for index in (0.9, 1.2, 1.8)),
    *("web", "books and code", "RL", "agents", "two lengths", "staircase", "one giant", "6K to 24K"),
)
STAGES = (1, 4, 8)
RANKS = (32, 256, 1024, 4096, 16384)
LARGE = 1024  # ranks, above which there are a quarter of the seeds


def lengths_of(name: str, ranks: int, seed: int) -> list[int]:
    """One step. Byted and GitHub have 32M tokens, the others about four times what the ranks hold."""
    rng = random.Random(f"{name} {seed}")
    context, tokens = min(2 * MILLION, CAPACITY * ranks), 4 * CAPACITY * ranks
    if name in ("byted", "github"):
        return sample_lengths(name, tokens=32 * MILLION, context=context, seed=seed)
    if name == "lognormal":
        return sample_lengths("lognormal:6.5:1.6", tokens=tokens, context=context, seed=seed)
    if name == "equal":
        length = int(2 ** rng.uniform(10, 17))
        return [length] * (tokens // length)
    lengths: list[int] = []
    while name == "middle" and tokens > 0:
        lengths.append(rng.randint(5_000, 30_000))
        tokens -= lengths[-1]
    while tokens > 0:
        long = name == "long" or rng.random() < 0.05
        lengths.append(int((100_000 if long else 2_000) * rng.uniform(0.95, 1.05)))
        tokens -= lengths[-1]
    return lengths


def unseen_length(name: str, context: int, rng: random.Random, number: int) -> float:
    """One of a step, the ``number``-th: mixtures of log-normal lengths, and others."""
    if name.startswith("pareto"):
        return 200 * rng.paretovariate(float(name.split()[1]))
    # Shares, medians and spreads: pages, a few of them long; books beside files of code; answers with tails as heavy
    # as those of chains of thought; turns of agents beside whole histories.
    mixtures = {
        "web": [(0.97, 700, 1.1), (0.03, 20_000, 1.0)],
        "books and code": [(0.1, 110_000, 0.7), (0.9, 1500, 1.4)],
        "RL": [(0.7, 2000, 0.6), (0.3, 9000, 1.2)],
        "agents": [(0.6, 6000, 0.5), (0.4, 50_000, 0.6)],
    }
    if parts := mixtures.get(name):
        _, median, spread = rng.choices(parts, [share for share, _, _ in parts])[0]
        return rng.lognormvariate(math.log(median), spread)
    if name == "two lengths":
        return rng.choice([3000, 48_000])
    if name == "staircase":
        return 4096 * (1 + number % 16)
    if name == "one giant":
        return context if number == 0 else rng.uniform(500, 2000)
    return rng.uniform(6000, 24_000)


def unseen_lengths(name: str, ranks: int, seed: int) -> list[int]:
    """One step, about four times what the ranks hold."""
    rng = random.Random(f"{name} {seed}")
    context, tokens = min(2 * MILLION, CAPACITY * ranks), 4 * CAPACITY * ranks
    lengths: list[int] = []
    while tokens > 0:
        lengths.append(max(1, min(context, int(unseen_length(name, context, rng, len(lengths))))))
        tokens -= lengths[-1]
    return lengths


def unseen_table(ranks: list[int], rows: dict[str, list[float]]) -> Iterator[str]:
    """A line for each family and kind of pipeline; a cell for each number of ranks: gap in percent, seconds. Adds what
    is not in ``rows``."""
    yield "| stages | lengths | " + " | ".join(f"{count:,} ranks" for count in ranks) + " |"
    yield "|" + "---|" * (2 + len(ranks))
    for (stages, slices), name in itertools.product(((1, 1), (4, 1), (4, 16)), (*UNSEEN, *FAMILIES)):
        kind = f"{stages}, {slices} slices" if slices > 1 else str(stages)
        cells = []
        for count in ranks:
            if (key := f"{kind} | {name} | {count}") not in rows:
                made = make_planner("h100", count, stages)
                planner = Planner(made.model, made.cluster, cost_model=made.cost_model, slices=slices)
                lengths = (unseen_lengths if name in UNSEEN else lengths_of)(name, count, 0)
                started = time.process_time()
                plan = planner.plan(lengths)
                seconds = time.process_time() - started
                planner.validate(plan, lengths)
                rows[key] = [plan.makespan_s / plan.lower_bound_s, seconds, plan.makespan_s]
            cells.append(f"{gap(rows[key][0])} ({rows[key][1]:.2f} s)")
        yield f"| {kind} | {name} | {' | '.join(cells)} |"


def measure(cost: str, name: str, stages: int, ranks: int, seeds: int) -> dict[str, Any]:
    """Gaps to the bound, and the least time of another policy relative to ours."""
    planner = make_planner(cost, ranks, stages)
    ratios, others, seconds = [], [], []
    for seed in range(seeds):
        lengths = lengths_of(name, ranks, seed)
        started = time.process_time()
        plan = planner.plan(lengths)
        seconds.append(time.process_time() - started)
        planner.validate(plan, lengths)
        ratios.append(plan.makespan_s / plan.lower_bound_s)
        best = math.inf
        for policy in ("pow2", "static", "naive"):
            with contextlib.suppress(InvalidUsage):  # static, where its mesh does not hold the longest
                best = min(best, make_planner(cost, ranks, stages, policy).plan(lengths).makespan_s)
        others.append(best / plan.makespan_s)
    return {
        "cost": cost,
        "lengths": name,
        "stages": stages,
        "ranks": ranks,
        "seeds": seeds,
        "mean_ratio": statistics.mean(ratios),
        "worst_ratio": max(ratios),
        "least_other": min(others),
        "mean_s": statistics.mean(seconds),
    }


def gains(
    cost: str, name: str, stages: int, ranks: int, seeds: int, slices: int, chunks: int
) -> list[tuple[float, float, float]]:
    """By seed, how many times as long a step takes without slices of long sequences as with them, as the bound, and
    with slices on one stage a device."""
    made = make_planner(cost, ranks, stages)
    whole, sliced, plain = (
        Planner(
            made.model,
            replace(made.cluster, chunks=each),
            cost_model=made.cost_model,
            memory=made.memory,
            slices=most,
        )
        for most, each in ((1, chunks), (slices, chunks), (slices, 1))
    )
    found = []
    for seed in range(seeds):
        lengths = lengths_of(name, ranks, seed)
        plan = sliced.plan(lengths)
        sliced.validate(plan, lengths)
        others = [whole.plan(lengths).makespan_s, plain.plan(lengths).makespan_s if chunks > 1 else plan.makespan_s]
        found.append((others[0] / plan.makespan_s, plan.makespan_s / plan.lower_bound_s, others[1] / plan.makespan_s))
    return found


def gains_table(chosen: dict[str, Any], seeds: int, slices: int, chunks: int) -> Iterator[str]:
    """A line for each cost, family and number of stages; a cell for each number of ranks: mean gain (least to most).
    Then the same with the mean gap to the bound (worst), in percent, and for several chunks with what these gain."""
    ranks = chosen["ranks"]
    head = "| stages | cost | lengths | " + " | ".join(f"{count:,} ranks" for count in ranks) + " |"
    head += "\n|" + "---|" * (3 + len(ranks))
    yield head
    lines, by_chunks = [], []
    for stages, cost, name in itertools.product(*(chosen[kind] for kind in ("stages", "costs", "families"))):
        cells, gaps, over_one = [], [], []
        for count in ranks:
            found, ratios, ones = zip(*gains(cost, name, stages, count, seeds, slices, chunks), strict=True)
            for row, values in ((cells, found), (over_one, ones)):
                row.append(f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
            gaps.append(f"{gap(statistics.mean(ratios))} ({gap(max(ratios))})")
        yield f"| {stages} | {cost} | {name} | {' | '.join(cells)} |"
        lines.append(f"| {stages} | {cost} | {name} | {' | '.join(gaps)} |")
        by_chunks.append(f"| {stages} | {cost} | {name} | {' | '.join(over_one)} |")
    yield "\ngaps to the bound:\n\n" + head
    yield from lines
    if chunks > 1:
        yield f"\nover one stage a device, with slices:\n\n{head}"
        yield from by_chunks


def place(row: dict[str, Any]) -> tuple[int, ...]:
    """Where a row belongs in the table."""
    return (
        STAGES.index(row["stages"]),
        COSTS.index(row["cost"]),
        FAMILIES.index(row["lengths"]),
        RANKS.index(row["ranks"]),
    )


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each cost and family; a cell for each number of ranks: mean gap (worst), in percent."""
    yield "| stages | cost | lengths | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " | best of others |"
    yield "|" + "---|" * (4 + len(RANKS))
    for stages, cost, name in itertools.product(STAGES, COSTS, FAMILIES):
        line = [row for row in rows if (row["stages"], row["cost"], row["lengths"]) == (stages, cost, name)]
        if not line:
            continue
        cells = {row["ranks"]: f"{gap(row['mean_ratio'])} ({gap(row['worst_ratio'])})" for row in line}
        found = " | ".join(cells.get(ranks, "") for ranks in RANKS)
        yield f"| {stages} | {cost} | {name} | {found} | {min(row['least_other'] for row in line):.2f}x |"


def gap(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 2) + 0.0:.2f}"  # no -0.00


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = {"families": FAMILIES, "costs": COSTS, "stages": STAGES, "ranks": RANKS}
    for name, values in choices.items():
        parser.add_argument(f"--{name}", default=",".join(map(str, values)), help="which (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=20, help=f"a quarter of them above {LARGE:,} ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written; its other rows are kept")
    parser.add_argument("--slices", type=int, metavar="N", help="instead: what up to N slices of a sequence gain")
    parser.add_argument("--chunks", type=int, default=1, metavar="V", help="with --slices: stages on each device")
    parser.add_argument("--unseen", action="store_true", help="instead: other lengths, on any --ranks")
    options = parser.parse_args()
    if options.unseen:
        rows = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else {}
        for line in unseen_table([int(each) for each in options.ranks.split(",")], rows):
            print(line, flush=True)
            if options.json:
                about = {"date": date.today().isoformat(), "machine": platform.processor() or platform.machine()}
                options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        return
    chosen = {}
    for name, values in choices.items():
        given = getattr(options, name).split(",")
        if unknown := [each for each in given if each not in map(str, values)]:
            parser.error(f"--{name} has {unknown[0]}, expected some of {', '.join(map(str, values))}")
        chosen[name] = [value for value in values if str(value) in given]
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    if options.chunks > 1 and not options.slices:
        parser.error(f"--chunks is {options.chunks}, and only the table of --slices has it")
    if options.slices:
        for line in gains_table(chosen, options.seeds, options.slices, options.chunks):
            print(line, flush=True)
        return
    kept = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    rows = {place(row): row for row in kept}
    for stages, ranks, cost, name in itertools.product(*(chosen[c] for c in ("stages", "ranks", "costs", "families"))):
        seeds = max(1, options.seeds // 4) if ranks > LARGE else options.seeds
        row = measure(cost, name, stages, ranks, seeds)
        rows[place(row)] = row
        print(json.dumps(row), flush=True)
        if options.json:
            result = {
                "date": date.today().isoformat(),
                "machine": platform.processor() or platform.machine(),
                "command": f"python benchmarks/planner_families.py --seeds {options.seeds}",
                "rows": [rows[key] for key in sorted(rows)],
            }
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table([rows[key] for key in sorted(rows)])))


if __name__ == "__main__":
    main()

"""What noise adds to a step at least, and what plans make of it: byted steps of 32K tokens on each of 256 ranks, with
contexts from 8K to 512K tokens, every micro-batch 5% quicker or slower by chance.

``floor`` is proved for every plan that binds sequences to ranks (docs/bound.md). ``long`` is what would be left if
only sequences that take more than 0.3 of the step had noise, packed longest first, and all shares of the ranks could be
chosen freely; it is shown where some do. ``blind`` and ``knowing`` are simulated steps of plans that do not and do know
of the noise, ``queue`` those of plans whose short sequences wait until a rank is free. All are over the bound without
noise, means over the seeds. Usage: ``python benchmarks/noise_floor.py [--seeds 10] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from closed_loop import CAPACITY, NODE, NOISE, TOKENS_PER_RANK, TrueRanks
from numpy.typing import NDArray

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner
from hdpcomm.plan.distributions import sample_lengths

RANKS = 256
CONTEXTS = (8192, 32_768, 131_072, 524_288)
STEPS = 60  # simulated, of each plan
DRAWS = 1 << 14
LONG = 0.3  # of the step


def excess(chains: list[list[float]], ranks: list[int]) -> float:
    """The least that the noise of these chains of micro-batches, each on so many ranks, adds to the mean step when the
    ranks may share out all other work, which has none: ``min over m of E max (m_c + noise_c)``, the mean of m over all
    ranks being 0. It is reached where each chain ends last as often as its share of the ranks tells."""
    share = np.array([*ranks, RANKS - sum(ranks)]) / RANKS
    rng = np.random.default_rng(0)
    noise: NDArray[np.float64] = np.zeros((len(share), DRAWS))
    for c, chain in enumerate(chains):
        for seconds in chain:
            normal = rng.standard_normal(DRAWS // 2)
            noise[c] += seconds * (np.exp(NOISE * np.concatenate([normal, -normal])) - np.exp(NOISE**2 / 2))
    rows = share > 0
    noise, share = noise[rows], share[rows]
    shift, least, rate, turns = np.zeros(len(share)), np.inf, 0.05, 300
    for turn in range(turns):
        ends = noise + shift[:, None]
        least = min(least, float(ends.max(axis=0).mean()))
        last = np.bincount(ends.argmax(axis=0), minlength=len(share)) / DRAWS
        shift -= rate * (1 - turn / turns) * (last - share)
        shift -= (share * shift).sum()
    return least


def packed(jobs: list[tuple[int, float]]) -> tuple[list[list[float]], list[int]]:
    """Chains of these (ranks, share of the step), the longest first, each on the fullest ranks that have room."""
    blocks: list[tuple[float, int, list[float]]] = [(0.0, RANKS, [])]
    for ranks, share in jobs:
        fitting = [block for block in blocks if block[1] >= ranks and block[0] + share <= 1]
        if not fitting:
            continue
        used, width, chain = max(fitting)
        blocks.remove((used, width, chain))
        blocks.append((used + share, ranks, [*chain, share]))
        if width > ranks:
            blocks.append((used, width - ranks, chain))
    full = [block for block in blocks if block[2]]
    return [block[2] for block in full], [block[1] for block in full]


def figures(context: int, seed: int) -> dict[str, float]:
    """The figures of one step."""
    cluster = ClusterSpec(RANKS, CAPACITY, ranks_per_node=NODE)
    cost = CostModel.analytic(MODELS["llama-7b"], cluster)
    lengths = sample_lengths("byted", tokens=TOKENS_PER_RANK * RANKS, context=context, seed=seed)
    blind = Planner(None, cluster, cost_model=cost).plan(lengths)
    knowing = Planner(None, cluster, cost_model=replace(cost, noise=NOISE)).plan(lengths)
    bound = blind.lower_bound_s
    compute = replace(cost, kv_intra=0.0, kv_inter=0.0, latency_intra=0.0, latency_inter=0.0)
    jobs, work = [], 0.0
    longest = sorted(lengths, reverse=True)
    for length in longest:
        ranks = -(-length // CAPACITY)
        work += ranks * cost.seconds([length], ranks, one_node=ranks <= NODE)
        work -= cost.fixed * (1 - length / CAPACITY) if ranks == 1 else 0.0
        jobs.append((ranks, compute.seconds([length], ranks) / bound))
    # No two of the first ones fit on one rank one after the other, on whatever sizes.
    quickest = [
        min(cost.seconds([length], size, one_node=False) for size in range(least, RANKS + 1)) / bound
        for length, (least, _) in zip(longest[:32], jobs, strict=False)
    ]
    apart = next((i for i in range(1, len(quickest)) if quickest[i - 1] + quickest[i] <= 1.06), len(quickest))
    apart = apart if apart > 1 or quickest[0] > 0.53 else 0
    found = {"floor": np.inf}
    alone = [
        [factor if i == wider else 1.0 for i in range(apart)] for wider in range(apart) for factor in (1.1, 1.5, 2.0)
    ]
    for factors in ([1.0] * apart, [1.1] * apart, [1.5] * apart, *alone):  # more ranks: less noise, more work
        wide = [int(ranks * factor) for (ranks, _), factor in zip(jobs, factors, strict=False)]
        if sum(wide) > RANKS:
            continue
        more, chains = work, []
        for length, (ranks, _), size in zip(longest, jobs, wide, strict=False):
            more += size * cost.seconds([length], size, one_node=False)
            more -= ranks * cost.seconds([length], ranks, one_node=False)
            chains.append([compute.seconds([length], size) / bound])
        mean = more / RANKS / bound * float(np.exp(NOISE**2 / 2))
        found["floor"] = min(found["floor"], mean + excess(chains, wide))
    if long := [job for job in jobs if job[1] > LONG and job[0] > 1]:
        found["long"] = float(np.exp(NOISE**2 / 2)) + excess(*packed(long))
    rng = random.Random(seed)
    true = TrueRanks(cost, (1.0,) * RANKS)
    queued = Planner(None, cluster, cost_model=replace(cost, noise=NOISE), queue=True).plan(lengths)
    for name, plan in (("blind", blind), ("knowing", knowing), ("queue", queued)):
        found[name] = statistics.mean(true.run(plan, rng).seconds for _ in range(STEPS)) / bound
    found["expected"], found["queue_expected"] = knowing.expected_s / bound, queued.expected_s / bound
    found["more_batches"] = len(knowing.table) / len(blind.table)
    found["queue_more_batches"] = len(queued.table) / len(blind.table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="steps of each context (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    print("| context | floor | long | blind | knowing | expected | micro-batches | queue | expected | micro-batches |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for context in CONTEXTS:
        runs = [figures(context, seed) for seed in range(options.seeds)]
        names = [name for name in runs[0] if all(name in run for run in runs)]
        row = {"context": context} | {name: statistics.mean(run[name] for run in runs) for name in names}
        rows.append(row)
        long = f"{row['long']:.3f}" if "long" in row else ""
        print(
            f"| {context:,} | {row['floor']:.3f} | {long} | {row['blind']:.3f} | {row['knowing']:.3f} | "
            f"{row['expected']:.3f} | x {row['more_batches']:.2f} | {row['queue']:.3f} | {row['queue_expected']:.3f} | "
            f"x {row['queue_more_batches']:.2f} |",
            flush=True,
        )
    if options.json:
        result = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "command": f"python benchmarks/noise_floor.py --seeds {options.seeds}",
            "noise": NOISE,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The closed loop on a simulated clock: wrong costs, slow ranks and noise, and what planning with the measured times
makes of them. Independent of what else the machine does.

Every step is planned by what was learned so far, and runs on ranks whose true costs and speeds the planner does not
know: a micro-batch starts when all of its ranks are free and takes the time of its slowest rank. Rows with a queue are
of plans whose short sequences wait until a rank is free. Prints the tables of docs/planner-figures.md.
Usage: ``python benchmarks/closed_loop.py [--seeds 20] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from hdpcomm.plan import MODELS, ClusterSpec, CostLearner, CostModel, Planner, RankTimes, StepPlan
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.plan.step import as_run

CAPACITY = 8192
NODE = 8
STEPS = 5  # after the first one
SHOWN = (0, 1, 5)  # of these, in the table
TOKENS_PER_RANK = 32_768
NOISE = 0.05  # standard deviation of a micro-batch's time, relative
ASK = 200e-6  # seconds until a rank knows which micro-batch of the queue is the next one


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ran.

    Attributes:
        times: what each rank measured.
        work: seconds at full speed that each one did.
        plan: with the ranks that have taken the micro-batches of its queue.
    """

    seconds: float
    times: list[RankTimes]
    work: list[float]
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class TrueRanks:
    """What the ranks really do."""

    cost: CostModel
    speeds: tuple[float, ...]

    def run(self, plan: StepPlan, rng: random.Random) -> Ran:
        """One step."""
        ranks = plan.num_ranks
        ready, work = [0.0] * ranks, [0.0] * ranks
        first = len(plan.table) - plan.queued
        free = [[(0.0, rank) for rank in range(pool, ranks, plan.queue_pools)] for pool in range(plan.queue_pools)]
        takers: list[int] = []
        compute: list[list[float]] = [[] for _ in range(ranks)]
        waits: list[list[float]] = [[] for _ in range(ranks)]
        free_links = replace(self.cost, kv_intra=0.0, kv_inter=0.0, latency_intra=0.0, latency_inter=0.0)
        for row, batch in enumerate(plan.micro_batches):
            if row == first:
                free = [sorted((ready[rank], rank) for _, rank in pool) for pool in free]  # a sorted list is a heap
            if row >= first:
                _, taker = heapq.heappop(free[batch.ranks[0] % plan.queue_pools])
                takers.append(taker)
                ready[taker] += ASK
                batch = replace(batch, ranks=(taker,))
            lengths, size = [sequence.length for sequence in batch.sequences], len(batch.ranks)
            inside = min(batch.ranks) // NODE == max(batch.ranks) // NODE
            alone = free_links.seconds(lengths, size) * rng.lognormvariate(0.0, NOISE)
            exposed = self.cost.seconds(lengths, size, one_node=inside) - free_links.seconds(lengths, size)
            start = max(ready[rank] for rank in batch.ranks)
            end = start + max((alone + exposed) / self.speeds[rank] for rank in batch.ranks)
            for rank in batch.ranks:
                own = alone / self.speeds[rank]
                compute[rank].append(own)
                waits[rank].append(max(0.0, end - ready[rank] - own))  # also for the ranks that come or work later
                work[rank] += alone
                ready[rank] = end
            if row >= first:
                heapq.heappush(free[takers[-1] % plan.queue_pools], (ready[takers[-1]], takers[-1]))
        times = [RankTimes(tuple(own), tuple(waited)) for own, waited in zip(compute, waits, strict=True)]
        return Ran(max(ready), times, work, as_run(plan, np.array(takers, dtype=np.int32)))


@dataclass(frozen=True, slots=True)
class Case:
    """Ranks, and the costs that are thought of them at first."""

    name: str
    true: TrueRanks
    believed: CostModel
    context: int = 0  # of the sequences; 0: what a quarter of the ranks hold
    queue: bool = False  # of the plans


def cases(seed: int) -> list[Case]:
    """What is to be learned; the seed chooses the slow ranks."""
    found = []
    rng = random.Random(seed)
    for ranks in (32, 256):
        cost = CostModel.analytic(MODELS["llama-7b"], ClusterSpec(ranks, CAPACITY, ranks_per_node=NODE))
        alike = (1.0,) * ranks
        slow = rng.randrange(ranks)
        one_slow = tuple(0.5 if rank == slow else 1.0 for rank in range(ranks))
        mixed = tuple(rng.choice([1.0, 1.0, 1.0, 0.8, 0.6]) for _ in range(ranks))
        true = TrueRanks(cost, alike)
        for queue in (False, True):
            found.append(Case("noise alone", true, cost, queue=queue))
            found.append(Case("noise, no long sequences", true, cost, CAPACITY, queue))
        for factor in (0.3, 0.7, 1.3):
            found.append(Case(f"square term x {factor}", true, replace(cost, attention=factor * cost.attention)))
        found.append(Case("links twice as slow", TrueRanks(replace(cost, kv_inter=2 * cost.kv_inter), alike), cost))
        for queue in (False, True):
            found.append(Case("a rank at half speed", TrueRanks(cost, one_slow), cost, queue=queue))
            found.append(Case("speeds 0.6, 0.8 and 1", TrueRanks(cost, mixed), cost, queue=queue))
    return found


def learn(case: Case, seed: int) -> list[dict[str, float]]:
    """A row for each step, planned by the costs learned before it."""
    true, ranks = case.true, len(case.true.speeds)
    cluster = ClusterSpec(ranks, CAPACITY, ranks_per_node=NODE)
    learner = CostLearner(case.believed, cluster)
    blind = Planner(None, cluster, cost_model=case.believed)
    known = Planner(None, replace(cluster, speeds=true.speeds), cost_model=true.cost)
    slowest = min(range(ranks), key=lambda rank: true.speeds[rank])
    rng = random.Random(seed)
    rows = []
    for step in range(STEPS + 1):
        context = case.context or CAPACITY * ranks // 4
        lengths = sample_lengths("byted", tokens=TOKENS_PER_RANK * ranks, context=context, seed=100 * seed + step)
        plan = Planner(None, learner.cluster, cost_model=learner.cost_model, queue=case.queue).plan(lengths)
        noise = rng.getrandbits(32)
        ran = true.run(plan, random.Random(noise))
        bound = known.lower_bound(lengths)
        speeds = learner.speeds or (1.0,) * ranks
        rows.append(
            {
                "square_term": learner.cost_model.attention / true.cost.attention,
                "speed_error": max(abs(a - b) for a, b in zip(speeds, true.speeds, strict=True)),
                "slowest_share": ran.work[slowest] * (ranks - 1) / (sum(ran.work) - ran.work[slowest]),
                "over_planned": ran.seconds / plan.makespan_s,
                "over_bound": ran.seconds / bound,
                "not_learning_over_bound": true.run(blind.plan(lengths), random.Random(noise)).seconds / bound,
            }
        )
        learner.add(ran.plan, ran.times)
    return rows


def summary(runs: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """By step: means over the seeds, and the worst."""
    found = []
    for rows in zip(*runs, strict=True):
        means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        worst = max((row["square_term"] for row in rows), key=lambda ratio: abs(ratio - 1))
        found.append(means | {"worst_square_term": worst, "worst_over_bound": max(row["over_bound"] for row in rows)})
    return found


def line(name: str, ranks: int, step: int, row: dict[str, float]) -> str:
    """A row of the table."""
    return (
        f"| {name} | {ranks} | {step} | {row['square_term']:.2f} ({row['worst_square_term']:.2f}) | "
        f"{row['slowest_share']:.2f} | {row['over_planned']:.3f} | {row['over_bound']:.3f} "
        f"({row['worst_over_bound']:.3f}) | {row['not_learning_over_bound']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each case (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    print("| case | ranks | step | square term (worst) | slowest rank's work | / planned | / bound (worst) | blind |")
    print("|---|---|---|---|---|---|---|---|")
    table = []
    for place, case in enumerate(cases(0)):
        runs = [learn(cases(seed)[place], seed) for seed in range(options.seeds)]
        ranks = len(case.true.speeds)
        for step, row in enumerate(summary(runs)):
            name = f"{case.name}, queue" if case.queue else case.name
            table.append({"case": name, "ranks": ranks, "step": step} | row)
            if step in SHOWN:
                print(line(name, ranks, step, row), flush=True)
    if options.json:
        result: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "command": f"python benchmarks/closed_loop.py --seeds {options.seeds}",
            "noise": NOISE,
            "rows": table,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

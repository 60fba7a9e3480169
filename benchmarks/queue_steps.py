"""What a queue of short sequences does to real steps: processes run whole training steps, in which the model waits as
long as it would compute, by the cost model and with 5% noise, or with a rank at half speed that nobody knows of.

The ranks, the plans, the counter, the reductions and the clocks are real; only the compute is not, so that 8 ranks fit
a machine with two cores. Steps with and without a queue take turns; each time is that until the last rank has run its
micro-batches, over the bound of ranks without noise. Prints the table of docs/planner-figures.md.
Usage: ``python benchmarks/queue_steps.py [--ranks 8] [--steps 10] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import hdpcomm as hdp
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.testing import spawn
from hdpcomm.train import Trainer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

CAPACITY = 8192
NODE = 8
TOKENS_PER_RANK = 32_768
NOISE = 0.05
SECONDS = 5.0  # of a step, about, so that what the processes really do is little beside it
CASES = {
    "8K": {"context": 8192},
    "32K": {"context": 32_768},
    "64K": {"context": 65_536},
    "8K, one rank at half speed": {"context": 8192, "half_speed": True},
    "32K, one rank at half speed": {"context": 32_768, "half_speed": True},
}


class Waits(nn.Module):
    """Takes as long as a cost model says. The ranks of a micro-batch start together, and end when the last one does."""

    takes_labels = True

    def __init__(self, cost: CostModel, speed: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.cost, self.speed = cost, speed
        self.noise = random.Random(0)

    def forward(self, _: Tensor, *, cu_seqlens: Tensor, comm: Communicator, labels: Tensor, **__: Tensor) -> Tensor:
        lengths = cu_seqlens.diff().tolist()
        inside = min(comm.ranks) // NODE == max(comm.ranks) // NODE
        if comm.size > 1:
            comm.barrier()
        factor = torch.tensor([self.noise.lognormvariate(0.0, NOISE)])
        if comm.size > 1:
            comm.broadcast(factor, 0)
        seconds = self.cost.seconds(lengths, comm.size, one_node=inside) * float(factor)
        time.sleep(seconds / self.speed)
        if comm.size > 1:
            comm.barrier()
        return self.weight.sum() * (labels >= 0).sum()


def rank(cost: CostModel, context: int, half_speed: bool, steps: int) -> list[dict[str, float]]:
    """One rank's steps; what rank 0 gives counts."""
    torch.set_num_threads(1)
    rows = []
    with hdp.init() as comm:
        cluster = ClusterSpec(comm.size, CAPACITY, ranks_per_node=NODE)
        slow = comm.size // 3
        model = Waits(cost, 0.5 if half_speed and comm.rank == slow else 1.0)
        speeds = tuple(0.5 if half_speed and each == slow else 1.0 for each in range(comm.size))
        true = Planner(None, replace(cluster, speeds=speeds), cost_model=cost)
        planners = {
            "static": Planner(None, cluster, cost_model=cost),
            "queue": Planner(None, cluster, cost_model=cost, queue=True),
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainers = {name: Trainer(model, optimizer, planner, comm) for name, planner in planners.items()}
        for step in range(steps):
            lengths = sample_lengths("byted", tokens=TOKENS_PER_RANK * comm.size, context=context, seed=step)
            row = {"bound_s": true.lower_bound(lengths)}
            for name, trainer in trainers.items():
                model.noise = random.Random(comm.size * step + comm.rank)
                metrics = trainer.step(lengths, lambda i, lengths=lengths: torch.zeros(lengths[i], dtype=torch.int64))
                spans = [span.end_s for span in trainer.timeline.spans if span.phase == "micro-batch"]
                end = torch.tensor([max(spans, default=0.0)], dtype=torch.float64)
                ends = end.new_empty(comm.size)
                comm.all_gather(ends, end)
                row |= {name: float(ends.max()), f"{name}_predicted": metrics.predicted_s}
                row |= {f"{name}_moved": metrics.moved, f"{name}_queued": metrics.queued}
            rows.append(row)
    return rows


def scaled(cost: CostModel, factor: float) -> CostModel:
    """Costs of a device that is quicker by 1 / factor."""
    names = ("attention", "linear", "fixed", "piece", "ring_step", "kv_intra", "kv_inter", "latency_intra",
             "latency_inter")  # fmt: skip
    return replace(cost, **{name: factor * getattr(cost, name) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="at least 8 (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of each case (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.ranks < 8 or options.steps < 1:
        parser.error(f"--ranks is {options.ranks} and --steps {options.steps}, expected at least 8 and 1")
    cluster = ClusterSpec(options.ranks, CAPACITY, ranks_per_node=NODE)
    analytic = CostModel.analytic(MODELS["llama-7b"], cluster)
    print("| context | static / bound | queue / bound | quicker by | moved |")
    print("|---|---|---|---|---|")
    table = []
    for name, case in CASES.items():
        lengths = sample_lengths("byted", tokens=TOKENS_PER_RANK * options.ranks, context=case["context"], seed=0)
        cost = scaled(analytic, SECONDS / Planner(None, cluster, cost_model=analytic).lower_bound(lengths))
        rows: list[dict[str, Any]] = spawn(
            rank, options.ranks, cost, case["context"], case.get("half_speed", False), options.steps, timeout=600.0
        )[0]
        static = statistics.mean(row["static"] / row["bound_s"] for row in rows)
        queue = statistics.mean(row["queue"] / row["bound_s"] for row in rows)
        moved = sum(row["queue_moved"] for row in rows) / max(1, sum(row["queue_queued"] for row in rows))
        quicker = statistics.median(row["static"] / row["queue"] for row in rows)
        print(f"| {name} | {static:.3f} | {queue:.3f} | {quicker:.3f} | {100 * moved:.0f}% |", flush=True)
        table.append({"case": name, "static": static, "queue": queue, "quicker": quicker, "moved": moved})
    if options.json:
        result = {
            "date": date.today().isoformat(),
            "machine": platform.machine(),
            "command": f"python benchmarks/queue_steps.py --steps {options.steps}",
            "ranks": options.ranks,
            "noise": NOISE,
            "rows": table,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

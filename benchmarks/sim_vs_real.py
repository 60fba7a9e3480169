"""The simulator compared with real steps of the trainer on this machine's CPU.

Two ranks profile a small Llama (the cost model is fitted to that profile, not to the steps), run random batches under
the balanced policy, and compare each step's time with the simulated one. The overhead of a step outside its
micro-batches (planning, comparing hashes, reduction, optimizer) is measured on steps of two tiny sequences.

Usage: ``python benchmarks/sim_vs_real.py [--batches 10] [--json FILE]``. Needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

import hdpcomm as hdp
from hdpcomm.comm.launch import run_ranks
from hdpcomm.measure import profile_cost_model
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, Planner
from hdpcomm.sim import simulate_step
from hdpcomm.train import Trainer

RANKS, CAPACITY, TOKENS, ROUNDS = 2, 2048, 8192, 5


def random_batch(seed: int) -> list[int]:
    """Log-normal lengths with a sum of TOKENS, cut to what the two ranks can hold."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := TOKENS - sum(lengths)) > 0:
        lengths.append(min(left, RANKS * CAPACITY, max(8, int(rng.lognormvariate(6.5, 1.2)))))
    return lengths


def measure(batches: int) -> list[tuple[float, float]]:
    """(simulated, real) seconds of each batch; runs on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with hdp.init() as comm:
        model = Llama(LlamaConfig(layers=2, hidden=128, heads=4, kv_heads=2, ffn=384))
        cluster = ClusterSpec(ranks=comm.size, capacity=CAPACITY)
        profiles = [profile_cost_model(model, comm, longest=CAPACITY)]
        planner = Planner(None, cluster, cost_model=profiles[0])
        trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-4), planner, comm)

        def real(lengths: Sequence[int]) -> float:
            def fetch(i: int) -> torch.Tensor:
                return torch.arange(lengths[i]) % 200

            return trainer.step(lengths, fetch).seconds

        tiny = [8] * comm.size
        lengths = [random_batch(seed) for seed in range(batches)]
        best = [float("inf")] * batches
        around = float("inf")
        # Other load on the machine only slows things down, so the fastest of several runs of a step and the fastest of
        # several profiles are taken. They alternate, so that a disturbance affects both.
        for _ in range(ROUNDS):
            profiles.append(profile_cost_model(model, comm, longest=CAPACITY))
            around = min(around, *(real(tiny) for _ in range(3)))
            best = [min(seconds, real(batch)) for seconds, batch in zip(best, lengths, strict=True)]
        cost = min(profiles, key=lambda profile: sum(profile.seconds(batch) for batch in lengths))
        judge = Planner(None, cluster, cost_model=cost)
        around = max(0.0, around - simulate_step(judge, planner.plan(tiny)).step_s)
        simulated = [simulate_step(judge, planner.plan(batch)).step_s + around for batch in lengths]
        return list(zip(simulated, best, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = run_ranks(measure, RANKS, options.batches, timeout=500)[0]
    print("| batch | simulated s | real s | difference |")
    print("|---|---|---|---|")
    errors = [simulated / real - 1 for simulated, real in rows]
    for number, ((simulated, real), error) in enumerate(zip(rows, errors, strict=True)):
        print(f"| {number} | {simulated:.3f} | {real:.3f} | {100 * error:+.1f}% |")
    worst, mean = max(map(abs, errors)), statistics.mean(map(abs, errors))
    print(f"mean difference {100 * mean:.1f}%, worst {100 * worst:.1f}%")
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        record = {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

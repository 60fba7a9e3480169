"""ZeRO-1, 2 and 3 and FSDP2 on the same batches, and a simulation of hosts that nobody has here.

    python benchmarks/zero.py [--ranks 2] [--steps 7] [--layers 6] [--hidden 512] [--json FILE]
    python benchmarks/zero.py --simulate [--json FILE]

Measured: trainers with ``zero=1``, 2 and 3 take turns with a loop of FSDP2 in lockstep, step by step, on the same plans
of sequences that each fit one rank. In lockstep every rank runs as many passes as the rank that has most; who has no
micro-batch left runs one token without a loss. Median seconds of a step, slowest rank, and ratios to ``zero=1``.

Simulated: plans for Llama 7B and 70B on H100 hosts with lengths like Byted's. A layer's pass takes its compute or its
transfer, whichever is longer. *Pulled*: a micro-batch ends when it has run and all before it in the order of ends have
ended. *Lockstep*: all ranks run their longest micro-batches first and wait for the slowest in each wave, by the plan of
the policy for which that is shortest (balanced, pow2, naive, static). Micro-batches vary by 5%. Plans count what is
moved as a cost of each micro-batch. 7B: cut among the 8 devices of a host. 70B does not fit that way: cut among all,
over the network, which the trainer does not do yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner, StepPlan
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.plan.specs import MODELS
from hdpcomm.plan.waves import make_waves, sorted_for_waves
from hdpcomm.testing import spawn
from hdpcomm.train import Trainer
from hdpcomm.train.losses.shards import micro_batch_loss, no_tokens, pack_shard

COST = CostModel(attention=1e-8, linear=1e-5, fixed=1e-3)
CAPACITY = 1024
SEED = 11


def lengths_of(step: int, ranks: int) -> list[int]:
    """About 4 x capacity tokens a rank: many short sequences and some long ones."""
    rng = random.Random(SEED + step)
    found: list[int] = []
    while sum(found) < 4 * CAPACITY * ranks:
        found.append(rng.choice([CAPACITY, rng.randint(16, 128), rng.randint(16, 128), rng.randint(100, 600)]))
    return found


def sequence_of(step: int, lengths: list[int], vocabulary: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randint(vocabulary, (lengths[place],), generator=generator)


def measure(options: argparse.Namespace, store: str) -> dict[str, Any]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    config = LlamaConfig(
        vocabulary=4096, layers=options.layers, hidden=options.hidden, heads=8, kv_heads=4, ffn=3 * options.hidden
    )
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with hdp.init(timeout=600.0) as comm:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
        planner = Planner(None, ClusterSpec(comm.size, CAPACITY), "static", COST)
        trainers = {}
        for zero in (1, 2, 3):
            model = Llama(config)
            trainers[zero] = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), planner, comm, zero=zero)
        sharded = Llama(config)
        mesh = init_device_mesh("cpu", (comm.size,))
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        alone = comm.subset([comm.rank])

        def lockstep(lengths: list[int], fetch: Callable[[int], torch.Tensor]) -> float:
            plan = planner.plan(lengths)
            most = max(len(plan.for_rank(rank)) for rank in range(comm.size))
            own = plan.for_rank(comm.rank)
            total = torch.zeros((), dtype=torch.float64)
            labels = sum(lengths) - len(lengths)
            optimizer.zero_grad()
            for place in range(most):
                packed = no_tokens(torch.device("cpu"))
                if place < len(own):
                    packed = pack_shard(own[place], fetch, comm=alone, device="cpu")
                loss = micro_batch_loss(sharded, packed, alone)
                (loss * (comm.size / labels)).backward()  # FSDP2 takes the mean over the ranks
                total += loss.detach().double()
            torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
            optimizer.step()
            comm.all_reduce(total)
            return float(total) / labels

        seconds: dict[str, list[float]] = {}
        losses: dict[str, list[float]] = {}
        for step in range(options.steps + 1):
            lengths = lengths_of(step, comm.size)
            fetch = partial(sequence_of, step, lengths, config.vocabulary)
            for name in ("zero 1", "zero 2", "zero 3", "FSDP2 in lockstep"):
                comm.barrier()
                started = time.perf_counter()
                if name.startswith("zero"):
                    loss = trainers[int(name[-1])].step(lengths, fetch).loss
                else:
                    loss = lockstep(lengths, fetch)
                took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
                comm.all_reduce(took, "max")
                losses.setdefault(name, []).append(loss)
                if step:
                    seconds.setdefault(name, []).append(float(took))
        dist.destroy_process_group()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, seconds["zero 1"], strict=True))
        for name, each in seconds.items()
    }
    return {
        "ranks": options.ranks, "parameters": sum(p.numel() for p in Llama(config, device="meta").parameters()),
        "steps": options.steps, "median_s": medians, "over_zero_1": ratios,
        "last_loss": {name: each[-1] for name, each in losses.items()},
    }  # fmt: skip


LINKS = {"NVLink": 360e9, "network": 40e9}  # bytes a second of a device that transfers reach
NOISE = 0.05


def times_of(
    plan: StepPlan, layers: int, pull: float, push: float, moved: float, seed: int
) -> dict[int, tuple[float, float]]:
    """By micro-batch, the seconds that it takes by itself, and with what it pulls and adds."""
    rng, times = random.Random(seed), {}
    for batch in plan.micro_batches:
        actual = (batch.predicted_s - moved) * max(0.5, rng.gauss(1.0, NOISE))
        forward, backward = actual / 3 / layers, 2 * actual / 3 / layers
        times[batch.index] = actual, layers * (max(forward, pull) + max(backward, pull + push))
    return times


def lockstep_s(plan: StepPlan, times: dict[int, tuple[float, float]]) -> float:
    """All ranks run the longest micro-batch that they have left, and wait for the slowest."""
    by_size = sorted(plan.micro_batches, key=lambda batch: -batch.predicted_s)
    waves = make_waves(sorted_for_waves(plan.micro_batches))
    return sum(max(times[by_size[batch.index].index][1] for batch in wave) for wave in waves)


def simulate(name: str, ranks: int, link: str, owners: int, tokens: int, seeds: int = 5) -> dict[str, Any]:
    spec, context = MODELS[name], 262_144
    layer_bytes = 2.0 * spec.params / spec.layers * (owners - 1) / owners
    pull, push = layer_bytes / LINKS[link], 2 * layer_bytes / LINKS[link]
    rows = []
    for seed in range(seeds):
        lengths = sample_lengths("byted", context=context, seed=seed, tokens=tokens)
        cluster = ClusterSpec(ranks=ranks, capacity=16_384, ranks_per_node=8, device="h100")
        known = Planner(spec, cluster, context=context)
        moved = spec.layers * (2 * pull + push)
        costs = replace(known.cost_model, fixed=known.cost_model.fixed + moved)
        plans = [
            Planner(None, cluster, policy, costs, context=context).plan(lengths)
            for policy in ("balanced", "pow2", "naive", "static")
        ]
        every = [times_of(each, spec.layers, pull, push, moved, seed) for each in plans]
        plan, times, without = plans[0], every[0], known.plan(lengths)
        alone_times = times_of(without, spec.layers, pull, push, 0.0, seed)
        alone = [0.0] * ranks
        for batch in without.micro_batches:
            end = max(alone[rank] for rank in batch.ranks) + alone_times[batch.index][0]
            for rank in batch.ranks:
                alone[rank] = end
        planned, free = [0.0] * ranks, [0.0] * ranks
        ends: list[tuple[float, int, tuple[int, ...]]] = []
        for batch in plan.micro_batches:
            end = max(planned[rank] for rank in batch.ranks) + batch.predicted_s
            ends.append((end, batch.index, batch.ranks))
            for rank in batch.ranks:
                planned[rank] = end
        turn = dict.fromkeys(range(-(-ranks // owners)), 0.0)
        for _, index, group in sorted(ends):
            hosts = {rank // owners for rank in group}
            end = max(max(free[rank] for rank in group) + times[index][1], *(turn[host] for host in hosts))
            for rank in group:
                free[rank] = end
            turn |= dict.fromkeys(hosts, end)
        lockstep = min(lockstep_s(each, took) for each, took in zip(plans, every, strict=True))
        rows.append((max(alone), max(free), lockstep))
    whole, pulled, lockstep = (statistics.mean(column) for column in zip(*rows, strict=True))
    return {
        "model": name, "devices": ranks, "cut among": owners, "link": link, "tokens": tokens, "passes_s": whole,
        "pulled_over_whole": pulled / whole, "lockstep_over_whole": lockstep / whole,
        "lockstep_over_pulled": lockstep / pulled,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("steps", 7), ("layers", 6), ("hidden", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures, too")
    options = parser.parse_args()
    found: Any
    if options.simulate:
        found = [
            simulate("llama-7b", 64, "NVLink", 8, 8 << 20),
            simulate("llama-7b", 256, "NVLink", 8, 32 << 20),
            simulate("llama-70b", 256, "network", 256, 32 << 20),
        ]
    else:
        store = Path(f"/tmp/hdpcomm-zero-{os.getpid()}")
        found = spawn(measure, options.ranks, options, str(store), timeout=3600.0)[0]
        store.unlink(missing_ok=True)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Hosts whose ranks share one network interface: rings that know it against rings that do not, simulated.

    python benchmarks/shared_nics.py --json benchmarks/results/shared_nics.json

LLaMA-7B on H100, hosts of 8 ranks, one interface of 400 Gbit/s each, capacity of 8,192 tokens, steps of 32,768 tokens
a rank. Both plans have the same groups; `blind` is made as if each rank had an interface of its own. "long" are
near-equal sequences of 95 to 105 thousand tokens; `static` is the mesh of groups that hold the longest sequence. Times
are those until the last backward pass.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from datetime import date
from pathlib import Path

from hdpcomm.plan import MODELS, ClusterSpec, Planner, StepPlan
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.sim import simulate_step

HOST = 8
TOKENS = 32768  # a rank


def lengths_of(name: str, ranks: int, seed: int) -> list[int]:
    """The lengths of a step."""
    if name == "long":
        rng = random.Random(seed)
        return [rng.randint(95_000, 105_000) for _ in range(ranks * TOKENS // 100_000)]
    return sample_lengths(name, tokens=ranks * TOKENS, context=min(2 << 20, 4096 * ranks), seed=seed)


def crossings(plan: StepPlan) -> int:
    """Messages between hosts in one step of each ring."""
    return sum(
        a // HOST != b // HOST
        for batch in plan.micro_batches
        for a, b in zip(batch.ranks, (*batch.ranks[1:], batch.ranks[0]), strict=True)
    )


def case(name: str, ranks: int, policy: str, seeds: int) -> dict[str, object]:
    """Means over ``seeds`` steps."""
    cluster = ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=HOST, nics=1)
    aware = Planner(MODELS["llama-7b"], cluster, policy)
    blind = Planner(MODELS["llama-7b"], ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=HOST), policy)
    figures: dict[str, list[float]] = {key: [] for key in ("aware_s", "blind_s", "gain")}
    counts = {"aware_crossings": 0, "blind_crossings": 0, "aware_peers": 0, "blind_peers": 0}
    for seed in range(seeds):
        lengths = lengths_of(name, ranks, seed)
        steps = {"aware": aware.plan(lengths), "blind": blind.plan(lengths)}
        for kind, plan in steps.items():
            figures[f"{kind}_s"].append(simulate_step(aware, plan).compute_s)
            counts[f"{kind}_crossings"] += crossings(plan)
            counts[f"{kind}_peers"] = max(counts[f"{kind}_peers"], plan.table.most_peers())
        figures["gain"].append(figures["blind_s"][-1] / figures["aware_s"][-1])
    means = {key: sum(values) / seeds for key, values in figures.items()}
    return {"lengths": name, "ranks": ranks, "policy": policy, "least_gain": min(figures["gain"])} | means | counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="steps of each case (default %(default)s)")
    parser.add_argument("--ranks", default="64,256", help="numbers of ranks (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    print("| lengths | ranks | policy | blind s | aware s | gain (least) | crossings, both | peers, both |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in ("byted", "github", "long"):
        for ranks in map(int, options.ranks.split(",")):
            for policy in ("balanced", "static"):
                row = case(name, ranks, policy, options.seeds)
                rows.append(row)
                print(
                    f"| {name} | {ranks:,} | {policy} | {row['blind_s']:.3f} | {row['aware_s']:.3f} | "
                    f"{row['gain']:.3f} ({row['least_gain']:.3f}) | {row['blind_crossings']:,}, "
                    f"{row['aware_crossings']:,} | {row['blind_peers']}, {row['aware_peers']} |",
                    flush=True,
                )
    if options.json:
        options.json.write_text(
            json.dumps({"date": date.today().isoformat(), "seeds": options.seeds, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

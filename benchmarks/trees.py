"""Prefix trees against flattened trajectories: time, work and bytes of attention; and the time to plan trees.

    python benchmarks/trees.py --ranks 2
    python benchmarks/trees.py --ranks 2 --prefix 4096 --answers 8x512 --repeat 7 --json FILE
    python benchmarks/trees.py --plan

The batch is one prompt with several answers, as in GRPO. ``tree``: one pack that is a tree. ``ring``: the flattened
trajectories as one pack of sequences over all ranks. ``alone``: each flattened trajectory on one rank, without
communication. All compute the same on one thread a rank, forward and backward; a round runs all three, and times are
medians over the rounds of the slowest rank. ``work`` is the ratio of (query, key) pairs; ``sent`` are the bytes of all
ranks, beside the least by the layout: each key once to every rank whose queries see it, in backward again with its
gradient in float32.

``--plan``: 10,000 trees for 1,024 ranks; processor time, the best of five.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, Tree, as_pack, ring_attention, shard
from hdpcomm.attention.ring import find_atoms
from hdpcomm.attention.tiles import Band
from hdpcomm.plan import MODELS, ClusterSpec, Planner
from hdpcomm.testing import RankPool

CAUSAL = Band(None, 0)


def answers_of(text: str) -> list[int]:
    """The lengths in "8x512" or "100,200"."""
    lengths = []
    for part in text.split(","):
        times, _, length = part.rpartition("x")
        lengths += [int(length)] * (int(times) if times else 1)
    return lengths


def pack_of(kind: str, prefix: int, answers: list[int], rank: int, size: int) -> Tree | list[int]:
    if kind == "tree":
        return Tree([-1, *[0] * len(answers)], [prefix, *answers])
    lengths = [prefix + answer for answer in answers]
    mine = lengths if kind == "ring" else lengths[rank::size]
    return [0, *torch.tensor(mine).cumsum(0).tolist()]


def run(kind: str, prefix: int, answers: list[int], shape: dict[str, int]) -> dict[str, float]:
    """Seconds and bytes of forward and backward on this rank."""
    torch.set_num_threads(1)
    with hdp.init() as world:
        pack = pack_of(kind, prefix, answers, world.rank, world.size)
        comm = None if kind == "alone" else world
        place = {"rank": 0, "size": 1} if comm is None else {"rank": comm.rank, "size": comm.size}
        generator = torch.Generator().manual_seed(0)
        tokens = as_pack(pack).layout(1).tokens
        heads = (shape["heads"], shape["kv_heads"], shape["kv_heads"], shape["heads"])
        q, k, v, dout = (
            shard(torch.randn(tokens, n, shape["head_dim"], generator=generator), pack, **place) for n in heads
        )
        for x in (q, k, v):
            x.requires_grad_()
        sent = world.stats()["bytes_sent"]
        world.barrier()
        started = time.perf_counter()
        options = AttentionOptions(variant="ring", check=False)
        out = ring_attention(q, k, v, comm=comm, cu_seqlens=pack, options=options)
        assert isinstance(out, torch.Tensor)
        middle = time.perf_counter()
        out.backward(dout)
        world.barrier()
        ended = time.perf_counter()
        return {
            "forward_s": middle - started,
            "seconds": ended - started,
            "bytes": float(world.stats()["bytes_sent"] - sent),
        }


def least_bytes(kind: str, prefix: int, answers: list[int], size: int, shape: dict[str, int]) -> int:
    if kind == "alone":
        return 0
    layout = as_pack(pack_of(kind, prefix, answers, 0, size)).layout(size)
    atoms = find_atoms(layout, layout, CAUSAL)
    rows = int((atoms.rows * atoms.needed.sum(axis=1)).sum())
    return rows * 2 * shape["kv_heads"] * shape["head_dim"] * (4 + 4 + 4)


def pairs_of(kind: str, prefix: int, answers: list[int]) -> float:
    if kind == "tree":
        layout = as_pack(Tree([-1, *[0] * len(answers)], [prefix, *answers])).layout(1)
        return layout.pairs(layout, CAUSAL)
    return float(sum((prefix + n) * (prefix + n + 1) // 2 for n in answers))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    answers = answers_of(args.answers)
    shape = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_dim")}
    kinds = ("tree", "ring", "alone")
    rounds: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in kinds}
    with RankPool(args.ranks) as pool:
        pool.run(run, "tree", 64, [8, 8], shape)  # imports, first operator calls
        for _ in range(args.repeat):
            for kind in kinds:
                rounds[kind].append(pool.run(run, kind, args.prefix, answers, shape))
    rows = {}
    for kind in kinds:
        seconds = [max(rank["seconds"] for rank in ranks) for ranks in rounds[kind]]
        rows[kind] = {
            "seconds": statistics.median(seconds),
            "fastest_s": min(seconds),
            "forward_s": statistics.median(max(rank["forward_s"] for rank in ranks) for ranks in rounds[kind]),
            "pairs": pairs_of(kind, args.prefix, answers),
            "bytes": sum(rank["bytes"] for rank in rounds[kind][0]),
            "least_bytes": least_bytes(kind, args.prefix, answers, args.ranks, shape),
        }
    flat = min(rows["ring"]["seconds"], rows["alone"]["seconds"])
    ratio, work = flat / rows["tree"]["seconds"], rows["ring"]["pairs"] / rows["tree"]["pairs"]
    print(
        f"prefix {args.prefix}, answers {args.answers}, {args.ranks} ranks, {args.heads} heads ({args.kv_heads} kv) of"
    )
    print(f"{args.head_dim}, float32, median of {args.repeat} rounds\n")
    print("| pack | s | forward s | pairs | sent MB | least MB |\n|---|---|---|---|---|---|")
    for kind, row in rows.items():
        print(
            f"| {kind} | {row['seconds']:.3f} | {row['forward_s']:.3f} | {row['pairs'] / 1e6:.1f} M | "
            f"{row['bytes'] / 1e6:.2f} | {row['least_bytes'] / 1e6:.2f} |"
        )
    print(f"\ntime {ratio:.2f}x (the faster flattened pack / tree), work {work:.2f}x, work / time {work / ratio:.3f}")
    return {"rows": rows, "time_ratio": ratio, "work_ratio": work}


def random_trees(count: int, seed: int) -> list[Tree]:
    """Prompts with 2 to 8 answers, some of two turns; lengths log-normal, the largest trees far above a capacity."""
    rng = random.Random(seed)
    trees = []
    for _ in range(count):
        parents, lengths = [-1], [max(16, int(rng.lognormvariate(6.0, 1.2)))]
        for _ in range(rng.randint(2, 8)):
            parents.append(0)
            lengths.append(max(8, int(rng.lognormvariate(5.5, 1.0))))
            if rng.random() < 0.2:
                parents.append(len(parents) - 1)
                lengths.append(max(8, int(rng.lognormvariate(5.0, 1.0))))
        trees.append(Tree(parents, lengths))
    return trees


def plan(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    print("| trees | ranks | tokens | fragments | ms | makespan / bound |\n|---|---|---|---|---|---|")
    for seed in range(args.seeds):
        trees = random_trees(10_000, seed)
        planner = Planner(MODELS["llama-7b"], ClusterSpec(1024, capacity=8192, ranks_per_node=8))
        seconds = []
        for _ in range(5):
            started = time.process_time()
            made = planner.plan(trees)
            seconds.append(time.process_time() - started)
        planner.validate(made, trees)
        row = {"seed": seed, "tokens": made.tokens, "fragments": len(made.fragments), "seconds": min(seconds)}
        row["ratio"] = made.makespan_s / made.lower_bound_s
        rows.append(row)
        print(
            f"| 10,000 | 1,024 | {made.tokens:,} | {row['fragments']} | {1e3 * min(seconds):.1f} | {row['ratio']:.4f} |"
        )
    return {"plans": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--answers", default="8x512")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--plan", action="store_true", help="measure planning instead")
    parser.add_argument("--seeds", type=int, default=3, help="batches of trees to plan")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        answers_of(args.answers)
    except ValueError:
        parser.error(f"--answers is {args.answers!r}, expected lengths such as 8x512 or 100,200")
    found = plan(args) if args.plan else compare(args)
    if args.json:
        about = {"date": date.today().isoformat(), "machine": platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps(about | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

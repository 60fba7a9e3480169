"""Attention over chosen keys beside ring attention: processor seconds and bytes of two ranks, forward and backward.

    python benchmarks/chosen_keys.py [--tokens 4096 16384 65536] [--top-k 64] [--json FILE]

One sequence, 4 heads of 64, 4 index heads of 32, random keys, so the choice is spread as widely as it can be. The
parts: the indexer's choice, attention over what it chose, and the ring over all keys; medians of ``--rounds`` rounds of
rank 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch

import hdpcomm as hdp
from hdpcomm.attention import index_top_k, ring_attention, selected_attention, shard
from hdpcomm.testing import spawn

HEADS, DIM, INDEX_HEADS, INDEX_DIM = 4, 64, 4, 32


def measured(tokens: int, top_k: int, rounds: int) -> dict[str, tuple[float, int]]:
    """By part: processor seconds, bytes sent."""
    torch.set_num_threads(1)
    comm = hdp.init(timeout=600.0)
    draw, cu = torch.Generator().manual_seed(0), [0, tokens]

    def normal(*shape: int) -> torch.Tensor:
        return shard(torch.randn(tokens, *shape, generator=draw), cu, rank=comm.rank, size=comm.size).contiguous()

    qkv = [normal(HEADS, DIM) for _ in range(3)]
    index = normal(INDEX_HEADS, INDEX_DIM), normal(INDEX_DIM), normal(INDEX_HEADS)
    found: dict[str, tuple[float, int]] = {}
    chosen = index_top_k(*index, top_k=top_k, comm=comm, cu_seqlens=cu)
    for part in ("index", "chosen", "ring"):
        seconds, sent = [], 0
        for _ in range(rounds):
            comm.barrier()
            started, before = time.process_time(), comm.stats()["bytes_sent"]
            if part == "index":
                index_top_k(*index, top_k=top_k, comm=comm, cu_seqlens=cu)
            else:
                q, k, v = (x.clone().requires_grad_() for x in qkv)
                if part == "chosen":
                    out = selected_attention(q, k, v, chosen, comm=comm, cu_seqlens=cu)
                else:
                    out = ring_attention(q, k, v, comm=comm, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
                out.sum().backward()
            seconds.append(time.process_time() - started)
            sent = comm.stats()["bytes_sent"] - before
        found[part] = statistics.median(seconds), sent
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    print(f"{'tokens':>8} {'index s':>9} {'chosen s':>9} {'ring s':>9} {'bytes of the ring':>18}")
    for tokens in options.tokens:
        found = spawn(measured, 2, tokens, options.top_k, options.rounds, timeout=3600.0)[0]
        share = (found["index"][1] + found["chosen"][1]) / found["ring"][1]
        print(f"{tokens:8} {found['index'][0]:9.2f} {found['chosen'][0]:9.2f} {found['ring'][0]:9.2f} {share:18.2f}")
        rows[tokens] = found
    if options.json:
        told = {"top_k": options.top_k, "torch": torch.__version__, "date": str(date.today()), "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

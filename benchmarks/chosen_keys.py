"""Attention over chosen keys beside ring attention: processor seconds and bytes of a rank, forward and backward.

    python benchmarks/chosen_keys.py [--ranks 2 4] [--tokens 4096 16384 65536] [--top-k 64] [--json FILE]
    python benchmarks/chosen_keys.py --work
    python benchmarks/chosen_keys.py --predict

One sequence, 4 heads of 64, 4 index heads of 32, random keys, so the choice is spread as widely as it can be. The
parts: the indexer's choice, attention over what it chose, the ring over all keys, and the messages alone of gathering
all keys and values and of bringing their gradients back; medians of ``--rounds`` rounds of rank 0.

``--work`` counts the FLOPs of each rank in a layer of DeepSeek-V3.2 (its configuration's sizes, k = 2,048, both passes,
the indexer forward) for five mixes of lengths, in pieces of one length and in the shards of training.

``--predict`` trains a small DeepSeek-V3.2 (k = 64) by ``hdpcomm train`` on 2 ranks, with sequences of up to 4,096
tokens that fit a rank, and that take both: what plans predict over the processor time of each step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

import hdpcomm as hdp
from hdpcomm.attention import (
    BalancedPack,
    index_top_k,
    ring_attention,
    selected_attention,
    shard,
)
from hdpcomm.testing import spawn

HEADS, DIM, INDEX_HEADS, INDEX_DIM = 4, 64, 4, 32
PARTS = ("index", "chosen", "ring", "gather")


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
    for part in PARTS:
        seconds, sent = [], 0
        for _ in range(rounds):
            comm.barrier()
            started, before = time.process_time(), comm.stats()["bytes_sent"]
            if part == "index":
                index_top_k(*index, top_k=top_k, comm=comm, cu_seqlens=cu)
            elif part == "gather":
                for x in qkv[1:]:
                    whole = x.new_empty(comm.size * len(x), HEADS, DIM)
                    comm.all_gather(whole, x)
                    comm.reduce_scatter(torch.empty_like(x), whole)
            else:
                q, k, v = (x.clone().requires_grad_() for x in qkv)
                pack = {"comm": comm, "cu_seqlens": cu}
                if part == "chosen":
                    out = selected_attention(q, k, v, chosen, **pack)
                else:
                    out = ring_attention(q, k, v, comm=comm, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
                out.sum().backward()
            seconds.append(time.process_time() - started)
            sent = comm.stats()["bytes_sent"] - before
        found[part] = statistics.median(seconds), sent
    return found


MIXES = ([131072], [16384], [8192, 16384, 32768], [4096] * 8, [3000, 50000, 7, 1200])


def work(lengths: list[int], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs ``[ranks, 3]``: products with weights, attention over chosen keys, the indexer; in both shards."""
    hidden, heads, nope, rope, v_dim, q_rank, kv_rank, top_k = 7168, 128, 128, 64, 128, 1536, 512, 2048
    index_heads, index_dim, expert, used = 64, 128, 2048, 9
    latent = hidden * q_rank + q_rank * heads * (nope + rope) + hidden * (kv_rank + rope)
    latent += kv_rank * heads * (nope + v_dim) + heads * v_dim * hidden
    token = 6.0 * (latent + 3 * hidden * expert * used)
    token += 2.0 * (q_rank * index_heads * index_dim + hidden * (index_dim + index_heads))
    pair, index_pair = 7.0 * heads * (2 * kv_rank + rope), 2.0 * index_heads * (index_dim + 1)
    plain = torch.tensor([0, *itertools.accumulate(lengths)])
    seen = torch.cat([torch.arange(1, n + 1) for n in lengths])
    found = []
    for cu in (plain, BalancedPack(plain, top_k, pair / (pair + index_pair))):
        shards = [shard(seen, cu, rank=rank, size=ranks).double() for rank in range(ranks)]
        found.append(
            np.array(
                [[token * len(x), pair * float(x.clamp(max=top_k).sum()), index_pair * float(x.sum())] for x in shards]
            )
        )
    return found[0], found[1]


def show_work() -> None:
    print(
        "most and least of a rank over the mean, in pieces of one length and in shards of training; of attention only;"
    )
    print("attention over chosen keys and the indexer of all")
    for lengths, ranks in itertools.product(MIXES, (4, 8)):
        told = f"{lengths[0]:7,} ... ({len(lengths)}), {ranks} ranks"
        both = work(lengths, ranks)
        for each in both:
            for sums in (each.sum(1), each[:, 1:].sum(1)):
                told += f"{sums.max() / sums.mean():8.3f}{sums.min() / sums.mean():8.3f}"
        parts = both[0].sum(0) / both[0].sum()
        print(f"{told}{parts[1]:8.0%}{parts[2]:6.0%}")


MODEL = {
    "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "index_n_heads": 8,
    "index_head_dim": 32, "index_topk": 64, "max_position_embeddings": 8192,
}  # fmt: skip


def predict() -> None:
    import transformers  # takes a while

    print("capacity   predicted over processor seconds, by step")
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.AutoConfig.for_model("deepseek_v32", **MODEL)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for capacity in (4096, 2048):
            told = Path(folder, f"{capacity}.json")
            given = ["--context", "4096", "--capacity", str(capacity), "--tokens-per-step", "16384", "--steps", "6"]
            command = [
                sys.executable,
                "-m",
                "hdpcomm",
                "train",
                "--model",
                folder,
                "--ranks",
                "2",
                "--trackers",
                "none",
            ]
            subprocess.run([*command, *given, "--json", str(told)], check=True, stdout=subprocess.DEVNULL)
            steps = json.loads(told.read_text())["steps"]
            ratios = [step["predicted_s"] / step["processor_s"] for step in steps]
            print(f"{capacity:8}   {'  '.join(f'{ratio:.3f}' for ratio in ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    if options.predict:
        predict()
        return
    if options.work:
        show_work()
        return
    rows = []
    print("seconds, and of what chooses bytes over those of gathering all")
    print("ranks   tokens" + "".join(f"{part:>10}" for part in PARTS[:-1]) + "  index+chosen")
    for ranks, tokens in itertools.product(options.ranks, options.tokens):
        found = spawn(measured, ranks, tokens, options.top_k, options.rounds, timeout=3600.0)[0]
        seconds = "".join(f"{found[part][0]:10.2f}" for part in PARTS[:-1])
        share = (found["index"][1] + found["chosen"][1]) / found["gather"][1]
        print(f"{ranks:5} {tokens:8}{seconds}{share:14.2f}", flush=True)
        rows.append({"ranks": ranks, "tokens": tokens, **found})
    if options.json:
        told = {"top_k": options.top_k, "torch": torch.__version__, "date": str(date.today()), "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

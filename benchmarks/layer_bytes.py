"""Bytes that layers send between ranks, measured beside the computed minimum: MLA, linear layers by length, and trees.

    python benchmarks/layer_bytes.py
    python benchmarks/layer_bytes.py --ranks 4 --lengths 1024 16384 131072 --json FILE

Forward and backward of one layer on one sequence in bfloat16 (gradients and states travel in float32), the sum over all
ranks. ``minimum``: for MLA, each row of keys once to each rank that needs it, and its gradient once back, by the dense
mask of the zigzag; for linear layers every state once over each border of runs, and each token of a convolution's past
once. A sum-up of runs (``gather``) sends more than that: its own count is 2 N (N-1) maps each way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hdpcomm as hdp
from hdpcomm.attention import (
    AttentionOptions,
    Tree,
    delta_rule,
    mla_attention,
    ring_attention,
    shard,
    short_conv,
    ssd,
)
from hdpcomm.testing import run_threads

MLA = {"heads": 16, "nope": 128, "rope": 64, "v": 128, "rank": 512}
"""DeepSeek-V3 with 16 of its 128 heads."""
LINEAR = {"heads": 4, "dk": 32, "dv": 32}
WIDTH = 4
"""Taps of the short convolution, over heads * dk channels."""
SOFTMAX = {"heads": 4, "kv_heads": 2, "dim": 64}
"""Shape of the softmax attention on trees."""


def rows_needed(length: int, size: int) -> int:
    """Keys that ranks need of others under a causal zigzag, counted once for each rank that needs them."""
    bounds = np.linspace(0, length, 2 * size + 1).astype(int)
    total = 0
    for rank in range(size):
        own = np.zeros(length, dtype=bool)
        last = 0
        for piece in (rank, 2 * size - 1 - rank):
            own[bounds[piece] : bounds[piece + 1]] = True
            last = max(last, int(bounds[piece + 1]))
        total += int((~own[:last]).sum())
    return total


def mla(send: str) -> tuple[Callable[..., Any], Callable[[int], dict[str, tuple[int, ...]]], int]:
    """(call, shapes by tokens, values of a row)."""
    heads, nope, rope, v, rank = MLA.values()

    def shapes(tokens: int) -> dict[str, tuple[int, ...]]:
        return {
            "q": (tokens, heads, nope + rope),
            "c_kv": (tokens, rank),
            "k_rope": (tokens, rope),
            "w_kv": (heads * (nope + v), rank),
        }

    def call(*tensors: torch.Tensor, **place: Any) -> Any:
        return mla_attention(*tensors, options=AttentionOptions(send=send, variant="ring", check=False), **place)

    return call, shapes, rank + rope if send == "latent" else heads * (nope + rope + v)


def tree_needs(tree: Tree, size: int) -> tuple[int, int]:
    """(keys, states) that ranks need of others, counted once for each rank that needs them."""
    owner = np.empty(tree.num_tokens, dtype=int)
    for rank in range(size):
        owner[shard(torch.arange(tree.num_tokens), tree, rank=rank, size=size).numpy()] = rank
    keys, previous = 0, tree.previous.tolist()
    for rank in range(size):
        seen = np.zeros(tree.num_tokens, dtype=bool)
        for token in np.flatnonzero(owner == rank).tolist():
            at = token
            while at >= 0 and not seen[at]:
                seen[at] = True
                at = previous[at]
        keys += int((seen & (owner != rank)).sum())
    return keys, len({(p, owner[t]) for t, p in enumerate(previous) if p >= 0 and owner[p] != owner[t]})


def measured(
    call: Callable[..., Any], shapes: dict[str, tuple[int, ...]], length: int, size: int, pack: Tree | list[int] | None
) -> tuple[int, int]:
    """Bytes that all ranks send in forward and in backward; ``pack``: default one sequence of ``length`` tokens."""
    cu = [0, length] if pack is None else pack

    def main() -> tuple[int, int]:
        comm = hdp.init()
        tensors = []
        for shape in shapes.values():
            x = torch.zeros(shape, dtype=torch.bfloat16)
            tensors.append(shard(x, cu, rank=comm.rank, size=size) if shape[0] == length else x)
        leaves = [x.requires_grad_() for x in tensors]
        counts = [comm.stats()["bytes_sent"]]
        out = call(*leaves, comm=comm, cu_seqlens=cu)
        counts.append(comm.stats()["bytes_sent"])
        out.float().sum().backward()
        counts.append(comm.stats()["bytes_sent"])
        return counts[1] - counts[0], counts[2] - counts[1]

    forward, backward = zip(*run_threads(main, size, timeout=600.0), strict=True)
    return sum(forward), sum(backward)


def layers(size: int, lengths: list[int], mla_length: int) -> list[dict[str, Any]]:
    """What to measure: name, length, shapes, call and the computed bytes each way."""
    found: list[dict[str, Any]] = []
    rows = rows_needed(mla_length, size)
    for send in ("latent", "kv"):
        call, shapes, row = mla(send)
        computed = (rows * row * 2, rows * row * (2 + 4))
        found.append({"layer": f"MLA, {send}", "length": mla_length, "shapes": shapes(mla_length), "call": call,
                      "minimum": computed, "computed": computed})  # fmt: skip
    heads, dk, dv = LINEAR.values()
    state = heads * dk * dv * 4
    for length in lengths:
        keys, values, scalars = (length, heads, dk), (length, heads, dv), (length, heads)
        delta = {"q": keys, "k": keys, "v": values, "g": scalars, "beta": scalars}
        mamba = {"x": values, "dt": scalars, "a": (heads,), "b": keys, "c": keys}
        states = (2 * (size - 1) * state,) * 2
        for name, layer, shapes, transition in (
            ("delta rule", delta_rule, delta, heads * dk * dk * 4),
            ("KDA", delta_rule, {**delta, "g": keys}, heads * dk * dk * 4),
            ("Mamba-2", ssd, mamba, heads * 4),
        ):
            for exchange in ("pipeline", "gather"):

                def call(*tensors: torch.Tensor, layer: Any = layer, exchange: str = exchange, **place: Any) -> Any:
                    return layer(*tensors, options=AttentionOptions(exchange=exchange, check=False), **place)

                gathered = (2 if size > 2 else 1) * size * (size - 1) * (state + transition)
                computed = states if exchange == "pipeline" else (gathered, gathered)
                found.append({"layer": f"{name}, {exchange}", "length": length, "shapes": shapes, "call": call,
                              "minimum": states, "computed": computed})  # fmt: skip
        past = 2 * (size - 1) * (WIDTH - 1) * heads * dk
        convolve = partial(short_conv, options=AttentionOptions(check=False))
        found.append({"layer": "convolution", "length": length, "call": convolve, "minimum": (past * 2, past * 4),
                      "shapes": {"x": (length, heads * dk), "weight": (heads * dk, WIDTH)},
                      "computed": (past * 2, past * 4)})  # fmt: skip
    return found


def trees(size: int, prefix: int, answers: list[int]) -> list[dict[str, Any]]:
    """Like :func:`layers`: a prompt with answers, as a tree and flattened."""
    tree = Tree([-1, *[0] * len(answers)], [prefix, *answers])
    lengths = [prefix + answer for answer in answers]
    flat = [0, *np.cumsum(lengths).tolist()]
    keys, states = tree_needs(tree, size)
    heads, dk, dv = LINEAR.values()
    key, state = 2 * SOFTMAX["kv_heads"] * SOFTMAX["dim"], heads * dk * dv * 4
    flat_states = 2 * (size - 1) * len(answers)
    found: list[dict[str, Any]] = []
    for name, pack, rows, borders in (
        ("tree", tree, keys, states),
        ("flattened", flat, sum(rows_needed(length, size) for length in lengths), flat_states),
    ):
        tokens = tree.num_tokens if pack is tree else flat[-1]
        queries, both = (tokens, SOFTMAX["heads"], SOFTMAX["dim"]), (tokens, SOFTMAX["kv_heads"], SOFTMAX["dim"])
        wide, scalars = (tokens, heads, dk), (tokens, heads)

        def attend(*tensors: torch.Tensor, **place: Any) -> Any:
            return ring_attention(*tensors, options=AttentionOptions(variant="ring", check=False), **place)

        def recur(*tensors: torch.Tensor, **place: Any) -> Any:
            return delta_rule(*tensors, options=AttentionOptions(exchange="pipeline", check=False), **place)

        for layer, call, shapes, computed in (
            ("softmax", attend, {"q": queries, "k": both, "v": both}, (rows * key * 2, rows * key * (2 + 4))),
            ("delta rule", recur, {"q": wide, "k": wide, "v": (tokens, heads, dv), "g": scalars, "beta": scalars},
             (borders * state,) * 2),
        ):  # fmt: skip
            found.append({"layer": f"{layer}, {name}", "length": tokens, "call": call, "shapes": shapes, "pack": pack,
                          "minimum": computed, "computed": computed})  # fmt: skip
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384, 131072], help="for linear layers")
    parser.add_argument("--mla-length", type=int, default=1024)
    parser.add_argument(
        "--tree", type=int, nargs="+", default=[4096, *[512] * 8], metavar="TOKENS", help="a prompt and its answers"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """0 if every measured count is the computed one, else 1."""
    args = parse(argv)
    torch.set_num_threads(1)
    print(
        f"{'layer':>22} {'tokens':>7} {'forward B':>12} {'computed':>12} {'backward B':>12} {'computed':>12} "
        f"{'/ minimum':>9}"
    )
    lines = []
    prefix, *answers = args.tree
    for each in layers(args.ranks, args.lengths, args.mla_length) + trees(args.ranks, prefix, answers):
        forward, backward = measured(
            each.pop("call"), each.pop("shapes"), each["length"], args.ranks, each.pop("pack", None)
        )
        line = {**each, "forward_bytes": forward, "backward_bytes": backward}
        line["times_minimum"] = (forward + backward) / sum(each["minimum"]) if args.ranks > 1 else 1.0
        lines.append(line)
        print(
            f"{line['layer']:>22} {line['length']:>7} {forward:>12,} {line['computed'][0]:>12,} {backward:>12,} "
            f"{line['computed'][1]:>12,} {line['times_minimum']:>9.2f}",
            flush=True,
        )
    if args.json is not None:
        versions = {"torch": torch.__version__, "hdpcomm": hdp.__version__, "date": time.strftime("%Y-%m-%d")}
        setting = {
            "ranks": args.ranks,
            "mla": MLA,
            "linear": LINEAR,
            "width": WIDTH,
            "softmax": SOFTMAX,
            "tree": args.tree,
        }
        args.json.write_text(json.dumps({"setting": setting, "versions": versions, "results": lines}, indent=1) + "\n")
    return int(any((line["forward_bytes"], line["backward_bytes"]) != tuple(line["computed"]) for line in lines))


if __name__ == "__main__":
    sys.exit(main())

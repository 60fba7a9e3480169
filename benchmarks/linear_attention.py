"""A gated-delta layer, or its recurrence alone, on several ranks against one rank: forward and backward of one pack.

    python benchmarks/linear_attention.py --ranks 2 --packs 16384 --repeat 9
    python benchmarks/linear_attention.py --what rule --exchanges gather scan pipeline --json FILE

The layer is that of Qwen3-Next: projections, short convolution, delta rule, gated norm, output projection, with ``key
heads``, two value heads each, and as many values as keys. Every rank is a process with one thread. Times are medians of
``--repeat`` rounds, in which one rank and several alternate; of several ranks the slowest counts. ``machine`` is the
speed-up of as many processes that each do the whole work at the same time, without communication: the upper limit here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, delta_rule, shard, short_conv
from hdpcomm.testing import RankPool


def lengths_of(text: str) -> list[int]:
    """The lengths in "16384", "8192,4096" or "64x256" (64 sequences of 256)."""
    lengths = []
    for part in text.split(","):
        times, _, length = part.rpartition("x")
        lengths += [int(length)] * (int(times) if times else 1)
    return lengths


def inputs_of(what: str, tokens: int, shape: dict[str, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors of tokens, parameters); the last tensor of tokens is the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    keys, dim, hidden = shape["key_heads"], shape["head_dim"], shape["hidden"]
    heads = 2 * keys

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    if what == "rule":
        k = F.normalize(random(tokens, keys, dim), dim=-1)
        g, beta = -F.softplus(random(tokens, heads)), random(tokens, heads).sigmoid()
        return [random(tokens, keys, dim), k, random(tokens, heads, dim), g, beta, random(tokens, heads, dim)], []
    mixed, values = 2 * keys * dim + heads * dim, heads * dim
    sizes = [(mixed + values, hidden), (2 * heads, hidden), (mixed, 4), (hidden, values), (dim,)]
    return [random(tokens, hidden), random(tokens, hidden)], [random(*size) / size[-1] ** 0.5 for size in sizes]


def layer(x: torch.Tensor, parameters: list[torch.Tensor], shape: dict[str, int], **place: Any) -> torch.Tensor:
    """[tokens, hidden] -> [tokens, hidden]"""
    keys, dim = shape["key_heads"], shape["head_dim"]
    heads, options = 2 * keys, place.pop("options")
    w_in, w_gates, w_conv, w_out, w_norm = parameters
    mixed, z = F.linear(x, w_in).split((2 * keys * dim + heads * dim, heads * dim), dim=1)
    a, b = F.linear(x, w_gates).split((heads, heads), dim=1)
    mixed = F.silu(short_conv(mixed.contiguous(), w_conv, **place))
    q, k, v = mixed.split((keys * dim, keys * dim, heads * dim), dim=1)
    q, k = (F.normalize(y.view(-1, keys, dim), dim=-1) for y in (q, k))
    out = delta_rule(q * dim**-0.5, k, v.reshape(-1, heads, dim), -F.softplus(a), b.sigmoid(), options=options, **place)
    out = F.rms_norm(out, (dim,), w_norm) * F.silu(z.view(-1, heads, dim))
    return F.linear(out.flatten(1), w_out)


def run(what: str, lengths: list[int], shape: dict[str, int], exchange: str, alone: bool) -> dict[str, float]:
    """Seconds of a forward and a backward on this rank; ``alone``: of the whole pack, whoever else runs."""
    torch.set_num_threads(1)
    with hdp.init() as world:
        comm = None if alone or world.size == 1 else world
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        place = {"rank": 0, "size": 1} if comm is None else {"rank": comm.rank, "size": comm.size}
        rows, parameters = inputs_of(what, sum(lengths), shape)
        *rows, dout = (shard(x, cu, **place) for x in rows)
        leaves = [x.requires_grad_() for x in (*rows, *parameters)]
        world.barrier()
        sent, start = world.stats()["bytes_sent"], time.perf_counter()
        options = AttentionOptions(exchange=exchange)
        if what == "rule":
            out = delta_rule(*leaves, comm=comm, cu_seqlens=cu, options=options)
        else:
            out = layer(leaves[0], leaves[1:], shape, comm=comm, cu_seqlens=cu, options=options)
        middle = time.perf_counter()
        out.backward(dout)
        end = time.perf_counter()
        return {
            "forward_s": middle - start,
            "backward_s": end - middle,
            "total_s": end - start,
            "bytes_sent": world.stats()["bytes_sent"] - sent,
        }


def idle() -> None:
    """Warms a rank up: imports, first operator calls."""
    run("layer", [64], {"key_heads": 1, "head_dim": 8, "hidden": 8}, "auto", True)


def measure(
    pools: dict[int, RankPool], pack: str, size: int, exchange: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One line of the table."""
    lengths = lengths_of(pack)
    shape = {name: getattr(args, name) for name in ("key_heads", "head_dim", "hidden")}
    rounds: dict[str, list[dict[str, float]]] = {"alone": [], "crowd": [], "shared": []}
    for _ in range(args.repeat):
        rounds["alone"].append(pools[1].run(run, args.what, lengths, shape, exchange, True)[0])
        for name, alone in (("crowd", True), ("shared", False)):
            by_rank = pools[size].run(run, args.what, lengths, shape, exchange, alone)
            rounds[name].append({key: max(rank[key] for rank in by_rank) for key in by_rank[0]})
    median = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in rounds.items()
    }
    single_s, total_s = median["alone"]["total_s"], median["shared"]["total_s"]
    return {
        "what": args.what,
        "pack": pack,
        "tokens": sum(lengths),
        "ranks": size,
        "exchange": exchange,
        "single_s": single_s,
        "forward_s": median["shared"]["forward_s"],
        "backward_s": median["shared"]["backward_s"],
        "total_s": total_s,
        "speedup": single_s / total_s,
        "machine_speedup": size * single_s / median["crowd"]["total_s"],
        "bytes_sent_per_rank": median["shared"]["bytes_sent"],
    }


def show(line: dict[str, Any]) -> None:
    print(
        f"{line['what']:>6} {line['pack']:>14} {line['ranks']:>5} {line['exchange']:>9} {line['single_s']:>9.3f} "
        f"{line['forward_s']:>9.3f} {line['backward_s']:>9.3f} {line['speedup']:>8.2f} {line['machine_speedup']:>8.2f} "
        f"{line['bytes_sent_per_rank'] / 1e6:>9.3f}",
        flush=True,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", default="layer", choices=["layer", "rule"], help="the layer, or the delta rule alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--packs", nargs="+", default=["16384"], help='lengths: "16384", "8192,4096,4096", "64x256"')
    parser.add_argument("--exchanges", nargs="+", default=["auto"], choices=["auto", "gather", "scan", "pipeline"])
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print(
        f"{'what':>6} {'pack':>14} {'ranks':>5} {'exchange':>9} {'single s':>9} {'forward s':>9} {'backward':>9} "
        f"{'speed-up':>8} {'machine':>8} {'MB sent':>9}"
    )
    pools: dict[int, RankPool] = {}
    lines = []
    try:
        for size in sorted({1, *args.ranks}):
            print(f"starting {size} ranks", file=sys.stderr)
            pools[size] = RankPool(size)
            pools[size].run(idle)
        for pack in args.packs:
            for size in args.ranks:
                for exchange in args.exchanges:
                    lines.append(measure(pools, pack, size, exchange, args))
                    show(lines[-1])
    finally:
        for pool in pools.values():
            pool.close()
    if args.json is not None:
        setting = {name: getattr(args, name) for name in ("what", "key_heads", "head_dim", "hidden", "repeat")}
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        versions = {"torch": torch.__version__, "hdpcomm": hdp.__version__, "date": time.strftime("%Y-%m-%d")}
        report = {"setting": setting, "machine": machine, "versions": versions, "results": lines}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

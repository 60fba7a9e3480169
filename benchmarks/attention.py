"""Distributed attention compared with the single-device operator on the same work, forward and backward.

    python benchmarks/attention.py --ranks 2 --packs 16384
    python benchmarks/attention.py --ranks 2 --packs 16384 8192,4096,4096 64x256 --variants ring gather --json FILE

``single`` is torch's fused operator in one process with one thread, sequence by sequence; ``ring`` has one thread a
rank. Speed-up is single / measured; efficiency is ideal / measured, ideal = single / ranks; ``exposed`` is the share
of the time in which a rank waited for messages. ``machine`` is the speed-up of the same number of processes that each
do the whole single-device work at the same time without communication: the upper limit on this machine. Times are the
best of ``--repeat`` rounds, in which both sides alternate, and those of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, ring_attention, shard
from hdpcomm.testing import RankPool


def lengths_of(text: str) -> list[int]:
    """The lengths in "16384", "8192,4096" or "64x256" (64 sequences of 256)."""
    lengths = []
    for part in text.split(","):
        times, _, length = part.rpartition("x")
        lengths += [int(length)] * (int(times) if times else 1)
    return lengths


def tensors(lengths: list[int], shape: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total, dtype = sum(lengths), getattr(torch, shape["dtype"])
    heads = (shape["heads"], shape["kv_heads"], shape["kv_heads"], shape["heads"])
    return [torch.randn(total, n, shape["head_dim"], generator=generator).to(dtype) for n in heads]


def single(lengths: list[int], shape: dict[str, Any], causal: bool) -> dict[str, float]:
    """Seconds of torch's operator on the whole pack, on one rank."""
    torch.set_num_threads(1)
    *inputs, dout = tensors(lengths, shape)
    parts = [[t.split(lengths)[i].transpose(0, 1)[None].detach() for t in inputs] for i in range(len(lengths))]
    grads = [g.transpose(0, 1)[None] for g in dout.split(lengths)]
    leaves = [[t.requires_grad_() for t in part] for part in parts]
    start = time.perf_counter()
    outs = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True) for part in leaves
    ]
    middle = time.perf_counter()
    torch.autograd.backward(outs, grads)
    return {"forward_s": middle - start, "backward_s": time.perf_counter() - middle}


def distributed(lengths: list[int], shape: dict[str, Any], causal: bool, variant: str) -> dict[str, float]:
    """Seconds of the distributed attention on this rank."""
    torch.set_num_threads(1)
    with hdp.init() as comm:
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        q, k, v, dout = (shard(t, cu, rank=comm.rank, size=comm.size) for t in tensors(lengths, shape))
        for x in (q, k, v):
            x.requires_grad_()
        sent = comm.stats()["bytes_sent"]
        comm.barrier()
        options = AttentionOptions(variant=variant)
        start, waited = time.perf_counter(), comm.stats()["wait_ns"]
        out = ring_attention(q, k, v, comm=comm, cu_seqlens=cu, causal=causal, options=options)
        assert isinstance(out, torch.Tensor)
        middle, exposed_ns = time.perf_counter(), comm.stats()["wait_ns"] - waited
        comm.barrier()
        again, waited = time.perf_counter(), comm.stats()["wait_ns"]
        out.backward(dout)
        end = time.perf_counter()
        return {
            "forward_s": middle - start,
            "backward_s": end - again,
            "exposed_s": (exposed_ns + comm.stats()["wait_ns"] - waited) * 1e-9,
            "bytes_sent": comm.stats()["bytes_sent"] - sent,
        }


def idle() -> None:
    """Warms a rank up: imports, first operator calls."""
    torch.set_num_threads(1)
    single([64], {"heads": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}, True)


def measure(pools: dict[int, RankPool], pack: str, size: int, variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    lengths = lengths_of(pack)
    shape = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_dim", "dtype")}
    alone: list[dict[str, float]] = []
    together: list[float] = []  # each rank runs the whole work by itself, all at the same time
    shared: list[dict[str, float]] = []
    for _ in range(args.repeat):
        alone.append(pools[1].run(single, lengths, shape, not args.full)[0])
        crowd = pools[size].run(single, lengths, shape, not args.full)
        together.append(max(rank["forward_s"] + rank["backward_s"] for rank in crowd))
        by_rank = pools[size].run(distributed, lengths, shape, not args.full, variant)
        shared.append({key: max(rank[key] for rank in by_rank) for key in by_rank[0]})
    best_alone = {key: min(round_[key] for round_ in alone) for key in ("forward_s", "backward_s")}
    best = min(shared, key=lambda round_: round_["forward_s"] + round_["backward_s"])
    single_s, total_s = sum(best_alone.values()), best["forward_s"] + best["backward_s"]
    return {
        "pack": pack,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "ranks": size,
        "variant": variant,
        "single_forward_s": best_alone["forward_s"],
        "single_backward_s": best_alone["backward_s"],
        "forward_s": best["forward_s"],
        "backward_s": best["backward_s"],
        "speedup": single_s / total_s,
        "efficiency": single_s / size / total_s,
        "machine_speedup": size * single_s / min(together),
        "exposed_share": best["exposed_s"] / total_s,
        "bytes_sent_per_rank": best["bytes_sent"],
    }


def show(line: dict[str, Any]) -> None:
    print(
        f"{line['pack']:>20} {line['ranks']:>5} {line['variant']:>8} "
        f"{line['single_forward_s']:>9.3f} {line['single_backward_s']:>9.3f} {line['forward_s']:>9.3f} "
        f"{line['backward_s']:>9.3f} {line['speedup']:>8.2f} {line['machine_speedup']:>8.2f} "
        f"{line['efficiency']:>10.2f} {line['exposed_share']:>8.1%} {line['bytes_sent_per_rank'] / 1e6:>9.1f}",
        flush=True,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--packs", nargs="+", default=["16384"], help='lengths: "16384", "8192,4096,4096", "64x256"')
    parser.add_argument(
        "--variants", nargs="+", default=["ring"], choices=["auto", "ring", "gather", "ulysses", "hybrid"]
    )
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print(
        f"{'pack':>20} {'ranks':>5} {'variant':>8} {'single f':>9} {'single b':>9} {'forward':>9} {'backward':>9} "
        f"{'speed-up':>8} {'machine':>8} {'efficiency':>10} {'exposed':>8} {'MB sent':>9}"
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
                for variant in args.variants:
                    lines.append(measure(pools, pack, size, variant, args))
                    show(lines[-1])
    finally:
        for pool in pools.values():
            pool.close()
    if args.json is not None:
        setting = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "full", "repeat")}
        machine = {"cpus": os.cpu_count(), "processor": processor(), "python": platform.python_version()}
        versions = {"torch": torch.__version__, "hdpcomm": hdp.__version__, "date": time.strftime("%Y-%m-%d")}
        report = {"setting": setting, "machine": machine, "versions": versions, "results": lines}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def processor() -> str:
    """The name of the CPU, as Linux gives it."""
    path = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())

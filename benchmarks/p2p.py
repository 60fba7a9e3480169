"""One-way time of messages between two ranks: hdpcomm compared with torch.distributed's gloo, in the same processes.

A ping-pong; the time of one way is half a round trip. Rounds of both alternate, and the medians over all rounds are
compared, so that noise of the machine affects both. If there are two cores, each rank is bound to one, as mpirun does;
``--free`` binds none. Usage: ``python benchmarks/p2p.py [--free] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist

import hdpcomm as hdp
from hdpcomm.comm.launch import run_ranks

SIZES = (8, 1024, 65_536, 1_048_576, 16_777_216)
ROUNDS = 9


def one_way(
    send: Callable[[torch.Tensor], object], recv: Callable[[torch.Tensor], object], rank: int, size: int
) -> float:
    """Seconds of one message of ``size`` bytes: half of a round trip, averaged over about 20 ms."""
    x = torch.zeros(size, dtype=torch.uint8)
    trips = max(5, min(1000, 50_000_000 // (size + 50_000)))
    for timed in (False, True):
        started = time.perf_counter()
        for _ in range(trips if timed else 3):
            if rank == 0:
                send(x)
                recv(x)
            else:
                recv(x)
                send(x)
    return (time.perf_counter() - started) / trips / 2


def measure(free: bool) -> list[dict[str, float]]:
    """The rows, on rank 0: bytes, and the median seconds of both libraries."""
    torch.set_num_threads(1)
    comm = hdp.init()
    dist.init_process_group("gloo")
    cores = sorted(os.sched_getaffinity(0))
    if not free and len(cores) >= 2:  # binds only this thread, not gloo's threads
        os.sched_setaffinity(0, {cores[comm.rank]})
    peer = 1 - comm.rank
    rows = []
    for size in SIZES:
        times: dict[str, list[float]] = {"hdpcomm": [], "gloo": []}
        for _ in range(ROUNDS):
            comm.barrier()
            times["hdpcomm"].append(
                one_way(lambda x: comm.send(x, peer), lambda x: comm.recv(x, peer), comm.rank, size)
            )
            dist.barrier()
            times["gloo"].append(one_way(lambda x: dist.send(x, peer), lambda x: dist.recv(x, peer), comm.rank, size))
        rows.append({"bytes": size} | {name: statistics.median(values) for name, values in times.items()})
    dist.destroy_process_group()
    comm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--free", action="store_true", help="do not bind the ranks to cores")
    arguments = parser.parse_args()
    rows = run_ranks(measure, 2, arguments.free, timeout=300)[0]
    print(f"{'bytes':>10}  {'hdpcomm us':>11}  {'gloo us':>9}  {'gloo / hdpcomm':>14}  {'hdpcomm GB/s':>12}")
    for row in rows:
        ours, gloo = row["hdpcomm"] * 1e6, row["gloo"] * 1e6
        print(
            f"{row['bytes']:>10}  {ours:>11.2f}  {gloo:>9.1f}  {gloo / ours:>14.1f}  {row['bytes'] / ours / 1e3:>12.2f}"
        )
    if arguments.json:
        record = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "hdpcomm": hdp.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "bound": not arguments.free and (os.cpu_count() or 1) >= 2,
            "rows": rows,
        }
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()

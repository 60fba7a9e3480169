"""Time of SharedCounter.fetch_add(): in a host, by one rank and by all at once, and from another host over TCP.

The other host is one of the machine's own (HDPCOMM_HOSTID), so its frames go through the loopback interface. Its owner
waits in an operation, multiplies matrices, or runs Python without a pause, which holds the interpreter's lock from the
threads that answer. In a host: nanoseconds a call over all calls of a round, the median of the rounds; between hosts:
microseconds of single calls. If there are two cores, each rank's program is bound to one. Usage: ``python
benchmarks/counter.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from datetime import date
from typing import Any

import torch

import hdpcomm as hdp
from hdpcomm.comm.launch import run_ranks

ROUNDS, CALLS = 9, 50_000
TRIPS = 2000
OWNERS = ("waits", "multiplies", "runs Python")


def bind(rank: int) -> None:
    """Binds this thread, and none of the transport's."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def in_a_host() -> list[dict[str, float]]:
    """Rows of who counts: the seconds of a call of each rank, the medians of the rounds."""
    comm = hdp.init()
    bind(comm.rank)
    rows = []
    for name, counts in (("the owner", comm.rank == 0), ("another rank", comm.rank == 1), ("both at once", True)):
        rounds = []
        with comm.counter() as counter:
            for _ in range(ROUNDS):
                comm.barrier()
                started = time.perf_counter()
                if counts:
                    for _ in range(CALLS):
                        counter.fetch_add()
                rounds.append((time.perf_counter() - started) / CALLS)
                comm.barrier()
        rows.append({"who": name, "counts": counts, "seconds": statistics.median(rounds)})
    return rows


def work(owner: str, over: threading.Event) -> None:
    x = torch.zeros(512, 512)
    while not over.is_set():
        if owner == "multiplies":
            x @ x
        else:
            sum(range(10_000))


def between_hosts(owner: str) -> list[float]:
    """On rank 1: the seconds of each call, ascending."""
    os.environ["HDPCOMM_HOSTID"] = "ab"[int(os.environ["RANK"])]
    torch.set_num_threads(1)
    comm = hdp.init(transport="auto")
    bind(comm.rank)
    times = []
    with comm.counter() as counter:
        comm.barrier()
        if comm.rank == 0:
            ended = comm.barrier(async_op=True)
            if owner == "waits":
                ended.wait()
            else:
                over = threading.Event()
                threading.Thread(target=lambda: (ended.wait(), over.set()), daemon=True).start()
                work(owner, over)
        else:
            for _ in range(TRIPS):
                started = time.perf_counter()
                counter.fetch_add()
                times.append(time.perf_counter() - started)
            comm.barrier()
        comm.barrier()
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"hdpcomm": hdp.__version__, "date": str(date.today()), "python": platform.python_version()}
    found |= {"cores": os.cpu_count(), "in a host": [], "between hosts": []}
    print("in a host, ns a call")
    for each in zip(*run_ranks(in_a_host, 2), strict=True):
        row = {"who": each[0]["who"], "ns": [1e9 * rank["seconds"] for rank in each if rank["counts"]]}
        found["in a host"].append(row)
        print(f"  {row['who']:>14}  " + "  ".join(f"{ns:.0f}" for ns in row["ns"]))
    print("from another host, us a call; the owner ...")
    for owner in OWNERS:
        times = [1e6 * seconds for seconds in run_ranks(between_hosts, 2, owner)[1]]
        row = {"owner": owner, "us": statistics.median(times), "us_99": times[len(times) * 99 // 100]}
        found["between hosts"].append(row)
        print(f"  {owner:>14}  median {row['us']:.0f}  99% {row['us_99']:.0f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

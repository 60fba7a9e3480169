"""Many random collectives on random overlapping subsets; all results checked, and nothing may grow.

    python -m tests.stress                              # twice 10,000 operations on 8 ranks (processes)
    python -m tests.stress --threads --seed 3           # ranks are threads of one process

Prints open descriptors, threads and resident memory of every rank after a first round of operations, and after a second
one; exit code 1 if descriptors or threads grew, or memory by more than 8 MiB a process.
"""

from __future__ import annotations

import argparse
import sys
import time

import psutil
import torch

import hdpcomm as hdp
from hdpcomm.testing import run_threads, spawn
from tests.harness.random_mix import random_mix

GROWTH = 8 * 2**20  # bytes; the allocator's own noise

Usage = tuple[int, int, int]


def usage() -> Usage:
    """Descriptors, threads, resident bytes of this process."""
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), process.memory_info().rss


def work(seed: int, operations: int, threads: bool) -> tuple[Usage, Usage]:
    torch.set_num_threads(1)

    def quiet_usage() -> Usage:
        """Counts while the other ranks wait. Threads have one count, taken by rank 0, since counting opens
        descriptors."""
        world.barrier()
        found = usage() if world.rank == 0 or not threads else (0, 0, 0)
        world.barrier()
        return found

    with hdp.init(timeout=60.0) as world:
        random_mix(seed, operations, world)
        early = quiet_usage()
        random_mix(seed + 1, operations, world)
        return early, quiet_usage()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", action="store_true", help="ranks are threads of one process")
    args = parser.parse_args()
    started = time.perf_counter()
    run = run_threads if args.threads else spawn
    results = run(work, args.ranks, args.seed, args.operations, args.threads, timeout=1800.0)[
        : 1 if args.threads else None
    ]
    grown = False
    for rank, (early, late) in enumerate(results):
        grown |= late[0] > early[0] or late[1] > early[1] or late[2] - early[2] > GROWTH
        print(
            f"rank {rank}: descriptors {early[0]} -> {late[0]}, threads {early[1]} -> {late[1]}, "
            f"memory {early[2] / 2**20:.1f} -> {late[2] / 2**20:.1f} MiB"
        )
    seconds = time.perf_counter() - started
    print(f"twice {args.operations:,} operations on {args.ranks} ranks in {seconds:.0f} s, all results right")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

"""Time to create a communicator by subset(), and the messages that this sends, for groups of up to 64 ranks.

The ranks are threads of this process; creating a subset is local, so one of them is enough to time it. Prints medians.
Usage: ``python benchmarks/subsets.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import hdpcomm as hdp
from hdpcomm.testing import run_threads

WORLD = 64
ROUNDS = 2000


def measure() -> list[dict[str, float]]:
    """On rank 0: median seconds of a subset() for each group size, and the number of messages sent."""
    comm = hdp.init()
    rows: list[dict[str, float]] = []
    if comm.rank == 0:
        for size in (1, 2, 4, 8, 16, 32, 64):
            ranks = list(range(size))
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                comm.subset(ranks)
                times.append(time.perf_counter() - started)
            rows.append({"ranks": size, "seconds": statistics.median(times), "messages": comm.stats()["messages_sent"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    rows = run_threads(measure, WORLD)[0]
    print(f"{'ranks':>6}  {'us':>6}  {'messages sent':>13}")
    for row in rows:
        print(f"{row['ranks']:>6}  {row['seconds'] * 1e6:>6.2f}  {row['messages']:>13}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"hdpcomm": hdp.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

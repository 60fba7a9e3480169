"""What strangers at a rank's TCP listener cost its traffic: at most 10% beside the same flood on one that does nothing.

    python benchmarks/flood.py [--connections 500] [--rounds 25] [--bytes 8 1048576 16777216] [--json FILE]

Two ranks exchange messages over TCP on loopback, both ways at once. Another process keeps connections to a port of rank
0: half of them say nothing, a quarter sends what is no greeting, a quarter the first byte of one. Each leaves and comes
again every ``--pace`` seconds. The rounds alternate: no flood, a flood on a socket of rank 0 that listens and never
accepts, the same flood on the listener for ranks. Figures are medians of the rounds, also what is lost between the last
two of each round, both of which have the strangers' own processor time.

Exit code 4: more is lost. Needs an idle machine for reliable figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

FLOODS = ("none", "deaf", "rank")
LIMIT = 0.10
MISSED = 4
GREETING_BYTES = 64  # about
KINDS = ("silent", "garbage", "silent", "one byte")


# The strangers: a process of their own, which needs no torch ---------------------------------------------------------


class Stranger:
    """One connection after the other to a port: at its turn it leaves and comes again, whatever became of it."""

    def __init__(self, port: int, kind: str) -> None:
        self.port, self.kind = port, kind
        self.connection: socket.socket | None = None
        self.connected = 0

    def turn(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        with contextlib.suppress(OSError):
            self.connection = socket.create_connection(("127.0.0.1", self.port), timeout=1.0)
            self.connected += 1
            if self.kind != "silent":
                self.connection.send(os.urandom(2 * GREETING_BYTES if self.kind == "garbage" else 1))


def flood(port: int, connections: int, pace_s: float) -> int:
    """Until standard input ends; prints a line when all have connected once, and at last how often they did."""
    strangers = [Stranger(port, KINDS[number % len(KINDS)]) for number in range(connections)]
    for each in strangers:
        each.turn()
    print("all", flush=True)
    os.set_blocking(0, False)
    begin = time.monotonic()
    for number in range(sys.maxsize):
        time.sleep(max(0.0, begin + number * pace_s / connections - time.monotonic()))
        strangers[number % connections].turn()
        if number % 16 == 0:
            with contextlib.suppress(BlockingIOError):
                if os.read(0, 1) == b"":
                    break
    print(sum(each.connected for each in strangers), flush=True)
    return 0


# The ranks -----------------------------------------------------------------------------------------------------------


def listening() -> set[int]:
    """The TCP ports at which this process listens."""
    ports = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.family == socket.AF_INET and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(int(each.getsockname()[1]))
    return ports


@contextlib.contextmanager
def flooded(port: int, connections: int, pace_s: float) -> Iterator[list[int]]:
    """A flood on a port meanwhile; the list gets the number of connections."""
    command = [sys.executable, str(Path(__file__).resolve()), "--strangers", str(port)]
    command += ["--connections", str(connections), "--pace", str(pace_s)]
    made: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield made
        made.append(int(process.communicate()[0]))


def measure(sizes: list[int], rounds: int, connections: int, pace_s: float, seconds: float) -> list[dict[str, Any]]:
    """Runs on both ranks: of each round, size and flood the messages a second, and the strangers' connections."""
    import torch

    import hdpcomm as hdp

    torch.set_num_threads(1)
    before = listening()
    found = []
    with hdp.init(transport="tcp") as comm:
        (port,) = listening() - before
        other = 1 - comm.rank

        def run(size: int, count: int) -> float:
            mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                comm.exchange([(mine, other)], [(theirs, other)])
            comm.barrier()
            return time.perf_counter() - begin

        counts = {}
        for size in sizes:
            run(size, 3)
            few = max(3, min(1000, (32 << 20) // size))
            count = torch.tensor([max(3, int(few * seconds / run(size, few)))])
            comm.broadcast(count, 0)
            counts[size] = int(count)
        for number in range(rounds):
            for size in sizes:
                for place in range(len(FLOODS)):
                    kind = FLOODS[(number + place) % len(FLOODS)]
                    with contextlib.ExitStack() as stack:
                        made = []
                        if comm.rank == 0 and kind != "none":
                            deaf = stack.enter_context(socket.socket())
                            deaf.bind(("127.0.0.1", 0))
                            deaf.listen(4096)
                            target = port if kind == "rank" else deaf.getsockname()[1]
                            made = stack.enter_context(flooded(target, connections, pace_s))
                        taken = run(size, counts[size])
                    one = {"round": number, "bytes": size, "flood": kind, "per_s": counts[size] / taken}
                    found.append({**one, "strangers": made[0] if made else 0})
    return found


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of the table for each size."""
    rows = []
    for size in sorted({one["bytes"] for one in found}):
        of = {kind: [one["per_s"] for one in found if one["bytes"] == size and one["flood"] == kind] for kind in FLOODS}
        lost = statistics.median(1 - rank / deaf for rank, deaf in zip(of["rank"], of["deaf"], strict=True))
        strangers = [one["strangers"] for one in found if one["bytes"] == size and one["flood"] == "rank"]
        per_s = {f"{kind}_per_s": statistics.median(of[kind]) for kind in FLOODS}
        rows.append(
            {"bytes": size, **per_s, "strangers": statistics.median(strangers), "lost": lost, "met": lost <= LIMIT}
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=int, default=500, help="at a time (default %(default)s)")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between turns of one (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=25, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, about (default %(default)s)")
    parser.add_argument("--bytes", type=int, nargs="+", default=[8, 1 << 20, 16 << 20], help="of a message")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--strangers", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("connections", "pace", "rounds", "seconds"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: give more than 0")
    if min(args.bytes) < 1:
        parser.error(f"--bytes {min(args.bytes)}: give at least 1")
    if args.strangers is not None:
        return flood(args.strangers, args.connections, args.pace)
    import torch

    import hdpcomm as hdp
    from hdpcomm.testing import RankPool

    with RankPool(2) as pool:
        wanted = args.bytes, args.rounds, args.connections, args.pace, args.seconds
        found = pool.run(measure, *wanted, timeout=60 + 30 * args.rounds * len(args.bytes) * args.seconds)[0]
    rows = rows_of(found)
    print(f"{'bytes':>10} {'none /s':>10} {'deaf /s':>10} {'rank /s':>10} {'strangers':>10} {'lost':>7}  met")
    for one in rows:
        rates = " ".join(f"{one[f'{kind}_per_s']:>10.1f}" for kind in FLOODS)
        print(
            f"{one['bytes']:>10} {rates} {one['strangers']:>10.0f} {one['lost']:>7.1%}  {'yes' if one['met'] else 'NO'}"
        )
    if args.json is not None:
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "hdpcomm": hdp.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            **{name: getattr(args, name) for name in ("connections", "pace", "rounds", "seconds")},
        }
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0 if all(one["met"] for one in rows) else MISSED


if __name__ == "__main__":
    sys.exit(main())

"""How soon ranks notice an error: calls that disagree within 1 s, a death within 2 s, a deadline within 0.5 s.

    python benchmarks/faults.py [--transports shm sim torch] [--rounds 9] [--json FILE]
    python benchmarks/faults.py --kills 200 [--transports shm sim torch] [--seed 0] [--json FILE]

A row is a kind of error on a transport; a time is that of the last rank to notice it, from its own call on (after a
barrier), or roughly from the death on. CommTimeout: how long after its deadline a sender was told, whose receiver was
stopped by SIGSTOP at some moment of the message; what the receiver has then (after SIGCONT) is checked.

``--kills N``: a rank ends by SIGKILL at N random points of traffic, joining, closing, training and saving. All others
must be told who died, none may hang, and no shared memory, file, process, descriptor or thread may be left.

Exit code 4: a limit is missed, or a kill found what should not be. Needs an idle machine for reliable figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from killed_ranks import PHASES, Outcome, Point, kill, make_workplace

import hdpcomm as hdp
from hdpcomm.testing import RankPool

TRANSPORTS = ("shm", "sim", "tcp")
MISMATCH_S, DEATH_S, LATE_S = 1.0, 2.0, 0.5
DEADLINE_S = 30.0
MISSED = 4

DISAGREEMENTS: dict[str, Callable[[hdp.Communicator], Any]] = {
    "size": lambda comm: comm.all_reduce(torch.zeros(4 + comm.rank)),
    "dtype": lambda comm: comm.all_reduce(torch.zeros(4, dtype=(torch.float32, torch.int32)[comm.rank])),
    "op": lambda comm: comm.all_reduce(torch.zeros(4), ("sum", "max")[comm.rank]),
    "root": lambda comm: comm.broadcast(torch.zeros(4), comm.rank),
    "order": lambda comm: comm.barrier() if comm.rank else comm.all_reduce(torch.zeros(4)),
}


def seconds_until(kind: type[hdp.Error], call: Callable[[], Any]) -> float:
    """Seconds until ``call`` raises ``kind``."""
    started = time.perf_counter()
    try:
        call()
    except kind:
        return time.perf_counter() - started
    raise RuntimeError(f"no {kind.__name__} was raised")


def disagree(transport: str, name: str) -> float:
    """Seconds until this rank, one of two, notices a disagreement; runs on both."""
    with hdp.init(transport=transport, timeout=DEADLINE_S) as comm:
        comm.barrier()
        return seconds_until(hdp.Mismatch, lambda: DISAGREEMENTS[name](comm))


def outlive(transport: str, folder: str) -> None:
    """Runs on three ranks, of which the last one dies; the others write their seconds to a file."""
    comm = hdp.init(transport=transport, timeout=DEADLINE_S)
    comm.barrier()
    time.sleep(0.2)  # over tcp a send returns before its data is sent, and a killed process would lose it
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def until_noticed() -> None:
        for _ in range(3):  # the first may still succeed, if the dead rank has sent its part
            comm.all_reduce(torch.zeros(4), algorithm="ring")

    seconds = seconds_until(hdp.PeerLost, until_noticed)
    Path(folder, str(comm.rank)).write_text(str(seconds))


def deaths(transport: str) -> float:
    """Seconds until the last survivor notices the death of a rank."""
    with tempfile.TemporaryDirectory() as folder, RankPool(3) as pool:
        try:
            pool.run(outlive, transport, folder, timeout=2 * DEADLINE_S)
        except hdp.PeerLost:
            seconds = [float(path.read_text()) for path in Path(folder).iterdir()]
            if len(seconds) == 2:
                return max(seconds)
    raise RuntimeError(f"over {transport} the death of a rank went unnoticed by one of the others")


def stop(transport: str, folder: str, memory: str, delay_s: float) -> float:
    """Seconds from the deadline of a send to its error; runs on both of two ranks, and stops the receiver."""
    deadline_s, count = 1.0, 1 << 24
    with hdp.init(transport=transport, timeout=DEADLINE_S) as comm:
        x = comm.empty(count) if memory == "empty()" else torch.empty(count)
        x.fill_(1.0)
        processes = torch.tensor([0, os.getpid()])[[comm.rank]].repeat(2)
        comm.all_reduce(processes)
        receiver, late_s, goes_on = int(processes[0]), 0.0, Path(folder, "goes on")
        if comm.rank == 0:
            goes_on.unlink(missing_ok=True)
        comm.barrier()
        try:
            if comm.rank == 0:
                work = comm.send(x, 1, async_op=True)
                time.sleep(delay_s)
                os.kill(receiver, signal.SIGSTOP)
                started = time.perf_counter()
                try:
                    work.wait(timeout=deadline_s)
                except hdp.CommTimeout:
                    late_s = time.perf_counter() - started - deadline_s
                x.fill_(-1.0)
            else:
                time.sleep(0.01)
                comm.recv(x.zero_(), 0)
                if not (x == 1).all():
                    raise RuntimeError("a receive returned what the sender had overwritten")
        except hdp.Error:
            if comm.rank == 0:
                raise
        finally:
            if comm.rank == 0:
                os.kill(receiver, signal.SIGCONT)
                goes_on.touch()
        while not goes_on.exists():
            time.sleep(0.01)
        comm.resync()
        return late_s


def measure(transports: list[str], rounds: int) -> list[dict[str, Any]]:
    """Measures all rows of the table."""
    rows = []
    with RankPool(2) as pool:
        for transport in transports:
            for name in DISAGREEMENTS:
                times = [max(pool.run(disagree, transport, name, timeout=2 * DEADLINE_S)) for _ in range(rounds)]
                rows.append(row(f"Mismatch: {name}", transport, times, MISMATCH_S))
    with tempfile.TemporaryDirectory() as folder, RankPool(2) as pool:
        for memory in ("plain", "empty()") if "shm" in transports else ():
            delays = [0.008 + 0.02 * i / rounds for i in range(rounds)]
            times = [max(pool.run(stop, "shm", folder, memory, delay, timeout=2 * DEADLINE_S)) for delay in delays]
            rows.append(row(f"CommTimeout: {memory}", "shm", times, LATE_S))
    for transport in transports:
        rows.append(row("PeerLost: SIGKILL", transport, [deaths(transport) for _ in range(rounds)], DEATH_S))
    return rows


def kills(transports: list[str], points: int, seed: int) -> list[dict[str, Any]]:
    """Kills ranks at random points; a row for each phase and transport. What is wrong is printed at once."""
    transports = [*transports, *(["fragments"] if "shm" in transports else [])]
    found: dict[tuple[str, str], list[Outcome]] = {}
    work = make_workplace()
    for number in range(points):
        phase = PHASES[number % len(PHASES)]
        transport = transports[number // len(PHASES) % len(transports)]
        outcome = kill(Point(phase, transport, f"{seed} {number}"), work)
        for fault in outcome.faults:
            print(f"{phase} over {transport}, seed {seed}, point {number}: {fault}", file=sys.stderr, flush=True)
        found.setdefault((phase, transport), []).append(outcome)
    if any(outcome.faults for each in found.values() for outcome in each):
        printed = [line for line in (work / "printed").read_text().splitlines() if not line.startswith("step ")]
        print("the last that the ranks printed:", *printed[-40:], sep="\n", file=sys.stderr, flush=True)
    rows = []
    for (phase, transport), outcomes in sorted(found.items()):
        times, faults = [outcome.seconds for outcome in outcomes], [each for one in outcomes for each in one.faults]
        one = row(f"SIGKILL: {phase}", transport, times, DEATH_S) | {"points": len(outcomes), "faults": faults}
        rows.append(one | {"met": one["met"] and not faults})
    return rows


def row(error: str, transport: str, times: list[float], limit_s: float) -> dict[str, Any]:
    """One line of the table."""
    figures = {"median_s": statistics.median(times), "worst_s": max(times), "limit_s": limit_s}
    return {"error": error, "transport": transport, **figures, "met": max(times) <= limit_s}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=9, help="of each row (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--kills", type=int, metavar="N", help="kill ranks at N random points instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random points (default %(default)s)")
    args = parser.parse_args(argv)
    for name, value in (("rounds", args.rounds), ("kills", args.kills)):
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: give at least 1")
    if args.kills is None:
        rows = measure(args.transports, args.rounds)
    else:
        rows = kills(args.transports, args.kills, args.seed)
    print(f"{'error':<22} {'transport':<10} {'median ms':>10} {'worst ms':>10} {'limit ms':>9}  met")
    for one in rows:
        times = f"{one['median_s'] * 1e3:>10.1f} {one['worst_s'] * 1e3:>10.1f} {one['limit_s'] * 1e3:>9.0f}"
        print(f"{one['error']:<22} {one['transport']:<10} {times}  {'yes' if one['met'] else 'NO'}")
    if args.json is not None:
        about: dict[str, Any] = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "hdpcomm": hdp.__version__,
        }
        about["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
        about |= {"rounds": args.rounds} if args.kills is None else {"kills": args.kills, "seed": args.seed}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0 if all(one["met"] for one in rows) else MISSED


if __name__ == "__main__":
    sys.exit(main())

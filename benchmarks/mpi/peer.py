"""The ranks of launch.py: a script that mpirun starts by its path; it imports neither torch nor hdpcomm.

    mpirun -n RANKS python peer.py SPEC.json

SPEC: see launch.py. Rank 0 prints one JSON object a line: first ``{"library": version}``, then for each row
``{"index", "out_of_place", "in_place", "create", "note"}``, times in microseconds as lists by rank. Times are taken
as hdpcomm's engine takes them: warm-up, barrier, then blocking calls back to back.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
NUMPY = {"float": "float32", "double": "float64", "half": "uint16", "bfloat16": "uint16"}  # 16 bits are only moved
REDOPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
NO_IN_PLACE = ("alltoall", "alltoallv", "sendrecv", "ring")


def array(count: int, kind: Any, value: int) -> Any:
    """An array in normal pages, like a torch tensor's: numpy uses huge pages from 4 MiB, which copy a third faster."""
    size = count * np.dtype(kind).itemsize
    if size < 1 << 22:
        return np.full(count, value, kind)
    filled = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), kind)
    filled[:] = value
    return filled


def subset(comm: Any, ranks: list[int], tag: int = 0) -> Any:
    """A communicator of the given ranks; only they call it. ``None`` on the others."""
    if comm.rank not in ranks:
        return None
    everyone = comm.Get_group()
    group = everyone.Incl(ranks)
    made = comm.Create_group(group, tag)
    group.Free()
    everyone.Free()
    return made


def call_of(op: str, comm: Any, row: dict[str, Any], in_place: bool) -> Callable[[], Any]:
    """The operation as a call without arguments."""
    kind = np.dtype(NUMPY.get(row["type"], row["type"]))
    redop = REDOPS.get(row["redop"])
    root, part = row["root"], row["count"]
    x, out = array(row["send"], kind, 1), array(row["recv"], kind, 0)
    rooted = comm.rank == root
    alone: Any = MPI.IN_PLACE
    if op == "all_gather":
        return lambda: comm.Allgather(alone if in_place else x, out)
    if op == "all_reduce":
        return lambda: comm.Allreduce(alone if in_place else x, out, redop)
    if op == "reduce_scatter":
        return lambda: comm.Reduce_scatter_block(alone if in_place else x, x if in_place else out, redop)
    if op == "broadcast":
        if in_place or not rooted:
            return lambda: comm.Bcast(out, root)

        def copy_and_broadcast() -> None:
            out[:] = x
            comm.Bcast(out, root)

        return copy_and_broadcast
    if op == "reduce":
        given = alone if in_place and rooted else x
        return lambda: comm.Reduce(given, out if rooted else None, redop, root)
    if op == "gather":
        given = alone if in_place and rooted else x
        return lambda: comm.Gather(given, out if rooted else None, root)
    if op == "scatter":
        target = alone if in_place and rooted else out
        return lambda: comm.Scatter(x if rooted else None, target, root)
    if op == "alltoall":
        return lambda: comm.Alltoall(x, out)
    if op == "alltoallv":
        distances = max(1, comm.size * (comm.size - 1) // 2)
        sizes = [part * comm.size * d // distances for d in range(comm.size)] if comm.size > 1 else [part]
        to = [sizes[(peer - comm.rank) % comm.size] for peer in range(comm.size)]
        come = [sizes[(comm.rank - peer) % comm.size] for peer in range(comm.size)]
        return lambda: comm.Alltoallv([x, to], [out, come])
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if op == "sendrecv":
        return lambda: comm.Sendrecv(x, after, 0, out, before, 0)
    assert op == "ring", op
    spare, half = array(row["recv"], kind, 0), part // 2

    def rotate() -> None:
        source = x
        for step in range(comm.size - 1):
            target = out if step % 2 else spare
            requests = [comm.Isend(source[:half], after, 0), comm.Isend(source[half:], after, 1)]
            requests += [comm.Irecv(target[:half], before, 0), comm.Irecv(target[half:], before, 1)]
            MPI.Request.Waitall(requests)
            source = target

    return rotate


def timed(call: Callable[[], Any], row: dict[str, Any]) -> float:
    """Microseconds of a call."""
    for _ in range(row["warmup"]):
        call()
    WORLD.Barrier()
    iters: int = row["iters"]
    started = time.perf_counter()
    for _ in range(iters):
        call()
    return (time.perf_counter() - started) / iters * 1e6


def measure(row: dict[str, Any], comm: Any) -> dict[str, Any]:
    """The times of a row on this rank; ``None``: not measured."""
    op = row["op"]
    result: dict[str, Any] = {"out_of_place": None, "in_place": None}
    for side in ("out_of_place", "in_place"):
        in_place = side == "in_place"
        if in_place and op in NO_IN_PLACE:
            continue
        if comm is None:
            WORLD.Barrier()
        else:
            calls = max(1, comm.size - 1) if op == "ring" else 1
            result[side] = timed(call_of(op, comm, row, in_place), row) / calls
    return result


def unsupported(op: str, row: dict[str, Any]) -> str:
    """Why MPI cannot run the row; empty: it can."""
    if op in REDUCING and row["type"] in ("half", "bfloat16"):
        return f"MPI has no reductions of {row['type']}"
    if op in REDUCING and row["redop"] not in REDOPS:
        return f"MPI has no {row['redop']}"
    return ""


def main() -> None:
    with open(sys.argv[1]) as file:
        spec = json.load(file)

    def print_record(record: dict[str, Any]) -> None:
        if WORLD.rank == 0:
            print(json.dumps(record), flush=True)

    print_record({"library": MPI.Get_library_version().split("\n")[0].split(",")[0].strip()})
    comms: dict[tuple[int, ...], Any] = {}
    for index, row in enumerate(spec["rows"]):
        ranks = tuple(row["ranks"])
        if ranks not in comms:
            comms[ranks] = WORLD if len(ranks) == WORLD.size else subset(WORLD, list(ranks))
        note = unsupported(row["op"], row)
        mine = {} if note else measure(row, comms[ranks])
        everyone = WORLD.gather(mine)
        if WORLD.rank == 0:
            assert everyone is not None
            sides = {key: [rank.get(key) for rank in everyone] for key in ("out_of_place", "in_place")}
            print_record({"index": index, "note": note, **sides})


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        WORLD.Abort(1)  # otherwise the other ranks would wait for ever

"""Exchanges between two ranks on one GPU compared with cudaMemcpyAsync, and a matrix product at the same time.

Figures have targets where the two processes run at the same time (with_mps.py); otherwise they get time slices of the
GPU.

A message of 64 MiB goes through slots, which is two copies, and to a landing place, which is one.
"""

from __future__ import annotations

import functools
import os
import time

import torch
from common import CUDA, Row, Rows, main, processes_kind, row, seconds

import hdpcomm as hdp
from hdpcomm.testing import spawn

SMALL, LARGE = 8, 64 << 20
LATENCY_US, REDUCTION_US, BANDWIDTH, BESIDE = 12.0, 15.0, 0.9, 0.98
PRODUCTS, SIDE, BESIDE_THEM = 96, 8192, 300  # some 0.15 s of products
REDUCTIONS = ("one_shot", "two_shot", "ring")
RANKS_S = 40.0


def one_way(comm: hdp.Communicator, num_bytes: int, trips: int) -> float:
    """Seconds of one message, from many in alternating directions on the stream; the host only waits for the last."""
    x = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=CUDA)
    peer = 1 - comm.rank
    for count in (3, trips):
        torch.cuda.synchronize()
        comm.barrier()
        started = time.perf_counter()
        for _ in range(count):
            for sender in (0, 1):
                (comm.send if comm.rank == sender else comm.recv)(x, peer)
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / trips / 2


def both_ways(comm: hdp.Communicator, num_bytes: int, count: int) -> float:
    """Seconds of an exchange of ``num_bytes`` each way."""
    out, back = (torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=CUDA) for _ in range(2))
    peer = 1 - comm.rank
    for repeat in (2, count):
        torch.cuda.synchronize()
        comm.barrier()
        started = time.perf_counter()
        for _ in range(repeat):
            comm.exchange(sends=[(out, peer)], recvs=[(back, peer)])
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def landing(comm: hdp.Communicator, num_bytes: int, count: int) -> float:
    """Seconds of a message to a landing place, in alternating directions."""
    x = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=CUDA)
    zone = comm.landing_zone(x)
    assert zone is not None
    place, peer = zone.memory[:num_bytes], 1 - comm.rank
    for repeat in (2, count):
        torch.cuda.synchronize()
        comm.barrier()
        started = time.perf_counter()
        for _ in range(repeat):
            for sender in (0, 1):
                mine = comm.rank == sender
                comm.exchange([(x, peer, 0)] if mine else [], [] if mine else [(place, peer, 0)])
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count / 2


def memcpy(num_bytes: int, count: int) -> float:
    """Seconds of one cudaMemcpyAsync from device to device in a chain of them."""
    a, b = (torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=CUDA) for _ in range(2))
    return seconds(lambda i: (a if i % 2 else b).copy_(b if i % 2 else a), rounds=5, inner=count)


def product_beside(comm: hdp.Communicator) -> float:
    """Speed of a matrix product while exchanges run on another stream, as a share of its speed alone (rank 0).

    The products are enqueued first, since that takes the host almost no time; so exchanges run from the first product
    to the last, however long the host takes to enqueue them.
    """
    a, b = (torch.randn(SIDE, SIDE, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    out, back = (torch.randint(0, 255, (LARGE,), dtype=torch.uint8, device=CUDA) for _ in range(2))
    side, times = torch.cuda.Stream(), []
    for busy in (False, False, True):
        torch.cuda.synchronize()
        comm.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PRODUCTS if comm.rank == 0 else 0):
            a @ b
        end.record()
        if busy:
            with torch.cuda.stream(side):
                for _ in range(BESIDE_THEM):
                    comm.exchange(sends=[(out, 1 - comm.rank)], recvs=[(back, 1 - comm.rank)])
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times[1] / times[2]


def all_reduce(comm: hdp.Communicator, num_bytes: int, algorithm: str, count: int) -> float:
    """Seconds of an all-reduce in a chain of them."""
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=CUDA)
    for repeat in (2, count):
        torch.cuda.synchronize()
        comm.barrier()
        started = time.perf_counter()
        for _ in range(repeat):
            comm.all_reduce(x, algorithm=algorithm)
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def on_a_rank() -> dict[str, float]:
    with hdp.init(transport="cuda") as comm:
        return {
            "small": one_way(comm, SMALL, 500),
            "small both": both_ways(comm, SMALL, 500),
            "large": one_way(comm, LARGE, 20),
            "landing": landing(comm, LARGE, 20),
            "both": both_ways(comm, LARGE, 20),
            "beside": product_beside(comm),
            **{f"{name} small": all_reduce(comm, SMALL, name, 200) for name in REDUCTIONS},
            **{f"{name} large": all_reduce(comm, LARGE, name, 10) for name in REDUCTIONS},
        }


def with_one_lane() -> float:
    os.environ["HDPCOMM_DEVICE_LANES"] = "1"
    with hdp.init(transport="cuda") as comm:
        return landing(comm, LARGE, 20)


@functools.cache
def copies() -> tuple[float, float]:
    """Seconds of cudaMemcpyAsync of either size."""
    return memcpy(SMALL, 200), memcpy(LARGE, 10)


def copy_rows() -> list[Row]:
    small, large = copies()
    return [
        row("cudaMemcpyAsync of 8 B", small * 1e6, "us"),
        row("cudaMemcpyAsync of 64 MiB", LARGE / large / 1e9, "GB/s"),
    ]


def rank_rows() -> list[Row]:
    kind, limits = processes_kind()
    found = spawn(on_a_rank, 2, transport="cuda", timeout=RANKS_S)[0]
    copy_small, copy_large = copies()
    ratio, share = found["small"] / copy_small, copy_large / found["landing"]
    latency, reduction = (LATENCY_US, REDUCTION_US) if limits else (None, None)
    rows = [
        row(f"{kind}: message of 8 B", found["small"] * 1e6, "us", at_most=latency),
        row(f"{kind}: 8 B, times cudaMemcpyAsync", ratio, "x"),
        row(f"{kind}: exchange of 8 B, both ways", found["small both"] * 1e6, "us"),
        row(f"{kind}: message of 64 MiB", LARGE / found["large"] / 1e9, "GB/s"),
        row(f"{kind}: message of 64 MiB to a landing place", LARGE / found["landing"] / 1e9, "GB/s"),
        row(f"{kind}: of it, share of cudaMemcpyAsync", share, "", at_least=BANDWIDTH if limits else None),
        row(f"{kind}: exchange of 64 MiB, both ways", 2 * LARGE / found["both"] / 1e9, "GB/s"),
        row(f"{kind}: matrix product beside", found["beside"], "", at_least=BESIDE if limits else None),
    ]
    for name in REDUCTIONS:
        limit = reduction if name == "one_shot" else None
        rows.append(row(f"{kind}: all_reduce of 8 B, {name}", found[f"{name} small"] * 1e6, "us", at_most=limit))
        rows.append(row(f"{kind}: all_reduce of 64 MiB, {name}", LARGE / found[f"{name} large"] / 1e9, "GB/s"))
    return rows


def lane_rows() -> list[Row]:
    kind, _ = processes_kind()
    found = spawn(with_one_lane, 2, transport="cuda", timeout=RANKS_S)[0]
    return [row(f"{kind}: 64 MiB to a landing place, one lane", LARGE / found / 1e9, "GB/s")]


GROUPS: list[Rows] = [copy_rows, rank_rows, lane_rows]

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)

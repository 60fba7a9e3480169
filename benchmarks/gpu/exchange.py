"""Exchanges between two ranks on one GPU compared with cudaMemcpyAsync, and a matrix product at the same time.

Figures have targets where the two processes run at the same time (with_mps.py); otherwise they get time slices of the
GPU.

A message of 64 MiB goes through slots, which is two copies, and to a landing place, which is one.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import torch
from common import CUDA, Row, Rows, host_seconds, main, processes_kind, row, seconds

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


def small_parts(comm: hdp.Communicator) -> dict[str, float]:
    """Seconds of the host for a message of 8 B, and of the GPU alone, by a graph of messages to and fro."""
    x = torch.randint(0, 255, (SMALL,), dtype=torch.uint8, device=CUDA)
    peer, trips = 1 - comm.rank, 20

    def trip() -> None:
        for sender in (0, 1):
            (comm.send if comm.rank == sender else comm.recv)(x, peer)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        trip()
        comm.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            for _ in range(trips):
                trip()
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            comm.barrier()
            started = time.perf_counter()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / 5 / trips / 2)
        torch.cuda.synchronize()
        comm.barrier()
        del graph
        host = host_seconds(comm, trip) / 2
        torch.cuda.synchronize()
    return {"small host": host, "small graph": sorted(times)[len(times) // 2]}


def calls_of_the_driver() -> dict[str, float]:
    """Seconds of the host for calls that the transport is made of, on a stream with little work."""
    cuda = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    a, b = (torch.zeros(256, dtype=torch.uint8, device=CUDA) for _ in range(2))
    made = torch.cuda.Event()
    made.record()
    event, to, of = ctypes.c_void_p(made.cuda_event), ctypes.c_uint64(a.data_ptr()), ctypes.c_uint64(b.data_ptr())
    zero, size, value = ctypes.c_uint(0), ctypes.c_size_t(8), ctypes.c_uint32(1)
    calls: dict[str, Callable[[], int]] = {
        "cuEventRecord": lambda: cuda.cuEventRecord(event, stream),
        "cuStreamWaitEvent": lambda: cuda.cuStreamWaitEvent(stream, event, zero),
        "cuEventQuery": lambda: cuda.cuEventQuery(event) and 0,
        "cuStreamWriteValue32": lambda: cuda.cuStreamWriteValue32_v2(stream, to, value, zero),
        "cuMemcpyAsync": lambda: cuda.cuMemcpyAsync(to, of, size, stream),
        "cuMemsetD8Async": lambda: cuda.cuMemsetD8Async(to, ctypes.c_ubyte(1), size, stream),
    }
    found = {}
    for name, call in calls.items():
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            started = time.perf_counter()
            codes = [call() for _ in range(50)]
            best = min(best, (time.perf_counter() - started) / 50)
            if any(codes):
                raise RuntimeError(f"{name} returned {max(codes)}")
        found[name] = best
    return found


class MemoryOperation(ctypes.Structure):
    """One of the operations of ``cuStreamBatchMemOp`` (``CUstreamBatchMemOpParams``)."""

    _fields_ = (
        ("kind", ctypes.c_uint32), ("_1", ctypes.c_uint32), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32), ("_2", ctypes.c_uint32), ("_3", ctypes.c_uint64 * 2),
    )  # fmt: skip


class Relay:
    """Copies of 64 MiB that two streams of this process make in turn, each after the other's; and what it takes to say
    so: by flags, as the transport does between processes, or by events, which only the streams of one host can."""

    WAIT, WRITE = 1, 2

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._flags = torch.zeros(128, dtype=torch.int32, device=CUDA)
        self._data = [torch.randint(0, 255, (LARGE,), dtype=torch.uint8, device=CUDA) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(3)]

    def flags(self, stream: int, *operations: tuple[int, int, int]) -> None:
        """A batch of (wait or write, flag, value)."""
        batch = (MemoryOperation * len(operations))()
        for each, (kind, flag, value) in zip(batch, operations, strict=True):
            each.kind, each.address, each.value = kind, self._flags.data_ptr() + 64 * flag, value
        raw = ctypes.c_void_p(self._streams[stream].cuda_stream)
        if code := self._cuda.cuStreamBatchMemOp_v2(raw, ctypes.c_uint(len(operations)), batch, ctypes.c_uint(0)):
            raise RuntimeError(f"cuStreamBatchMemOp returned {code}")

    def copy(self, stream: int) -> None:
        with torch.cuda.stream(self._streams[stream]):
            self._data[1 - stream].copy_(self._data[stream])

    def in_one_stream(self, _: int) -> None:
        self.copy(0)

    def by_events(self, place: int) -> None:
        stream = place % 2
        self.copy(stream)
        self._streams[1 - stream].wait_stream(self._streams[stream])

    def by_one_flag(self, place: int) -> None:
        """The receiver's place is free."""
        stream, landed = place % 2, 1 + place % 2
        self.copy(stream)
        self.flags(stream, (self.WRITE, landed, 1))
        self.flags(1 - stream, (self.WAIT, landed, 1), (self.WRITE, landed, 0))

    def by_two_flags(self, place: int) -> None:
        """As a message to a landing place: the receiver tells that its place is free."""
        stream, landed, clear = place % 2, 1 + place % 2, 3 + place % 2
        self.flags(stream, (self.WAIT, clear, 1), (self.WRITE, clear, 0))
        self.copy(stream)
        self.flags(stream, (self.WRITE, landed, 1))
        self.flags(1 - stream, (self.WRITE, clear, 1), (self.WAIT, landed, 1), (self.WRITE, landed, 0))

    def write(self, _: int) -> None:
        self.flags(0, (self.WRITE, 5, 1))

    def seconds(self, step: Callable[[int], None], count: int) -> float:
        """What a step takes, from ``count`` that are enqueued before the first begins."""
        times = []
        for _ in range(4):
            self._flags.zero_()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for stream in (0, 1):
                self.flags(stream, (self.WAIT, 0, 1))
            begin.record(self._streams[0])
            for place in range(count):
                step(place)
            self._streams[0].wait_stream(self._streams[1])
            end.record(self._streams[0])
            self.flags(2, (self.WRITE, 0, 1))
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / count)
        return sorted(times[1:])[1]


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
            **small_parts(comm),
            "large": one_way(comm, LARGE, 20),
            "landing": landing(comm, LARGE, 20),
            "both": both_ways(comm, LARGE, 20),
            "beside": product_beside(comm),
            **{f"{name} small": all_reduce(comm, SMALL, name, 200) for name in REDUCTIONS},
            **{f"{name} large": all_reduce(comm, LARGE, name, 10) for name in REDUCTIONS},
        }


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
        row(f"{kind}: 8 B, the host's time for a call", found["small host"] * 1e6, "us"),
        row(f"{kind}: 8 B, replayed from a graph", found["small graph"] * 1e6, "us"),
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


def call_rows() -> list[Row]:
    return [row(f"the host's time for {name}", each * 1e6, "us") for name, each in calls_of_the_driver().items()]


def relay_rows() -> list[Row]:
    """What a message of 64 MiB can reach on one GPU, whoever copies."""
    relay = Relay()
    alone = relay.seconds(relay.in_one_stream, 40)
    ways = {"an event": relay.by_events, "a flag": relay.by_one_flag, "a flag each way": relay.by_two_flags}
    rows = [row(f"64 MiB in turns by {name}: share", alone / relay.seconds(way, 40), "") for name, way in ways.items()]
    return [*rows, row("a stream's write of a flag", relay.seconds(relay.write, 200) * 1e6, "us")]


GROUPS: list[Rows] = [copy_rows, rank_rows, call_rows, relay_rows]

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)

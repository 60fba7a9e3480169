"""Measures the bandwidth to host memory in both directions at once, as in an offloaded step."""

from __future__ import annotations

import time

import torch

from hdpcomm._core.offload import CopyEngine
from hdpcomm.errors import InvalidUsage
from hdpcomm.offload.pool import PinnedPool, compute_stream

__all__ = ["measure_copies"]


def measure_copies(pool: PinnedPool, size: int, *, iterations: int = 10, warmup: int = 2) -> float:
    """Bytes/s of copies of ``size`` bytes between the pool and its device in each direction, while the other one runs;
    the best of three rounds. Local.

    Raises:
        InvalidUsage: the size is below 1, or the pool has no room for three blocks of it.
    """
    if size < 1 or iterations < 1 or warmup < 0:
        raise InvalidUsage(f"size is {size}, iterations {iterations}, warmup {warmup}; give at least 1, 1 and 0")
    stats = pool.stats()
    room = stats.capacity - stats.in_use
    if room < 3 * (-(-size // 256) * 256):
        raise InvalidUsage(
            f"copies of {size} bytes need three blocks of the pool, of which {room} bytes are not in use; make it "
            "larger or the copies smaller"
        )
    engine, compute = CopyEngine(pool.core, timeout=60.0), compute_stream(pool.device)
    place = torch.device("cpu") if pool.device.is_sim else torch.device("cuda", pool.device.ordinal)
    out, back = (torch.ones(size, dtype=torch.uint8, device=place) for _ in range(2))
    stored = engine.store(out.data_ptr(), size, compute=compute, owner=None)
    assert stored is not None  # the pool has room for three
    stored.finish_store(compute=compute)

    def both(times: int) -> float:
        """Seconds of so many copies in each direction."""
        engine.drain()
        started = time.perf_counter()
        for _ in range(times):
            copy = engine.store(out.data_ptr(), size, compute=compute, owner=None)
            assert copy is not None
            copy.drop()
            stored.load(back.data_ptr(), compute=compute, owner=None)
        engine.drain()
        return time.perf_counter() - started

    try:
        both(warmup)
        return iterations * size / min(both(iterations) for _ in range(3))
    finally:
        engine.drain()
        stored.drop()

"""Rates of copies to host memory: through the pool, each direction alone and both at once, and plain ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hdpcomm._core.offload import CopyEngine
from hdpcomm.offload.pool import PinnedPool, compute_stream
from hdpcomm.testing import _native

__all__ = ["CopyRates", "copy_rates"]


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Rates of copies of ``size`` bytes, in bytes/s.

    Attributes:
        d2h, h2d: copies through the pool, one direction alone.
        both_d2h, both_h2d: copies through the pool while the other direction runs.
        plain_d2h, plain_h2d: plain copies to and from one pinned buffer: the upper limit.
    """

    size: int
    d2h: float
    h2d: float
    both_d2h: float
    both_h2d: float
    plain_d2h: float
    plain_h2d: float


def copy_rates(pool: PinnedPool, size: int, *, iterations: int = 10, warmup: int = 2) -> CopyRates:
    """Rates of copies of ``size`` bytes, of which the pool has room for three; the best of three rounds. Local."""
    return _Measurement(pool, size, iterations, warmup).rates()


class _Measurement:
    def __init__(self, pool: PinnedPool, size: int, iterations: int, warmup: int) -> None:
        self._device: _native.TestedDevice = pool.device
        self._engine = CopyEngine(pool.core, timeout=60.0)
        self._size, self._iterations, self._warmup = size, iterations, warmup
        place = torch.device("cpu") if pool.device.is_sim else torch.device("cuda", pool.device.ordinal)
        self._out, self._in = (torch.ones(size, dtype=torch.uint8, device=place) for _ in range(2))
        self._compute = compute_stream(pool.device)
        self._stream = self._device.create_stream()
        self._pinned = self._device.allocate_pinned(size)

    def rates(self) -> CopyRates:
        out, back, size, stream = self._out.data_ptr(), self._in.data_ptr(), self._size, self._stream
        stored = self._engine.store(out, size, compute=self._compute, owner=None)
        assert stored is not None  # the pool has room for three
        stored.finish_store(compute=self._compute)

        def store() -> None:
            copy = self._engine.store(out, size, compute=self._compute, owner=None)
            assert copy is not None
            copy.drop()

        def load() -> None:
            stored.load(back, compute=self._compute, owner=None)

        def both() -> None:
            store()
            load()

        try:
            together = self._rate(both)
            return CopyRates(
                size=size,
                d2h=self._rate(store),
                h2d=self._rate(load),
                both_d2h=together,
                both_h2d=together,
                plain_d2h=self._rate(lambda: self._device.copy(self._pinned, out, bytes=size, stream=stream)),
                plain_h2d=self._rate(lambda: self._device.copy(back, self._pinned, bytes=size, stream=stream)),
            )
        finally:
            self._wait()
            stored.drop()
            self._device.free_pinned(self._pinned)
            self._device.destroy_stream(stream)

    def _rate(self, copy: Callable[[], None]) -> float:
        """Bytes/s of one direction of ``copy``."""
        for _ in range(self._warmup):
            copy()
        best = float("inf")
        for _ in range(3):
            self._wait()
            started = time.perf_counter()
            for _ in range(self._iterations):
                copy()
            self._wait()
            best = min(best, time.perf_counter() - started)
        return self._iterations * self._size / best

    def _wait(self) -> None:
        self._engine.drain()
        self._device.synchronize_stream(self._stream)

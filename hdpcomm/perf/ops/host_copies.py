"""offload: copies between a device and the pinned pool, each direction alone and both at once."""

from __future__ import annotations

from collections.abc import Iterator

from hdpcomm.offload import CopyRates, PinnedPool, measure_copies

__all__ = ["COLUMNS", "offload_rates", "row_of"]

COLUMNS = (
    ("size(B)", "size"),
    ("d2h", "d2h"),
    ("h2d", "h2d"),
    ("both d2h", "both_d2h"),
    ("both h2d", "both_h2d"),
    ("plain d2h", "plain_d2h"),
    ("plain h2d", "plain_h2d"),
    ("fresh d2h", "fresh_d2h"),
)
"""Heading and field of each column; rates in GB/s. ``plain``: copies to an existing pinned buffer, the upper limit;
``fresh``: a pinned buffer allocated and freed for each copy, as without a pool."""


def offload_rates(device: str, sizes: list[int], *, iterations: int, warmup: int) -> Iterator[CopyRates]:
    """The rates for each size, with one pool that can hold four of the largest. ``device``: ``cuda:0``, ``sim``."""
    pool = PinnedPool(4 * max(4096, *sizes), device="cpu" if device == "sim" else device)
    for size in sizes:
        yield measure_copies(pool, size, iterations=iterations, warmup=warmup)


def row_of(rates: CopyRates) -> dict[str, float]:
    """Size in bytes, rates in GB/s."""
    fields = [field for _, field in COLUMNS[1:]]
    return {"size": rates.size, **{field: getattr(rates, field) / 1e9 for field in fields}}

"""Offload on this GPU: rates of the copies, step time and memory over the ratio, and the longest sequence.

Models are stacks of LLaMA-7B's layers, as many as fit without offload (at most 8 at 64K tokens, 3 at 128K), in bf16;
see benchmarks/offload.py, which also measures other lengths, ratios and layers.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from pathlib import Path

import torch
from common import Row, Rows, main, row
from copy_rates import copy_rates

from hdpcomm.offload.pool import host_memory

sys.path.append(str(Path(__file__).resolve().parents[1]))  # at the end: this folder has no offload.py
import offload as bench

DEVICE, POOL, COPY_BYTES = "cuda", "32G", 256 << 20
K = 1024
MEDIUM, LONG, SHORT, PROBE = 64 * K, 128 * K, 32 * K, 8 * K
RATES, SAVED, SLOWER_HALF, SLOWER_ALL = 0.95, 0.30, 0.02, 0.03
CAP_BYTES = 40e9  # of device memory, for the longest sequence: with more, host memory would be the limit


@functools.cache
def shared_pool() -> object:
    """The pool of all models, since reserving one takes seconds per GB."""
    return bench.PinnedPool(pool_bytes(), device=DEVICE if DEVICE == "cuda" else "cpu")


@functools.cache
def pool_bytes() -> int:
    """Size of the pool: POOL, but at most half of the available host memory."""
    return min(bench.parse_size(POOL), host_memory().lockable // 2 // 4096 * 4096)


def clean() -> None:
    """Frees the memory of the previous stack."""
    gc.collect()
    torch.cuda.empty_cache()


def stack(layers: int, repeats: int = 2) -> bench.Bench:
    clean()
    options = argparse.Namespace(device=DEVICE, layers=layers, pool=POOL, repeats=repeats)
    return bench.Bench(options, pool=shared_pool())


def sound(made: bench.Row) -> bench.Row:
    """Returns the row, if the method has run; raises its error otherwise."""
    if made.seconds is None:
        raise RuntimeError(f"{made.method} at {made.tokens} tokens: {made.error}")
    return made


def method(on: bench.Bench, name: str, tokens: int, base: bench.Row | None = None) -> bench.Row:
    ways = {
        "none": bench.contextlib.nullcontext,
        "half": lambda: on.offload.micro_batch(0.5, tokens=tokens),
        "all": lambda: on.offload.micro_batch(1.0, tokens=tokens),
        "save_on_cpu": bench.others(on.place)["save_on_cpu"],
    }
    return sound(on.measure(name, tokens, ways[name], base))


@functools.cache
def bytes_of_a_token() -> tuple[float, float]:
    """Bytes per token (in a layer, outside of the layers), from two stacks at few tokens."""
    two, four = (method(stack(layers, 1), "none", PROBE).memory_bytes for layers in (2, 4))
    layer = (four - two) / 2 / PROBE
    return layer, max(0.0, two / PROBE - 2 * layer)


def fitting(tokens: int, most: int) -> int:
    """Layers of a stack that fits on this device without offload; at least 3, since the last two are not offloaded."""
    layer, outside = bytes_of_a_token()
    clean()
    weights = 4 * 12 * bench.SHAPES[DEVICE].hidden ** 2  # bytes of a layer's weights and gradients, rounded up
    free = 0.92 * torch.cuda.mem_get_info()[0]
    return int(max(3, min(most, (free - outside * tokens) // (layer * tokens + weights))))


def copy_rows() -> list[Row]:
    rates = copy_rates(shared_pool(), COPY_BYTES)
    return [
        row("pinned cudaMemcpyAsync, D2H", rates.plain_d2h / 1e9, "GB/s"),
        row("pinned cudaMemcpyAsync, H2D", rates.plain_h2d / 1e9, "GB/s"),
        row("offload: D2H, share of it", rates.d2h / rates.plain_d2h, "", at_least=RATES),
        row("offload: H2D, share of it", rates.h2d / rates.plain_h2d, "", at_least=RATES),
        row("offload: D2H while H2D runs", rates.both_d2h / 1e9, "GB/s"),
        row("offload: H2D while D2H runs", rates.both_h2d / 1e9, "GB/s"),
    ]


def ratio_rows(tokens: int, most_layers: int, name: str, slower: float, saved: float | None) -> list[Row]:
    layers = fitting(tokens, most_layers)
    on = stack(layers)
    base = method(on, "none", tokens)
    made = method(on, name, tokens, base)
    label = f"{tokens // K}K tokens, {layers} layers"
    ratio = {"half": "r=0.5", "all": "r=1"}[name]
    return [
        row(f"{label}: step without offload", base.seconds, "s"),
        row(f"{label}: {ratio}, slower by", made.slower, "", at_most=slower),
        row(f"{label}: {ratio}, activation memory saved", made.saved, "", at_least=saved),
    ]


def longest_rows() -> list[Row]:
    """The longest sequence in CAP_BYTES of device memory, to 1/8; starts at the prediction of bytes_of_a_token()."""
    layer, outside = bytes_of_a_token()
    on = stack(8, 0)
    free = CAP_BYTES - torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / torch.cuda.get_device_properties(0).total_memory))
    try:
        rows = []
        for ratio, resident in ((0.0, 8), (1.0, 3)):
            by_device = free / (layer * resident + outside)
            by_host = pool_bytes() / (layer * 6) if ratio else float("inf")
            start = int(0.8 * min(by_device, by_host)) // K * K
            tokens = bench.longest_of(on, ratio, start)
            name = "r=1" if ratio else "without offload"
            rows.append(row(f"longest sequence in 40 GB, 8 layers, {name}", tokens, "tokens"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    longer = float(rows[1]["value"]) / max(1.0, float(rows[0]["value"]))
    return [*rows, row("longest sequence: r=1 over without offload", longer, "x", at_least=1.0)]


def against_save_on_cpu() -> list[Row]:
    on = stack(fitting(SHORT, 8), 1)
    base = method(on, "none", SHORT)
    ours, theirs = method(on, "all", SHORT, base), method(on, "save_on_cpu", SHORT, base)
    return [
        row("32K tokens: r=1, slower by", ours.slower, ""),
        row("32K tokens: save_on_cpu, slower by", theirs.slower, ""),
        row("32K tokens: r=1, activation memory saved", ours.saved, ""),
        row("32K tokens: save_on_cpu, activation memory saved", theirs.saved, ""),
        row("32K tokens: r=1 faster than save_on_cpu", theirs.seconds / ours.seconds, "x", at_least=1.0),
    ]


GROUPS: dict[str, list[Rows]] = {
    "copies": [copy_rows],
    "ratios": [
        lambda: ratio_rows(MEDIUM, 8, "half", SLOWER_HALF, SAVED),
        lambda: ratio_rows(LONG, 3, "all", SLOWER_ALL, None),  # 4 fit on an H200, but not into the pool
    ],
    "others": [against_save_on_cpu],
    "longest": [longest_rows],
}

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)

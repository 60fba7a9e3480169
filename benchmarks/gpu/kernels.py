"""Merge, zigzag gather and scatter, reductions and folds compared with the copy bandwidth of the same run.

Bytes are the minimum that must move: every input read once, every output written once. Inputs are random and larger
than the cache, and two sets alternate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from common import CUDA, Row, Rows, copy_bandwidth, main, row, seconds

from hdpcomm import kernels
from hdpcomm.attention import as_pack, shard
from hdpcomm.attention import rows as _kernels
from tests.harness import buffer_kernels

SHARE = 0.85
TOKENS, HEADS, DIM = 16384, 32, 128
BUFFER_BYTES = 256 << 20
LENGTHS = [200] * 200 + [4096] * 14 + [32768]  # a pack of short and long sequences


def merge_rows() -> list[tuple[str, float, float]]:
    results = []
    for block in (torch.float32, torch.bfloat16):
        sets = []
        for _ in range(2):
            out, part = torch.randn(TOKENS, HEADS, DIM, device=CUDA), torch.randn(TOKENS, HEADS, DIM, device=CUDA)
            lse, part_lse = (torch.randn(TOKENS, HEADS, device=CUDA) for _ in range(2))
            sets.append((out, lse, part.to(block), part_lse))
        num_bytes = TOKENS * HEADS * (DIM * (8 + sets[0][2].element_size()) + 12)
        results.append(
            (f"merge of a {str(block)[6:]} block", num_bytes, seconds(lambda i, s=sets: _kernels.merge(*s[i % 2])))
        )
    return results


def zigzag_rows() -> list[tuple[str, float, float]]:
    cu = np.cumsum([0, *LENGTHS])
    wide = [torch.randn(int(cu[-1]), 8192, device=CUDA).bfloat16() for _ in range(2)]
    rows = _kernels.Rows(as_pack(cu).layout(2).segments(0))
    local = [shard(x, cu, rank=0, size=2) for x in wide]
    num_bytes = 2 * local[0].numel() * 2
    gather = seconds(lambda i: _kernels.copy_rows(local[i % 2], wide[i % 2], rows))
    back = rows.inverse()
    scatter = seconds(lambda i: _kernels.copy_rows(wide[i % 2], local[i % 2], back))
    return [("zigzag gather", num_bytes, gather), ("zigzag scatter", num_bytes, scatter)]


def buffer_rows() -> list[tuple[str, float, float]]:
    results = []
    for dtype, offset in ((torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1), (torch.int8, 0)):
        size = torch.empty(0, dtype=dtype).element_size()
        count = BUFFER_BYTES // size
        sets = [[random(count + offset, dtype) for _ in range(3)] for _ in range(2)]
        kind = f"sum of two {str(dtype)[6:]}" + (", one unaligned" if offset else "")
        triples = [(out[:count], a[offset:], b[:count]) for out, a, b in sets]
        time = seconds(lambda i, t=triples: kernels.reduce(*t[i % 2]))
        results.append((kind, 3.0 * count * size, time))
    for peers in (2, 8):
        inputs = [random(BUFFER_BYTES // 4, torch.bfloat16) for _ in range(peers)]
        out = torch.empty_like(inputs[0])
        time = seconds(lambda _, x=inputs, y=out: buffer_kernels.fold([y], x))
        results.append((f"fold of {peers} bfloat16 buffers", 2.0 * (peers + 1) * out.numel(), time))
    return results


def random(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, device=CUDA).to(dtype)
    return torch.randint(-100, 100, (count,), device=CUDA, dtype=dtype)


@functools.cache
def copied() -> float:
    return copy_bandwidth()


def shares(part: Callable[[], list[tuple[str, float, float]]]) -> list[Row]:
    return [
        row(f"{name}: share of the copy", num_bytes / time / copied(), "", at_least=SHARE)
        for name, num_bytes, time in part()
    ]


GROUPS: list[Rows] = [
    lambda: [row("copy, read and write", copied() / 1e9, "GB/s")],
    lambda: shares(merge_rows),
    lambda: shares(zigzag_rows),
    lambda: shares(buffer_rows),
]

if __name__ == "__main__":
    main(__doc__.splitlines()[0], GROUPS)

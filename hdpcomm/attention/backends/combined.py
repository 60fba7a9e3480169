"""Backends made of others: long tiles by the one that is faster on them, and V of another head_dim than K.

On an H100 cuDNN's kernels reach 1.7 times the rate of flash attention 2 from 2,048 queries and keys on, and a call of
theirs takes longer than flash's where tiles are short (docs/gpu-figures.md). Blackwell was not measured; torch's flash
attention has no kernels of its own for it, and torch itself prefers cuDNN there (check_prefer_cudnn_attention of
sdp_utils.cpp, torch 2.13). But cuDNN compiles a plan for every new shape, which takes 60 to 90 ms. So tiles are cut:
the part that cuDNN gets has one of eight sizes an octave, and the rest, on average a sixteenth of the rows, goes to the
other backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Problem, Score, Three
from hdpcomm.attention.backends.dense import lower
from hdpcomm.attention.tiles import Tile

__all__ = ["DividedBackend", "PaddedBackend", "divided", "plan_size"]


def plan_size(rows: int) -> int:
    """The largest size of at most ``rows`` of which there are eight in an octave."""
    step = 1 << max(0, rows.bit_length() - 4)
    return rows // step * step


def _tile(tile: Tile, q: tuple[int, int], k: tuple[int, int], high: int | None = None) -> Tile | None:
    """The part of a tile in these queries and keys, if there are any."""
    if q[0] == q[1] or k[0] == k[1]:
        return None
    num_k = k[1] - k[0]
    high = None if high is None or high >= num_k - 1 else high
    return Tile(tile.q_start + q[0], tile.q_start + q[1], tile.k_start + k[0], tile.k_start + k[1], None, high)


def _cut(tile: Tile, least: int) -> Iterator[tuple[bool, Tile]]:
    """(whether it is long, part) for the parts of a tile without a window."""
    rows, keys = tile.num_q, tile.num_k
    if tile.full:
        a, b = plan_size(rows), plan_size(keys)
        parts = [_tile(tile, (0, a), (0, b)), _tile(tile, (0, a), (b, keys)), _tile(tile, (a, rows), (0, keys))]
    else:  # causal from the top left
        a = b = plan_size(min(rows, keys))
        parts = [_tile(tile, (0, a), (0, a), 0), None, _tile(tile, (a, rows), (0, keys), a)]
    if min(a, b) < least:
        yield False, tile
        return
    for i, part in enumerate(parts):
        if part is not None:
            yield i == 0, part


@lru_cache(maxsize=512)
def divided(tiles: tuple[Tile, ...], least: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """The tiles as (long ones, all others): the same pairs of queries and keys, each once. Long ones see all of their
    keys, or are causal from the top left, and have at least ``least`` queries and keys, of a size of
    :func:`plan_size`."""
    long: list[Tile] = []
    others: list[Tile] = []
    for tile in tiles:
        if tile.low is not None or tile.visible is not None or min(tile.num_q, tile.num_k) < least:
            others.append(tile)
            continue
        cut = [each for part in lower(tile) for each in _cut(part, least)]
        if not any(is_long for is_long, _ in cut):
            others.append(tile)
            continue
        long += [part for is_long, part in cut if is_long]
        others += [part for is_long, part in cut if not is_long]
    return tuple(long), tuple(others)


class DividedBackend(Backend):
    """``long`` computes tiles from ``least`` queries and keys on, ``others`` the rest."""

    def __init__(self, long: Backend, others: Backend, *, least: int, generations: Sequence[int]) -> None:
        """``generations``: major compute capabilities of devices on which this is faster."""
        self.name = f"{others.name}+{long.name}"
        self._long, self._others, self._least, self._generations = long, others, least, generations

    def refuses(self, problem: Problem) -> str | None:
        for backend in (self._long, self._others):
            if (reason := backend.refuses(problem)) is not None:
                return reason
        have = torch.cuda.get_device_capability()[0] if problem.device == "cuda" else self._generations[0]
        if have in self._generations:
            return None
        return f"it is faster on compute capability {' and '.join(f'{each}.x' for each in self._generations)} only"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._others.compute_dtype(dtype)

    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        for backend, part in zip((self._long, self._others), divided(tuple(tiles), self._least), strict=True):
            backend.forward(qkv, part, score, result)

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        for backend, part in zip((self._long, self._others), divided(tuple(tiles), self._least), strict=True):
            backend.backward(dout, qkv, out, lse, part, score, grads)


def _wide(x: Tensor, dim: int) -> Tensor:
    return pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x


class _Narrow(Accumulator):
    """Cuts the columns that the padding of V adds off each block before it is merged into another result."""

    __slots__ = ("_result", "_width")

    def __init__(self, result: Accumulator, width: int) -> None:
        self._result, self._width, self.dtype = result, width, result.dtype

    def merge(self, block_out: Tensor, block_lse: Tensor, rows: slice | Tensor) -> None:
        self._result.merge(block_out[..., : self._width].contiguous(), block_lse, rows)


class PaddedBackend(Backend):
    """Another backend, whose kernel knows one head_dim, for a V with another: the smaller ones are padded with zeros.

    Zeros at the end of q and k change no score, and zeros at the end of V only add columns to the output, which are cut
    off. The kernel computes as if both had the larger head_dim.
    """

    own_v_dim = True

    def __init__(self, inner: Backend) -> None:
        self.name = inner.name
        self._inner = inner

    def refuses(self, problem: Problem) -> str | None:
        return self._inner.refuses(problem)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.compute_dtype(dtype)

    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        q, k, v = qkv
        dim = max(q.shape[-1], v.shape[-1])
        wide = _wide(q, dim), _wide(k, dim), _wide(v, dim)
        self._inner.forward(wide, tiles, score, _Narrow(result, v.shape[-1]))

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        q, k, v = qkv
        dim = max(q.shape[-1], v.shape[-1])
        sums = tuple(grad if grad.dim == dim else grad.with_dim(dim) for grad in grads)
        wide = _wide(q, dim), _wide(k, dim), _wide(v, dim)
        self._inner.backward(_wide(dout, dim), wide, _wide(out, dim), lse, tiles, score, (sums[0], sums[1], sums[2]))
        for grad, total in zip(grads, sums, strict=True):
            if grad is not total:
                grad.add(total.total()[..., : grad.dim], slice(None))

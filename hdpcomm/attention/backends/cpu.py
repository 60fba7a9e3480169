"""The fused attention operator of torch's CPU build.

Its pitfalls, all handled here (measured with torch 2.13): ``is_causal`` is aligned at the top left; a row that sees no
key gives lse = 0 instead of -inf (tiles have no such rows); empty inputs kill the process (tiles are never empty); the
lse has strides of [tokens, heads]. 16-bit inputs are computed in float32, which is more exact and, without AMX,
several times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from hdpcomm.attention.backends.base import Accumulator, Grads, Problem, Score
from hdpcomm.attention.tiles import Tile

__all__ = ["CpuBackend", "batched", "cut", "lower"]

_BACKWARD_BLOCK = 2048
"""Queries and keys of one backward call. Larger blocks do not fit into the cache: 30 ns a pair at 2048 x 2048, 35 to 39
at 4096 x 4096 and above (4 heads of 64, float32, one thread of a Xeon at 2.5 GHz, two in use). Forward has no limit."""
_MASK_ROWS = 256
"""Queries of a banded tile that share one mask; a mask takes rows x (rows + band) values."""


def _part(tile: Tile, q: tuple[int, int], k: tuple[int, int], low: int | None = None, high: int | None = None) -> Tile:
    return Tile(tile.q_start + q[0], tile.q_start + q[1], tile.k_start + k[0], tile.k_start + k[1], low, high)


def lower(tile: Tile) -> Iterator[Tile]:
    """Splits a tile into shapes that the operator has: unmasked, causal from the top left, or small and banded.

    Tiles with a mask of one's own stay whole."""
    if tile.full or tile.visible is not None:
        yield tile
    elif tile.low is None and tile.high is not None:  # keys up to a diagonal: a rectangle beside a triangle
        if tile.high > 0:
            yield _part(tile, (0, tile.num_q), (0, tile.high))
        yield _part(tile, (0, tile.num_q), (tile.high, tile.num_k), None, 0)
    else:
        yield from _band_parts(tile)


def _band_parts(tile: Tile) -> Iterator[Tile]:
    low = -tile.num_q if tile.low is None else tile.low
    high = tile.num_k if tile.high is None else tile.high
    rows = max(_MASK_ROWS, min(high - low, 4 * _MASK_ROWS))
    for first in range(0, tile.num_q, rows):
        last = min(first + rows, tile.num_q)
        first_k, last_k = max(0, first + low), min(tile.num_k, last + high)
        offset = first - first_k
        yield _part(tile, (first, last), (first_k, last_k), low + offset, high + offset)


def cut(tile: Tile, block: int) -> Iterator[Tile]:
    """Cuts a result of :func:`lower` into blocks of at most ``block`` queries and keys; banded ones stay whole."""
    if tile.low is not None or tile.visible is not None:
        yield tile
        return
    for first_k in range(0, tile.num_k, block):
        keys = (first_k, min(first_k + block, tile.num_k))
        first_q = 0
        if not tile.full:  # the diagonal begins here; later queries see all keys of this block
            first_q = min(keys[1], tile.num_q)
            yield _part(tile, (keys[0], first_q), keys, None, 0)
        for start in range(first_q, tile.num_q, block):
            yield _part(tile, (start, min(start + block, tile.num_q)), keys)


@lru_cache(maxsize=16)
def _mask(rows: int, keys: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    difference = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_((difference < low) | (difference > high), -torch.inf)


def batched(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of [tokens, heads, dim] as [1, heads, rows, dim]; a view."""
    return x[start:stop].transpose(0, 1).unsqueeze(0)


def _masking(tile: Tile, dtype: torch.dtype) -> tuple[bool, torch.Tensor | None]:
    if tile.full:
        return False, None
    if tile.visible is not None:
        return False, torch.zeros(tile.num_q, tile.num_k, dtype=dtype).masked_fill_(
            torch.from_numpy(~tile.visible.pairs), -torch.inf
        )
    if tile.low is None or tile.high is None:
        return True, None
    return False, _mask(tile.num_q, tile.num_k, tile.low, tile.high, dtype)


class CpuBackend:
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward."""

    name = "cpu"
    own_v_dim = False

    def refuses(self, problem: Problem) -> str | None:
        if problem.device != "cpu":
            return f"it computes on the CPU; the tensors are on {problem.device}"
        if problem.softcap:
            return "torch's CPU operator has no softcap"
        return None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Sequence[Tile],
        score: Score,
        result: Accumulator,
    ) -> None:
        for tile in (part for whole in tiles for part in lower(whole)):
            causal, mask = _masking(tile, q.dtype)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                batched(q, tile.q_start, tile.q_stop),
                batched(k, tile.k_start, tile.k_stop),
                batched(v, tile.k_start, tile.k_stop),
                0.0, causal, attn_mask=mask, scale=score.scale,
            )  # fmt: skip
            block, block_lse = out[0].transpose(0, 1).contiguous(), lse[0].transpose(0, 1)
            if tile.visible is not None and (blind := torch.from_numpy(~tile.visible.pairs.any(axis=1))).any():
                block_lse = block_lse.masked_fill(blind[:, None], -torch.inf)
                block.masked_fill_(blind[:, None, None], 0.0)
            result.merge(block, block_lse, slice(tile.q_start, tile.q_stop))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Sequence[Tile],
        score: Score,
        grads: Grads,
    ) -> None:
        for tile in (block for whole in tiles for part in lower(whole) for block in cut(part, _BACKWARD_BLOCK)):
            causal, mask = _masking(tile, q.dtype)
            q_rows, k_rows = (tile.q_start, tile.q_stop), (tile.k_start, tile.k_stop)
            row_lse = lse[slice(*q_rows)]
            if tile.visible is not None:  # a query that sees no key at all has the lse -inf; all its weights are 0
                row_lse = row_lse.masked_fill(row_lse == -torch.inf, 0.0)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                batched(dout, *q_rows), batched(q, *q_rows), batched(k, *k_rows), batched(v, *k_rows),
                batched(out, *q_rows), row_lse.transpose(0, 1).unsqueeze(0),
                0.0, causal, attn_mask=mask, scale=score.scale,
            )  # fmt: skip
            for grad, part, rows in zip(grads, parts, (q_rows, k_rows, k_rows), strict=True):
                grad.add(part[0].transpose(0, 1), slice(*rows))

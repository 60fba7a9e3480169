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
from torch import Tensor

from hdpcomm.attention.backends.base import Problem, Score, Three
from hdpcomm.attention.backends.dense import DenseBackend, cut, lower
from hdpcomm.attention.tiles import Tile

__all__ = ["CpuBackend"]

_BACKWARD_BLOCK = 2048
"""Queries and keys of one backward call. Larger blocks do not fit into the cache: 30 ns a pair at 2048 x 2048, 35 to 39
at 4096 x 4096 and above (4 heads of 64, float32, one thread of a Xeon at 2.5 GHz, two in use). Forward has no limit."""


@lru_cache(maxsize=16)
def _mask(rows: int, keys: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    difference = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_((difference < low) | (difference > high), -torch.inf)


def _masking(tile: Tile, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    if tile.full:
        return False, None
    if tile.visible is not None:
        return False, torch.zeros(tile.num_q, tile.num_k, dtype=dtype).masked_fill_(
            torch.from_numpy(~tile.visible.pairs), -torch.inf
        )
    if tile.low is None or tile.high is None:
        return True, None
    return False, _mask(tile.num_q, tile.num_k, tile.low, tile.high, dtype)


class CpuBackend(DenseBackend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward."""

    name = "cpu"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device != "cpu":
            return f"it computes on the CPU; the tensors are on {problem.device}"
        if problem.softcap:
            return "torch's CPU operator has no softcap"
        return None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def backward_tiles(self, tiles: Sequence[Tile]) -> Iterator[Tile]:
        return (block for whole in tiles for part in lower(whole) for block in cut(part, _BACKWARD_BLOCK))

    def call_forward(self, qkv: Three, tile: Tile, score: Score) -> tuple[Tensor, Tensor]:
        causal, mask = _masking(tile, qkv[0].dtype)
        out_and_lse: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv, 0.0, causal, attn_mask=mask, scale=score.scale
        )
        return out_and_lse

    def call_backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, score: Score
    ) -> Sequence[Tensor]:
        causal, mask = _masking(tile, dout.dtype)
        grads: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *qkv, out, lse, 0.0, causal, attn_mask=mask, scale=score.scale
        )
        return grads

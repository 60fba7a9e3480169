"""Plain softmax attention in float64 with torch's basic operations: the reference of the tests, and the last choice.

Slow and exact; works on any device and for any mask, and is the only CPU backend with a softcap. Tiles are taken in
blocks, so that memory stays at block x block; autograd gives the derivatives of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Problem, Score, Three
from hdpcomm.attention.backends.dense import DenseBackend, cut, lower, repeated_heads
from hdpcomm.attention.tiles import Tile

__all__ = ["ReferenceBackend"]

_BLOCK = 2048


def _scores(q: Tensor, k: Tensor, tile: Tile, score: Score) -> Tensor:
    """[tiles, heads, rows, keys]; -inf where the mask forbids the pair."""
    scores = q @ k.mT * score.scale
    if score.softcap:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    if tile.visible is not None:
        return scores.masked_fill(torch.from_numpy(~tile.visible.pairs).to(q.device), -torch.inf)
    gap = torch.arange(tile.num_k, device=q.device) - torch.arange(tile.num_q, device=q.device)[:, None]
    for bound, outside in ((tile.low, torch.lt), (tile.high, torch.gt)):
        if bound is not None:
            scores = scores.masked_fill(outside(gap, bound), -torch.inf)
    return scores


class ReferenceBackend(DenseBackend):
    """Attention in float64, without fused kernels."""

    name = "reference"
    own_v_dim = True

    def refuses(self, problem: Problem) -> str | None:  # noqa: ARG002
        return None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002
        return torch.float64

    def call_tiles(self, tiles: Sequence[Tile]) -> Iterator[Tile]:
        return (block for whole in tiles for part in lower(whole) for block in cut(part, _BLOCK))

    backward_tiles = call_tiles

    def call_forward(self, qkv: Three, tile: Tile, score: Score) -> tuple[Tensor, Tensor]:
        q, k, v = repeated_heads(qkv)
        scores = _scores(q, k, tile, score)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def call_backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, score: Score
    ) -> Sequence[Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in qkv]
            q, k, v = repeated_heads((leaves[0], leaves[1], leaves[2]))
            weights = torch.exp(_scores(q, k, tile, score) - lse[..., None])
            gain = dout @ v.mT - (dout * out).sum(-1, keepdim=True)  # by how much a score changes the loss
            return torch.autograd.grad((weights * gain).sum(), leaves)

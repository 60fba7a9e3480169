"""Plain softmax attention in float64 with torch's basic operations: the reference of the tests, and the last choice.

Slow and exact; works on any device and for any mask, and is the only CPU backend with a softcap. Queries are taken in
blocks, so that memory stays at block x keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Problem, Score, Three
from hdpcomm.attention.tiles import Tile

__all__ = ["ReferenceBackend"]

_QUERY_ROWS = 512


def _blocks(tiles: Sequence[Tile]) -> Iterator[tuple[Tile, slice, slice]]:
    for tile in tiles:
        for first in range(0, tile.num_q, _QUERY_ROWS):
            last = min(first + _QUERY_ROWS, tile.num_q)
            yield tile, slice(tile.q_start + first, tile.q_start + last), slice(tile.k_start, tile.k_stop)


def _hidden(tile: Tile, rows: slice, device: torch.device) -> Tensor | None:
    """[rows, keys]: the pairs that the mask forbids, or None if there are none."""
    if tile.full:
        return None
    first = rows.start - tile.q_start
    if tile.visible is not None:
        return torch.from_numpy(~tile.visible.pairs[first : first + rows.stop - rows.start]).to(device)
    queries = torch.arange(first, first + rows.stop - rows.start, device=device)[:, None]
    gap = torch.arange(tile.num_k, device=device)[None, :] - queries
    hidden = torch.zeros_like(gap, dtype=torch.bool)
    if tile.low is not None:
        hidden |= gap < tile.low
    if tile.high is not None:
        hidden |= gap > tile.high
    return hidden


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, ...] as [rows, kv_heads, group, ...]."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, score: Score) -> tuple[Tensor, Tensor | None]:
    """Scores [kv_heads, group, rows, keys] and, with a softcap, their derivative with respect to the uncapped ones."""
    grouped = _grouped(q, k.shape[1])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * score.scale
    slope = None
    if score.softcap:
        bent = torch.tanh(scores / score.softcap)
        scores, slope = score.softcap * bent, 1 - bent.square()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, slope


class ReferenceBackend(Backend):
    """Attention in float64, without fused kernels."""

    name = "reference"
    own_v_dim = True

    def refuses(self, problem: Problem) -> str | None:  # noqa: ARG002
        return None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002
        return torch.float64

    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        q, k, v = qkv
        for tile, rows, keys in _blocks(tiles):
            scores, _ = _scores(q[rows], k[keys], _hidden(tile, rows, q.device), score)
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
            out = torch.einsum("hgqk,khd->qhgd", weights, v[keys]).flatten(1, 2)
            lse = lse.permute(2, 0, 1).flatten(1)
            result.merge(out.to(result.dtype).contiguous(), lse.to(result.dtype), rows)

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        q, k, v = qkv
        dq, dk, dv = grads
        heads = k.shape[1]
        for tile, rows, keys in _blocks(tiles):
            scores, slope = _scores(q[rows], k[keys], _hidden(tile, rows, q.device), score)
            row_lse = _grouped(lse[rows].to(scores.dtype), heads).permute(1, 2, 0)
            row_lse = torch.where(row_lse == -torch.inf, 0.0, row_lse)  # a query that sees no key: all weights are 0
            weights = torch.exp(scores - row_lse[..., None])
            grad_out = _grouped(dout[rows], heads)
            delta = _grouped((dout[rows] * out[rows]).sum(-1), heads).permute(1, 2, 0)
            dv.add(torch.einsum("hgqk,qhgd->khd", weights, grad_out).to(dv.dtype), keys)
            dscores = weights * (torch.einsum("qhgd,khd->hgqk", grad_out, v[keys]) - delta[..., None]) * score.scale
            if slope is not None:
                dscores = dscores * slope
            dq.add(torch.einsum("hgqk,khd->qhgd", dscores, k[keys]).flatten(1, 2).to(dq.dtype), rows)
            dk.add(torch.einsum("hgqk,qhgd->khd", dscores, _grouped(q[rows], heads)).to(dk.dtype), keys)

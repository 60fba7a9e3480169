"""Backends whose kernels know one head_dim, for a V with another: the smaller ones are padded with zeros.

Zeros at the end of q and k change no score, and zeros at the end of V only add columns to the output, which are cut
off. The kernel computes as if both had the larger head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Problem, Score
from hdpcomm.attention.tiles import Tile

__all__ = ["PaddedBackend"]


def _wide(x: torch.Tensor, dim: int) -> torch.Tensor:
    return pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x


class _Narrow(Accumulator):
    """Cuts the columns that the padding of V adds off each block before it is merged into another result."""

    __slots__ = ("_result", "_width")

    def __init__(self, result: Accumulator, width: int) -> None:
        self._result, self._width, self.dtype = result, width, result.dtype

    def merge(self, block_out: torch.Tensor, block_lse: torch.Tensor, rows: slice | torch.Tensor) -> None:
        self._result.merge(block_out[..., : self._width].contiguous(), block_lse, rows)


class PaddedBackend:
    """Another backend, with its inputs padded to one head_dim."""

    own_v_dim = True

    def __init__(self, inner: Backend) -> None:
        self.name = inner.name
        self._inner = inner

    def refuses(self, problem: Problem) -> str | None:
        return self._inner.refuses(problem)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.compute_dtype(dtype)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Sequence[Tile],
        score: Score,
        result: Accumulator,
    ) -> None:
        dim = max(q.shape[-1], v.shape[-1])
        self._inner.forward(
            _wide(q, dim), _wide(k, dim), _wide(v, dim), tiles, score,
            _Narrow(result, v.shape[-1]),
        )  # fmt: skip

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
        dim = max(q.shape[-1], v.shape[-1])
        wide = tuple(grad if grad.dim == dim else grad.other(dim) for grad in grads)
        self._inner.backward(
            _wide(dout, dim), _wide(q, dim), _wide(k, dim), _wide(v, dim), _wide(out, dim), lse, tiles, score,
            (wide[0], wide[1], wide[2]),
        )  # fmt: skip
        for grad, found in zip(grads, wide, strict=True):
            if grad is not found:
                grad.add(found.total()[..., : grad.dim], slice(None))

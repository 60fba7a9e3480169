"""Backends whose kernels take many sequences in one call (cu_seqlens): tiles are batched into as few calls as possible.

Tiles go into one call if they have the same window and share neither queries nor keys, so that each gradient row is
added to once per call, in a fixed order. Kernels of this kind align queries and keys at their ends.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Score, Three
from hdpcomm.attention.tiles import Tile
from hdpcomm.kernels.transfers import to_device

__all__ = ["Batch", "VarlenBackend", "batches_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tiles of one kernel call."""

    left: int
    """Keys left of the diagonal that a query sees, -1 for all; the last query is aligned with the last key."""
    right: int
    """Keys right of the diagonal that a query sees, -1 for all; 0 is causal."""
    q_rows: Tensor | slice
    k_rows: Tensor | slice
    cu_q: Tensor
    """int32 [tiles + 1]"""
    cu_k: Tensor
    max_q: int
    max_k: int

    @property
    def causal(self) -> bool:
        """Whether the window is the plain causal mask, which kernels take as a flag."""
        return (self.left, self.right) == (-1, 0)


def _window(tile: Tile) -> tuple[int, int]:
    shift = tile.num_k - tile.num_q
    left = -1 if tile.low is None else shift - tile.low
    right = -1 if tile.high is None else tile.high - shift
    return left, right


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor | slice:
    """A slice if the ranges are consecutive, else their row numbers."""
    if all(a[1] == b[0] for a, b in itertools.pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return to_device(torch.cat([torch.arange(*r) for r in ranges]), device)


def _running_sum(sizes: Iterable[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32), device)


@lru_cache(maxsize=512)
def batches_of(tiles: tuple[Tile, ...], device: torch.device) -> tuple[Batch, ...]:
    """The calls for ``tiles``, in a fixed order."""
    groups: list[tuple[tuple[int, int], list[Tile]]] = []
    for tile in tiles:
        window = _window(tile)
        for other, members in groups:
            clash = any(
                (m.q_start < tile.q_stop and tile.q_start < m.q_stop)
                or (m.k_start < tile.k_stop and tile.k_start < m.k_stop)
                for m in members
            )
            if other == window and not clash:
                members.append(tile)
                break
        else:
            groups.append((window, [tile]))
    return tuple(
        Batch(
            left=left,
            right=right,
            q_rows=_rows([(t.q_start, t.q_stop) for t in members], device),
            k_rows=_rows([(t.k_start, t.k_stop) for t in members], device),
            cu_q=_running_sum([t.num_q for t in members], device),
            cu_k=_running_sum([t.num_k for t in members], device),
            max_q=max(t.num_q for t in members),
            max_k=max(t.num_k for t in members),
        )
        for (left, right), members in groups
    )


class VarlenBackend(Backend):
    """Base of the backends with a varlen kernel; a subclass implements the two calls."""

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, score: Score) -> tuple[Tensor, Tensor]:
        """(out [rows, heads, dim], lse [heads, rows] in float32)."""

    @abstractmethod
    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, batch: Batch, score: Score) -> Three:
        """(dq, dk, dv) of the rows; ``lse``: [heads, rows], contiguous."""

    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        q, k, v = qkv
        for batch in batches_of(tuple(tiles), q.device):
            out, lse = self.call_forward(q[batch.q_rows], k[batch.k_rows], v[batch.k_rows], batch, score)
            result.merge(out.contiguous(), lse.transpose(0, 1), batch.q_rows)

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        q, k, v = qkv
        for batch in batches_of(tuple(tiles), q.device):
            rows, keys = batch.q_rows, batch.k_rows
            row_lse = lse[rows].transpose(0, 1).contiguous()
            parts = self.call_backward(dout[rows], (q[rows], k[keys], v[keys]), out[rows], row_lse, batch, score)
            for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                grad.add(part, where)

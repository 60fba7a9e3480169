"""Backends with one kernel call a tile, or for equal tiles that follow each other, as those of sequences of one length,
on [tiles, heads, rows, dim]; their kernels align masks at the top left."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Score, Three
from hdpcomm.attention.tiles import Tile

__all__ = ["DenseBackend", "cut", "equal_runs", "lower", "repeated_heads"]

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


def equal_runs(tiles: Iterable[Tile]) -> Iterator[tuple[Tile, int]]:
    """Tiles in their order, as (the first, how many): equal ones, each of which begins where the one before ends."""
    first, count = None, 0
    for tile in tiles:
        if first is not None:
            q, k = count * first.num_q, count * first.num_k
            moved = Tile(first.q_start + q, first.q_stop + q, first.k_start + k, first.k_stop + k, *first[4:])
            if tile.visible is None and tile == moved:
                count += 1
                continue
            yield first, count
        first, count = tile, 1
    if first is not None:
        yield first, count


def batched(x: Tensor, start: int, stop: int, count: int) -> Tensor:
    """``count`` times as many rows of [tokens, heads, ...] from ``start`` on as [count, heads, rows, ...]; a view."""
    return x[start : start + count * (stop - start)].view(count, stop - start, *x.shape[1:]).transpose(1, 2)


def _unbatched(x: Tensor, widest: torch.dtype) -> Tensor:
    """[count, heads, rows, ...] as [tokens, heads, ...], in a type not above that of sums; a view where a kernel wrote
    it so."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat.to(widest) if x.dtype.itemsize > widest.itemsize else flat


def repeated_heads(qkv: Three) -> Three:
    """Repeats the heads of k and v for operators that have no grouped heads."""
    q, k, v = qkv
    times = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


class DenseBackend(Backend):
    """Takes tiles one by one, in shapes that kernels have."""

    @abstractmethod
    def call_forward(self, qkv: Three, tile: Tile, score: Score) -> tuple[Tensor, Tensor]:
        """(out [tiles, heads, rows, dim], lse [tiles, heads, rows]) of tiles like this one."""

    @abstractmethod
    def call_backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, score: Score
    ) -> Sequence[Tensor]:
        """(dq, dk, dv), shaped like ``qkv``; the lse is a view of [tokens, heads]."""

    def call_tiles(self, tiles: Sequence[Tile]) -> Iterator[Tile]:
        """The tiles of forward calls."""
        return (part for whole in tiles for part in lower(whole))

    def backward_tiles(self, tiles: Sequence[Tile]) -> Iterator[Tile]:
        """The tiles of backward calls."""
        return self.call_tiles(tiles)

    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        q, k, v = qkv
        for tile, count in equal_runs(self.call_tiles(tiles)):
            rows, keys = (tile.q_start, tile.q_stop, count), (tile.k_start, tile.k_stop, count)
            out, lse = self.call_forward((batched(q, *rows), batched(k, *keys), batched(v, *keys)), tile, score)
            block, lse = _unbatched(out, result.dtype).contiguous(), _unbatched(lse, result.dtype)
            if tile.visible is not None and (blind := torch.from_numpy(~tile.visible.pairs.any(axis=1))).any():
                lse = lse.masked_fill(blind[:, None], -torch.inf)
                block.masked_fill_(blind[:, None, None], 0.0)
            result.merge(block, lse, _rows_of(*rows))

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        q, k, v = qkv
        for tile, count in equal_runs(self.backward_tiles(tiles)):
            rows, keys = (tile.q_start, tile.q_stop, count), (tile.k_start, tile.k_stop, count)
            row_lse = batched(lse, *rows)
            if tile.visible is not None:  # a query that sees no key at all has the lse -inf; all its weights are 0
                row_lse = row_lse.masked_fill(row_lse == -torch.inf, 0.0)
            parts = self.call_backward(
                batched(dout, *rows), (batched(q, *rows), batched(k, *keys), batched(v, *keys)), batched(out, *rows),
                row_lse, tile, score,
            )  # fmt: skip
            for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                grad.add(_unbatched(part, grad.dtype), _rows_of(*where))


def _rows_of(start: int, stop: int, count: int) -> slice:
    return slice(start, start + count * (stop - start))

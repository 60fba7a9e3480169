"""Backends with one kernel call a tile, or for equal tiles that follow each other, as those of sequences of one length,
on [tiles, heads, rows, dim]; their kernels align masks at the top left."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Problem, Score, Three
from hdpcomm.attention.tiles import Tile

__all__ = [
    *("CpuBackend", "DenseBackend", "DividedBackend", "PaddedBackend", "ReferenceBackend", "cut"),
    *("divided", "equal_runs", "lower", "plan_size", "repeated_heads"),
]


_MASK_ROWS = 256
"""Queries of a banded tile that share one mask; a mask takes rows x (rows + band) values."""


def _part(tile: Tile, q: tuple[int, int], k: tuple[int, int], low: int | None = None, high: int | None = None) -> Tile:
    return Tile(tile.q_start + q[0], tile.q_start + q[1], tile.k_start + k[0], tile.k_start + k[1], low, high)


def lower(tile: Tile) -> Iterator[Tile]:
    """Splits a tile into shapes that the operator has: unmasked, causal from the top left, or small and banded."""
    if tile.full:
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
    if tile.low is not None:
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
            if tile == moved:
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
            result.merge(block, lse, _rows_of(*rows))

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        q, k, v = qkv
        for tile, count in equal_runs(self.backward_tiles(tiles)):
            rows, keys = (tile.q_start, tile.q_stop, count), (tile.k_start, tile.k_stop, count)
            parts = self.call_backward(
                batched(dout, *rows), (batched(q, *rows), batched(k, *keys), batched(v, *keys)), batched(out, *rows),
                batched(lse, *rows), tile, score,
            )  # fmt: skip
            for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                grad.add(_unbatched(part, grad.dtype), _rows_of(*where))


def _rows_of(start: int, stop: int, count: int) -> slice:
    return slice(start, start + count * (stop - start))


_BLOCK = 2048


def _scores(q: Tensor, k: Tensor, tile: Tile, score: Score) -> Tensor:
    """[tiles, heads, rows, keys]; -inf where the mask forbids the pair."""
    scores = q @ k.mT * score.scale
    if score.softcap:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    gap = torch.arange(tile.num_k, device=q.device) - torch.arange(tile.num_q, device=q.device)[:, None]
    for bound, outside in ((tile.low, torch.lt), (tile.high, torch.gt)):
        if bound is not None:
            scores = scores.masked_fill(outside(gap, bound), -torch.inf)
    return scores


class ReferenceBackend(DenseBackend):
    """Plain softmax attention in float64 with torch's basic operations: the reference of the tests, and the last
    choice.

    Slow and exact; works on any device and for any mask, and is the only CPU backend with a softcap. Tiles are taken in
    blocks, so that memory stays at block x block; autograd gives the derivatives of a block.
    """

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
    if tile.low is None or tile.high is None:
        return True, None
    return False, _mask(tile.num_q, tile.num_k, tile.low, tile.high, dtype)


class CpuBackend(DenseBackend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward.

    Its pitfalls, all handled here (measured with torch 2.13): ``is_causal`` is aligned at the top left; a row that sees
    no key gives lse = 0 instead of -inf (tiles have no such rows); empty inputs kill the process (tiles are never
    empty); the lse has strides of [tokens, heads]. 16-bit inputs are computed in float32, which is more exact and,
    without AMX, several times faster.
    """

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


def plan_size(rows: int) -> int:
    """The largest size of at most ``rows`` of which there are eight in an octave."""
    step = 1 << max(0, rows.bit_length() - 4)
    return rows // step * step


def _cut(tile: Tile, least: int) -> Iterator[tuple[bool, Tile]]:
    """(whether it is long, part) for the parts of a tile without a window."""
    rows, keys = tile.num_q, tile.num_k
    if tile.full:
        a, b = plan_size(rows), plan_size(keys)
        parts = [_part(tile, (0, a), (0, b)), _part(tile, (0, a), (b, keys)), _part(tile, (a, rows), (0, keys))]
    else:  # causal from the top left
        a = b = plan_size(min(rows, keys))
        rest = (a, rows), (0, keys)
        parts = [
            _part(tile, (0, a), (0, a), None, 0 if a > 1 else None),
            _part(tile, *rest, None, a if a < keys - 1 else None),
        ]
    if min(a, b) < least:
        yield False, tile
        return
    for i, part in enumerate(parts):
        if part.num_q and part.num_k:
            yield i == 0, part


@lru_cache(maxsize=512)
def divided(tiles: tuple[Tile, ...], least: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """The tiles as (long ones, all others): the same pairs of queries and keys, each once. Long ones see all of their
    keys, or are causal from the top left, and have at least ``least`` queries and keys, of a size of
    :func:`plan_size`."""
    long: list[Tile] = []
    others: list[Tile] = []
    for tile in tiles:
        if tile.low is not None or min(tile.num_q, tile.num_k) < least:
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
    """``long`` computes tiles from ``least`` queries and keys on, ``others`` the rest.

    On an H100 cuDNN's kernels reach 1.7 times the rate of flash attention 2 from 2,048 queries and keys on, and a call
    of theirs takes longer than flash's where tiles are short (docs/gpu-figures.md). Blackwell was not measured; torch's
    flash attention has no kernels of its own for it, and torch itself prefers cuDNN there (check_prefer_cudnn_attention
    of sdp_utils.cpp, torch 2.13). But cuDNN compiles a plan for every new shape, which takes 60 to 90 ms. So tiles are
    cut: the part that cuDNN gets has one of eight sizes an octave, and the rest, on average a sixteenth of the rows,
    goes to the other backend.
    """

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

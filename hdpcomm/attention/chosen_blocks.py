"""Attention over blocks of keys that were chosen for each query and head: MoBA, and what NSA selects.

A block is ``block`` consecutive tokens of a sequence, counted from its first one. Ranks fetch the keys of chosen blocks
once each; work is one matrix product for each block, head and the queries that chose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdpcomm.arguments import check_whole
from hdpcomm.attention.call_check import agree_on_call
from hdpcomm.attention.fetched_rows import Needed, needed_tokens
from hdpcomm.attention.indexer import check_qkv, layout_of_pack, places_of, rank_in
from hdpcomm.attention.layout import SequenceLayout
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["PackBlocks", "block_attention", "moba_attention", "pack_blocks"]

_SCORES = 1 << 22
"""Elements of scores that are there at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class PackBlocks:
    """The blocks of a pack, and the tokens of one rank.

    Attributes:
        start, stop: of each block its first token in the pack, and the token after its last one.
        base: of each sequence its first block.
        first: of each sequence its first token.
        sequence, position: of each own token.
    """

    start: Tensor
    stop: Tensor
    base: Tensor
    first: Tensor
    sequence: Tensor
    position: Tensor

    def runs(self) -> Iterator[tuple[int, slice]]:
        """(sequence, own rows) of each sequence of which this rank has tokens."""
        numbers, counts = torch.unique_consecutive(self.sequence, return_counts=True)
        stops = counts.cumsum(0)
        for number, start, stop in zip(numbers.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True):
            yield number, slice(start, stop)


@lru_cache(maxsize=64)
def pack_blocks(layout: SequenceLayout, rank: int, block: int) -> PackBlocks:
    """Made once a pack. Local."""
    lengths = layout.lengths
    first = np.cumsum(lengths) - lengths
    counts = -(-lengths // block)
    base = np.cumsum(counts) - counts
    inside = (np.arange(int(counts.sum())) - np.repeat(base, counts)) * block
    start = np.repeat(first, counts) + inside
    stop = np.minimum(start + block, np.repeat(first + lengths, counts))
    tokens = places_of(layout).tokens[rank]
    starts = torch.from_numpy(first)
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    begins, ends, bases = (torch.from_numpy(each) for each in (start, stop, base))
    return PackBlocks(begins, ends, bases, starts, sequence, tokens - starts[sequence])


@untraced
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    block: int,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    scale: float | None = None,
) -> Tensor:
    """Attention of each query over the blocks that were chosen for it, causally. Exact; differentiable once in q, k, v.

    Collective over ``comm``, its backward pass, too. Each key and value that a rank's queries see and it does not hold
    comes to it once, and one gradient of it goes back; gradients are added in fp32 (fp64).

    Args:
        q: ``[tokens, heads, dim]``, this rank's shard of the pack. k: ``[tokens, kv_heads, dim]``. v: ``[tokens,
            kv_heads, v_dim]``; ``kv_heads`` divides ``heads``.
        chosen: int64 ``[tokens, heads, n]``, or ``[tokens, kv_heads, n]`` where the heads of a group share them:
            numbers of blocks in the token's own sequence, each at most once, none after its own; -1: none.
        block: tokens of a block.
        scale: of the scores; default ``dim ** -0.5``.

    Returns: ``[tokens, heads, v_dim]``; 0 where nothing was chosen.

    Raises: InvalidUsage, on all ranks.
    """

    def prepare() -> tuple[SequenceLayout, str, str]:
        check_whole("block_attention", "block", block, least=1)
        layout = layout_of_pack(cu_seqlens, comm)
        rank = rank_in(comm)
        check_qkv(q, k, v, layout.rows(rank))
        _check_chosen(chosen, q, k, pack_blocks(layout, rank, block), block)
        facts = f"{tuple(k.shape[1:])} {tuple(v.shape[1:])} {q.dtype} {scale} {block}"
        return layout, f"{layout.facts[0]} {facts}", f"k, v, type, scale, block: {facts}; {layout.facts[1]}"

    layout = agree_on_call(comm, "block_attention", careful=True, device=q.device, prepare=prepare)
    return _attend(q, k, v, chosen, layout, comm, block, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    layout: SequenceLayout,
    comm: Communicator | None,
    block: int,
    scale: float | None,
) -> Tensor:
    tiles = _Tiles(chosen, layout, rank_in(comm), block, (q.shape[1], k.shape[1]))
    return _BlockAttention.apply(q, k, v, tiles, layout, comm, q.shape[2] ** -0.5 if scale is None else scale)  # type: ignore[no-any-return, no-untyped-call]


def _check_chosen(chosen: Tensor, q: Tensor, k: Tensor, blocks: PackBlocks, block: int) -> None:
    given = f"chosen {tuple(chosen.shape)} {chosen.dtype}"
    if chosen.ndim != 3 or chosen.shape[1] not in (q.shape[1], k.shape[1]) or chosen.shape[0] != q.shape[0]:
        raise InvalidUsage(
            f"expected chosen [{q.shape[0]} tokens, {q.shape[1]} heads or {k.shape[1]} of keys, n]: {given}"
        )
    if chosen.dtype != torch.int64:
        raise InvalidUsage(f"chosen must be int64: {given}")
    own = (blocks.position // block)[:, None, None].to(chosen.device)
    if chosen.numel() and (int(chosen.min()) < -1 or bool((chosen > own).any())):
        raise InvalidUsage(
            f"chosen has numbers from {int(chosen.min())} to {int(chosen.max())}; expected -1, or blocks of the "
            f"sequence up to the token's own (position / {block})"
        )
    ordered = chosen.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise InvalidUsage("chosen has a block twice for one token and head")


@untraced
def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    top_k: int,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    scale: float | None = None,
) -> Tensor:
    """Mixture of block attention: each query and head looks at its own block, causally, and at the ``top_k - 1`` blocks
    before it whose mean keys have the highest product with it; of equal ones the first. Source: MoBA (arXiv
    2502.13189), section 2.

    Collective over ``comm``, its backward pass, too; ranks add up the sums of the blocks' keys, then
    :func:`block_attention`. The choice has no gradient.

    Args:
        block: tokens of a block.
        top_k: blocks that a query looks at, its own included.

    The others as of :func:`block_attention`. Returns: ``[tokens, heads, v_dim]``. Raises: InvalidUsage, on all ranks.

    Example:
        >>> import torch
        >>> from hdpcomm.attention import moba_attention
        >>> q, k, v = torch.randn(3, 50, 2, 8)
        >>> moba_attention(q, k, v, block=16, top_k=2, comm=None, cu_seqlens=[0, 50]).shape
        torch.Size([50, 2, 8])
    """

    def prepare() -> tuple[SequenceLayout, str, str]:
        check_whole("moba_attention", "block", block, least=1)
        check_whole("moba_attention", "top_k", top_k, least=1)
        layout = layout_of_pack(cu_seqlens, comm)
        check_qkv(q, k, v, layout.rows(rank_in(comm)))
        facts = f"{tuple(k.shape[1:])} {tuple(v.shape[1:])} {q.dtype} {scale} {block} {top_k}"
        return layout, f"{layout.facts[0]} {facts}", f"k, v, type, scale, block, top_k: {facts}; {layout.facts[1]}"

    layout = agree_on_call(comm, "moba_attention", careful=True, device=q.device, prepare=prepare)
    chosen = _by_means(q, k, layout, comm, block, top_k)
    return _attend(q, k, v, chosen, layout, comm, block, scale)


@torch.no_grad()
def _by_means(
    q: Tensor, k: Tensor, layout: SequenceLayout, comm: Communicator | None, block: int, top_k: int
) -> Tensor:
    """``[tokens, heads, at most top_k]``"""
    blocks = pack_blocks(layout, rank_in(comm), block)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups, each = k.shape[1], q.shape[1] // k.shape[1]
    current = blocks.position // block
    means = torch.zeros(len(blocks.start), *k.shape[1:], dtype=wide, device=k.device)
    means.index_add_(0, (blocks.base[blocks.sequence] + current).to(k.device), k.to(wide))
    if comm is not None and comm.size > 1:
        comm.all_reduce(means)
    means /= (blocks.stop - blocks.start).to(k.device)[:, None, None]
    counts = torch.diff(blocks.base, append=torch.tensor([len(blocks.start)]))
    chosen = torch.full((*q.shape[:2], min(top_k, int(counts.max()) if len(counts) else 0)), -1, device=q.device)
    for sequence, rows in blocks.runs():
        base, count = int(blocks.base[sequence]), int(counts[sequence])
        step = max(1, _SCORES // max(1, q.shape[1] * count))
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            own = current[part].to(q.device)[:, None, None]
            mine = q[part].to(wide).view(-1, groups, each, q.shape[2])
            scores = torch.einsum("tgrd,bgd->tgrb", mine, means[base : base + count]).flatten(1, 2)
            numbers = torch.arange(count, device=q.device)
            scores = scores.masked_fill(numbers > own, -torch.inf).masked_fill(numbers == own, torch.inf)
            best = scores.sort(dim=-1, descending=True, stable=True)
            kept = best.indices.masked_fill(best.values == -torch.inf, -1)[..., : chosen.shape[2]]
            chosen[part, :, : kept.shape[2]] = kept
    return chosen


class _Tile(NamedTuple):
    """Queries, by row, of the heads that share keys of one head, over the first keys of a block."""

    rows: Tensor
    heads: slice
    group: int
    tokens: slice
    limits: Tensor | None
    """By query, its last key; ``None``: it sees all."""


class _Tiles:
    """Key blocks that a rank's queries attend to, a block and a head of the choice at a time."""

    def __init__(self, chosen: Tensor, layout: SequenceLayout, rank: int, block: int, heads: tuple[int, int]) -> None:
        blocks, self._heads = pack_blocks(layout, rank, block), heads
        self._choosers = chosen.shape[1]
        chosen = chosen.cpu()
        rows, choosers, columns = (chosen >= 0).nonzero(as_tuple=True)
        number = blocks.base[blocks.sequence[rows]] + chosen[rows, choosers, columns]
        order = torch.argsort(number * self._choosers + choosers, stable=True)
        self._rows, number, choosers = rows[order], number[order], choosers[order]
        token = blocks.first[blocks.sequence] + blocks.position  # in the pack
        self._last = token[self._rows]
        keys = number * self._choosers + choosers
        self._keys, counts = torch.unique_consecutive(keys, return_counts=True)
        self._bounds = [0, *counts.cumsum(0).tolist()]
        self._start = blocks.start
        seen = torch.zeros_like(blocks.stop).scatter_reduce(0, number, self._last + 1, "amax")
        self._stop = torch.minimum(blocks.stop, seen)
        """By block, the token after the last one that a query sees."""

    def tokens(self) -> Tensor:
        """All that are seen, rising."""
        lengths = (self._stop - self._start).clamp(min=0)
        inside = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return torch.repeat_interleave(self._start, lengths) + inside

    def __iter__(self) -> Iterator[_Tile]:
        each = self._heads[0] // self._choosers
        for place, key in enumerate(self._keys.tolist()):
            number, chooser = divmod(key, self._choosers)
            heads = slice(chooser * each, (chooser + 1) * each)
            group = heads.start * self._heads[1] // self._heads[0]
            start, stop = int(self._start[number]), int(self._stop[number])
            step = max(1, _SCORES // (each * (stop - start)))
            for first in range(self._bounds[place], self._bounds[place + 1], step):
                part = slice(first, min(first + step, self._bounds[place + 1]))
                limits = self._last[part] - start
                hides = bool((limits < stop - start - 1).any())
                yield _Tile(self._rows[part], heads, group, slice(start, stop), limits if hides else None)


def _scores(q: Tensor, keys: Tensor, tile: _Tile, scale: float) -> Tensor:
    """``[queries, heads, keys]``"""
    scores = q @ keys.T * scale
    if tile.limits is not None:
        hidden = torch.arange(keys.shape[0]) > tile.limits[:, None]
        scores = scores.masked_fill(hidden[:, None].to(scores.device), -torch.inf)
    return scores


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: _Tiles,
        layout: SequenceLayout,
        comm: Communicator | None,
        scale: float,
    ) -> Tensor:
        needed = needed_tokens(tiles.tokens(), layout, comm)
        fetched = needed.fetch(torch.cat((k.flatten(1), v.flatten(1)), dim=1), comm)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
        for tile in tiles:
            keys, values = _of_tile(fetched, needed, tile, k, v, wide)
            rows = tile.rows.to(q.device)
            scores = _scores(q[rows, tile.heads].to(wide), keys, tile, scale)
            own = scores.logsumexp(-1)
            before = lse[rows, tile.heads]
            both = torch.logaddexp(before, own)
            result = torch.exp(scores - both[..., None]) @ values
            out[rows, tile.heads] = out[rows, tile.heads] * torch.exp(before - both)[..., None] + result
            lse[rows, tile.heads] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, fetched, out, lse)
        ctx.tiles, ctx.needed, ctx.comm, ctx.scale, ctx.like = tiles, needed, comm, scale, (k[:0], v[:0], k.shape[0])
        return out

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, fetched, out, lse = ctx.saved_tensors
        k, v, rows_of_rank = ctx.like
        wide = lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        d_fetched = torch.zeros(fetched.shape, dtype=wide, device=fetched.device)
        width = k.shape[1] * k.shape[2]
        for tile in ctx.tiles:
            keys, values = _of_tile(fetched, ctx.needed, tile, k, v, wide)
            rows = tile.rows.to(q.device)
            mine, g = q[rows, tile.heads].to(wide), grad[rows, tile.heads].to(wide)
            p = torch.exp(_scores(mine, keys, tile, ctx.scale) - lse[rows, tile.heads][..., None])
            delta = (g * out[rows, tile.heads].to(wide)).sum(-1, keepdim=True)
            ds = p * (g @ values.T - delta) * ctx.scale
            dq[rows, tile.heads] += ds @ keys
            places = ctx.needed.numbers[tile.tokens].to(q.device)
            columns = slice(tile.group * k.shape[2], (tile.group + 1) * k.shape[2])
            d_fetched[places, columns] += torch.einsum("thk,thd->kd", ds, mine)
            columns = slice(width + tile.group * v.shape[2], width + (tile.group + 1) * v.shape[2])
            d_fetched[places, columns] += torch.einsum("thk,thd->kd", p, g)
        total = ctx.needed.scatter_add_grads(d_fetched, rows_of_rank, ctx.comm)
        dk, dv = total[:, :width].reshape(-1, *k.shape[1:]), total[:, width:].reshape(-1, *v.shape[1:])
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None


def _of_tile(
    fetched: Tensor, needed: Needed, tile: _Tile, k: Tensor, v: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``[keys, dim]`` and ``[keys, v_dim]`` of one head."""
    rows = needed.numbers[tile.tokens].to(fetched.device)
    first, width = tile.group * k.shape[2], k.shape[1] * k.shape[2]
    start = width + tile.group * v.shape[2]
    keys, values = fetched[:, first : first + k.shape[2]], fetched[:, start : start + v.shape[2]]
    return keys[rows].to(wide), values[rows].to(wide)  # of this head's columns only

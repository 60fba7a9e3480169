"""Attention over keys that were chosen for each query: work and traffic follow the choice.

From what its queries chose a rank knows which keys and values it needs from whom: these rows are asked for and come
once each, whichever queries chose them, and their gradients go back the same way. The choice is an indexer's
(:func:`hdpcomm.attention.index_top_k`), or the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.arguments import check_whole
from hdpcomm.attention.call_check import agree_on_call, keep_rows
from hdpcomm.attention.indexer import check_qkv, index_top_k, needed_tokens, places_of, rank_in
from hdpcomm.attention.packs import CuSeqlens, as_pack
from hdpcomm.attention.tree_layout import TokenLayout
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["indexed_attention", "selected_attention"]

_GATHERED = 1 << 22
"""Elements of keys that are laid out for a block of queries at a time."""


@untraced
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    chosen: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    scale: float | None = None,
    v_dim: int | None = None,
) -> Tensor:
    """Attention of each query over the keys that were chosen for it. Exact; differentiable once in q, k and v.

    Collective over ``comm``, its backward pass, too. Each key and value that a rank's queries need and it does not hold
    comes to it once, and one gradient of it goes back; gradients are added in fp32 (fp64). Work and traffic follow what
    was chosen, not the length of the sequence.

    Args:
        q: ``[tokens, heads, dim]``, this rank's shard of the pack. k: ``[tokens, kv_heads, dim]``. v: ``[tokens,
            kv_heads, v_dim]``; ``kv_heads`` divides ``heads``. ``None``: values are the first ``v_dim`` elements of the
            keys, which are sent once then (the latents of MLA, with queries that have taken in the keys' weights).
        chosen: int64 ``[tokens, k]``: numbers of tokens in the pack, each at most once a row; -1: none. With a
            slice, numbers in the sequence up to its end.
            :func:`index_top_k` gives it.
        scale: of the scores; default ``dim ** -0.5``.
        v_dim: without ``v`` only.

    Returns: ``[tokens, heads, v_dim]``; 0 where nothing was chosen.

    Raises: InvalidUsage, on all ranks.
    """

    def prepare() -> tuple[tuple[TokenLayout, Tensor, Tensor | None], str, str]:
        pack = as_pack(cu_seqlens)
        layout, k_layout = pack.token_layouts(1 if comm is None else comm.size)
        width = check_whole("selected_attention", "v_dim", v_dim, least=1, most=k.shape[-1]) if v is None else v_dim
        if v is not None and v_dim is not None:
            raise InvalidUsage(f"v_dim={v_dim} was given with v; it is for values that are a part of the keys")
        _check_selected(q, k, k if v is None else v, chosen, layout.rows(rank_in(comm)), k_layout)
        keys, *more = keep_rows(pack, comm, *((k,) if v is None else (k, v)))[0]
        values = width if v is None else tuple(v.shape[1:])
        facts = f"{layout.facts[0]} {tuple(k.shape[1:])} {values} {q.dtype} {scale}"
        given = k_layout, keys, more[0] if more else None
        return given, facts, f"k {tuple(k.shape[1:])}, v {values}; {layout.facts[1]}"

    layout, keys, values = agree_on_call(comm, "selected_attention", careful=True, device=q.device, prepare=prepare)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    return _Selected.apply(q, keys, values, v_dim, chosen, layout, comm, factor)  # type: ignore[no-any-return, no-untyped-call]


def indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    *,
    top_k: int,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    scale: float | None = None,
) -> Tensor:
    """:func:`selected_attention` over what :func:`index_top_k` chooses; see both. Collective over ``comm``.

    The indexer gets no gradient from it.

    Examples:
        >>> import torch
        >>> from hdpcomm.attention import indexed_attention
        >>> q, k, v = torch.randn(3, 5, 2, 8)
        >>> index_q, index_k, weights = torch.randn(5, 4, 8), torch.randn(5, 8), torch.rand(5, 4)
        >>> indexed_attention(q, k, v, index_q, index_k, weights, top_k=2, comm=None, cu_seqlens=[0, 5]).shape
        torch.Size([5, 2, 8])
    """
    chosen = index_top_k(index_q, index_k, weights, top_k=top_k, comm=comm, cu_seqlens=cu_seqlens)
    return selected_attention(q, k, v, chosen, comm=comm, cu_seqlens=cu_seqlens, scale=scale)


def _check_selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, rows: int, keys: TokenLayout) -> None:
    """``keys``: that may be chosen."""
    check_qkv(q, k, v, rows)
    owner = places_of(keys).owner
    tokens = len(owner)
    if chosen.ndim != 2 or chosen.shape[0] != q.shape[0] or chosen.dtype != torch.int64:
        raise InvalidUsage(f"expected chosen [{q.shape[0]} tokens, k], int64; got {tuple(chosen.shape)} {chosen.dtype}")
    if chosen.is_meta:  # has no numbers
        return
    if chosen.numel() and not -1 <= int(chosen.min()) <= int(chosen.max()) < tokens:
        raise InvalidUsage(
            f"chosen has numbers from {int(chosen.min())} to {int(chosen.max())}; the pack has {tokens} tokens"
        )
    if bool((owner < 0).any()) and bool((owner[chosen[chosen >= 0].cpu()] < 0).any()):
        raise InvalidUsage("chosen has tokens of other branches, which this slice of a tree does not see")


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        v_dim: int | None,
        chosen: Tensor,
        layout: TokenLayout,
        comm: Communicator | None,
        scale: float,
    ) -> Tensor:
        tokens = places_of(layout).owner.add(1).nonzero()[:, 0] if chosen.is_meta else torch.unique(chosen[chosen >= 0])
        needed = needed_tokens(tokens, layout, comm)
        places = needed.numbers.to(chosen.device)[chosen]
        own = k.flatten(1) if v is None else torch.cat((k.flatten(1), v.flatten(1)), dim=1)
        like = k.shape[1:], None if v is None else v.shape[1:], v_dim
        fetched = needed.fetch(own, comm)
        out, lse = _attend(q, *_parts(fetched, like), places, scale)
        ctx.save_for_backward(q, fetched, places, out, lse)
        ctx.needed, ctx.comm, ctx.scale, ctx.like, ctx.rows = needed, comm, scale, like, k.shape[0]
        return out

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, fetched, places, out, lse = ctx.saved_tensors
        dq, d_keys, d_values = _attend_backward(q, *_parts(fetched, ctx.like), places, out, lse, grad, ctx.scale)
        k_shape, v_shape, v_dim = ctx.like
        if v_shape is None:
            d_keys[..., :v_dim] += d_values
            sent = d_keys.flatten(1)
        else:
            sent = torch.cat((d_keys.flatten(1), d_values.flatten(1)), dim=1)
        total = ctx.needed.scatter_add_grads(sent, ctx.rows, ctx.comm)
        width = k_shape.numel()
        dk = total[:, :width].reshape(-1, *k_shape).to(q.dtype)
        dv = None if v_shape is None else total[:, width:].reshape(-1, *v_shape).to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None, None


def _parts(buffer: Tensor, like: tuple[torch.Size, torch.Size | None, int | None]) -> tuple[Tensor, Tensor]:
    """Keys ``[rows, kv_heads, dim]`` and values of rows that have come. ``like``: what a row has of keys, of values
    beside them, and of values in them."""
    k_shape, v_shape, v_dim = like
    width = k_shape.numel()
    keys = buffer[:, :width].reshape(-1, *k_shape)
    return keys, keys[..., :v_dim] if v_shape is None else buffer[:, width:].reshape(-1, *v_shape)


def _blocks(places: Tensor, row: int) -> Iterator[slice]:
    """Queries whose keys are laid out at a time; ``row``: elements of a key and value."""
    step = max(1, _GATHERED // max(1, places.shape[1] * row))
    for start in range(0, places.shape[0], step):
        yield slice(start, min(start + step, places.shape[0]))
        if places.is_meta:  # the others take no more memory
            break


def _attend(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(results, log-sum-exp ``[tokens, heads]``)"""
    heads = q.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(q.shape[0], heads, values.shape[2])
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    if not keys.shape[0]:
        return out, lse
    for block in _blocks(places, keys[0].numel() + values[0].numel()):
        scores, absent, _ = _block_scores(q[block], keys, places[block], scale, wide)
        own = scores.logsumexp(-1)
        p = torch.exp(scores - own[..., None]).masked_fill(absent, 0.0)
        got = torch.einsum("bgrk,bkgd->bgrd", p, values[places[block].clamp(min=0)].to(wide))
        out[block] = got.reshape(got.shape[0], heads, -1).to(q.dtype)
        lse[block] = own.reshape(-1, heads)
    return out, lse


def _block_scores(
    q: Tensor, keys: Tensor, rows: Tensor, scale: float, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[queries, kv_heads, heads / kv_heads, k]``, which are absent, and the keys ``[queries, k, kv_heads,
    dim]``."""
    laid = keys[rows.clamp(min=0)].to(wide)
    mine = _grouped(q.to(wide), keys.shape[1])
    scores = torch.einsum("bgrd,bkgd->bgrk", mine, laid) * scale
    absent = (rows < 0)[:, None, None, :]
    return scores.masked_fill(absent, -torch.inf), absent, laid


def _attend_backward(
    q: Tensor, keys: Tensor, values: Tensor, places: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of the keys and values that have come, in the wide type."""
    wide = lse.dtype
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    d_keys, d_values = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (keys, values))
    if not keys.shape[0]:
        return dq, d_keys, d_values
    groups = keys.shape[1]
    for block in _blocks(places, keys[0].numel() + values[0].numel()):
        scores, absent, laid = _block_scores(q[block], keys, places[block], scale, wide)
        own = _grouped(lse[block], groups)
        p = torch.exp(scores - own[..., None]).masked_fill(absent, 0.0)
        rows = places[block].clamp(min=0)
        g = _grouped(grad[block].to(wide), groups)
        result = _grouped(out[block].to(wide), groups)
        dp = torch.einsum("bgrd,bkgd->bgrk", g, values[rows].to(wide))
        ds = p * (dp - (g * result).sum(-1, keepdim=True)) * scale
        dq[block] = torch.einsum("bgrk,bkgd->bgrd", ds, laid).flatten(1, 2)
        mine = _grouped(q[block].to(wide), groups)
        flat = rows.flatten()
        d_keys.index_add_(0, flat, torch.einsum("bgrk,bgrd->bkgd", ds, mine).flatten(0, 1))
        d_values.index_add_(0, flat, torch.einsum("bgrk,bgrd->bkgd", p, g).flatten(0, 1))
    return dq, d_keys, d_values


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[tokens, heads, ...]`` as ``[tokens, kv_heads, heads / kv_heads, ...]``."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])

"""Attention over keys that were chosen for each query: work and traffic follow the choice.

From what its queries chose a rank knows which keys and values it needs from whom: these rows are asked for and come
once each, whichever queries chose them, and their gradients go back the same way. The choice is an indexer's
(:func:`hdpcomm.attention.index_top_k`), or the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hdpcomm.attention.call_check import agree_on_call
from hdpcomm.attention.indexer import TYPES, index_top_k, layout_of_pack, places_of, rank_in
from hdpcomm.attention.layout import CuSeqlens, Layout
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["indexed_attention", "selected_attention"]

_GATHERED = 1 << 22
"""Elements of keys that are laid out for a block of queries at a time."""


@untraced
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    scale: float | None = None,
) -> Tensor:
    """Attention of each query over the keys that were chosen for it. Exact; differentiable once in q, k and v.

    Collective over ``comm``, its backward pass, too. Each key and value that a rank's queries need and it does not hold
    comes to it once, and one gradient of it goes back; gradients are added in fp32 (fp64). Work and traffic follow what
    was chosen, not the length of the sequence.

    Args:
        q: ``[tokens, heads, dim]``, this rank's shard of the pack. k: ``[tokens, kv_heads, dim]``. v: ``[tokens,
            kv_heads, v_dim]``; ``kv_heads`` divides ``heads``.
        chosen: int64 ``[tokens, k]``: numbers of tokens in the pack, each at most once a row; -1: none.
            :func:`index_top_k` gives it.
        scale: of the scores; default ``dim ** -0.5``.

    Returns: ``[tokens, heads, v_dim]``; 0 where nothing was chosen.

    Raises: InvalidUsage, on all ranks.
    """

    def prepare() -> tuple[Layout, str, str]:
        layout = layout_of_pack(cu_seqlens, comm)
        _check_selected(q, k, v, chosen, layout, rank_in(comm))
        facts = f"{layout.facts[0]} {tuple(k.shape[1:])} {tuple(v.shape[1:])} {q.dtype} {scale}"
        return layout, facts, f"k {tuple(k.shape[1:])}, v {tuple(v.shape[1:])}; {layout.facts[1]}"

    layout = agree_on_call(comm, "selected_attention", careful=True, device=q.device, prepare=prepare)
    return _Selected.apply(q, k, v, chosen, layout, comm, q.shape[2] ** -0.5 if scale is None else scale)  # type: ignore[no-any-return, no-untyped-call]


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

    Example:
        >>> import torch
        >>> from hdpcomm.attention import indexed_attention
        >>> q, k, v = torch.randn(3, 5, 2, 8)
        >>> index_q, index_k, weights = torch.randn(5, 4, 8), torch.randn(5, 8), torch.rand(5, 4)
        >>> indexed_attention(q, k, v, index_q, index_k, weights, top_k=2, comm=None, cu_seqlens=[0, 5]).shape
        torch.Size([5, 2, 8])
    """
    chosen = index_top_k(index_q, index_k, weights, top_k=top_k, comm=comm, cu_seqlens=cu_seqlens)
    return selected_attention(q, k, v, chosen, comm=comm, cu_seqlens=cu_seqlens, scale=scale)


def _check_selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, layout: Layout, rank: int) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, chosen {tuple(chosen.shape)}"
    if (q.ndim, k.ndim, v.ndim, chosen.ndim) != (3, 3, 3, 2):
        raise InvalidUsage(
            f"expected q and k [tokens, heads, dim], v [tokens, kv_heads, v_dim] and chosen [tokens, k]: {shapes}"
        )
    rows = layout.rows(rank)
    heads = k.shape[1] == v.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2] > 0
    if not heads or not q.shape[0] == k.shape[0] == v.shape[0] == chosen.shape[0] == rows:
        raise InvalidUsage(f"these shapes do not belong together, or to {rows} local tokens: {shapes}")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in TYPES or chosen.dtype != torch.int64:
        raise InvalidUsage(
            f"q, k and v must have one type and chosen int64; got {q.dtype}, {k.dtype}, {v.dtype}, {chosen.dtype}"
        )
    if chosen.numel() and not -1 <= int(chosen.min()) <= int(chosen.max()) < layout.tokens:
        raise InvalidUsage(
            f"chosen has numbers from {int(chosen.min())} to {int(chosen.max())}; the pack has {layout.tokens} tokens"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Needed:
    """Which rows a rank's queries need, and who needs its rows.

    Attributes:
        places: ``[tokens, k]``: row of the buffer; -1: none.
        asked: by rank, the rows of that rank that come from it, in the order of the buffer.
        given: by rank, the own rows that go to it.
    """

    places: Tensor
    asked: list[Tensor]
    given: list[Tensor]


def _needed(chosen: Tensor, layout: Layout, comm: Communicator | None) -> _Needed:
    """Collective: ranks tell each other what they need."""
    places, rank = places_of(layout), rank_in(comm)
    tokens = torch.unique(chosen[chosen >= 0]).cpu()
    order = torch.argsort(places.owner[tokens], stable=True)  # by owner, then by token
    tokens = tokens[order]
    counts = torch.bincount(places.owner[tokens], minlength=layout.size)
    asked = list(torch.split(places.row[tokens], counts.tolist()))
    given = [asked[rank]]
    if comm is not None and comm.size > 1:
        theirs = torch.empty_like(counts)
        comm.all_to_all(theirs, counts)
        flat = torch.empty(int(theirs.sum()), dtype=torch.int64)
        comm.all_to_all(flat, torch.cat(asked), out_splits=theirs.tolist(), in_splits=counts.tolist())
        given = list(torch.split(flat, theirs.tolist()))
    numbers = torch.full((layout.tokens + 1,), -1, dtype=torch.int64)
    numbers[tokens] = torch.arange(len(tokens))
    return _Needed(numbers.to(chosen.device)[chosen], asked, given)


def _swap(parts: list[Tensor], counts: list[int], comm: Communicator | None) -> Tensor:
    """Sends the parts to the ranks and gives what they send, one after the other: ``[sum of counts, width]``."""
    if comm is None or comm.size == 1:
        return parts[0]
    out = parts[0].new_empty(sum(counts), parts[0].shape[1])
    width = out.shape[1]
    comm.all_to_all(
        out.view(-1),
        torch.cat(parts).view(-1),
        out_splits=[count * width for count in counts],
        in_splits=[len(part) * width for part in parts],
    )
    return out


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor,
        layout: Layout,
        comm: Communicator | None,
        scale: float,
    ) -> Tensor:
        needed = _needed(chosen, layout, comm)
        both = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
        buffer = _swap([both[rows.to(k.device)] for rows in needed.given], [len(rows) for rows in needed.asked], comm)
        keys, values = _parts(buffer, k, v)
        out, lse = _attend(q, keys, values, needed.places, scale)
        ctx.save_for_backward(q, keys, values, needed.places, out, lse)
        ctx.needed, ctx.comm, ctx.scale, ctx.like = needed, comm, scale, (k.shape, v.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, keys, values, places, out, lse = ctx.saved_tensors
        needed: _Needed = ctx.needed
        dq, d_keys, d_values = _attend_backward(q, keys, values, places, out, lse, grad, ctx.scale)
        sent = torch.cat((d_keys.flatten(1), d_values.flatten(1)), dim=1)
        counts = [len(rows) for rows in needed.given]
        came = _swap(list(torch.split(sent, [len(rows) for rows in needed.asked])), counts, ctx.comm)
        k_shape, v_shape = ctx.like
        total = sent.new_zeros(k_shape[0], sent.shape[1])
        for rows, part in zip(needed.given, torch.split(came, counts), strict=True):  # in the order of ranks
            total.index_add_(0, rows.to(total.device), part)
        width = k_shape[1] * k_shape[2]
        dk, dv = total[:, :width].reshape(k_shape), total[:, width:].reshape(v_shape)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None


def _parts(buffer: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[rows, kv_heads, dim]`` and values of rows that have come."""
    width = k.shape[1] * k.shape[2]
    return buffer[:, :width].reshape(-1, *k.shape[1:]), buffer[:, width:].reshape(-1, *v.shape[1:])


def _blocks(places: Tensor, row: int) -> Iterator[slice]:
    """Queries whose keys are laid out at a time; ``row``: elements of a key and value."""
    step = max(1, _GATHERED // max(1, places.shape[1] * row))
    for start in range(0, places.shape[0], step):
        yield slice(start, min(start + step, places.shape[0]))


def _attend(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(results, log-sum-exp ``[tokens, heads]``)"""
    heads = q.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(q.shape[0], heads, values.shape[2])
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    if not keys.shape[0]:
        return out, lse
    for block in _blocks(places, keys[0].numel() + values[0].numel()):
        scores, absent, _ = _block_scores(q, keys, places, block, scale, wide)
        own = scores.logsumexp(-1)
        p = torch.exp(scores - own[..., None]).masked_fill(absent, 0.0)
        got = torch.einsum("bgrk,bkgd->bgrd", p, values[places[block].clamp(min=0)].to(wide))
        out[block] = got.reshape(got.shape[0], heads, -1).to(q.dtype)
        lse[block] = own.reshape(-1, heads)
    return out, lse


def _block_scores(
    q: Tensor, keys: Tensor, places: Tensor, block: slice, scale: float, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[queries, kv_heads, heads / kv_heads, k]``, which are absent, and the keys ``[queries, k, kv_heads,
    dim]``."""
    rows = places[block]
    laid = keys[rows.clamp(min=0)].to(wide)
    mine = _grouped(q[block].to(wide), keys.shape[1])
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
        scores, absent, laid = _block_scores(q, keys, places, block, scale, wide)
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

"""Attention over keys that were chosen for each query: work and traffic follow the choice.

From what its queries chose a rank knows which keys and values it needs from whom: these rows are asked for and come
once each, whichever queries chose them, and their gradients go back the same way. The choice is the caller's, or an
indexer's (:func:`index_top_k`): the exact top-k of its scores over whole sequences that several ranks share.

The indexer's keys are small and travel the ring; each query keeps the best of all blocks that have passed, so a rank
holds ``local tokens x k`` entries and one block. Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.arguments import check_whole
from hdpcomm.attention.call_check import agree_on_call, check_alike, keep_rows
from hdpcomm.attention.packs import CuSeqlens, as_pack
from hdpcomm.attention.tree_layout import TokenLayout
from hdpcomm.comm import Communicator
from hdpcomm.comm.tensors import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import without_second_derivative
from hdpcomm.plan.tree import Tree

__all__ = ["index_top_k", "indexed_attention", "selected_attention"]


_BLOCK = 512
"""Queries, and keys, that are scored at a time."""
_LOW = (1 << 32) - 1
_LOWEST = (-8388608) ^ 0x7FFFFFFF
"""Sort key of -inf."""
_NONE = 1 << 62
"""Number of a key that is none; behind all others."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the tokens of a pack are.

    Attributes:
        owner, row: of each token of the pack, the rank and its row there; -1 of tokens that a slice does not see.
        tokens: by rank, the tokens of its rows.
        runs: by rank, its rows of each sequence, or of each segment of a tree.
        starts: first token of each sequence or segment.
        tree: ``None``: sequences, which see nothing of each other.

    For the queries of a slice, tokens are numbers in the whole sequence or tree; owner and row begin with the slice.
    """

    owner: Tensor
    row: Tensor
    tokens: tuple[Tensor, ...]
    runs: tuple[dict[int, list[slice]], ...]
    starts: list[int]
    tree: Tree | None

    def pairs(self, rank: int, others: Places, source: int) -> Iterator[tuple[slice, slice]]:
        """Rows of ``rank`` and rows of keys on ``source`` that they see, up to the token itself."""
        keys = others.runs[source]
        for segment, queries in self.runs[rank].items():
            for seen in (segment,) if self.tree is None else self.tree.path(segment):
                yield from itertools.product(queries, keys.get(seen, ()))


@lru_cache(maxsize=64)
def places_of(layout: TokenLayout) -> Places:
    """Made once a pack. Local."""
    total = int((layout.source + layout.count).max(initial=0))
    owner = torch.full((total,), -1, dtype=torch.int64)
    row = torch.zeros_like(owner)
    tokens = []
    for rank in range(layout.size):
        segments = layout.segments(rank)
        own = [torch.arange(start, start + count) for _, start, count in segments.tolist()]
        tokens.append(torch.cat(own) if own else torch.empty(0, dtype=torch.int64))
        owner[tokens[-1]] = rank
        row[tokens[-1]] = torch.arange(len(tokens[-1]))
    runs = tuple(layout.own_runs(rank) for rank in range(layout.size))
    if first := layout.first_token:
        tokens = [own + first for own in tokens]
    return Places(owner, row, tuple(tokens), runs, layout.firsts.tolist(), layout.tree)


@dataclass(frozen=True, slots=True, eq=False)
class Needed:
    """Which rows a rank needs, and who needs its rows.

    Attributes:
        numbers: of each token of the pack, the row of what comes; -1: it does not. One more entry, -1.
        recv_rows: by rank, the rows of that rank that come from it, in their order.
        send_rows: by rank, the own rows that go to it.
    """

    numbers: Tensor
    recv_rows: list[Tensor]
    send_rows: list[Tensor]

    def fetch(self, own: Tensor, comm: Communicator | None) -> Tensor:
        """The rows of ``[tokens, width]`` that are needed. Collective."""
        return _swap(
            [own[rows.to(own.device)] for rows in self.send_rows], [len(rows) for rows in self.recv_rows], comm
        )

    def scatter_add_grads(self, sent: Tensor, rows: int, comm: Communicator | None) -> Tensor:
        """``[rows, width]``: what all ranks have for this one's rows, added in the order of ranks. Collective."""
        counts = [len(each) for each in self.send_rows]
        arrived = _swap(list(torch.split(sent, [len(each) for each in self.recv_rows])), counts, comm)
        total = sent.new_zeros(rows, sent.shape[1])
        for own, part in zip(self.send_rows, torch.split(arrived, counts), strict=True):
            total.index_add_(0, own.to(total.device), part)
        return total


def needed_tokens(tokens: Tensor, layout: TokenLayout, comm: Communicator | None) -> Needed:
    """Rows that this rank fetches from each rank for these tokens of a pack, which rise. Collective: ranks tell each
    other what they need."""
    places = places_of(layout)
    owner, row = places.owner, places.row
    rank, size = rank_in(comm), 1 if comm is None else comm.size
    wanted = tokens.cpu()
    order = torch.argsort(owner[wanted], stable=True)  # by owner, then by number
    wanted = wanted[order]
    counts = torch.bincount(owner[wanted], minlength=size)
    recv_rows = list(torch.split(row[wanted], counts.tolist()))
    send_rows = [recv_rows[rank]]
    if comm is not None and comm.size > 1:
        theirs = torch.empty_like(counts)
        comm.all_to_all(theirs, counts)
        flat = torch.empty(int(theirs.sum()), dtype=torch.int64)
        comm.all_to_all(flat, torch.cat(recv_rows), out_splits=theirs.tolist(), in_splits=counts.tolist())
        send_rows = list(torch.split(flat, theirs.tolist()))
    numbers = torch.full((len(owner) + 1,), -1, dtype=torch.int64)
    numbers[wanted] = torch.arange(len(wanted))
    return Needed(numbers, recv_rows, send_rows)


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


@untraced
@torch.no_grad()
def index_top_k(
    index_q: Tensor, index_k: Tensor, weights: Tensor, *, top_k: int, comm: Communicator | None, cu_seqlens: CuSeqlens
) -> Tensor:
    """The ``top_k`` keys of the same sequence, at or before each token, with the highest index scores
    ``sum_h weights[t, h] * relu(index_q[t, h] . index_k[s])``; of equal ones the first. In a tree those on its way from
    the root; in a slice those of earlier slices, too, whose index keys were kept.

    Collective over ``comm``; each rank gives its shard of the pack (:func:`hdpcomm.attention.shard`). Scores are
    computed in fp32 (fp64 of fp64 inputs); the same values give the same choice on any number of ranks only if the
    products round alike, as with fp64. Nothing has a gradient.

    Args:
        index_q: ``[tokens, heads, dim]``.
        index_k: ``[tokens, dim]``.
        weights: ``[tokens, heads]``, with any scale in it.
        top_k: at least 1.

    Returns: int64 ``[tokens, min(top_k, longest sequence)]``: numbers of tokens in the pack, ascending, -1 at the end
        where there are fewer; of a slice, in the whole sequence.

    Raises: InvalidUsage, on all ranks: shapes or types that do not belong together, or a mask.
    """

    def prepare() -> tuple[tuple[TokenLayout, TokenLayout, Tensor, int], str, str]:
        check_whole("index_top_k", "top_k", top_k, least=1)
        pack = as_pack(cu_seqlens)
        layouts = pack.token_layouts(1 if comm is None else comm.size)
        layout = layouts[0]
        check_index(index_q, index_k, weights, layout.rows(rank_in(comm)))
        (keys,), _ = keep_rows(pack, comm, index_k.contiguous())
        facts = f"{layout.facts[0]} {top_k} {tuple(index_q.shape[1:])} {index_q.dtype}"
        return (
            (*layouts, keys, min(top_k, pack.longest)),
            facts,
            f"top_k {top_k}, index keys of {index_k.shape[-1]}; {layout.facts[1]}",
        )

    layout, k_layout, own_keys, count = agree_on_call(
        comm, "index_top_k", careful=True, device=index_q.device, prepare=prepare
    )
    places, k_places, rank = places_of(layout), places_of(k_layout), rank_in(comm)
    wide = torch.float64 if index_q.dtype == torch.float64 else torch.float32
    best = (_Best if wide == torch.float64 else _Packed)(index_q.shape[0], count, index_q.device)
    own = places.tokens[rank].to(index_q.device)
    for source, keys in _round_the_ring(own_keys, comm, [len(each) for each in k_places.tokens]):
        theirs = k_places.tokens[source].to(index_q.device)
        blocks = _blocks_seen(places, k_places, rank, source)
        for queries, block in itertools.islice(blocks, 1) if index_q.is_meta else blocks:  # there all take as much
            scores = _scores(index_q[queries].to(wide), keys[block].to(wide), weights[queries].to(wide))
            scores.masked_fill_(theirs[block] > own[queries, None], -torch.inf)
            best.keep(queries, scores, theirs[block])
    chosen = best.tokens().sort(dim=1).values
    return chosen.masked_fill_(chosen == _NONE, -1)


def _blocks_seen(places: Places, k_places: Places, rank: int, source: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows of ``rank``, and of keys on ``source`` of which they see some."""
    own, theirs = places.tokens[rank], k_places.tokens[source]
    for mine, others in places.pairs(rank, k_places, source):
        for first in range(mine.start, mine.stop, _BLOCK):
            last = min(first + _BLOCK, mine.stop)
            for start in range(others.start, others.stop, _BLOCK):
                if theirs[start] > own[last - 1]:  # rows of a sequence rise
                    break
                yield slice(first, last), slice(start, min(start + _BLOCK, others.stop))


def _scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``[queries, keys]``"""
    products = torch.relu(q.transpose(0, 1) @ k.T)  # [heads, queries, keys]
    return (products * weights.T[:, :, None]).sum(0)


class _Best:
    """The best keys so far of each query, in the order of scores, then of tokens."""

    def __init__(self, queries: int, count: int, device: torch.device) -> None:
        self._values = torch.full((queries, count), -torch.inf, dtype=torch.float64, device=device)
        self._tokens = torch.full((queries, count), _NONE, dtype=torch.int64, device=device)

    def keep(self, queries: slice, scores: Tensor, tokens: Tensor) -> None:
        """Merges a block of scores ``[queries, keys]``; -inf: not to be chosen."""
        values = torch.cat((self._values[queries], scores), dim=1)
        numbers = torch.cat((self._tokens[queries], tokens.expand(scores.shape)), dim=1)
        order = numbers.argsort(dim=1)
        values, numbers = values.gather(1, order), numbers.gather(1, order)
        order = values.sort(dim=1, descending=True, stable=True).indices[:, : self._values.shape[1]]
        self._values[queries], self._tokens[queries] = values.gather(1, order), numbers.gather(1, order)

    def tokens(self) -> Tensor:
        return torch.where(torch.isneginf(self._values), _NONE, self._tokens)


class _Packed:
    """Sort key of fp32 scores: score and token as one whole number, of which no two are equal, so that one ``topk``
    does. The bits of a float rise with it, but for negative ones, whose other bits are turned; low tokens are last."""

    def __init__(self, queries: int, count: int, device: torch.device) -> None:
        self._keys = torch.full((queries, count), torch.iinfo(torch.int64).min, device=device)

    def keep(self, queries: slice, scores: Tensor, tokens: Tensor) -> None:
        bits = (scores + 0.0).view(torch.int32)  # no -0.0
        rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
        keys = torch.cat((self._keys[queries], (rising << 32) + (_LOW - tokens)), dim=1)
        self._keys[queries] = keys.topk(self._keys.shape[1], dim=1, sorted=False).values

    def tokens(self) -> Tensor:
        return torch.where(self._keys >> 32 > _LOWEST, _LOW - (self._keys & _LOW), _NONE)


def _round_the_ring(own: Tensor, comm: Communicator | None, rows: list[int]) -> Iterator[tuple[int, Tensor]]:
    """(rank, its rows) of all ranks, this one's first; the next block is under way while one is looked at."""
    if comm is None or comm.size == 1:
        yield 0, own
        return
    block, size = own, comm.size
    for step in range(size):
        source = (comm.rank - step) % size
        work, arriving = None, None
        if step + 1 < size:
            arriving = own.new_empty(rows[(source - 1) % size], *own.shape[1:])
            work = comm.exchange([(block, (comm.rank + 1) % size)], [(arriving, (comm.rank - 1) % size)], async_op=True)
        yield source, block
        if work is not None and arriving is not None:
            work.wait()
            block = arriving


def check_index(index_q: Tensor, index_k: Tensor, weights: Tensor, rows: int) -> None:
    """Raises: InvalidUsage for tensors of an indexer that do not belong together, or to so many local tokens."""
    shapes = f"index_q {tuple(index_q.shape)}, index_k {tuple(index_k.shape)}, weights {tuple(weights.shape)}"
    if (index_q.ndim, index_k.ndim, weights.ndim) != (3, 2, 2):
        raise InvalidUsage(
            f"expected index_q [tokens, heads, dim], index_k [tokens, dim], weights [tokens, heads]: {shapes}"
        )
    fits = index_q.shape[2] == index_k.shape[1] and weights.shape[1] == index_q.shape[1]
    if not fits or not index_q.shape[0] == index_k.shape[0] == weights.shape[0] == rows:
        raise InvalidUsage(f"these shapes do not belong together, or to {rows} local tokens: {shapes}")
    check_alike({"index_q": index_q, "index_k": index_k})


def check_qkv(q: Tensor, k: Tensor, v: Tensor, rows: int) -> None:
    """Raises: InvalidUsage for tensors that do not belong together, or to so many local tokens."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise InvalidUsage(f"expected q and k [tokens, heads, dim] and v [tokens, kv_heads, v_dim]: {shapes}")
    heads = k.shape[1] == v.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2] > 0
    if not heads or not q.shape[0] == k.shape[0] == v.shape[0] == rows:
        raise InvalidUsage(f"these shapes do not belong together, or to {rows} local tokens: {shapes}")
    check_alike({"q": q, "k": k, "v": v})


def rank_in(comm: Communicator | None) -> int:
    """This rank's position; without a communicator it is alone."""
    return 0 if comm is None else comm.rank


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

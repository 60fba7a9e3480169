"""Native sparse attention (NSA): compressed, selected and near keys, on any ranks.

Source: NSA (arXiv 2502.11089), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hdpcomm.arguments import check_type, check_whole
from hdpcomm.attention.api import ring_attention
from hdpcomm.attention.call_check import agree_on_call
from hdpcomm.attention.chosen_blocks import PackBlocks, block_attention, pack_blocks
from hdpcomm.attention.fetched_rows import fetch_rows, needed_rows, needed_tokens
from hdpcomm.attention.indexer import check_qkv, layout_of_pack, places_of, rank_in
from hdpcomm.attention.layout import SequenceLayout
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["NSABlocks", "nsa_attention"]

_SCORES = 1 << 22
"""Elements of scores that are there at a time."""
Compress: TypeAlias = Callable[[Tensor], Tensor]
Branches: TypeAlias = "Tensor | tuple[Tensor, Tensor, Tensor]"


@dataclass(frozen=True, slots=True)
class NSABlocks:
    """The sizes of :func:`nsa_attention`; the defaults are the paper's.

    Attributes:
        length, stride: tokens of a block that is compressed, and from one to the next; ``stride`` divides ``length``.
        selected: tokens of a block that is selected; a multiple of ``stride``.
        top_k: blocks that a query selects, these included: the ``first`` ones, and the ``local`` last ones, of which
            its own is one.
        window: keys of the near branch, the query's own included.
    """

    length: int = 32
    stride: int = 16
    selected: int = 64
    top_k: int = 16
    first: int = 1
    local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "first" else 1
            check_whole("NSABlocks", field.name, getattr(self, field.name), least=least)
        if self.length % self.stride or self.selected % self.stride or self.top_k < self.first + self.local:
            raise InvalidUsage(f"{self}: stride must divide length and selected, and top_k be at least first + local")


@untraced
def nsa_attention(
    q: Tensor,
    k: Branches,
    v: Branches,
    gates: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    blocks: NSABlocks | None = None,
    compress: tuple[Compress, Compress] | None = None,
    scale: float | None = None,
) -> Tensor:
    """The gated sum of three attentions: over compressed blocks of keys, over the blocks that these scores select, and
    over the last keys. Exact; differentiable once in q, k, v, the gates and what compresses.

    Collective over ``comm``, its backward pass, too. Compressed keys are made once each, on the rank of their block's
    first token, and come to the ranks whose queries see them; the other branches are :func:`block_attention` and
    :func:`ring_attention`. The heads of a group select the same blocks, by the sum of their probabilities (equations 9
    and 10); of equal blocks the first. The selection has no gradient.

    Args:
        q: ``[tokens, heads, dim]``, this rank's shard of the pack.
        k: ``[tokens, kv_heads, dim]``, or the compressed, selected and near branches' own.
        v: ``[tokens, kv_heads, v_dim]``, likewise.
        gates: ``[tokens, heads, 3]``, the weight of each branch.
        compress: what makes one key, and one value, of a block: ``[blocks, length, kv_heads, dim]`` to ``[blocks,
            kv_heads, dim]``. Default: the mean. Parameters get the gradient of this rank's blocks, also of none.
        scale: of the scores; default ``dim ** -0.5``.

    Returns: ``[tokens, heads, v_dim]``. Raises: InvalidUsage, on all ranks.

    Example:
        >>> import torch
        >>> from hdpcomm.attention import NSABlocks, nsa_attention
        >>> q, k, v = torch.randn(3, 50, 2, 8)
        >>> sizes = NSABlocks(length=8, stride=4, selected=8, top_k=4, window=16)
        >>> nsa_attention(q, k, v, torch.rand(50, 2, 3), comm=None, cu_seqlens=[0, 50], blocks=sizes).shape
        torch.Size([50, 2, 8])
    """
    sizes = NSABlocks() if blocks is None else blocks
    keys, values = (tuple(x) if isinstance(x, tuple | list) else (x, x, x) for x in (k, v))

    def prepare() -> tuple[SequenceLayout, str, str]:
        check_type("nsa_attention", "blocks", sizes, NSABlocks)
        if len(keys) != 3 or len(values) != 3:
            raise InvalidUsage(
                f"{len(keys)} keys and {len(values)} values were given; expected one each, or one for each of the "
                "branches: compressed, selected, near"
            )
        layout = layout_of_pack(cu_seqlens, comm)
        for own_k, own_v in zip(keys, values, strict=True):
            check_qkv(q, own_k, own_v, layout.rows(rank_in(comm)))
        if gates.shape != (*q.shape[:2], 3):
            raise InvalidUsage(f"expected gates {(*q.shape[:2], 3)}, one for each branch; got {tuple(gates.shape)}")
        facts = f"{tuple(keys[0].shape[1:])} {tuple(values[0].shape[1:])} {q.dtype} {scale} {sizes}"
        return layout, f"{layout.facts[0]} {facts}", f"k, v, type, scale, blocks: {facts}; {layout.facts[1]}"

    layout = agree_on_call(comm, "nsa_attention", careful=True, device=q.device, prepare=prepare)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    compressed, numbers = _compressed(keys[0], values[0], layout, comm, sizes, compress or (_mean, _mean))
    views = _Views(layout, rank_in(comm), sizes, numbers)
    far, chosen = _CompressedAttention.apply(q, *compressed, views, factor)  # type: ignore[no-untyped-call]
    pack: dict[str, Any] = {"comm": comm, "cu_seqlens": cu_seqlens, "scale": factor}
    selected = block_attention(q, keys[1], values[1], chosen, block=sizes.selected, **pack)
    near = ring_attention(*(x.contiguous() for x in (q, keys[2], values[2])), window=sizes.window, **pack)
    out: Tensor = gates[..., :1] * far + gates[..., 1:2] * selected + gates[..., 2:] * near
    return out


def _mean(block: Tensor) -> Tensor:
    return block.mean(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Compressions:
    """The compressed blocks of a pack.

    Attributes:
        base: of each sequence, its first one; one more entry, their number.
        start: the first token in the pack.
        owner, row: the rank that makes it, and its row there.
    """

    base: Tensor
    start: Tensor
    owner: Tensor
    row: Tensor


@lru_cache(maxsize=64)
def _compressions(layout: SequenceLayout, length: int, stride: int) -> _Compressions:
    lengths = layout.lengths
    counts = np.where(lengths >= length, (lengths - length) // stride + 1, 0)
    base = np.concatenate(([0], np.cumsum(counts)))
    inside = (np.arange(base[-1]) - np.repeat(base[:-1], counts)) * stride
    start = torch.from_numpy(np.repeat(np.cumsum(lengths) - lengths, counts) + inside)
    owner = places_of(layout).owner[start]
    row = torch.empty_like(owner)
    for rank in range(layout.size):
        mine = owner == rank
        row[mine] = torch.arange(int(mine.sum()))
    return _Compressions(torch.from_numpy(base), start, owner, row)


def _compressed(
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    comm: Communicator | None,
    sizes: NSABlocks,
    compress: tuple[Compress, Compress],
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(compressed keys and values of all blocks that this rank's queries see, the row of each block of the pack).
    Collective."""
    rank, every = rank_in(comm), _compressions(layout, sizes.length, sizes.stride)
    starts = every.start[every.owner == rank]
    tokens = starts[:, None] + torch.arange(sizes.length)
    near = needed_tokens(torch.unique(tokens), layout, comm)
    fetched = fetch_rows(torch.cat((k.flatten(1), v.flatten(1)), dim=1), near, comm)
    laid = fetched[near.numbers[tokens].to(fetched.device)]
    width = k.shape[1] * k.shape[2]
    parts = laid[..., :width].unflatten(2, k.shape[1:]), laid[..., width:].unflatten(2, v.shape[1:])  # type: ignore[no-untyped-call]
    keys, values = (_made(make, part).flatten(1) for make, part in zip(compress, parts, strict=True))
    seen = _seen(layout, rank, every, sizes)
    far = needed_rows(seen, every.owner, every.row, comm)
    whole = fetch_rows(torch.cat((keys, values), dim=1).to(k.dtype), far, comm)
    return (whole[:, :width].unflatten(1, k.shape[1:]), whole[:, width:].unflatten(1, v.shape[1:])), far.numbers  # type: ignore[no-untyped-call]


def _made(compress: Compress, blocks: Tensor) -> Tensor:
    compressed = compress(blocks)
    wanted = blocks.shape[0], *blocks.shape[2:]
    if not isinstance(compressed, Tensor) or compressed.shape != wanted:
        given = tuple(compressed.shape) if isinstance(compressed, Tensor) else type(compressed).__name__
        raise InvalidUsage(
            f"compress made {given} of blocks {tuple(blocks.shape)}; expected {wanted}, one key or value of each"
        )
    return compressed


def _seen(layout: SequenceLayout, rank: int, every: _Compressions, sizes: NSABlocks) -> Tensor:
    """Blocks that a rank's queries see, rising."""
    blocks = pack_blocks(layout, rank, sizes.selected)
    seen = [torch.empty(0, dtype=torch.int64)]
    for sequence, rows in blocks.runs():
        base = int(every.base[sequence])
        last = int(blocks.position[rows][-1])  # rows of a sequence rise
        seen.append(torch.arange(base, base + max(0, (last + 1 - sizes.length) // sizes.stride + 1)))
    return torch.cat(seen)


class _Views:
    """Compressed blocks that a rank's queries see, some queries at a time."""

    def __init__(self, layout: SequenceLayout, rank: int, sizes: NSABlocks, numbers: Tensor) -> None:
        self.sizes = sizes
        self._blocks: PackBlocks = pack_blocks(layout, rank, sizes.selected)
        self._every = _compressions(layout, sizes.length, sizes.stride)
        self._numbers = numbers

    def runs(self, heads: int) -> Any:
        """(own rows, their positions, rows of the compressed keys, how many of them each query sees)"""
        for sequence, rows in self._blocks.runs():
            base, end = self._every.base[sequence : sequence + 2].tolist()
            step = max(1, _SCORES // max(1, heads * (end - base)))
            for start in range(rows.start, rows.stop, step):
                part = slice(start, min(start + step, rows.stop))
                position = self._blocks.position[part]
                visible = ((position + 1 - self.sizes.length) // self.sizes.stride + 1).clamp(min=0)
                yield part, position, self._numbers[base : base + int(visible.max())], visible

    def choose(self, shares: Tensor, position: Tensor) -> Tensor:
        """``[queries, kv_heads, n]``: the blocks to select, by the probabilities ``[queries, kv_heads, compressed]``
        summed over the heads of a group (equation 9: a block gets those of each compressed block once for each stride
        of it that lies inside)."""
        sizes, units = self.sizes, self.sizes.length // self.sizes.stride
        own = position // sizes.selected
        count = int(own.max()) + 1
        each = sizes.selected // sizes.stride
        strides = shares.new_zeros(*shares.shape[:2], max(count * each, shares.shape[2] + units))
        for shift in range(units):
            strides[..., shift : shift + shares.shape[2]] += shares
        importance = strides[..., : count * each].reshape(*shares.shape[:2], count, each).sum(-1)
        numbers = torch.arange(count, device=shares.device)
        own = own.to(shares.device)[:, None, None]
        kept = (numbers < sizes.first) | (numbers > own - sizes.local)
        importance = importance.masked_fill(kept, torch.inf).masked_fill(numbers > own, -torch.inf)
        best = importance.sort(dim=-1, descending=True, stable=True)
        return best.indices.masked_fill(best.values == -torch.inf, -1)[..., : sizes.top_k]


class _CompressedAttention(torch.autograd.Function):
    """(results, selected blocks): the latter have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, views: _Views, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        groups = keys.shape[1]
        out = q.new_zeros(*q.shape[:2], values.shape[2])
        chosen = torch.full((q.shape[0], groups, views.sizes.top_k), -1, device=q.device)
        for part, position, numbers, visible in views.runs(q.shape[1]):
            p, own = _shares(q[part], keys, numbers, visible, scale, wide)
            results = torch.einsum("tgrb,bgd->tgrd", p, values[own].to(wide))
            out[part] = results.flatten(1, 2).to(q.dtype)
            selected = views.choose(p.sum(2), position)
            chosen[part, :, : selected.shape[2]] = selected
        ctx.save_for_backward(q, keys, values, out)
        ctx.views, ctx.scale, ctx.wide = views, scale, wide
        ctx.mark_non_differentiable(chosen)
        return out, chosen

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, keys, values, out = ctx.saved_tensors
        wide, groups = ctx.wide, keys.shape[1]
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, keys, values))
        for part, _, numbers, visible in ctx.views.runs(q.shape[1]):
            p, own = _shares(q[part], keys, numbers, visible, ctx.scale, wide)
            mine, g, result = (x[part].to(wide).view(len(p), groups, -1, x.shape[2]) for x in (q, grad, out))
            dp = torch.einsum("tgrd,bgd->tgrb", g, values[own].to(wide))
            ds = p * (dp - (g * result).sum(-1, keepdim=True)) * ctx.scale
            dq[part] = torch.einsum("tgrb,bgd->tgrd", ds, keys[own].to(wide)).flatten(1, 2)
            dk.index_add_(0, own, torch.einsum("tgrb,tgrd->bgd", ds, mine))
            dv.index_add_(0, own, torch.einsum("tgrb,tgrd->bgd", p, g))
        return dq.to(q.dtype), dk.to(keys.dtype), dv.to(values.dtype), None, None


def _shares(
    q: Tensor, keys: Tensor, numbers: Tensor, visible: Tensor, scale: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(probabilities ``[queries, kv_heads, heads / kv_heads, blocks]``, 0 where a query sees none, rows of the keys)"""
    own = numbers.to(q.device)
    mine = q.to(wide).view(q.shape[0], keys.shape[1], -1, q.shape[2])
    scores = torch.einsum("tgrd,bgd->tgrb", mine, keys[own].to(wide)) * scale
    hidden = torch.arange(len(numbers), device=q.device) >= visible.to(q.device)[:, None]
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    return scores.softmax(-1).masked_fill(hidden[:, None, None], 0.0), own

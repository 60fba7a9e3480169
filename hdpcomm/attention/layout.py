"""Zigzag sharding of packed sequences, sequence by sequence.

Each sequence of a pack is cut into 2N pieces; rank r of N holds pieces r and 2N-1-r, its *head* and its *tail*, so that
under a causal mask every rank has the same work for every sequence. Piece sizes differ by at most one token, and the
longer pieces are distributed so that the ranks' totals over the pack differ by at most one: any length and any N,
without padding. A rank's rows are [head of sequence 0, tail of sequence 0, head of sequence 1, ...]. Source: ByteScale
(arXiv 2502.21231) section 7.

Where attention is over few keys a query, a :class:`BalancedPack` in place of ``cu_seqlens`` has heads and tails of
other lengths, which make the work equal.

All functions are local: every rank computes the same from ``cu_seqlens``. They also take a
:class:`hdpcomm.plan.Tree`, a :class:`hdpcomm.attention.BlockMask` or a slice of a
:class:`hdpcomm.attention.SlicedSequence` in its place, whose layouts are in tree_layout.py and block_mask.py.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from hdpcomm._core import kernels as _core
from hdpcomm.arguments import check_number, check_type, check_whole
from hdpcomm.attention._kernels import Rows, copy_rows, take_rows, take_rows_and_positions
from hdpcomm.attention.block_mask import BlockMask
from hdpcomm.attention.pieces import Pieces
from hdpcomm.attention.slices import SequenceSlice
from hdpcomm.attention.tree_layout import tree_layout
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import Tree

__all__ = [
    "AnyLayout",
    "BalancedPack",
    "CuSeqlens",
    "Layout",
    "as_cu_seqlens",
    "as_pack",
    "layout_of",
    "local_cu_seqlens",
    "longest_length",
    "positions",
    "sequences_layout",
    "shard",
    "shard_with_positions",
    "unshard",
]

CuSeqlens: TypeAlias = (
    "torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int] | BalancedPack | Tree | BlockMask | SequenceSlice"
)
Int64: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True, eq=False)
class BalancedPack:
    """A pack of sequences whose shards have equal work where queries see few keys, in place of ``cu_seqlens``.

    With at most ``key_limit`` keys a query, the first tokens of a sequence cost less than the others, and all others
    alike: pieces of one length are uneven then. Here each rank has a head and a tail that together have as many tokens
    as those of other ranks (or one more), and as much work, within that of one token. All ranks give the same.

    Args:
        cu_seqlens: ``[sequences + 1]``, the running sum of the lengths of all sequences, from 0.
        key_limit: keys that a query sees at most where they are chosen (``top_k``, a window).
        limited: that part of the cost of a query and key; the others are over all keys, as an indexer's scores.

    Raises: InvalidUsage.

    Example:
        >>> pack = BalancedPack([0, 4096], key_limit=1024)
        >>> [int(shard(torch.arange(1, 4097), pack, rank=r, size=2).clamp(max=1024).sum()) for r in range(2)]
        [1835102, 1835426]
    """

    cu_seqlens: torch.Tensor | Int64 | Sequence[int]
    key_limit: float
    limited: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cu_seqlens", as_cu_seqlens(self.cu_seqlens))
        check_number("BalancedPack", "key_limit", self.key_limit, least=1)
        check_number("BalancedPack", "limited", self.limited, least=0, most=1)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which rank holds which tokens of a pack."""

    bounds: Int64
    """[sequences, 2N + 1]: first token, inside its sequence, of each piece; the last column holds the lengths."""
    size: int
    """N, the number of ranks."""
    limit: tuple[float, float] = (0.0, 0.0)
    """``key_limit`` and ``limited`` of a :class:`BalancedPack`."""

    @property
    def lengths(self) -> Int64:
        """[sequences]"""
        return self.bounds[:, -1]

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return int(self.lengths.sum())

    @property
    def facts(self) -> tuple[str, str]:
        """Text that is the same on two ranks only if they mean the same pack, and a summary of it for messages."""
        lengths = self.lengths.tolist()
        shown = str(lengths) if len(lengths) <= 12 else f"{lengths[:12]}..."
        limit = ", balanced for a share of {1:g} over {0:g} keys at most".format(*self.limit) if self.limit[1] else ""
        return f"{lengths}{limit}", f"{len(lengths)} sequences with {sum(lengths)} tokens, lengths {shown}{limit}"

    def first_positions(self, rank: int) -> Int64:
        """[2 * sequences]: position, inside its sequence, of the first token of every head and tail of ``rank``."""
        return self.spans(rank)[:, :, 0].reshape(-1)

    def spans(self, rank: int) -> Int64:
        """[sequences, 2, 2]: (start, stop) of the head and of the tail of ``rank``, as positions in the sequence."""
        pieces = [rank, 2 * self.size - 1 - rank]
        return np.stack([self.bounds[:, pieces], self.bounds[:, [p + 1 for p in pieces]]], axis=-1)

    def local_cu(self, rank: int) -> Int64:
        """[sequences + 1]: running sum of the sequences' tokens on ``rank``."""
        spans = self.spans(rank)
        counts = (spans[:, :, 1] - spans[:, :, 0]).sum(axis=1)
        return np.concatenate(([0], np.cumsum(counts)))

    def rows(self, rank: int) -> int:
        """Tokens that ``rank`` holds."""
        return _rows_of(self, rank)

    def segments(self, rank: int) -> Int64:
        """[2 * sequences, 3]: (local row, row in the pack, rows) of every head and tail of ``rank``."""
        spans = self.spans(rank)
        counts = (spans[:, :, 1] - spans[:, :, 0]).reshape(-1)
        starts = np.cumsum(self.lengths) - self.lengths
        source = (spans[:, :, 0] + starts[:, None]).reshape(-1)
        return np.stack([np.cumsum(counts) - counts, source, counts], axis=1)


AnyLayout: TypeAlias = "Layout | Pieces"
"""Which rank holds which tokens: of a pack of sequences (Layout), or of a tree, a mask of one's own or a slice
(Pieces)."""


@lru_cache(maxsize=1024)
def _rows_of(layout: Layout, rank: int) -> int:
    return int(layout.local_cu(rank)[-1])


def as_pack(cu_seqlens: CuSeqlens) -> Int64 | BalancedPack | Tree | BlockMask | SequenceSlice:
    """A balanced pack, a tree, a mask or a slice as it is, and :func:`as_cu_seqlens` of all else."""
    kept = isinstance(cu_seqlens, BalancedPack | Tree | BlockMask | SequenceSlice)
    return cu_seqlens if kept else as_cu_seqlens(cu_seqlens)  # type: ignore[return-value]


def longest_length(cu_seqlens: CuSeqlens) -> int:
    """One more than the last position of a pack."""
    if isinstance(cu_seqlens, Tree):
        return cu_seqlens.depth
    if isinstance(cu_seqlens, SequenceSlice):
        queries = cu_seqlens.layouts(1)[0]
        return int((queries.start + queries.count).max())
    if isinstance(cu_seqlens, BlockMask):
        return cu_seqlens.num_tokens if cu_seqlens.positions is None else int(cu_seqlens.positions.max()) + 1
    return int(np.diff(as_cu_seqlens(cu_seqlens)).max(initial=0))


def as_cu_seqlens(cu_seqlens: CuSeqlens, *, name: str = "cu_seqlens") -> Int64:
    """``cu_seqlens`` as a checked int64 array: one dimension, begins with 0, never falls. Waits for a CUDA tensor."""
    if isinstance(cu_seqlens, BalancedPack):
        return cast(Int64, cu_seqlens.cu_seqlens)  # checked when it was made
    if isinstance(cu_seqlens, Tree | BlockMask | SequenceSlice):
        raise InvalidUsage(
            f"{name} is a {type(cu_seqlens).__name__}, and only packs of plain sequences are possible here: give the "
            "running sum of their lengths"
        )
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.is_meta:
            raise InvalidUsage(f"{name} is on meta, where tensors have no values; give it on the CPU")
        if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
            raise InvalidUsage(f"{name} has type {cu_seqlens.dtype}; expected int32 or int64")
        array = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    else:
        try:
            array = np.asarray(cu_seqlens)
        except ValueError as error:
            raise InvalidUsage(f"{name} is {reprlib.repr(cu_seqlens)}; expected a list of integers") from error
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise InvalidUsage(f"{name} is {cu_seqlens!r}, of type {array.dtype}; expected integers of 64 bits")
        array = array.astype(np.int64)
    if array.ndim != 1 or array.size == 0 or array[0] != 0 or (np.diff(array) < 0).any():
        raise InvalidUsage(
            f"{name} must be the running sum of the lengths of all sequences of the pack, beginning with 0 "
            f"(one dimension, num_sequences + 1 entries); got shape {array.shape}: "
            f"{array[:8].tolist() if array.ndim else array.tolist()}..."
        )
    return array


@lru_cache(maxsize=256)
def _cached_layout(cu_seqlens: bytes, size: int, limit: tuple[float, float]) -> Layout:
    bounds = _core.zigzag_bounds(np.frombuffer(cu_seqlens, dtype=np.int64), size, *limit)
    bounds.setflags(write=False)
    return Layout(bounds, size, limit)


@untraced
def layout_of(cu_seqlens: CuSeqlens, *, size: int, name: str = "cu_seqlens") -> AnyLayout:
    """The layout of a pack over ``size`` ranks: a zigzag of sequences, or that of a tree or a mask."""
    check_whole("layout", "size", size, least=1)
    if isinstance(cu_seqlens, Tree):
        return tree_layout(cu_seqlens, size)
    if isinstance(cu_seqlens, BlockMask):
        return cu_seqlens.layout(size)
    if isinstance(cu_seqlens, SequenceSlice):
        return cu_seqlens.layouts(size)[0]
    limit = (cu_seqlens.key_limit, cu_seqlens.limited) if isinstance(cu_seqlens, BalancedPack) else (0.0, 0.0)
    return _cached_layout(as_cu_seqlens(cu_seqlens, name=name).tobytes(), size, limit)


def sequences_layout(cu_seqlens: CuSeqlens, *, size: int) -> Layout:
    """:func:`layout_of` of a pack of plain sequences. Raises InvalidUsage for a tree, a mask or a slice."""
    as_cu_seqlens(cu_seqlens)
    layout = layout_of(cu_seqlens, size=size)
    assert isinstance(layout, Layout)  # the others were refused
    return layout


def _check_rank(rank: int, size: int) -> None:
    check_whole("layout", "rank", rank)
    if not 0 <= rank < size:
        raise InvalidUsage(f"rank {rank} is not in a group of {size}; expected 0 <= rank < size")


def shard(x: torch.Tensor, cu_seqlens: CuSeqlens, *, rank: int, size: int, dim: int = 0) -> torch.Tensor:
    """The part of ``x`` that ``rank`` of ``size`` holds.

    ``x``: any tensor whose dimension ``dim`` runs over the tokens of the pack (tokens, labels, loss weights, hidden
    states, RoPE tables, ...); shift labels and compute position ids *before* sharding. ``cu_seqlens``:
    [num_sequences + 1] of the whole pack. Differentiable; local. Raises InvalidUsage.
    """
    return take_rows(x, _rows_to_take(x, cu_seqlens, rank=rank, size=size, dim=dim), dim=dim)


def shard_with_positions(
    x: torch.Tensor, cu_seqlens: CuSeqlens, *, rank: int, size: int, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`shard` and :func:`positions` in one kernel; the positions are on the device of ``x``."""
    if _given_positions(cu_seqlens) is not None:
        places = positions(cu_seqlens, rank=rank, size=size, device=x.device)
        return shard(x, cu_seqlens, rank=rank, size=size, dim=dim), places
    return take_rows_and_positions(x, _rows_to_take(x, cu_seqlens, rank=rank, size=size, dim=dim), dim=dim)


def _rows_to_take(x: torch.Tensor, cu_seqlens: CuSeqlens, *, rank: int, size: int, dim: int) -> Rows:
    layout = layout_of(cu_seqlens, size=size)
    _check_rank(rank, size)
    check_type("shard()", "x", x, torch.Tensor)
    total = layout.tokens
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != total:
        told = "cu_seqlens ends with" if isinstance(layout, Layout) else "the tokens of the pack are"
        raise InvalidUsage(
            f"x has shape {tuple(x.shape)}, but {told} {total}; dimension {dim} must be the pack's tokens"
        )
    return _rows_with_positions(layout, rank)


def _rows_with_positions(layout: AnyLayout, rank: int) -> Rows:
    return Rows(layout.segments(rank), positions=layout.first_positions(rank))


def _given_positions(cu_seqlens: CuSeqlens) -> torch.Tensor | None:
    """[tokens]: the positions that were given with a mask; None: they follow from the layout."""
    return cu_seqlens.positions if isinstance(cu_seqlens, BlockMask) else None


def unshard(shards: Sequence[torch.Tensor], cu_seqlens: CuSeqlens, *, dim: int = 0) -> torch.Tensor:
    """The whole tensor, from all ranks' parts in the order of ranks: undoes :func:`shard`. Differentiable; local."""
    layout = layout_of(cu_seqlens, size=len(shards))
    parts = [layout.segments(rank) for rank in range(layout.size)]
    offset = 0
    for rank, (part, piece) in enumerate(zip(parts, shards, strict=True)):
        rows = int(part[:, 2].sum())
        if not -piece.ndim <= dim < piece.ndim or piece.shape[dim] != rows:
            raise InvalidUsage(
                f"the part of rank {rank} has shape {tuple(piece.shape)}; expected {rows} tokens in dimension {dim}"
            )
        part[:, 0] += offset
        offset += rows
    return take_rows(torch.cat(list(shards), dim=dim), Rows(np.concatenate(parts)[:, [1, 0, 2]]), dim=dim)


def local_cu_seqlens(cu_seqlens: CuSeqlens, *, rank: int, size: int) -> torch.Tensor:
    """int32 [num_sequences + 1]: running sum of the tokens that ``rank`` holds of each sequence (maybe 0 of some).

    Raises InvalidUsage for a tree or a mask, whose tokens belong to no single sequence.
    """
    layout = sequences_layout(cu_seqlens, size=size)
    _check_rank(rank, size)
    return torch.from_numpy(layout.local_cu(rank).astype(np.int32))


def positions(cu_seqlens: CuSeqlens, *, rank: int, size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """int64 [T_local]: position of each local token inside its own sequence (what RoPE needs), made on ``device``.

    In a tree it is the number of tokens before it on the way from the root.
    """
    layout = layout_of(cu_seqlens, size=size)
    _check_rank(rank, size)
    if (given := _given_positions(cu_seqlens)) is not None:
        return shard(given, cu_seqlens, rank=rank, size=size).to(device)
    rows = _rows_with_positions(layout, rank)
    out = torch.empty(rows.total, dtype=torch.int64, device=device)
    nothing = out.new_empty(rows.total, 0)
    copy_rows(nothing, nothing, rows, positions=out)
    return out

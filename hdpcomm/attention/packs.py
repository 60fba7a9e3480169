"""Packs of tokens that run together (sequences, a tree, a slice), and how ranks share them.

The public functions take ``cu_seqlens`` in many forms and make a pack of it once (:func:`as_pack`); then the pack and
its :class:`hdpcomm.attention.layout.Layout` answer all that depends on its kind. Packs never change. All functions here
are local: every rank computes the same from the pack.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.arguments import check_number, check_type, check_whole
from hdpcomm.attention.layout import NO_SPANS, Layout, SequenceLayout, sequence_layout
from hdpcomm.attention.rows import Rows, copy_rows, take_rows
from hdpcomm.attention.tiles import Int64
from hdpcomm.attention.tree_layout import TokenLayout, TreeLayout, tree_layout
from hdpcomm.comm.tensors import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import Tree

__all__ = [
    "BalancedPack",
    "CuSeqlens",
    "Kept",
    "Pack",
    "Run",
    "SpanPack",
    "as_pack",
    "check_size",
    "local_cu_seqlens",
    "positions",
    "shard",
    "unshard",
]

Kept: TypeAlias = Callable[[], tuple[Tensor, ...]]
"""Gives the keys and values of a slice and those before it in the backward pass. Local."""
Run: TypeAlias = "Callable[..., tuple[Tensor, Tensor | None]]"
"""``run(state, *tensors)``: (output, state after them), from the state before them; ``None``: of whole sequences."""


class Pack(ABC):
    """Tokens that run together, on any number of ranks. Immutable; all methods are local."""

    plain = False
    """Whether it is of plain sequences, whose keys may be others."""
    branched = False
    """Whether tokens belong to several sequences: it is a tree, or a slice of one that has branches."""
    keeps = False
    """Whether layers keep what later packs need (:class:`hdpcomm.attention.KVStore`)."""
    begins = True
    """Whether no pack comes before it whose keys its queries see."""
    continues = False
    """Whether its queries may see keys of packs before it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError(
                f"{name} of a {type(self).__name__} was set, and a pack never changes; make another one"
            )
        super().__setattr__(name, value)

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return self.layout(1).tokens

    @property
    @abstractmethod
    def longest(self) -> int:
        """One more than the last position."""

    def again(self) -> Pack:
        """For one more forward pass."""
        return self

    @abstractmethod
    def layout(self, size: int) -> Layout:
        """Which of ``size`` ranks holds which tokens."""

    def layouts(self, size: int, keys: Pack | None = None) -> tuple[Layout, Layout]:
        """Layouts of the queries and of the keys that they see; ``keys``: others than the pack's own. Raises
        InvalidUsage where these cannot belong together."""
        if keys is not None:
            raise InvalidUsage(
                "cu_seqlens_k was given with a tree, a mask or a slice, which says what its keys are; leave it out"
            )
        layout = self.layout(size)
        return layout, layout

    @abstractmethod
    def token_layouts(self, size: int) -> tuple[TokenLayout, TokenLayout]:
        """:meth:`layouts` for a layer that looks at tokens in their order. Raises InvalidUsage for a mask."""

    def sequences(self, name: str = "cu_seqlens") -> Sequences:
        """The pack, if it is one of plain sequences. Raises InvalidUsage."""
        raise self.no_sequences(name)

    def no_sequences(self, name: str = "cu_seqlens") -> InvalidUsage:
        """The error where only plain sequences are possible."""
        return InvalidUsage(
            f"{name} is a {type(self).__name__.removesuffix('Pack')}, and only packs of plain sequences are possible "
            "here: give the running sum of their lengths"
        )

    def _rows(self, rank: int, size: int) -> Rows:
        """Copies from the pack's rows to those of a rank, with positions. Raises InvalidUsage."""
        layout = self.layout(size)
        check_whole("layout", "rank", rank)
        if not 0 <= rank < size:
            raise InvalidUsage(f"rank {rank} is not in a group of {size}; expected 0 <= rank < size")
        return Rows(layout.segments(rank), positions=layout.first_positions(rank))

    _told_tokens = "the tokens of the pack are"

    def shard(self, x: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
        """The part of ``x`` that a rank holds. Differentiable. Raises InvalidUsage."""
        rows, total = self._rows(rank, size), self.layout(size).tokens
        check_type("shard()", "x", x, Tensor)
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != total:
            raise InvalidUsage(
                f"x has shape {tuple(x.shape)}, but {self._told_tokens} {total}; dimension {dim} must be the pack's "
                "tokens"
            )
        return take_rows(x, rows, dim=dim)

    def positions(self, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [T_local]: the position of each local token."""
        rows = self._rows(rank, size)
        out = torch.empty(rows.total, dtype=torch.int64, device=device)
        nothing = out.new_empty(rows.total, 0)
        copy_rows(nothing, nothing, rows, positions=out)
        return out

    def places(self, rank: int, size: int) -> Tensor:
        """int64 [T_local]: the tokens of the whole pack, or of the sequence or tree whose slice it is, that a rank
        holds."""
        return self.shard(torch.arange(self.tokens), rank, size)

    def reads(self, rank: int, size: int) -> list[tuple[int, int, int]]:
        """(sequence or segment, first position, position after the last) of the parts that a rank holds, in the order
        of its rows."""
        spans = self.layout(size).own_spans(rank)
        return [(segment, span.start, span.stop) for segment, own in spans.items() for span in own]

    def segments(self) -> tuple[Int64, Int64 | None]:
        """[sequences, or segments of a tree]: the first token of each, among :meth:`places`; and of a tree one past the
        last descendant of each. Raises InvalidUsage for a mask."""
        return self.sequences().cu_seqlens[:-1], None

    def keep(self, *new: Tensor, rank: int, size: int) -> tuple[tuple[Tensor, ...], Kept | None]:
        """``new``, what a layer made of this rank's rows, ``[T_local, ...]``, and in a slice with what was kept of the
        slices before it; and what gives these again in the backward pass."""
        del rank, size
        return new, None

    def carry(self, run: Run, zero: Callable[[], Tensor], *tensors: Tensor) -> Tensor:
        """The output of ``run``; a slice starts from the state that those before it have left. ``zero()``: the state
        before the first token, [states of this rank, ...]."""
        del zero
        return run(None, *tensors)[0]


class Sequences(Pack):
    """Plain sequences: ``cu_seqlens``, int64 ``[sequences + 1]``, is the running sum of their lengths."""

    plain = True
    spans = NO_SPANS
    _told_tokens = "cu_seqlens ends with"

    def __init__(self, cu_seqlens: Any, name: str = "cu_seqlens", *, limit: tuple[float, float] = (0.0, 0.0)) -> None:
        """``limit``: how shards are balanced where queries see few keys, see :class:`BalancedPack`; (0, 0): for causal
        attention."""
        self.cu_seqlens, self.limit = _checked_sum(cu_seqlens, name), limit

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def longest(self) -> int:
        return int(np.diff(self.cu_seqlens).max(initial=0))

    def layout(self, size: int) -> SequenceLayout:
        check_size(size)
        return sequence_layout(self.cu_seqlens.tobytes(), size, self.limit, self.spans.tobytes())

    def layouts(self, size: int, keys: Pack | None = None) -> tuple[Layout, Layout]:
        layout = self.layout(size)
        if keys is None:
            return layout, layout
        if not keys.plain:
            return super().layouts(size, keys)
        lengths = len(self.cu_seqlens) - 1, len(keys.sequences().cu_seqlens) - 1
        if lengths[0] != lengths[1]:
            raise InvalidUsage(f"cu_seqlens has {lengths[0]} sequences, cu_seqlens_k {lengths[1]}; expected as many")
        return layout, keys.layout(size)

    def token_layouts(self, size: int) -> tuple[SequenceLayout, SequenceLayout]:
        layout = self.layout(size)
        return layout, layout

    def sequences(self, name: str = "cu_seqlens") -> Sequences:  # noqa: ARG002
        return self


class BalancedPack(Sequences):
    """A pack of sequences whose shards have equal work where queries see few keys, in place of ``cu_seqlens``.

    With at most ``key_limit`` keys a query, the first tokens of a sequence cost less than the others, and all others
    alike: pieces of one length are uneven then. Here each rank has a head and a tail that together have as many tokens
    as those of other ranks (or one more), and as much work, within that of one token. All ranks give the same.

    Args:
        cu_seqlens: ``[sequences + 1]``, the running sum of the lengths of all sequences, from 0.
        key_limit: keys that a query sees at most where they are chosen (``top_k``, a window).
        limited: that part of the cost of a query and key; the others are over all keys, as an indexer's scores.

    Raises: InvalidUsage.

    Examples:
        >>> pack = BalancedPack([0, 4096], key_limit=1024)
        >>> [int(shard(torch.arange(1, 4097), pack, rank=r, size=2).clamp(max=1024).sum()) for r in range(2)]
        [1835102, 1835426]
    """

    def __init__(self, cu_seqlens: CuSeqlens, key_limit: float, limited: float = 1.0) -> None:
        super().__init__(as_pack(cu_seqlens).sequences().cu_seqlens, limit=(key_limit, limited))
        check_number("BalancedPack", "key_limit", key_limit, least=1)
        check_number("BalancedPack", "limited", limited, least=0, most=1)


class SpanPack(Sequences):
    """A pack of sequences of which some spans see all of themselves, not only what comes before, in place of
    ``cu_seqlens``: images of Gemma 3, prefixes of a prefix LM.

    A token of a span sees, beside what the causal mask and the window allow, the tokens of the span after it. Shards
    are those of the sequences alone. All ranks give the same.

    Args:
        cu_seqlens: ``[sequences + 1]``, the running sum of the lengths of all sequences, from 0; or such a pack.
        spans: int64 ``[n, 2]``, the first token of the pack that is in a span, and the one after its last; by rising
            tokens, each in one sequence.

    Raises: InvalidUsage.
    """

    def __init__(self, cu_seqlens: CuSeqlens, spans: npt.ArrayLike) -> None:
        plain = as_pack(cu_seqlens).sequences()
        super().__init__(plain.cu_seqlens, limit=plain.limit)
        given = np.asarray(spans)
        if given.size == 0:
            given = given.reshape(0, 2).astype(np.int64)
        if given.ndim != 2 or given.shape[1] != 2 or not np.issubdtype(given.dtype, np.integer):
            raise InvalidUsage(f"spans have shape {given.shape} and type {given.dtype}; expected integers [n, 2]")
        flat = given.astype(np.int64)
        sequence = np.searchsorted(self.cu_seqlens, flat[:, 0], side="right") - 1
        begins = self.cu_seqlens[sequence][:, None]
        ends = np.append(self.cu_seqlens, self.tokens)[sequence + 1]
        if (
            (np.diff(flat.ravel()) < 0).any()
            or (flat[:, 0] >= flat[:, 1]).any()
            or (flat[:, 1] > ends).any()
            or (flat < 0).any()
        ):
            raise InvalidUsage(
                f"spans are {reprlib.repr(given.tolist())}; expected [first token, token after the last], rising, "
                f"apart, each in one sequence of {reprlib.repr(self.cu_seqlens.tolist())}"
            )
        self.spans = np.concatenate((sequence[:, None], flat - begins), axis=1)

    def layouts(self, size: int, keys: Pack | None = None) -> tuple[Layout, Layout]:
        return super().layouts(size) if keys is None else Pack.layouts(self, size, keys)

    def token_layouts(self, size: int) -> tuple[SequenceLayout, SequenceLayout]:  # noqa: ARG002
        raise self.no_sequences()


@dataclass(frozen=True, eq=False)
class TreePack(Pack):
    """A :class:`hdpcomm.plan.Tree`, whose tokens see those on their way from the root."""

    tree: Tree
    branched = True

    @property
    def longest(self) -> int:
        return self.tree.depth

    def segments(self) -> tuple[Int64, Int64 | None]:
        return self.tree.rows, self.tree.ends

    def layout(self, size: int) -> TreeLayout:
        check_size(size)
        return tree_layout(self.tree, size)

    def token_layouts(self, size: int) -> tuple[TreeLayout, TreeLayout]:
        layout = self.layout(size)
        return layout, layout


CuSeqlens: TypeAlias = "Tensor | npt.NDArray[np.integer[Any]] | Sequence[int] | Tree | Pack"


@untraced
def as_pack(cu_seqlens: CuSeqlens, name: str = "cu_seqlens") -> Pack:
    """The pack that is meant. Waits for a CUDA tensor. Raises InvalidUsage."""
    if isinstance(cu_seqlens, Pack):
        return cu_seqlens
    return TreePack(cu_seqlens) if isinstance(cu_seqlens, Tree) else Sequences(cu_seqlens, name)


def _checked_sum(cu_seqlens: Any, name: str) -> Int64:
    """``cu_seqlens`` as an int64 array: one dimension, begins with 0, never falls. Raises InvalidUsage."""
    if isinstance(cu_seqlens, Tensor):
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
    array.setflags(write=False)
    return array


def check_size(size: int) -> None:
    """Raises InvalidUsage for a number of ranks below 1."""
    check_whole("layout", "size", size, least=1)


@untraced
def shard(x: Tensor, cu_seqlens: CuSeqlens, *, rank: int, size: int, dim: int = 0) -> Tensor:
    """The part of ``x`` that ``rank`` of ``size`` holds.

    ``x``: any tensor whose dimension ``dim`` runs over the tokens of the pack (tokens, labels, loss weights, hidden
    states, RoPE tables, ...); shift labels and compute position ids *before* sharding. ``cu_seqlens``:
    [num_sequences + 1] of the whole pack. Differentiable; local. Raises InvalidUsage.
    """
    return as_pack(cu_seqlens).shard(x, rank, size, dim)


@untraced
def unshard(shards: Sequence[Tensor], cu_seqlens: CuSeqlens, *, dim: int = 0) -> Tensor:
    """The whole tensor, from all ranks' parts in the order of ranks: undoes :func:`shard`. Differentiable; local."""
    layout = as_pack(cu_seqlens).layout(len(shards))
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


def local_cu_seqlens(cu_seqlens: CuSeqlens, *, rank: int, size: int) -> Tensor:
    """int32 [num_sequences + 1]: running sum of the tokens that ``rank`` holds of each sequence (maybe 0 of some).

    Raises InvalidUsage for a tree or a mask, whose tokens belong to no single sequence.
    """
    pack = as_pack(cu_seqlens).sequences()
    pack._rows(rank, size)
    return torch.from_numpy(pack.layout(size).local_cu(rank).astype(np.int32))


@untraced
def positions(cu_seqlens: CuSeqlens, *, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """int64 [T_local]: position of each local token inside its own sequence (what RoPE needs), made on ``device``.

    In a tree it is the number of tokens before it on the way from the root.
    """
    return as_pack(cu_seqlens).positions(rank, size, device)

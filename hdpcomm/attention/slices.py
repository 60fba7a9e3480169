"""A long sequence or tree in slices, which run one after the other on the same ranks: :class:`SlicedSequence`.

A slice's queries see the keys of its own tokens and those of the slices before it, which their ranks have kept. Each
slice is dealt to the ranks by itself, so its work is the same for all; what a rank keeps of earlier slices it passes on
in the rings of later ones. Backward passes run from the last slice to the first: each adds what it finds for kept keys
to sums, which the pass of the slice that made them takes up. In a tree, tokens are in depth-first order: what a slice
sees of those before it lies on the way from the root to its first token. Sources: TeraPipe (arXiv 2102.07988), Seq1F1B
(2406.03488).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from hdpcomm.arguments import check_number, check_type
from hdpcomm.attention.kv_store import KVStore, SliceRows
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import Kept, Pack, Run, check_size
from hdpcomm.attention.tiles import Int64
from hdpcomm.attention.tree_layout import TreeLayout, seen_keys, slice_layouts
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device
from hdpcomm.offload import ActivationOffload
from hdpcomm.plan.tree import Tree

__all__ = ["SequenceSlice", "SlicedSequence"]


class SlicedSequence:
    """A sequence or tree whose slices run one after the other, and the :class:`KVStore` of what layers keep of them.
    Local.

    Run the forward passes of :meth:`slice` 0, 1, ...; in attention each takes the place of ``cu_seqlens``. Then their
    backward passes from the last one to the first. To hold the activations of one slice at a time, run the forward
    passes of all but the last under ``torch.no_grad()``, and each again with gradients before its backward pass.

    Causal attention and recurrences run so. Every rank of the communicator keeps its rows of keys and values of all
    slices, and sums of their gradients in float32 (float64), until the backward pass of slice 0; for recurrences ranks
    keep the states that later slices begin with, and for convolutions the tokens before these. With ``offload``, a
    share of these rows and sums is in host memory but for those of one layer and the next, which come while it computes
    (after FPDT, arXiv 2408.16978).

    Args:
        bounds: where slices begin, from 0, rising, and the length of the sequence; of a tree, tokens in depth-first
            order, the order of its rows.
        tree: whose slices they are; ``None``: a plain sequence.
        offload: takes keys, values and sums of gradients to host memory; ``None``: they stay on the device.
        ratio: share of the rows that goes there, 0 to 1; default that of ``offload``.

    Raises:
        InvalidUsage: bounds that do not rise from 0, or that do not end with the tokens of the tree; what is no tree or
            no offload; a ratio out of range.

    Examples:
        >>> sliced = SlicedSequence([0, 4096, 7000, 9000])
        >>> len(sliced), sliced.slice(1).length
        (3, 2904)
    """

    def __init__(
        self,
        bounds: Sequence[int],
        tree: Tree | None = None,
        *,
        offload: ActivationOffload | None = None,
        ratio: float | None = None,
    ) -> None:
        self.bounds = tuple(int(each) for each in bounds)
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise InvalidUsage(
                f"a sequence is cut at {list(bounds)!r}; expected rising numbers of tokens, from 0 to its length"
            )
        if tree is not None:
            check_type("SlicedSequence", "tree", tree, Tree)
        self.tree = Tree([-1], self.bounds[-1:]) if tree is None else tree
        if self.tree.num_tokens != self.bounds[-1]:
            raise InvalidUsage(
                f"a tree of {self.tree.num_tokens} tokens is cut at {list(bounds)!r}; expected its tokens at the end"
            )
        if offload is not None:
            check_type("SlicedSequence", "offload", offload, ActivationOffload)
            ratio = offload.ratio if ratio is None else ratio
            check_number("SlicedSequence", "ratio, the share of the rows to offload,", ratio, least=0, most=1)
        self.store = KVStore(len(self), offload, ratio or 0.0)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __repr__(self) -> str:
        return f"SlicedSequence({list(self.bounds)}{f', {self.tree!r}' if self.branches else ''})"

    @property
    def branches(self) -> bool:
        """Whether it is a tree of several segments."""
        return len(self.tree) > 1

    def slice(self, number: int) -> SequenceSlice:
        """For one forward pass of a slice; one more for each that runs again."""
        if not 0 <= number < len(self):
            raise InvalidUsage(f"slice {number} asked of a sequence of {len(self)} slices: give 0 to {len(self) - 1}")
        return SequenceSlice(self, number, self.store.begin_pass())


@dataclass(frozen=True, eq=False, repr=False)
class SequenceSlice(Pack):
    """One slice of a :class:`SlicedSequence` in one forward pass; in attention it takes the place of ``cu_seqlens``."""

    sequence: SlicedSequence
    number: int
    forward_pass: int
    """Its number in the sequence's :class:`KVStore`."""
    keeps = True

    def __repr__(self) -> str:
        return f"slice {self.number} of {self.sequence!r}"

    @property
    def branched(self) -> bool:  # type: ignore[override]
        return self.sequence.branches

    @property
    def continues(self) -> bool:  # type: ignore[override]
        return len(self.sequence) > 1

    @property
    def begins(self) -> bool:  # type: ignore[override]
        return self.number == 0

    @property
    def start(self) -> int:
        """Its first token."""
        return self.sequence.bounds[self.number]

    @property
    def stop(self) -> int:
        """The token after its last one."""
        return self.sequence.bounds[self.number + 1]

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start

    @property
    def longest(self) -> int:
        queries = self.layout(1)
        return int((queries.start + queries.count).max())

    def again(self) -> SequenceSlice:
        """For one more forward pass."""
        return self.sequence.slice(self.number)

    def _up_to_end(self, size: int, number: int) -> tuple[TreeLayout, TreeLayout]:
        """Layouts of the queries of a slice and of all keys up to its end."""
        check_size(size)
        return slice_layouts(self.sequence.tree, self.sequence.bounds, number, size)

    def places(self, rank: int, size: int) -> Tensor:
        return self.shard(torch.arange(self.start, self.stop), rank, size)

    def layout(self, size: int) -> TreeLayout:
        return self._up_to_end(size, self.number)[0]

    def token_layouts(self, size: int) -> tuple[TreeLayout, TreeLayout]:
        queries, keys = self._up_to_end(size, self.number)
        return queries, seen_keys(keys)

    def layouts(self, size: int, keys: Pack | None = None) -> tuple[Layout, Layout]:
        return super().layouts(size, keys) if keys is not None else self.token_layouts(size)

    def segments(self) -> tuple[Int64, Int64 | None]:
        return self.sequence.tree.rows, self.sequence.tree.ends if self.branched else None

    def keep(self, *new: Tensor, rank: int, size: int) -> tuple[tuple[Tensor, ...], Kept]:
        queries, keys = self._up_to_end(size, self.number)
        own, end = queries.rows(rank), keys.rows(rank)
        if any(x.shape[0] != own for x in new):
            raise InvalidUsage(
                f"attention was given {[x.shape[0] for x in new]} tokens; of {self!r}, "
                f"rank {rank} of {size} holds {own}"
            )
        total = self._up_to_end(size, len(self.sequence) - 1)[1].rows(rank)
        rows = SliceRows(self.number, end - own, end, total, _rows_seen(keys, rank, new[0].device))
        return self.sequence.store.keep(self.forward_pass, rows, new)

    def carry(self, run: Run, zero: Callable[[], Tensor], *tensors: Tensor) -> Tensor:
        return self.sequence.store.carry(self.forward_pass, self.number, run, zero(), tensors)


@lru_cache(maxsize=64)
def _rows_seen(keys: TreeLayout, rank: int, device: torch.device) -> Tensor | None:
    """Which rows of a rank a slice sees, of those up to its end; ``None``: all."""
    seen = seen_keys(keys)
    if seen is keys:
        return None
    runs = [torch.arange(first, first + count) for first, _, count in seen.rows_in(keys, rank).triples.tolist()]
    return to_device(torch.cat(runs or [torch.arange(0)]), device)

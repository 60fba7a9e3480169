"""A long sequence or tree in slices, which run one after the other on the same ranks: :class:`SlicedSequence`.

A slice's queries see the keys of its own tokens and those of the slices before it, which their ranks have kept. Each
slice is dealt to the ranks by itself, so its work is the same for all; what a rank keeps of earlier slices it passes on
in the rings of later ones. Backward passes run from the last slice to the first: each adds what it finds for kept keys
to sums, which the pass of the slice that made them takes up. In a tree, tokens are in depth-first order: what a slice
sees of those before it lies on the way from the root to its first token. Sources: TeraPipe (arXiv 2102.07988), Seq1F1B
(2406.03488).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from hdpcomm.arguments import check_number, check_type
from hdpcomm.attention.tree_layout import TreeLayout, seen_keys, slice_layouts
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative
from hdpcomm.offload import ActivationOffload
from hdpcomm.offload.rows import HostRows
from hdpcomm.plan.tree import Tree

__all__ = ["CallMark", "SequenceSlice", "SlicedSequence", "check_backward", "is_tree"]

_Made = TypeVar("_Made")


class _Calls(threading.local):
    """Which calls of attention a thread is about to make."""

    def __init__(self) -> None:
        self.marks: list[CallMark] = []
        """The checkpoints whose forward pass runs, the outermost first."""
        self.again: list[int | None] = [None]
        """The number of the next call, where layers are computed again; the innermost last."""


_calls = _Calls()


class CallMark:
    """Context of the forward pass of an activation checkpoint: calls of attention have the same numbers when they are
    made again inside :attr:`again`. Both may be entered again and again."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The number of the first call inside."""
        self.again = _Again(self)

    def __enter__(self) -> None:
        _calls.marks.append(self)

    def __exit__(self, *_: object) -> None:
        _calls.marks.pop()


class _Again:
    """Context of a recomputed forward pass, on any thread."""

    def __init__(self, mark: CallMark) -> None:
        self._mark = mark

    def __enter__(self) -> None:
        _calls.again.append(self._mark.first)

    def __exit__(self, *_: object) -> None:
        _calls.again.pop()


def check_backward(number: int, expected: int) -> None:
    """Raises InvalidUsage where the backward pass of slice ``number`` runs before or after its turn."""
    if number != expected:
        raise InvalidUsage(
            f"the backward pass of slice {number} runs where that of slice {expected} has to: run them from the last "
            "slice to the first, each once"
        )


class _Kept:
    """KV that one attention call has kept of earlier slices, and its gradients from later ones."""

    def __init__(self, slices: int) -> None:
        self.tensors: tuple[torch.Tensor, ...] = ()
        """``[rows of the rank in all slices, ...]``; those of slices to come are not set."""
        self.sums: list[torch.Tensor] = []
        self.host: _OnHost | None = None
        """Instead of both."""
        self.written = 0
        """Slices."""
        self.next_backward = slices - 1
        self._like: list[torch.Tensor] = []

    def write(self, new: Sequence[torch.Tensor], part: _Part) -> tuple[torch.Tensor, ...]:
        """Takes the rows of a slice; gives those that it sees."""
        self._check(new, part.number)
        if self.host is not None:
            return part.seen_of(self.host.write(new, part))
        if not self.tensors:
            self.tensors = tuple(x.new_empty((part.total, *x.shape[1:])) for x in new)
        for kept, x in zip(self.tensors, new, strict=True):
            kept.data[part.first : part.end] = x.detach()
        return self.read(part)

    def read(self, part: _Part) -> tuple[torch.Tensor, ...]:
        """The rows that a slice sees."""
        if self.host is not None:
            return part.seen_of(self.host.read(part))
        # Without their version counter: a later slice writes other rows of the same memory.
        return part.seen_of([kept.data[: part.end] for kept in self.tensors])

    def _check(self, new: Sequence[torch.Tensor], number: int) -> None:
        if number > self.written:
            raise InvalidUsage(
                f"attention runs in slice {number} before slice {self.written}: run the forward passes from slice 0 on"
            )
        self.written = max(self.written, number + 1)
        if not self._like:
            self._like = [x.new_empty((0, *x.shape[1:])) for x in new]
        for kept, x in zip(self._like, new, strict=True):
            if kept.shape[1:] != x.shape[1:] or kept.dtype != x.dtype or kept.device != x.device:
                raise InvalidUsage(
                    f"a call of attention was given {tuple(x.shape)} {x.dtype} on {x.device}, and in an earlier slice "
                    f"{tuple(kept.shape)} {kept.dtype} on {kept.device} (number of rows apart): the model must run the "
                    "same layers in every slice"
                )

    def backward(self, grads: Sequence[torch.Tensor], part: _Part) -> list[torch.Tensor]:
        """Adds up the gradients of kept rows; gives those of the slice's own rows, which are the last ones."""
        check_backward(part.number, self.next_backward)
        self.next_backward -= 1
        first, end, seen = part.first, part.end, part.seen
        before = first if seen is None else len(seen) - (end - first)
        sums = self.sums if self.host is None else self.host.take_sums(part)
        if not sums:
            wide = [torch.promote_types(x.dtype, torch.float32) for x in grads]
            sums = [x.new_zeros((first, *x.shape[1:]), dtype=kind) for x, kind in zip(grads, wide, strict=True)]
            own = [x[before:] for x in grads]
        else:
            own = [(total[first:end] + x[before:]).to(x.dtype) for total, x in zip(sums, grads, strict=True)]
        for total, x in zip(sums, grads, strict=True):
            if seen is None:
                total[:first] += x[:first]
            else:
                total.index_add_(0, seen[:before], x[:before].to(total.dtype))
        if self.host is not None:
            self.host.keep_sums([total[:first] for total in sums])
        else:
            self.tensors, self.sums = (self.tensors, sums) if part.number else ((), [])
        return own


class _OnHost:
    """Where a :class:`_Kept` has its rows if they go to host memory: what a call needs comes while the one before it
    computes, in forward and in backward passes."""

    def __init__(self, offload: ActivationOffload, ratio: float, before: _OnHost | None) -> None:
        """``before``: that of the call before this one."""
        self._rows, self._sums = HostRows(offload, ratio), HostRows(offload, ratio)
        self._after: _OnHost | None = None
        self._before = None if before is None else weakref.ref(before)
        self._present: list[torch.Tensor] | None = None
        """Rows that were read where a layer was computed again, for its backward pass."""
        if before is not None:
            before._after = self

    def write(self, new: Sequence[torch.Tensor], part: _Part) -> list[torch.Tensor]:
        """Takes the rows of a slice, unless it runs again; gives those up to its end."""
        if _calls.again[-1] is not None:
            self._present = None
            self._present = self._rows.read(part.number + 1, part.end)
            return self._present
        found = self._rows.read(part.number, part.end) if part.number else []
        if self._after is not None and part.number:
            self._after._rows.prefetch(part.number, part.end)
        if len(self._rows) == part.number:
            self._rows.add(new)
        found = found or [x.new_empty((part.end, *x.shape[1:])) for x in new]
        for whole, x in zip(found, new, strict=True):
            whole[part.first : part.end] = x.detach()
        return found

    def read(self, part: _Part) -> list[torch.Tensor]:
        """The rows up to the end of a slice, in its backward pass."""
        found, self._present = self._present, None
        if found is None:
            found = self._rows.read(part.number + 1, part.end)
        if len(self._sums):
            self._sums.prefetch(1, part.end)
        before = None if self._before is None else self._before()
        if before is not None and before._present is None:
            before._rows.prefetch(part.number + 1, part.end)
        return found

    def take_sums(self, part: _Part) -> list[torch.Tensor]:
        """The sums up to the end of a slice; none if it is the last one."""
        if not len(self._sums):
            return []
        found = self._sums.read(1, part.end)
        self._sums.drop_last()
        return found

    def keep_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """After the backward pass of the last slice whose rows are kept: these are not needed any more."""
        self._present = None
        self._rows.drop_last()
        if len(self._rows):
            self._sums.add(sums)


@dataclass(frozen=True)
class _Part:
    """The rows of a slice on a rank.

    Attributes:
        number: of the slice.
        first, end: of its own rows, among those of all slices.
        total: rows of all slices.
        seen: which rows up to its end it sees; ``None``: all.
    """

    number: int
    first: int
    end: int
    total: int
    seen: torch.Tensor | None

    def seen_of(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Rows that this slice attends to, among those up to its end."""
        return tuple(rows) if self.seen is None else tuple(x.index_select(0, self.seen) for x in rows)


class _Keep(torch.autograd.Function):
    """From the keys of a slice to those that it sees, which earlier slices have kept."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, part: _Part, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.kept, ctx.part = kept, part
        return kept.write(new, part)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.kept.backward(grads, ctx.part)


class SlicedSequence:
    """A sequence or tree whose slices run one after the other, and what the layers of one model keep of them. Local.

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

    Example:
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
        self._offload = offload if ratio else None
        self._ratio = ratio or 0.0
        self._last_on_host: _OnHost | None = None
        self._kept: list[object] = []
        """By call: what it has kept."""

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
        return SequenceSlice(self, number)

    def _place(self, kept: _Kept) -> None:
        """Where a call is to have what it keeps."""
        if self._offload is not None and kept.host is None:
            kept.host = self._last_on_host = _OnHost(self._offload, self._ratio, self._last_on_host)

    def _of_call(self, number: int, make: Callable[[int], _Made]) -> _Made:
        while len(self._kept) <= number:
            self._kept.append(make(len(self)))
        found = self._kept[number]
        if isinstance(make, type) and not isinstance(found, make):
            raise InvalidUsage(
                f"call {number} of a layer is not of the kind that it was in an earlier slice: the model must run the "
                "same layers in every slice"
            )
        return found  # type: ignore[return-value]


class SequenceSlice:
    """One slice of a :class:`SlicedSequence` in one forward pass; in attention it takes the place of ``cu_seqlens``."""

    def __init__(self, sequence: SlicedSequence, number: int) -> None:
        self.sequence, self.number = sequence, number
        self._made = 0
        """Calls of attention so far."""

    def __repr__(self) -> str:
        return f"slice {self.number} of {self.sequence!r}"

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

    def layouts(self, size: int) -> tuple[TreeLayout, TreeLayout]:
        """Layouts of its queries and of the keys that these see."""
        queries, keys = slice_layouts(self.sequence.tree, self.sequence.bounds, self.number, size)
        return queries, seen_keys(keys)

    def next_call(self, make: Callable[[int], _Made]) -> _Made:
        """KV kept for the next attention call of this pass; under recomputation, for the replayed one; ``make(slices)``
        for the first slice. Local."""
        call = _calls.again[-1]
        if call is None:
            call, self._made = self._made, self._made + 1
        else:
            _calls.again[-1] = call + 1
        for mark in _calls.marks:
            if mark.first is None:
                mark.first = call
        return self.sequence._of_call(call, make)

    def keep(
        self, *new: torch.Tensor, rank: int, size: int
    ) -> tuple[tuple[torch.Tensor, ...], Callable[[], tuple[torch.Tensor, ...]]]:
        """Keeps what a layer made of this rank's rows, ``[T_local, ...]``; gives the rows that the slice sees, and what
        gives them in its backward pass.

        One call of attention, the next one of this pass, or where layers are computed again, of that. Local.
        """
        queries, keys = slice_layouts(self.sequence.tree, self.sequence.bounds, self.number, size)
        own, end = queries.rows(rank), keys.rows(rank)
        if any(x.shape[0] != own for x in new):
            raise InvalidUsage(
                f"attention was given {[x.shape[0] for x in new]} tokens; of {self!r}, "
                f"rank {rank} of {size} holds {own}"
            )
        whole = slice_layouts(self.sequence.tree, self.sequence.bounds, len(self.sequence) - 1, size)[1]
        part = _Part(self.number, end - own, end, whole.rows(rank), _rows_seen(keys, rank, new[0].device))
        kept = self.next_call(_Kept)
        self.sequence._place(kept)
        return _Keep.apply(kept, part, *new), partial(kept.read, part)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _rows_seen(keys: TreeLayout, rank: int, device: torch.device) -> torch.Tensor | None:
    """Which rows of a rank a slice sees, of those up to its end; ``None``: all."""
    seen = seen_keys(keys)
    return None if seen is keys else torch.from_numpy(seen.rows_in(keys, rank)).to(device)


def is_tree(pack: object) -> bool:
    """Whether tokens of a pack belong to several sequences: it is a tree, or a slice of one that has branches."""
    return isinstance(pack, Tree) or (isinstance(pack, SequenceSlice) and pack.sequence.branches)

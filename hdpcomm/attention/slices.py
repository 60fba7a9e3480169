"""A long sequence or tree in slices, which run one after the other on the same ranks: :class:`SlicedSequence`; and the
store of the keys, values and states that later slices need: :class:`KVStore`.

A slice's queries see the keys of its own tokens and those of the slices before it, which their ranks have kept. Each
slice is dealt to the ranks by itself, so its work is the same for all; what a rank keeps of earlier slices it passes on
in the rings of later ones. Backward passes run from the last slice to the first: each adds what it finds for kept keys
to sums, which the pass of the slice that made them takes up. In a tree, tokens are in depth-first order: what a slice
sees of those before it lies on the way from the root to its first token. Sources: TeraPipe (arXiv 2102.07988), Seq1F1B
(2406.03488).

Models call their layers in one order in every slice, so the number of a call names the layer; the store counts the
calls of each forward pass, and :class:`Recomputation` tells which ones an activation checkpoint makes again.
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
from torch import Tensor

from hdpcomm.arguments import check_number, check_type
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import Kept, Pack, Run, check_size
from hdpcomm.attention.tiles import Int64
from hdpcomm.attention.tree_layout import TreeLayout, seen_keys, slice_layouts
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import to_device, without_second_derivative
from hdpcomm.offload import ActivationOffload
from hdpcomm.offload.activations import HostRows
from hdpcomm.plan.tree import Tree

__all__ = ["Again", "KVStore", "Recomputation", "SequenceSlice", "SliceRows", "SlicedSequence", "innermost_checkpoint"]

_Entry = TypeVar("_Entry")


class _Contexts(threading.local):
    """The activation checkpoints that a thread is in, whose forward pass runs or is made again, the outermost first."""

    def __init__(self) -> None:
        self.entered: list[Recomputation | Again] = []


_contexts = _Contexts()


class Recomputation:
    """Context of the forward pass of an activation checkpoint: its calls are those of the same layers when they are
    made again inside :attr:`again`, on any thread. Both may be entered again and again.

    Attributes:
        first: the layer of the first call inside that looks at a :class:`KVStore`.
        notes: what layers have noted for the time when they run again, in their order.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.notes: list[Any] = []
        self.again = Again(self)

    def __enter__(self) -> None:
        _contexts.entered.append(self)

    def __exit__(self, *_: object) -> None:
        _contexts.entered.pop()


class Again:
    """Context in which the forward pass of an activation checkpoint is made again.

    Attributes:
        layer: of the next call that looks at a :class:`KVStore`.
        next: number of the note that is read next.
    """

    def __init__(self, recomputation: Recomputation) -> None:
        self.recomputation = recomputation
        self.layer: int | None = None
        self.next = 0

    def __enter__(self) -> None:
        self.layer, self.next = self.recomputation.first, 0
        _contexts.entered.append(self)

    def __exit__(self, *_: object) -> None:
        _contexts.entered.pop()


def innermost_checkpoint() -> Recomputation | Again | None:
    """The innermost activation checkpoint that this thread is in. Local."""
    return _contexts.entered[-1] if _contexts.entered else None


def _innermost_again() -> Again | None:
    """The innermost checkpoint that is made again, if slices have run in it."""
    found = next((each for each in reversed(_contexts.entered) if isinstance(each, Again)), None)
    return None if found is None or found.layer is None else found


@dataclass(frozen=True, slots=True)
class SliceRows:
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
    seen: Tensor | None

    def seen_of(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Rows that this slice attends to, among those up to its end."""
        return tuple(rows) if self.seen is None else tuple(x.index_select(0, self.seen) for x in rows)


class KVStore:
    """Keys, values and states that the layers of one model keep of the slices of one sequence on a rank. Local.

    Args:
        slices: of the sequence.
        offload: takes keys, values and sums of gradients to host memory; ``None``: they stay on the device.
        ratio: share of the rows that goes there, 0 to 1.
    """

    def __init__(self, slices: int, offload: ActivationOffload | None = None, ratio: float = 0.0) -> None:
        self._slices, self.ratio = slices, ratio
        self._offload = offload if ratio else None
        self._last_on_host: _OnHost | None = None
        self._layers: list[object] = []
        """By layer: what it has kept."""
        self._calls: list[int] = []
        """By forward pass: calls so far."""

    def begin_pass(self) -> int:
        """The number of a new forward pass of a slice."""
        self._calls.append(0)
        return len(self._calls) - 1

    def _layer(self, forward_pass: int) -> int:
        """The layer that is called next."""
        if (again := _innermost_again()) is not None:
            layer, again.layer = again.layer or 0, (again.layer or 0) + 1
        else:
            layer = self._calls[forward_pass]
            self._calls[forward_pass] += 1
        for each in _contexts.entered:
            if isinstance(each, Recomputation) and each.first is None:
                each.first = layer
        return layer

    def entry(self, forward_pass: int, make: Callable[[int], _Entry]) -> _Entry:
        """Entry of the layer that is called next; ``make(slices)`` for the first slice."""
        layer = self._layer(forward_pass)
        while len(self._layers) <= layer:
            self._layers.append(make(self._slices))
        entry = self._layers[layer]
        if isinstance(make, type) and not isinstance(entry, make):
            raise InvalidUsage(
                f"call {layer} of a layer is not of the kind that it was in an earlier slice: the model must run the "
                "same layers in every slice"
            )
        return entry  # type: ignore[return-value]

    def keep(
        self, forward_pass: int, rows: SliceRows, new: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Callable[[], tuple[Tensor, ...]]]:
        """Keeps a layer's rows of a slice; gives those that the slice sees, and what gives them again."""
        kept = self.entry(forward_pass, _Kept)
        if self._offload is not None and kept.host is None:
            kept.host = self._last_on_host = _OnHost(self._offload, self.ratio, self._last_on_host)
        return _Keep.apply(kept, rows, *new), partial(kept.read, rows)  # type: ignore[no-untyped-call]

    def carry(
        self,
        forward_pass: int,
        number: int,
        run: Callable[..., tuple[Tensor, Tensor | None]],
        zero: Tensor,
        tensors: Sequence[Tensor],
    ) -> Tensor:
        """The output of ``run(state, *tensors)`` from the state before slice ``number``; keeps the state after it.

        ``zero``: the state before slice 0, [states of this rank, ...]. Raises InvalidUsage where an earlier slice ran
        other layers.
        """
        carried = self.entry(forward_pass, _Carried)
        state = zero if number == 0 else carried.states.get(number)
        if state is None or state.shape[1:] != zero.shape[1:] or state.dtype != zero.dtype:
            raise InvalidUsage(
                f"a layer of slice {number} asked for a state {tuple(zero.shape)} {zero.dtype}, and the slice before "
                f"it left {'none' if state is None else f'{tuple(state.shape)} {state.dtype}'}: run the forward passes "
                "from slice 0 on, with the same layers"
            )
        out, final = run(*_Begin.apply(carried, state, *tensors))  # type: ignore[no-untyped-call]
        result: Tensor = _End.apply(carried, number, out, final)  # type: ignore[no-untyped-call]
        return result


def _check_backward(number: int, expected: int) -> None:
    """Raises InvalidUsage where the backward pass of slice ``number`` runs before or after its turn."""
    if number != expected:
        raise InvalidUsage(
            f"the backward pass of slice {number} runs where that of slice {expected} has to: run them from the last "
            "slice to the first, each once"
        )


class _Kept:
    """KV that one attention call has kept of earlier slices, and its gradients from later ones."""

    def __init__(self, slices: int) -> None:
        self.tensors: tuple[Tensor, ...] = ()
        """``[rows of the rank in all slices, ...]``; those of slices to come are not set."""
        self.sums: list[Tensor] = []
        self.host: _OnHost | None = None
        """Instead of both."""
        self.written = 0
        """Slices."""
        self.next_backward = slices - 1
        self._like: list[Tensor] = []

    def write(self, new: Sequence[Tensor], rows: SliceRows) -> tuple[Tensor, ...]:
        """Takes the rows of a slice; gives those that it sees."""
        self._check(new, rows.number)
        if self.host is not None:
            return rows.seen_of(self.host.write(new, rows))
        if not self.tensors:
            self.tensors = tuple(x.new_empty((rows.total, *x.shape[1:])) for x in new)
        for kept, x in zip(self.tensors, new, strict=True):
            kept.data[rows.first : rows.end] = x.detach()
        return self.read(rows)

    def read(self, rows: SliceRows) -> tuple[Tensor, ...]:
        """The rows that a slice sees."""
        if self.host is not None:
            return rows.seen_of(self.host.read(rows))
        # Without their version counter: a later slice writes other rows of the same memory.
        return rows.seen_of([kept.data[: rows.end] for kept in self.tensors])

    def _check(self, new: Sequence[Tensor], number: int) -> None:
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

    def backward(self, grads: Sequence[Tensor], rows: SliceRows) -> list[Tensor]:
        """Adds up the gradients of kept rows; gives those of the slice's own rows, which are the last ones."""
        _check_backward(rows.number, self.next_backward)
        self.next_backward -= 1
        first, end, seen = rows.first, rows.end, rows.seen
        before = first if seen is None else len(seen) - (end - first)
        sums = self.sums if self.host is None else self.host.take_sums(rows)
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
            self.tensors, self.sums = (self.tensors, sums) if rows.number else ((), [])
        return own


class _OnHost:
    """Where a :class:`_Kept` has its rows if they go to host memory: what a call needs comes while the one before it
    computes, in forward and in backward passes."""

    def __init__(self, offload: ActivationOffload, ratio: float, before: _OnHost | None) -> None:
        """``before``: that of the call before this one."""
        self._rows, self._sums = HostRows(offload, ratio), HostRows(offload, ratio)
        self._after: _OnHost | None = None
        self._before = None if before is None else weakref.ref(before)
        self._present: list[Tensor] | None = None
        """Rows that were read where a layer was computed again, for its backward pass."""
        if before is not None:
            before._after = self

    def write(self, new: Sequence[Tensor], rows: SliceRows) -> list[Tensor]:
        """Takes the rows of a slice, unless it runs again; gives those up to its end."""
        if _innermost_again() is not None:
            self._present = None
            self._present = self._rows.read(rows.number + 1, rows.end)
            return self._present
        whole_rows = self._rows.read(rows.number, rows.end) if rows.number else []
        if self._after is not None and rows.number:
            self._after._rows.prefetch(rows.number, rows.end)
        if len(self._rows) == rows.number:
            self._rows.add(new)
        whole_rows = whole_rows or [x.new_empty((rows.end, *x.shape[1:])) for x in new]
        for whole, x in zip(whole_rows, new, strict=True):
            whole[rows.first : rows.end] = x.detach()
        return whole_rows

    def read(self, rows: SliceRows) -> list[Tensor]:
        """The rows up to the end of a slice, in its backward pass."""
        present, self._present = self._present, None
        if present is None:
            present = self._rows.read(rows.number + 1, rows.end)
        if len(self._sums):
            self._sums.prefetch(1, rows.end)
        before = None if self._before is None else self._before()
        if before is not None and before._present is None:
            before._rows.prefetch(rows.number + 1, rows.end)
        return present

    def take_sums(self, rows: SliceRows) -> list[Tensor]:
        """The sums up to the end of a slice; none if it is the last one."""
        if not len(self._sums):
            return []
        sums = self._sums.read(1, rows.end)
        self._sums.drop_last()
        return sums

    def keep_sums(self, sums: Sequence[Tensor]) -> None:
        """After the backward pass of the last slice whose rows are kept: these are not needed any more."""
        self._present = None
        self._rows.drop_last()
        if len(self._rows):
            self._sums.add(sums)


class _Keep(torch.autograd.Function):
    """From the keys of a slice to those that it sees, which earlier slices have kept."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, rows: SliceRows, *new: Tensor) -> tuple[Tensor, ...]:
        ctx.kept, ctx.rows = kept, rows
        return kept.write(new, rows)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.kept.backward(grads, ctx.rows)


class _Carried:
    """The states of one call of a layer, by slice, and the gradient of the one that the next backward pass ends
    with."""

    def __init__(self, slices: int) -> None:
        self.states: dict[int, Tensor] = {}
        """The state before each slice, until the backward pass of slice 0."""
        self.grad: Tensor | None = None
        self.next_backward = slices - 1


class _Begin(torch.autograd.Function):
    """The tensors of a call as they are, and the state before the slice."""

    @staticmethod
    def forward(ctx: Any, carried: _Carried, state: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.carried = carried
        return (state.clone(), *(x.view_as(x) for x in tensors))

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.carried.grad = grads[0]
        return None, None, *grads[1:]


class _End(torch.autograd.Function):
    """The output of a call as it is; keeps the state after the slice."""

    @staticmethod
    def forward(ctx: Any, carried: _Carried, number: int, out: Tensor, state: Tensor) -> Tensor:
        ctx.carried, ctx.number = carried, number
        carried.states[number + 1] = state.detach().clone()
        return out.view_as(out)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        carried: _Carried = ctx.carried
        _check_backward(ctx.number, carried.next_backward)
        carried.next_backward -= 1
        grad, carried.grad = carried.grad, None
        if ctx.number == 0:
            carried.states = {}
        return None, None, dout, grad


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

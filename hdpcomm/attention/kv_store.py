"""Store of the keys, values and states of a sequence's slices that later slices need: :class:`KVStore`.

Models call their layers in one order in every slice, so the number of a call names the layer; the store counts the
calls of each forward pass, and :class:`Recomputation` tells which ones an activation checkpoint makes again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative
from hdpcomm.offload import ActivationOffload
from hdpcomm.offload.rows import HostRows

__all__ = ["Again", "KVStore", "Recomputation", "SliceRows", "innermost_checkpoint"]

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

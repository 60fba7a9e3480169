"""States that a layer hands from one slice of a sequence to the next: the state that a slice ends with. Local.

In a tree those after all tokens that a later slice goes on from. Forward passes write the states before the next slice;
backward passes, from the last slice to the first, take up the gradient that the slice after them found for them. See
:class:`hdpcomm.attention.SlicedSequence`.
"""

from __future__ import annotations

from typing import Any

import torch

from hdpcomm.attention.slices import SequenceSlice, check_backward
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

__all__ = ["Carried", "begin_slice", "end_slice"]


class Carried:
    """The states of one call of a layer, by slice, and the gradient of the one that the next backward pass ends
    with."""

    def __init__(self, slices: int) -> None:
        self.states: dict[int, torch.Tensor] = {}
        """The state before each slice, until the backward pass of slice 0."""
        self.grad: torch.Tensor | None = None
        self.next_backward = slices - 1


class _Begin(torch.autograd.Function):
    """The tensors of a call as they are, and the state before the slice."""

    @staticmethod
    def forward(ctx: Any, carried: Carried, state: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.carried = carried
        return (state.clone(), *(x.view_as(x) for x in tensors))

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.carried.grad = grads[0]
        return None, None, *grads[1:]


class _End(torch.autograd.Function):
    """The output of a call as it is; keeps the state after the slice."""

    @staticmethod
    def forward(ctx: Any, carried: Carried, number: int, out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        ctx.carried, ctx.number = carried, number
        carried.states[number + 1] = state.detach().clone()
        return out.view_as(out)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        carried: Carried = ctx.carried
        check_backward(ctx.number, carried.next_backward)
        carried.next_backward -= 1
        grad, carried.grad = carried.grad, None
        if ctx.number == 0:
            carried.states = {}
        return None, None, dout, grad


def begin_slice(part: SequenceSlice, zero: torch.Tensor, *tensors: torch.Tensor) -> tuple[Carried, list[torch.Tensor]]:
    """One call of a layer: (what it hands on, the state before the slice and ``tensors``, in the graph).

    ``zero``: the state before slice 0, [states of this rank, ...]. Raises InvalidUsage where an earlier slice ran other
    layers.
    """
    carried = part.next_call(Carried)
    state = zero if part.number == 0 else carried.states.get(part.number)
    if state is None or state.shape[1:] != zero.shape[1:] or state.dtype != zero.dtype:
        raise InvalidUsage(
            f"a layer of {part!r} asked for a state {tuple(zero.shape)} {zero.dtype}, and the slice before it left "
            f"{'none' if state is None else f'{tuple(state.shape)} {state.dtype}'}: run the forward passes from slice "
            "0 on, with the same layers"
        )
    return carried, list(_Begin.apply(carried, state, *tensors))  # type: ignore[no-untyped-call]


def end_slice(carried: Carried, part: SequenceSlice, out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``out`` in the graph; ``state``, after the slice, is kept for the next one."""
    found: torch.Tensor = _End.apply(carried, part.number, out, state)  # type: ignore[no-untyped-call]
    return found

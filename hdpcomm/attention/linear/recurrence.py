"""Forward and backward of one distributed linear layer; autograd calls these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.attention.linear.exchange import Group, Map, num_groups, travel
from hdpcomm.attention.linear.scan import ForestScan, Inputs, PartRuns, Scan, chunked
from hdpcomm.attention.linear.state_plan import StatePlan
from hdpcomm.kernels._tensors import autocast_type
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["LinearCall", "LinearRecurrence"]

_CACHE_BYTES = 16 << 20
"""Keys and values of heads that are computed together on a CPU; larger temporary tensors are slower."""


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    plan: StatePlan
    comm: Communicator | None
    exchange: str

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """See :meth:`StatePlan.ends`."""
        return self.plan.ends(0 if self.comm is None else self.comm.rank)

    def parts(self, dk: int) -> tuple[PartRuns, ...]:
        return _parts_of(self.plan, 0 if self.comm is None else self.comm.rank, dk)

    def groups(self, inputs: Inputs) -> list[slice]:
        """The heads that are computed together. Without an exchange they are as many as fit into a CPU's cache."""
        heads, device, count = inputs.q.shape[1], inputs.q.device.type, 1
        if self.plan.messages:
            count = num_groups(heads, device) if self.exchange == "pipeline" else 1
        elif device == "cpu":
            row = (inputs.q.shape[2] + inputs.v.shape[2]) * inputs.dtype.itemsize
            least = inputs.q.shape[0] * heads * row / _CACHE_BYTES
            count = next((n for n in range(1, heads + 1) if heads % n == 0 and n >= least), heads)
        width = heads // count
        return [slice(i * width, (i + 1) * width) for i in range(count)]


@lru_cache(maxsize=128)
def _parts_of(plan: StatePlan, rank: int, dk: int) -> tuple[PartRuns, ...]:
    """The parts of ``rank``, in chunks that suit states of ``dk`` rows."""
    forest = tuple((chunked(each.starts, each.lengths, dk), each.links) for each in plan.forests[rank])
    return tuple(forest if runs is None else chunked(*runs, dk) for runs in plan.runs[rank])


class _Forward(Group):
    def __init__(self, out: Tensor, *begin: Any) -> None:
        """``out``: receives the output of these heads."""
        super().__init__(*begin)
        self._out = out

    def _run(self, place: int, state: Tensor) -> Tensor:
        self.states[place] = state
        return self._scans[place].run(state)

    def finish(self, place: int) -> None:
        self._scans.pop(place).output(self._out)

    def summary(self, place: int, count: int) -> Map:
        carrier_map = self._carriers(place).summary(self.zeros(count))
        self.transitions[place] = carrier_map[0].contiguous()
        return carrier_map


class _Backward(Group):
    def __init__(self, dout: Tensor, grads: Inputs, *begin: Any) -> None:
        """``dout``: the gradient of the output of these heads; ``grads``: receives those of the inputs."""
        super().__init__(*begin)
        self._dout, self._grads = dout, grads

    def _make(self, place: int) -> Scan | ForestScan:
        scan, state = super()._make(place), self.states[place]
        assert state is not None
        scan.run(state)
        scan.take_grad(self._dout)
        return scan

    def _run(self, place: int, state: Tensor) -> Tensor:
        return self._scans[place].run_backward(state)

    def finish(self, place: int) -> None:
        self._scans.pop(place).gradients(self._grads)

    def summary(self, place: int, count: int) -> Map:
        scan, transition = self._carriers(place), self.transitions[place]
        assert transition is not None
        if transition.shape[-1] > 1:
            transition = transition.mT
        return transition, scan.backward_bias(self.zeros(count))


def _ended(passes: Sequence[Group], initial: Tensor | None) -> Tensor | None:
    """Final states of the groups, [states of the rank, ...]; None of whole sequences."""
    if initial is None:
        return None
    final_states = [group.final for group in passes if group.final is not None]
    return torch.cat(final_states, dim=1) if final_states else initial[:0]


def _run_forward(inputs: Inputs, call: LinearCall, initial: Tensor | None) -> tuple[Tensor, list[_Forward]]:
    """The output, and the passes with the states that their runs began with. Collective over the call's ranks."""
    parts, heads = call.parts(inputs.q.shape[2]), call.groups(inputs)
    out = inputs.v.new_empty(inputs.v.shape)
    passes = [
        _Forward(out[:, each], parts, inputs.heads(each), None if initial is None else initial[:, each], call.ends)
        for each in heads
    ]
    travel(passes, call.comm, call.exchange, call.plan, backward=False)
    return out, passes


def _run_backward(
    dout: Tensor, inputs: Inputs, kept: Sequence[Tensor | None], call: LinearCall, dfinal: Tensor | None
) -> tuple[Inputs, Tensor | None]:
    """The gradients of the inputs and of the initial state; ``kept``: the initial states and the transitions of the
    forward, group by group. Collective over the call's ranks."""
    new, beta = torch.empty_like, inputs.beta
    parts, heads = call.parts(inputs.q.shape[2]), call.groups(inputs)
    grads = Inputs(new(inputs.q), new(inputs.k), new(inputs.v), new(inputs.g), None if beta is None else new(beta))
    passes = []
    for i, chosen in enumerate(heads):
        begin = None if dfinal is None else dfinal[:, chosen]
        group = _Backward(dout[:, chosen], grads.heads(chosen), parts, inputs.heads(chosen), begin, call.ends[::-1])
        own = kept[2 * len(parts) * i : 2 * len(parts) * (i + 1)]
        group.states, group.transitions = list(own[: len(parts)]), list(own[len(parts) :])
        passes.append(group)
    travel(passes, call.comm, call.exchange, call.plan, backward=True)
    return grads, _ended(passes, dfinal)


class LinearRecurrence(torch.autograd.Function):
    """(out, final) = f(q, k, v, g, beta, initial); the local work in float32 (float64), the states that a run starts
    with are kept. ``initial``, ``final``: the states that a slice begins with, and that it keeps for those after it,
    [states of the rank, heads, dk, dv]; None of whole sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        initial: Tensor | None,
        call: LinearCall,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(autocast_type(q), enabled=False):
            out, passes = _run_forward(Inputs(q, k, v, g, beta), call, initial)
        kept = [[*each.states, *each.transitions] for each in passes]
        ctx.call = call
        ctx.save_for_backward(q, k, v, g, beta, *(x for states in kept for x in states))
        return out, _ended(passes, initial)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        q, k, v, g, beta, *kept = ctx.saved_tensors
        with torch.autocast(autocast_type(q), enabled=False):
            grads, dinitial = _run_backward(dout, Inputs(q, k, v, g, beta), kept, call, dfinal)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, dinitial, None

"""Forward and backward of one distributed linear layer; autograd calls these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention.layout import Layout
from hdpcomm.attention.linear.exchange import Map, num_groups, travel
from hdpcomm.attention.linear.fla import make_scan
from hdpcomm.attention.linear.runs import Runs, runs_of
from hdpcomm.attention.linear.scan import Inputs

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["LinearCall", "LinearRecurrence"]


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    layout: Layout
    comm: Communicator | None
    exchange: str
    backend: str

    def runs(self, dk: int) -> tuple[Runs, ...]:
        return runs_of(self.layout, 0 if self.comm is None else self.comm.rank, dk)

    def groups(self, heads: int, device: str) -> list[slice]:
        """The heads that travel together."""
        count = num_groups(heads, device) if self.exchange == "pipeline" and self.comm is not None else 1
        width = heads // count
        return [slice(i * width, (i + 1) * width) for i in range(count)]


class _Group:
    """The runs of some heads; what both directions share. ``states[part]``: the initial states of the forward, or None
    for zeros; ``transitions[part]``: of the maps that the forward summed up."""

    def __init__(self, backend: str, runs: tuple[Runs, ...], inputs: Inputs) -> None:
        self.scans = [make_scan(backend, each, inputs) for each in runs]
        shape = inputs.state_shape(runs[0].sequences)
        self._zero = torch.zeros((), dtype=inputs.dtype, device=inputs.q.device).expand(shape)
        dk = shape[2]
        scalar = (1 if inputs.g.ndim == 2 else dk, 1)
        self.transition_shape = (dk, dk) if inputs.beta is not None else scalar
        self.states: list[torch.Tensor | None] = [None] * len(runs)
        self.transitions: list[torch.Tensor | None] = [None] * len(runs)

    def zero(self) -> torch.Tensor:
        return self._zero.contiguous()


class _Forward(_Group):
    def run(self, part: int, state: torch.Tensor) -> torch.Tensor:
        self.states[part] = state
        return self.scans[part].run(state)

    def summary(self, part: int) -> Map:
        found = self.scans[part].summary(self.zero())
        self.transitions[part] = found[0].contiguous()
        return found


class _Backward(_Group):
    """The parts in the order of the backward: the last one is the first."""

    def run(self, part: int, state: torch.Tensor) -> torch.Tensor:
        return self.scans[-1 - part].run_backward(state)

    def summary(self, part: int) -> Map:
        transition = self.transitions[-1 - part]
        assert transition is not None
        if transition.shape[-1] > 1:
            transition = transition.mT
        return transition, self.scans[-1 - part].backward_bias(self.zero())


def _run_forward(inputs: Inputs, call: LinearCall) -> tuple[torch.Tensor, list[_Forward]]:
    """The output, and the passes with the states that their runs began with. Collective over the call's ranks."""
    q, v = inputs.q, inputs.v
    runs, heads = call.runs(q.shape[2]), call.groups(q.shape[1], q.device.type)
    passes = [_Forward(call.backend, runs, inputs.heads(each)) for each in heads]
    travel(passes, call.comm, call.exchange)
    out = v.new_empty(v.shape)
    for each, chosen in zip(passes, heads, strict=True):
        for scan in each.scans:
            scan.output(out[:, chosen])
    return out, passes


def _run_backward(dout: torch.Tensor, inputs: Inputs, kept: Sequence[torch.Tensor | None], call: LinearCall) -> Inputs:
    """The gradients of the inputs; ``kept``: the initial states and the transitions of the forward, group by group.
    Collective over the call's ranks."""
    new, q, beta = torch.empty_like, inputs.q, inputs.beta
    runs, heads = call.runs(q.shape[2]), call.groups(q.shape[1], q.device.type)
    grads = Inputs(new(q), new(inputs.k), new(inputs.v), new(inputs.g), None if beta is None else new(beta))
    passes = []
    for i, chosen in enumerate(heads):
        group = _Backward(call.backend, runs, inputs.heads(chosen))
        own = kept[2 * len(runs) * i : 2 * len(runs) * (i + 1)]
        group.transitions = list(own[len(runs) :])
        for scan, state in zip(group.scans, own, strict=False):
            scan.run(group.zero() if state is None else state)
            scan.take_grad(dout[:, chosen])
        passes.append(group)
    travel(passes, call.comm, call.exchange)
    for group, chosen in zip(passes, heads, strict=True):
        for scan in group.scans:
            scan.gradients(grads.heads(chosen))
    return grads


class LinearRecurrence(torch.autograd.Function):
    """out = f(q, k, v, g, beta); the local work in float32 (float64), the states that a run starts with are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor | None,
        call: LinearCall,
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, passes = _run_forward(Inputs(q, k, v, g, beta), call)
        kept = [[*each.states, *each.transitions] for each in passes]
        if call.comm is None:  # all begin with 0
            kept = [[None] * len(states) for states in kept]
        ctx.call = call
        ctx.save_for_backward(q, k, v, g, beta, *(x for states in kept for x in states))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: LinearCall = ctx.call
        q, k, v, g, beta, *kept = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = _run_backward(dout, Inputs(q, k, v, g, beta), kept, call)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, None

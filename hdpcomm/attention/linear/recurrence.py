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
from hdpcomm.attention.linear.scan import Inputs, Scan

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["LinearCall", "LinearRecurrence"]

_CACHE_BYTES = 16 << 20
"""Keys and values of heads that are computed together on a CPU; larger temporary tensors are slower."""


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    layout: Layout
    comm: Communicator | None
    exchange: str
    backend: str

    def runs(self, dk: int) -> tuple[Runs, ...]:
        return runs_of(self.layout, 0 if self.comm is None else self.comm.rank, dk)

    def groups(self, inputs: Inputs) -> list[slice]:
        """The heads that are computed together. Without an exchange they are as many as fit into a CPU's cache."""
        heads, device, count = inputs.q.shape[1], inputs.q.device.type, 1
        if self.comm is not None:
            count = num_groups(heads, device) if self.exchange == "pipeline" else 1
        elif device == "cpu":
            row = (inputs.q.shape[2] + inputs.v.shape[2]) * inputs.dtype.itemsize
            least = inputs.q.shape[0] * heads * row / _CACHE_BYTES
            count = next((n for n in range(1, heads + 1) if heads % n == 0 and n >= least), heads)
        width = heads // count
        return [slice(i * width, (i + 1) * width) for i in range(count)]


class _Group:
    """The runs of some heads, part by part; a part's scan lives from :meth:`prepare` to :meth:`finish`.

    ``states[i]``: the initial states of the i-th runs in the forward, or None for zeros; ``transitions[i]``: of the
    maps that the forward summed up.
    """

    def __init__(self, backend: str, runs: tuple[Runs, ...], inputs: Inputs) -> None:
        self._backend, self._runs, self._inputs = backend, runs, inputs
        self._scans: dict[int, Scan] = {}
        self._shape = inputs.state_shape(runs[0].sequences)
        dk = self._shape[2]
        self.transition_shape = (dk, dk) if inputs.beta is not None else (1 if inputs.g.ndim == 2 else dk, 1)
        self.states: list[torch.Tensor | None] = [None] * len(runs)
        self.transitions: list[torch.Tensor | None] = [None] * len(runs)

    def zero(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=self._inputs.dtype, device=self._inputs.q.device)

    def _make(self, place: int) -> Scan:
        return make_scan(self._backend, self._runs[place], self._inputs)


class _Forward(_Group):
    def __init__(self, backend: str, runs: tuple[Runs, ...], inputs: Inputs, out: torch.Tensor) -> None:
        """``out``: receives the output of these heads."""
        super().__init__(backend, runs, inputs)
        self._out = out

    def prepare(self, part: int) -> None:
        if part not in self._scans:
            self._scans[part] = self._make(part)

    def run(self, part: int, state: torch.Tensor) -> torch.Tensor:
        self.prepare(part)
        self.states[part] = state
        return self._scans[part].run(state)

    def finish(self, part: int) -> None:
        self._scans.pop(part).output(self._out)

    def summary(self, part: int) -> Map:
        self.prepare(part)
        found = self._scans[part].summary(self.zero())
        self.transitions[part] = found[0].contiguous()
        return found


class _Backward(_Group):
    """The parts in the order of the backward: the last one is the first."""

    def __init__(self, backend: str, runs: tuple[Runs, ...], inputs: Inputs, dout: torch.Tensor, grads: Inputs) -> None:
        """``dout``: the gradient of the output of these heads; ``grads``: receives those of the inputs."""
        super().__init__(backend, runs, inputs)
        self._dout, self._grads = dout, grads

    def _place(self, part: int) -> int:
        return len(self._runs) - 1 - part

    def prepare(self, part: int) -> None:
        if part not in self._scans:
            scan, state = self._make(self._place(part)), self.states[self._place(part)]
            scan.run(self.zero() if state is None else state)
            scan.take_grad(self._dout)
            self._scans[part] = scan

    def run(self, part: int, state: torch.Tensor) -> torch.Tensor:
        self.prepare(part)
        return self._scans[part].run_backward(state)

    def finish(self, part: int) -> None:
        self._scans.pop(part).gradients(self._grads)

    def summary(self, part: int) -> Map:
        self.prepare(part)
        transition = self.transitions[self._place(part)]
        assert transition is not None
        if transition.shape[-1] > 1:
            transition = transition.mT
        return transition, self._scans[part].backward_bias(self.zero())


def _run_forward(inputs: Inputs, call: LinearCall) -> tuple[torch.Tensor, list[_Forward]]:
    """The output, and the passes with the states that their runs began with. Collective over the call's ranks."""
    runs, heads = call.runs(inputs.q.shape[2]), call.groups(inputs)
    out = inputs.v.new_empty(inputs.v.shape)
    passes = [_Forward(call.backend, runs, inputs.heads(each), out[:, each]) for each in heads]
    travel(passes, call.comm, call.exchange)
    return out, passes


def _run_backward(dout: torch.Tensor, inputs: Inputs, kept: Sequence[torch.Tensor | None], call: LinearCall) -> Inputs:
    """The gradients of the inputs; ``kept``: the initial states and the transitions of the forward, group by group.
    Collective over the call's ranks."""
    new, beta = torch.empty_like, inputs.beta
    runs, heads = call.runs(inputs.q.shape[2]), call.groups(inputs)
    grads = Inputs(new(inputs.q), new(inputs.k), new(inputs.v), new(inputs.g), None if beta is None else new(beta))
    passes = []
    for i, chosen in enumerate(heads):
        group = _Backward(call.backend, runs, inputs.heads(chosen), dout[:, chosen], grads.heads(chosen))
        own = kept[2 * len(runs) * i : 2 * len(runs) * (i + 1)]
        group.states, group.transitions = list(own[: len(runs)]), list(own[len(runs) :])
        passes.append(group)
    travel(passes, call.comm, call.exchange)
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

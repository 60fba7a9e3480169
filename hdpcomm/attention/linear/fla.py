"""The scan of a rank's runs by the kernels of flash-linear-attention, where it is installed (CUDA, 16-bit types).

Its functions take and return states and are differentiable in them, which is all that an exchange needs: the bias of a
run is its final state from zeros, the transition its final state from the unit matrix with V = 0, and the backward is
linear in the gradients of the output and of the final state. Checked against stand-ins with its signatures only, never
on a device. Source: github.com/fla-org/flash-linear-attention, fla/ops (release 0.5).
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention.linear.runs import Runs
from hdpcomm.attention.linear.scan import Inputs, RunScan, Scan
from hdpcomm.errors import InvalidUsage

__all__ = ["BACKENDS", "FlaScan", "choose_backend", "make_scan"]

BACKENDS = ("auto", "torch", "fla")


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def _refuses(device: str, dtype: torch.dtype) -> str | None:
    """Why flash-linear-attention cannot compute this here, or None."""
    if device != "cuda":
        return f"it computes on CUDA devices; the tensors are on {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16; q has {dtype}"
    return None if _installed() else "the package flash-linear-attention is not installed"


def choose_backend(name: str, device: str, dtype: torch.dtype) -> str:
    """ "torch" or "fla" for a call with ``backend=name``. Raises InvalidUsage."""
    if name not in BACKENDS:
        raise InvalidUsage(f"backend={name!r}; expected one of {', '.join(BACKENDS)}")
    if name == "torch":
        return name
    reason = _refuses(device, dtype)
    if name == "fla" and reason is not None:
        raise InvalidUsage(f"the backend 'fla' cannot do this: {reason}; use torch")
    return "torch" if reason is not None else "fla"


def make_scan(backend: str, runs: Runs, inputs: Inputs) -> Scan:
    """The scan of ``runs`` by a backend that :func:`choose_backend` returned."""
    return FlaScan(runs, inputs) if backend == "fla" else RunScan(runs, inputs)


def _function(inputs: Inputs) -> Any:
    if inputs.beta is None:
        return importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    if inputs.g.ndim == 3:
        return importlib.import_module("fla.ops.kda").chunk_kda
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


class FlaScan:
    """A :class:`hdpcomm.attention.linear.scan.Scan` by flash-linear-attention."""

    def __init__(self, runs: Runs, inputs: Inputs) -> None:
        device = inputs.q.device
        self._used = np.flatnonzero(runs.lengths)
        starts, lengths = runs.starts[self._used], runs.lengths[self._used]
        rows = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]
        self._rows = torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)).to(device)
        self._sequences = torch.from_numpy(self._used).to(device)
        self._cu = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to(device)
        self._run = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
        self._call = _function(inputs)
        names = ("q", "k", "v", "g", "beta")
        tensors = {name: getattr(inputs, name) for name in names}
        self._inputs = {name: x.index_select(0, self._rows) for name, x in tensors.items() if x is not None}
        self._inputs["v"] = self._inputs["v"].to(self._inputs["q"].dtype)
        self._leaves: list[Tensor] = []
        self._results: tuple[Tensor, Tensor] | None = None
        self._gradients: list[Tensor] = []
        self._dout = inputs.v.new_empty(0)

    def _compute(self, inputs: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """(output [tokens, heads, dv], final states [runs, heads, dk, dv])."""
        batched = {name: x[None] for name, x in inputs.items()}
        out, final = self._call(**batched, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=self._cu)
        return out[0], final

    def _put_states(self, states: Tensor, x: Tensor) -> Tensor:
        return states.index_copy(0, self._sequences, x.to(states.dtype))

    def run(self, initial: Tensor) -> Tensor:
        if not len(self._used):
            return initial
        leaves = {name: x.detach().requires_grad_() for name, x in self._inputs.items()}
        state = initial.index_select(0, self._sequences).requires_grad_()
        with torch.enable_grad():
            self._results = self._compute(leaves, state)
        self._leaves = [state, *leaves.values()]
        return self._put_states(initial, self._results[1].detach())

    def output(self, out: Tensor) -> None:
        if self._results is not None:
            out.index_copy_(0, self._rows, self._results[0].detach().to(out.dtype))

    def summary(self, zero: Tensor) -> tuple[Tensor, Tensor]:
        sequences, heads, dk, _ = zero.shape
        g = self._inputs["g"]
        delta = "beta" in self._inputs
        if not len(self._used):
            unit = torch.eye(dk) if delta else torch.ones(1 if g.ndim == 2 else dk, 1)
            return unit.to(zero).expand(sequences, heads, *unit.shape).contiguous(), zero
        bias = self._compute(self._inputs, zero.index_select(0, self._sequences))[1]
        if delta:
            unit = torch.eye(dk, dtype=zero.dtype, device=zero.device).expand(sequences, heads, dk, dk).contiguous()
            blank = {**self._inputs, "v": torch.zeros_like(self._inputs["k"])}
            transition = self._compute(blank, unit.index_select(0, self._sequences))[1]
            return self._put_states(unit, transition), self._put_states(zero, bias)
        sums = torch.zeros((len(self._used), *g.shape[1:]), dtype=torch.float64, device=g.device)
        sums.index_add_(0, self._run, g.double())
        factor = torch.exp(sums).to(zero.dtype).view(len(self._used), heads, -1, 1)
        ones = zero.new_ones((sequences, *factor.shape[1:]))
        return self._put_states(ones, factor), self._put_states(zero, bias)

    def take_grad(self, dout: Tensor) -> None:
        self._dout = dout.index_select(0, self._rows)

    def _backward(self, final: Tensor, keep: bool) -> tuple[Tensor, ...]:
        assert self._results is not None
        out, state = self._results
        upstream = (self._dout.to(out.dtype), final.index_select(0, self._sequences).to(state.dtype))
        return torch.autograd.grad((out, state), self._leaves, upstream, retain_graph=keep)

    def backward_bias(self, zero: Tensor) -> Tensor:
        return self._put_states(zero, self._backward(zero, True)[0]) if len(self._used) else zero

    def run_backward(self, final: Tensor) -> Tensor:
        if not len(self._used):
            return final
        dinitial, *self._gradients = self._backward(final, False)
        self._results = None
        return self._put_states(final, dinitial)

    def gradients(self, grads: Inputs) -> None:
        if len(self._used):
            for name, x in zip(self._inputs, self._gradients, strict=True):
                out = getattr(grads, name)
                out.index_copy_(0, self._rows, x.to(out.dtype))

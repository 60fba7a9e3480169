"""All gradients of a model in one flat buffer, so that a step needs one reduction and one norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hdpcomm.train.buckets import trained_parameters

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["GradientBuffer"]


class GradientBuffer:
    """Sums the gradients of many backward passes in one flat tensor of fp32 (fp64 if any parameter is).

    A parameter of the buffer's dtype gets a view of it as ``.grad``, so autograd adds in place and nothing is copied.
    Gradients of narrower parameters (bf16, fp16) are added after each backward by :meth:`collect`, in the wide type,
    and handed back by :meth:`finish`. A parameter that no backward reached has a gradient of zero, as on a single
    device that saw all of the batch.

    Args:
        parameters: those with ``requires_grad`` are taken, each once; all on one device.
        comm: the ranks over which :meth:`reduce` sums; None: this one alone.

    Raises:
        InvalidUsage: nothing to train, several devices, or a complex parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: Communicator | None = None) -> None:
        self._comm = comm
        self.parameters = trained_parameters(parameters)
        wide = any(p.dtype == torch.float64 for p in self.parameters)
        size = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(size, dtype=torch.float64 if wide else torch.float32, device=self.parameters[0].device)
        sizes = [p.numel() for p in self.parameters]
        self._views = [
            part.view(p.shape) for part, p in zip(torch.split(self.flat, sizes), self.parameters, strict=True)
        ]

    def zero(self) -> None:
        """Forgets all gradients and takes over ``.grad`` of every parameter. Call at the start of a step."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view if parameter.dtype == view.dtype else None

    def collect(self) -> None:
        """Adds what a backward pass left in the ``.grad`` of narrower parameters. Call after each backward."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.dtype != view.dtype and parameter.grad is not None:
                view += parameter.grad
                parameter.grad = None

    def reduce(self, factor: float) -> None:
        """Makes the gradients ``factor`` times the sums over the ranks of ``comm``. Collective over it."""
        if self._comm is not None:
            self._comm.all_reduce(self.flat)
        self.flat *= factor

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that their global L2 norm is at most ``max_norm``; returns the norm before that."""
        norm = float(torch.linalg.vector_norm(self.flat))
        if max_norm is not None and norm > max_norm:
            self.flat *= max_norm / norm
        return norm

    def finish(self) -> None:
        """Gives every parameter its gradient in the parameter's own dtype. Call before the optimizer's step."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.dtype != view.dtype:
                parameter.grad = view.to(parameter.dtype)

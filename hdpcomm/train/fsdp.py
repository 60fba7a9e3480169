"""Models that FSDP2 has sharded (``torch.distributed.fsdp.fully_shard``), with any number of micro-batches a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.tensor import DTensor

    from hdpcomm.comm import Communicator

__all__ = ["FullyShardedParameters", "is_dtensor", "is_fully_sharded"]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a ``torch.distributed.tensor.DTensor``: none is before something has imported that module."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_fully_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of the parameters is a shard of FSDP2."""
    return any(is_dtensor(parameter) for parameter in parameters)


class FullyShardedParameters:
    """The gradients of a model after ``fully_shard``, with the steps of :class:`hdpcomm.train.Gradients`.

    FSDP2 communicates in each forward and backward pass, in the order in which layers run: ranks that have different
    numbers of micro-batches, or other ranks beside them in one, would wait for each other. So the parameters are
    gathered once a step, before the first micro-batch; the passes add up whole gradients and communicate nothing of
    FSDP2's; and a pass over no tokens after the last one scatters the sums, on all ranks alike.
    A rank then needs room for whole parameters and gradients during the step; the optimizer's state stays sharded.

    Args:
        model: ``fully_shard(model)``, and mostly its layers before it, on one mesh of all ranks of ``comm``.

    Raises:
        InvalidUsage: the model itself is not a root of FSDP2, some parameters are not sharded, or the mesh is not one
            of all ranks in their order.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        from torch.distributed.fsdp import FSDPModule  # a second, which others' imports of this package need not wait

        parameters = [p for p in model.parameters() if p.requires_grad]
        if not isinstance(model, FSDPModule):
            raise InvalidUsage(
                f"layers of {type(model).__name__} are sharded by fully_shard, and it is not itself; call "
                "fully_shard(model) after its layers, on the model that the trainer gets"
            )
        for parameter in parameters:
            mesh = parameter.device_mesh if is_dtensor(parameter) else None
            if mesh is None or mesh.mesh.flatten().tolist() != list(range(comm.size)) or mesh.ndim != 1:
                raise InvalidUsage(
                    f"a parameter of shape {tuple(parameter.shape)} is on {mesh or 'no mesh'}; shard all of them on "
                    f"one mesh of the {comm.size} ranks that train together (init_device_mesh(..., ({comm.size},)))"
                )
        self.parameters = parameters
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._comm = comm

    def zero(self) -> None:
        """Forgets all gradients. Call at the start of a step."""
        for parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def passes(self, scatter: Callable[[], object], _: object) -> Iterator[None]:
        """Context of the passes of a step, of which there may be none on a rank. Collective, at both ends.

        Args:
            scatter: a forward and backward pass that adds nothing and communicates nothing, the same on all ranks.
        """
        self._set(sync=False)
        for module in self._modules:
            module.unshard()
        yield
        self._set(sync=True)
        scatter()

    def _nothing(self, *_: object) -> None:
        """Nothing is to do beside the passes, after which the sums are scattered, on all ranks alike."""

    begin_pass = end_pass = reduce_early = start = drain = finish = _nothing

    def _set(self, *, sync: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(sync, recurse=False)
            module.set_reshard_after_backward(sync, recurse=False)
            module.set_reshard_after_forward(False, recurse=False)

    def reduce(self, factor: float) -> None:
        """Makes the gradients ``factor`` times the sums over the ranks. Local: they have been scattered."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad *= factor * self._comm.size  # FSDP2 takes the mean

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that their global L2 norm is at most ``max_norm``; returns the norm before that.

        Collective.
        """
        gradients = [_local(parameter.grad) for parameter in self.parameters]
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients]
        total = torch.stack(squares).sum().cpu().reshape(1)
        self._comm.all_reduce(total)
        norm = float(total.sqrt())
        if max_norm is not None and norm > max_norm:
            for gradient in gradients:
                gradient *= max_norm / norm
        return norm


def _local(tensor: object) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[return-value]

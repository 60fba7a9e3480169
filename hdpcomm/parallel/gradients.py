"""Gradients on a mesh: summed over all ranks that hold the same parameters, clipped by the norm of the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from hdpcomm.parallel.mesh import Mesh
from hdpcomm.train.gradients import GradientBuffer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["CopyKind", "MeshGradients", "ParameterCopies"]


@dataclass(frozen=True, eq=False)
class ParameterCopies:
    """Which ranks of a mesh hold the same parameters as this one.

    Attributes:
        parts: by the parameter's id, into how many parts the tensor ranks have cut it (a divisor of their number);
            those that are missing are whole on each.
        tied: the parameter on this rank that stands for the same weight as one on the other end of the pipeline, or
            ``None``. Its gradient is the sum of both, and counts once in the norm.
        experts: ids of the parameters of which each rank of an expert group has the part of its own experts.
    """

    mesh: Mesh
    parts: Mapping[int, int]
    tied: nn.Parameter | None = None
    experts: Collection[int] = ()

    def kind(self, parameter: nn.Parameter) -> CopyKind:
        """Parameters of one kind are on the same ranks."""
        parts = self.parts.get(id(parameter), 1) if self.mesh.tensor > 1 else 1
        return CopyKind(id(parameter) in self.experts, parts, parameter is self.tied)

    def hdp_comm(self, kind: CopyKind) -> Communicator:
        """The HDP ranks that hold such parameters."""
        return self.mesh.expert_replica_comm if kind.expert else self.mesh.hdp_comm

    def tensor_comm(self, kind: CopyKind) -> Communicator | None:
        """The tensor ranks that hold such parameters; ``None``: this one alone."""
        each = self.mesh.tensor // kind.parts
        first = self.mesh.tensor_rank // each * each
        return self.mesh.tensor_comm.subset(range(first, first + each)) if each > 1 else None

    def ends_comm(self) -> Communicator:
        """Of the two ends of the pipeline, for the tied parameter."""
        return cast("Communicator", self.mesh.pipeline_comm.subset([0, self.mesh.pipeline - 1]))

    def counts(self, kind: CopyKind) -> bool:
        """Whether the norm counts such parameters of this rank, rather than those of another tensor rank or stage."""
        return self.mesh.tensor_rank % (self.mesh.tensor // kind.parts) == 0 and not (kind.tied and self.mesh.stage > 0)


class CopyKind(NamedTuple):
    """What tells on which ranks a parameter's copies are: see :class:`ParameterCopies`."""

    expert: bool
    parts: int
    tied: bool


class MeshGradients(GradientBuffer):
    """The gradients of the parameters on this rank.

    Those that several tensor ranks hold lie side by side, so that one message adds up their parts; and so do those of
    experts that are not on every HDP rank.

    Args:
        parameters: of this rank's model or stages.
        copies: over whose ranks :meth:`reduce` sums; the norm is that of all stages, tensor ranks and experts.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], copies: ParameterCopies) -> None:
        super().__init__(sorted(parameters, key=copies.kind, reverse=True))
        self._mesh = mesh = copies.mesh
        own = sum(parameter.numel() for parameter in self.parameters if id(parameter) in copies.experts)
        self._of_experts, self._of_all = self.flat[:own], self.flat[own:]
        self._shared: list[tuple[torch.Tensor, Communicator]] = []
        counted: list[tuple[int, int]] = []
        start = 0
        for kind, members in itertools.groupby(self.parameters, copies.kind):
            stop = start + sum(parameter.numel() for parameter in members)
            if copies.counts(kind) and (kind.expert or mesh.expert_rank == 0):
                counted.append((start, stop))
            if (alike := copies.tensor_comm(kind)) is not None:
                self._shared.append((self.flat[start:stop], alike))
            if kind.tied:
                self._shared.append((self.flat[start:stop], copies.ends_comm()))
            start = stop
        self._counted = [self.flat[begin:end] for begin, end in _merged(counted)]

    def reduce(self, factor: float) -> None:
        """Makes the gradients ``factor`` times the sums over the HDP ranks and the tensor ranks that hold the same
        parameters, and of both ends where they are tied.

        Collective over the mesh.
        """
        self._mesh.hdp_comm.all_reduce(self._of_all)
        if self._of_experts.numel():
            self._mesh.expert_replica_comm.all_reduce(self._of_experts)
        self.flat *= factor
        for gradients, comm in self._shared:
            comm.all_reduce(gradients)

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that the model's global L2 norm is at most ``max_norm``; returns it as it was.

        Collective over the ranks that hold one copy of the model, which get the same norm.
        """
        squares = torch.zeros(1, dtype=torch.float64)
        for part in self._counted:
            squares += float(torch.linalg.vector_norm(part)) ** 2
        self._mesh.expert_comm.all_reduce(squares)
        self._mesh.tensor_comm.all_reduce(squares)
        self._mesh.pipeline_comm.all_reduce(squares)
        norm = math.sqrt(float(squares))
        if max_norm is not None and norm > max_norm:
            self.flat *= max_norm / norm
        return norm


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring ranges as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged

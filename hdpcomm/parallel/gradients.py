"""Gradients on a mesh: summed over all ranks that hold the same parameters, clipped by the norm of the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hdpcomm.parallel.mesh import Mesh
from hdpcomm.train.gradients import GradientBuffer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["MeshGradients"]


class MeshGradients(GradientBuffer):
    """The gradients of the parameters on this rank.

    Those that several tensor ranks hold lie side by side, so that one message adds up their parts; and so do those of
    experts that are not on every HDP rank.

    Args:
        parameters: of this rank's model or stages.
        mesh: over whose ``hdp_comm``, or for experts ``expert_replica_comm``, :meth:`reduce` sums; the norm is that of
            all stages, tensor ranks and experts.
        parts: by the parameter's id, into how many parts the tensor ranks have cut it (a divisor of their number);
            those that are missing are whole on each.
        tied: the parameter on this rank that stands for the same weight as one on the other end of the pipeline, or
            ``None``. Its gradient is the sum of both, and counts once in the norm.
        experts: ids of the parameters of which each rank of an expert group has the part of its own experts.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: Mesh,
        parts: Mapping[int, int],
        tied: nn.Parameter | None,
        experts: Collection[int] = (),
    ) -> None:
        def kind(parameter: nn.Parameter) -> tuple[bool, int]:
            return id(parameter) in experts, parts.get(id(parameter), 1) if mesh.tensor > 1 else 1

        super().__init__(sorted(parameters, key=kind, reverse=True))
        self._mesh = mesh
        own = sum(parameter.numel() for parameter in self.parameters if id(parameter) in experts)
        self._of_experts, self._of_all = self.flat[:own], self.flat[own:]
        self._ends = mesh.pipeline_comm.subset([0, mesh.pipeline - 1]) if mesh.pipeline > 1 else None
        self._tied: torch.Tensor | None = None
        self._replicated: list[tuple[torch.Tensor, Communicator]] = []
        counted: list[tuple[int, int]] = []
        start = 0
        for (expert, number), members in itertools.groupby(self.parameters, kind):
            first, each = start, mesh.tensor // number
            for parameter in members:
                stop = start + parameter.numel()
                if parameter is tied:
                    self._tied = self.flat[start:stop]
                elsewhere = mesh.tensor_rank % each or (mesh.expert_rank and not expert)
                if not elsewhere and not (parameter is tied and mesh.stage > 0):
                    counted.append((start, stop))
                start = stop
            if each > 1:
                alike = mesh.tensor_rank // each * each
                replicas = mesh.tensor_comm.subset(range(alike, alike + each))
                self._replicated.append((self.flat[first:start], cast("Communicator", replicas)))
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
        for gradients, replicas in self._replicated:
            replicas.all_reduce(gradients)
        if self._tied is not None:
            cast("Communicator", self._ends).all_reduce(self._tied)

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

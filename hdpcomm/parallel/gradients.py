"""Gradients on a mesh: summed over all ranks that hold the same parameters, clipped by the norm of the whole model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
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

    Those that several tensor ranks hold lie side by side, so that one message adds up their parts.

    Args:
        parameters: of this rank's model or stages.
        mesh: over whose ``hdp_comm`` :meth:`reduce` sums; the norm is that of all stages and tensor ranks.
        parts: by the parameter's id, into how many parts the tensor ranks have cut it (a divisor of their number);
            those that are missing are whole on each.
        tied: the parameter on this rank that stands for the same weight as one on the other end of the pipeline, or
            ``None``. Its gradient is the sum of both, and counts once in the norm.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: Mesh, parts: Mapping[int, int], tied: nn.Parameter | None
    ) -> None:
        def parts_of(parameter: nn.Parameter) -> int:
            return parts.get(id(parameter), 1) if mesh.tensor > 1 else 1

        super().__init__(sorted(parameters, key=parts_of, reverse=True), mesh.hdp_comm)
        self._mesh = mesh
        self._ends = mesh.pipeline_comm.subset([0, mesh.pipeline - 1]) if mesh.pipeline > 1 else None
        self._tied: torch.Tensor | None = None
        self._replicated: list[tuple[torch.Tensor, Communicator]] = []
        counted: list[tuple[int, int]] = []
        start = 0
        for number, members in itertools.groupby(self.parameters, parts_of):
            first, each = start, mesh.tensor // number
            for parameter in members:
                stop = start + parameter.numel()
                if parameter is tied:
                    self._tied = self.flat[start:stop]
                if mesh.tensor_rank % each == 0 and not (parameter is tied and mesh.stage > 0):
                    counted.append((start, stop))
                start = stop
            if each > 1:
                alike = mesh.tensor_rank // each * each
                replicas = mesh.tensor_comm.subset(range(alike, alike + each))
                self._replicated.append((self.flat[first:start], cast("Communicator", replicas)))
        self._counted = [self.flat[begin:end] for begin, end in _merged(counted)]

    def reduce(self, factor: float) -> None:
        """Makes the gradients ``factor`` times the sums over the HDP ranks, over the tensor ranks that hold the same
        parameters, and of both ends where they are tied.

        Collective over the mesh.
        """
        super().reduce(factor)
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

"""Gradients of a pipeline's stages: summed over each stage's HDP ranks, clipped by the norm of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hdpcomm.parallel.mesh import Mesh
from hdpcomm.train.gradients import GradientBuffer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["StageGradients"]


class StageGradients(GradientBuffer):
    """The gradients of the parameters on this rank, which are those of its stages.

    Args:
        parameters: of this rank's stages.
        mesh: over whose ``hdp_comm`` :meth:`reduce` sums, and over whose ``pipeline_comm`` the norm is one.
        tied: the parameter on this rank that stands for the same weight as one on the other end of the pipeline, or
            ``None``. Its gradient is the sum of both, and counts once in the norm.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh, tied: nn.Parameter | None) -> None:
        super().__init__(parameters, mesh.hdp_comm)
        self._pipeline = mesh.pipeline_comm
        self._ends = mesh.pipeline_comm.subset([0, mesh.pipeline - 1]) if mesh.pipeline > 1 else None
        self._counted = [self.flat]
        self._tied: torch.Tensor | None = None
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            if parameter is tied:
                self._tied = self.flat[start:stop]
                if mesh.stage > 0:
                    self._counted = [self.flat[:start], self.flat[stop:]]
            start = stop

    def reduce(self, factor: float) -> None:
        """Makes the gradients ``factor`` times the sums over the HDP ranks, and of both ends where they are tied.

        Collective over the mesh.
        """
        super().reduce(factor)
        if self._tied is not None:
            cast("Communicator", self._ends).all_reduce(self._tied)

    def clip_(self, max_norm: float | None) -> float:
        """Scales all gradients so that the model's global L2 norm is at most ``max_norm``; returns it as it was.

        Collective over the ranks of this rank's pipeline, which get the same norm.
        """
        squares = torch.zeros(1, dtype=torch.float64)
        for part in self._counted:
            squares += float(torch.linalg.vector_norm(part)) ** 2
        self._pipeline.all_reduce(squares)
        norm = math.sqrt(float(squares))
        if max_norm is not None and norm > max_norm:
            self.flat *= max_norm / norm
        return norm

"""ZeRO-1 and mixed precision on a mesh: each kind of parameter is cut among the HDP ranks that hold it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hdpcomm.parallel.gradients import CopyKind, ParameterCopies
from hdpcomm.train.sharded import BUCKET_BYTES, ShardedParameters

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Work

__all__ = ["MeshShardedParameters"]


class MeshShardedParameters(ShardedParameters):
    """The parameters on this rank of a mesh, of which its optimizer updates a part.

    With ``zero=1`` a parameter is cut among the HDP ranks that hold it: all of them, or those with the same experts.
    Tensor ranks that hold the same parameters have the same part of them, and so have both ends of a pipeline of a tied
    one: only the parts' gradients are added up there.

    Args:
        parameters: of this rank's model or stages; equal on the ranks of ``copies``.
        copies: which ranks hold the same parameters. Collective over its mesh in :meth:`reduce`, :meth:`clip_` and
            :meth:`publish`.
        optimizer, zero, dtype, bucket_bytes: as of :class:`hdpcomm.train.ShardedParameters`, whose errors it has, too.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        copies: ParameterCopies,
        *,
        zero: int,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._copies = copies
        super().__init__(parameters, optimizer, copies.mesh.hdp_comm, zero=zero, dtype=dtype, bucket_bytes=bucket_bytes)

    def _kind(self, parameter: nn.Parameter) -> CopyKind:
        return self._copies.kind(parameter)

    def _replicas(self, kind: Hashable) -> Communicator:
        return self._copies.hdp_comm(cast(CopyKind, kind))

    def reduce(self, factor: float) -> None:
        """Ends the reductions; this rank's part of each bucket then holds ``factor`` times the sum over all ranks that
        hold the same parameters.

        The sum over the tensor ranks that hold a bucket alike starts when its own reduction has ended, while those of
        later buckets go on.
        """
        self.start()
        sums: list[Work] = []
        for work, bucket in zip(self._works, self.buckets, strict=True):
            work.wait()
            if (alike := self._copies.tensor_comm(cast(CopyKind, bucket.kind))) is not None:
                sums.append(alike.all_reduce(self._own_gradients(bucket), async_op=True))
        for work in sums:
            work.wait()
        super().reduce(factor)
        for bucket in self.buckets:
            if cast(CopyKind, bucket.kind).tied:
                self._copies.ends_comm().all_reduce(self._own_gradients(bucket))

    def clip_(self, max_norm: float | None) -> float:
        """As of :class:`hdpcomm.train.ShardedParameters`; the norm is that of all stages, tensor ranks and experts."""
        mesh = self._copies.mesh
        counted = (bucket for bucket in self.buckets if self._counts(cast(CopyKind, bucket.kind)))
        squares = self._squares(counted)
        for comm in (mesh.hdp_comm if self.zero_stage else mesh.expert_comm, mesh.tensor_comm, mesh.pipeline_comm):
            comm.all_reduce(squares)
        return self._clip(math.sqrt(float(squares)), max_norm)

    def _counts(self, kind: CopyKind) -> bool:
        """Without ZeRO every HDP rank has all that is on all of them: the first of an expert group counts it."""
        alone = self.zero_stage == 1 or kind.expert or self._copies.mesh.expert_rank == 0
        return alone and self._copies.counts(kind)

"""ZeRO-1 and mixed precision: wide weights that the optimizer updates in place of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.train.gradients import Bucket, Gradients, memory_of, trained_parameters
from hdpcomm.train.layout import Layout
from hdpcomm.train.matrix_owners import MatrixOwners
from hdpcomm.train.trainer_check import check_elementwise

__all__ = ["Masters", "Piece"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """The part of a parameter that this rank's optimizer updates.

    Attributes:
        start: its first element in the parameter, in row-major order.
        master: its values in the wide type: what the optimizer has in place of the parameter.
        gradient: of these, a view of the flat gradients.
    """

    parameter: nn.Parameter
    start: int
    master: nn.Parameter
    gradient: Tensor


class Masters:
    """A model's parameters in flat memory, and the part of them that this rank's optimizer updates.

    The parameters become views of flat buckets, in ``dtype``. With ``zero=1`` each rank keeps 1 / replicas of each
    bucket: its master weights in fp32 (fp64 if any parameter is) and the optimizer's state; :meth:`publish` gathers the
    updated parameters (Rajbhandari et al., arXiv 1910.02054, stage 1). With ``zero=0`` every rank keeps all of them.
    Parameters in the wide type are their own masters.

    Tensor ranks that hold the same parameters have the same part of them, and so have both ends of a pipeline of a tied
    one.

    The optimizer's groups get the rank's pieces in place of the parameters; learning rates and schedules go on as they
    are.

    Args:
        parameters: of the module on this rank, equal on all replicas; frozen ones only change their type.
        optimizer: over the trained parameters, before its first step; one that updates each element by itself.
        layout, mesh, bucket_bytes: of :class:`hdpcomm.train.Gradients`.

    Attributes:
        gradients: of these parameters, summed where the pieces are.

    Raises:
        InvalidUsage: an optimizer that looks at whole matrices or has made steps, parameters that it does not hold,
            sharded ones (DTensor), another ``dtype`` than float32, float64 and bfloat16.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        mesh: Mesh,
        *,
        zero: int,
        dtype: torch.dtype | None,
        bucket_bytes: int,
    ) -> None:
        everything = list(parameters)
        trained = trained_parameters(everything)
        _check(trained, optimizer, dtype)
        for parameter in everything:
            if dtype is not None and not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        group_of = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
        double = dtype == torch.float64 or any(p.dtype == torch.float64 for p in trained)
        self.gradients = Gradients(
            trained, layout, mesh, bucket_bytes=bucket_bytes, zero=zero,
            group_of=lambda p: (group_of[id(p)], dtype or p.dtype), wide=torch.float64 if double else torch.float32,
        )  # fmt: skip
        self.pieces: list[Piece] = []
        self._memories = [self._take_over(bucket, dtype, mesh) for bucket in self.gradients.buckets]
        """The parameters of each bucket, and this rank's part of them in the wide type."""
        by_parameter = {id(piece.parameter): piece.master for piece in self.pieces}
        for group in optimizer.param_groups:
            group["params"] = [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]

    def _take_over(self, bucket: Bucket, dtype: torch.dtype | None, mesh: Mesh) -> tuple[Tensor, Tensor]:
        flat = self.gradients.flat
        narrow = dtype or bucket.parameters[0].dtype
        memory = memory_of(mesh.comm, bucket.length, narrow, flat.device)
        whole = torch.zeros(bucket.length, dtype=flat.dtype, device=flat.device)
        with torch.no_grad():
            spans = [slice(o, o + p.numel()) for p, o in zip(bucket.parameters, bucket.offsets, strict=True)]
            for parameter, span in zip(bucket.parameters, spans, strict=True):
                whole[span] = parameter.detach().flatten()
            memory.copy_(whole)
            for parameter, span in zip(bucket.parameters, spans, strict=True):
                parameter.data = memory[span].view(parameter.shape)
        wide = bucket.own_part(memory) if narrow == flat.dtype else bucket.own_part(whole).clone()
        gradients, begin = self.gradients.own(bucket), bucket.own * bucket.part
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            start, stop = max(offset, begin), min(offset + parameter.numel(), begin + bucket.part)
            if start < stop or (parameter.numel() == 0 and bucket.own == 0):
                shape = parameter.shape if bucket.parts == 1 else (stop - start,)
                span = slice(start - begin, stop - begin)
                master = nn.Parameter(wide[span].view(shape))
                self.pieces.append(Piece(parameter, start - offset, master, gradients[span].view(shape)))
        return memory, wide

    @property
    def master_bytes(self) -> int:
        """Bytes of this rank's master weights beside the parameters."""
        return sum(wide.nbytes for memory, wide in self._memories if memory.dtype != wide.dtype)

    def finish(self) -> None:
        """Hands the gradients to the optimizer; parameters that no rank has used have none. Call before its step."""
        for piece in self.pieces:
            piece.master.grad = piece.gradient if self.gradients.used(piece.parameter) else None

    def publish(self) -> None:
        """Gives the updated parameters to all ranks. Call after the optimizer's step. Collective."""
        works = []
        with torch.no_grad():
            for (memory, wide), bucket in zip(self._memories, self.gradients.buckets, strict=True):
                own = bucket.own_part(memory)
                if memory.dtype != wide.dtype:
                    own.copy_(wide)
                if bucket.parts > 1:
                    works.append(bucket.holders.replicas.all_gather(memory, own, async_op=True))
        for work in works:
            work.wait()


def _check(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidUsage(
            f"dtype is {dtype}; give torch.bfloat16 or torch.float32 (float16 needs loss scaling, which is not here)"
        )
    if isinstance(optimizer, MatrixOwners):
        raise InvalidUsage(
            "MatrixOwners has shared the matrices and their state among the ranks already; give zero=0 and dtype=None"
        )
    check_elementwise(optimizer, "with zero=1 or dtype=")
    if optimizer.state:
        raise InvalidUsage("the optimizer has made steps already; give the trainer a new one")
    if wrong := [type(p).__name__ for p in parameters if type(p.data) is not Tensor]:
        raise InvalidUsage(f"a parameter is a {wrong[0]}; the trainer shards plain tensors itself, without fully_shard")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = sum(id(p) not in held for p in parameters)
    others = len(held) + missing - len(parameters)
    if missing or others:
        raise InvalidUsage(
            f"the optimizer lacks {missing} of the model's {len(parameters)} parameters with requires_grad, and holds "
            f"{others} others (frozen, or not the model's); make it over exactly those with requires_grad"
        )

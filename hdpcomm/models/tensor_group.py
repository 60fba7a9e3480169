"""Tensor parallelism: what the ranks that share a model's layers exchange, differentiable (:class:`TensorGroup`).

Sequence parallel regions (Korthikanti et al., arXiv 2205.05198, section 4.2.2): between the layers' linear parts each
rank holds some of the tokens, in blocks of equal size in the ranks' order; the last block is filled up with rows of
zeros. An all-gather goes before a linear part, a reduce-scatter after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["TensorGroup", "TensorShard"]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Which part of a parameter a rank holds: number ``part`` of ``parts`` equal ones along ``dim``.

    With fewer parts than ranks, neighbouring ranks hold the same one; ``parts`` = 1: all of it on each rank.
    """

    dim: int
    part: int
    parts: int


@dataclass(slots=True, eq=False)
class TensorGroup:
    """The ranks that share the layers of a model, each with all tokens of the same micro-batches.

    Attributes:
        comm: those ranks. All methods are collective over it, in forward and in backward.
        shards: by the parameter's name in the model that was given to :func:`hdpcomm.parallel.tensor_parallel`.
    """

    comm: Communicator
    shards: dict[str, TensorShard] = field(default_factory=dict)

    def shard(self, parts: int, dim: int = 0) -> TensorShard:
        """This rank's part where there are ``parts``, which divide the number of ranks. Local."""
        return TensorShard(dim, self.comm.rank * parts // self.comm.size, parts)

    def rows(self, tokens: int) -> int:
        """Rows of a block: ``tokens`` by the number of ranks, rounded up. Local."""
        return -(-tokens // self.comm.size)

    def tokens_here(self, tokens: int) -> int:
        """How many of ``tokens`` are in this rank's block. Local."""
        return min(self.rows(tokens), max(0, tokens - self.comm.rank * self.rows(tokens)))

    def gather(self, x: Tensor, tokens: int | None = None, *, partial: bool = True) -> Tensor:
        """``[tokens, ...]`` from all ranks' blocks ``[rows, ...]``, or ``[1, ...]`` of both.

        Args:
            tokens: default: all rows, with those that fill up the last block.
            partial: each rank has a part of the result's gradient, which backward sums; else all have the whole of it.
        """
        gathered: Tensor = _Gather.apply(x, self, tokens, partial)  # type: ignore[no-untyped-call]
        return gathered

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's block ``[rows, ...]`` of the sum of all ranks' ``[tokens, ...]``, or ``[1, ...]`` of both."""
        block: Tensor = _Scatter.apply(x, self)  # type: ignore[no-untyped-call]
        return block

    def join_columns(self, logits: Tensor) -> Tensor:
        """``[tokens, vocabulary]`` from ``[tokens, columns]`` of each rank; for a loss that all of them compute."""
        joined: Tensor = _JoinColumns.apply(logits, self)  # type: ignore[no-untyped-call]
        return joined

    def _gathered(self, block: Tensor, tokens: int | None) -> Tensor:
        whole = block.new_empty(block.shape[0] * self.comm.size, *block.shape[1:])
        self.comm.all_gather(whole, block.contiguous())
        return whole[:tokens]

    def _scattered(self, x: Tensor) -> Tensor:
        rows = self.rows(x.shape[0])
        block = x.new_empty(rows, *x.shape[1:])
        self.comm.reduce_scatter(block, self._filled(x, rows))
        return block

    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's block of ``[tokens, ...]``, filled up with zeros."""
        rows = self.rows(x.shape[0])
        return self._filled(x, rows)[self.comm.rank * rows :][:rows]

    def _filled(self, x: Tensor, rows: int) -> Tensor:
        missing = rows * self.comm.size - x.shape[0]
        return x.contiguous() if not missing else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


class VocabularyShard:
    """The forward of an embedding whose rank holds some of its rows: gives this rank's block of the tokens' vectors."""

    def __init__(self, embedding: nn.Embedding, group: TensorGroup) -> None:
        self._forward = embedding.forward
        self._first = group.comm.rank * embedding.num_embeddings
        self._rows = embedding.num_embeddings
        self._group = group

    def __call__(self, tokens: Tensor) -> Tensor:
        places = tokens - self._first
        own = (places >= 0) & (places < self._rows)
        vectors = self._forward(torch.where(own, places, 0))
        return self._group.scatter(torch.where(own[..., None], vectors, 0))


class RowLinear:
    """The forward of a linear layer whose rank holds some of its inputs: gives this rank's block of the sums."""

    def __init__(self, linear: nn.Linear, group: TensorGroup) -> None:
        self._linear, self._group = linear, group
        self.product: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear
        """Multiplies the input by the weight; replaced by :class:`hdpcomm.models.weight_gradients.WeightGradients`."""

    def __call__(self, x: Tensor) -> Tensor:
        return _block_of_sums(self.product(x, self._linear.weight), self._linear, self._group)


class AdaptedRows:
    """The forward of such a layer with adapters, of which the rank holds the first matrices' part of the inputs: what
    both give is summed at once."""

    def __init__(self, module: nn.Module, linear: nn.Linear, group: TensorGroup) -> None:
        self._forward, self._linear, self._group = module.forward, linear, group
        linear.forward = self._product  # type: ignore[method-assign, assignment]

    def _product(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._linear.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return _block_of_sums(self._forward(x), self._linear, self._group)


def _block_of_sums(product: Tensor, linear: nn.Linear, group: TensorGroup) -> Tensor:
    """This rank's block of the products of all tensor ranks, with the bias."""
    block = group.scatter(product)
    return block if linear.bias is None else block + linear.bias


def _of_batch(x: Tensor) -> tuple[Tensor, bool]:
    """Without the batch dimension of one that transformers' models have, and whether there was one."""
    batched = x.dim() == 3 and x.shape[0] == 1
    return (x[0] if batched else x), batched


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, tokens: int | None, partial: bool) -> Tensor:
        ctx.group, ctx.partial = group, partial
        block, batched = _of_batch(x)
        whole = group._gathered(block, tokens)
        return whole[None] if batched else whole

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, batched = _of_batch(upstream[0])
        block = ctx.group._scattered(gradient) if ctx.partial else ctx.group.own_rows(gradient)
        return block[None] if batched else block, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        whole, batched = _of_batch(x)
        ctx.group, ctx.tokens = group, whole.shape[0]
        block = group._scattered(whole)
        return block[None] if batched else block

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        gradient, batched = _of_batch(upstream[0])
        whole = ctx.group._gathered(gradient, ctx.tokens)
        return whole[None] if batched else whole, None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.columns = group, logits.shape[-1]
        whole = logits.new_empty(group.comm.size, *logits.shape)
        group.comm.all_gather(whole, logits.contiguous())
        return whole.movedim(0, -2).flatten(-2)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        first = ctx.group.comm.rank * ctx.columns
        return upstream[0][..., first : first + ctx.columns].contiguous(), None

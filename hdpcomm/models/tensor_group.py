"""Tensor parallelism: what the ranks that share a model's layers exchange, differentiable (:class:`TensorGroup`).

Sequence parallel regions (Korthikanti et al., arXiv 2205.05198, section 4.2.2): between the layers' linear parts each
rank holds some of the tokens, in blocks of equal size in the ranks' order; the last block is filled up with rows of
zeros. An all-gather goes before a linear part, a reduce-scatter after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdpcomm.comm import Communicator
from hdpcomm.kernels.transfers import without_second_derivative

__all__ = ["Block", "TensorGroup", "TensorShard", "rows_of"]


class Block(NamedTuple):
    """Rows of a parameter that belong to some heads, groups or experts, one after the other.

    Ranks that divide the heads get as many each. Heads that are fewer, and divide the ranks, lie on several
    neighbouring ones each, which all hold the first ``shared`` rows of their head and an equal part of each of
    ``divided``.

    Attributes:
        shared, divided: rows of a head, these behind those.
    """

    heads: int
    shared: int = 0
    divided: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Rows of a head."""
        return self.shared + sum(self.divided)

    def ranges(self, part: int, parts: int) -> Iterator[tuple[int, int, int]]:
        """(first row, row after the last, how many ranks hold these) of what one of ``parts`` ranks has of it."""
        if self.heads % parts == 0:
            each = self.heads // parts * self.width
            yield part * each, (part + 1) * each, 1
            return
        ranks = parts // self.heads
        start = part // ranks * self.width
        if self.shared:
            yield start, start + self.shared, ranks
        start += self.shared
        for rows in self.divided:
            first = start + part % ranks * (rows // ranks)
            yield first, first + rows // ranks, 1
            start += rows


def rows_of(blocks: Sequence[Block]) -> int:
    """Rows of blocks one after the other. Local."""
    return sum(block.heads * block.width for block in blocks)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The part that rank ``part`` of ``parts`` holds of a parameter: ``blocks``, one after the other along ``dim``.

    Attributes:
        ranges: (first row, row after the last, how many ranks hold these) in the whole parameter, in the order in which
            they are in this rank's. Shards that hold the same are equal.
    """

    dim: int
    blocks: tuple[Block, ...]
    part: int = field(compare=False)
    parts: int
    ranges: tuple[tuple[int, int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        joined: list[tuple[int, int, int]] = []
        start = 0
        for block in self.blocks:
            for first, last, ranks in block.ranges(self.part, self.parts):
                if joined and joined[-1][1:] == (start + first, ranks):
                    first = joined.pop()[0] - start
                joined.append((start + first, start + last, ranks))
            start += block.heads * block.width
        object.__setattr__(self, "ranges", tuple(joined))

    @property
    def size(self) -> int:
        """Rows of the whole parameter."""
        return rows_of(self.blocks)

    def take(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part. Local."""
        return torch.cat([whole.narrow(self.dim, first, last - first) for first, last, _ in self.ranges], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the parts of all ranks. Local."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.size
        whole = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            for offsets, box, _ in replace(self, part=rank).spread([0] * len(shape), part):
                whole.narrow(self.dim, offsets[self.dim], box.shape[self.dim]).copy_(box)
        return whole

    def spread(self, offsets: Sequence[int], box: Tensor) -> Iterator[tuple[list[int], Tensor, int]]:
        """(where it begins in the whole parameter, its elements, how many ranks hold them) of the boxes of the whole
        parameter that a box of this rank's part is."""
        begin, end = offsets[self.dim], offsets[self.dim] + box.shape[self.dim]
        place = 0
        for first, last, ranks in self.ranges:
            start, stop = max(begin, place), min(end, place + last - first)
            if start < stop:
                moved = [*offsets[: self.dim], first + start - place, *offsets[self.dim + 1 :]]
                yield moved, box.narrow(self.dim, start - begin, stop - start), ranks
            place += last - first


@dataclass(slots=True, eq=False)
class TensorGroup:
    """The ranks that share the layers of a model, each with all tokens of the same micro-batches.

    Attributes:
        comm: those ranks. All methods are collective over it, in forward and in backward.
        shards: by the parameter's name in the model that was given to :func:`hdpcomm.parallel.tensor_parallel`.
    """

    comm: Communicator
    shards: dict[str, TensorShard] = field(default_factory=dict)

    def shard(self, *blocks: Block, dim: int = 0) -> TensorShard:
        """This rank's part of a parameter that is these blocks along ``dim``. Local."""
        return TensorShard(dim, blocks, self.comm.rank, self.comm.size)

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


class SplitNorm:
    """The forward of an RMSNorm over channels of which each rank of ``sharing`` has as many: the squares are summed
    over them.

    With a ``gate``, as state-space layers have it, its SiLU multiplies the input, or the result where the layer says
    ``norm_before_gate``.
    """

    def __init__(self, norm: Any, sharing: Communicator) -> None:
        self._norm, self._sharing = norm, sharing
        self._eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        norm, wide = self._norm, x.to(torch.float32)
        gates = 1.0 if gate is None else nn.functional.silu(gate.to(torch.float32))
        late = getattr(norm, "norm_before_gate", False)
        if not late:
            wide = wide * gates
        squares: Tensor = _Sum.apply(wide.square().mean(-1, keepdim=True), self._sharing)  # type: ignore[no-untyped-call]
        wide = wide * torch.rsqrt(squares / self._sharing.size + self._eps)
        normed: Tensor = norm.weight * (wide if late else wide.to(x.dtype))
        return (normed * gates).to(x.dtype) if late else normed


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
    """The forward of a linear layer whose rank holds some of its inputs, and of its adapters' first matrices: gives
    this rank's block of the sums of all that they give.

    Args:
        module: the layer with its adapters; ``linear``: the matrix beneath, without any the same.
    """

    def __init__(self, module: nn.Module, linear: nn.Linear, group: TensorGroup) -> None:
        self._linear, self._group = linear, group
        self.product: Callable[[Tensor, Tensor], Tensor] = nn.functional.linear
        """Multiplies the input by the weight; replaced by :class:`hdpcomm.models.recompute.WeightGradients`."""
        self._forward = self._without_bias if module is linear else module.forward
        linear.forward = self._without_bias  # type: ignore[method-assign, assignment]

    def _without_bias(self, x: Tensor) -> Tensor:
        return self.product(x, self._linear.weight)

    def __call__(self, x: Tensor) -> Tensor:
        block = self._group.scatter(self._forward(x))
        return block if self._linear.bias is None else block + self._linear.bias


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


class _Sum(torch.autograd.Function):
    """Over ranks of which each has a part of the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream[0].clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return total, None


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

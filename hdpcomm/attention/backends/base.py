"""The interface of a backend: attention of local queries over a block of keys, with its LSE, and the backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdpcomm.attention.rows import merge
from hdpcomm.attention.tiles import Tile

__all__ = ["Accumulator", "Backend", "GradSum", "Grads", "Problem", "Score", "Three", "refuses_tensors"]


@dataclass(frozen=True, slots=True)
class Problem:
    """The kind of attention that a backend is asked to compute."""

    device: str
    """"cpu" or "cuda"."""
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    windowed: bool = False
    """Whether a mask limits the keys on the left."""
    softcap: float = 0.0
    v_head_dim: int | None = None
    """Head dimension of V, where it differs from that of q and k."""
    latent_dim: int = 0
    """Values of a row of MLA's latent, where it travels in place of K and V."""

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True, slots=True)
class Score:
    """How scores are computed: ``scale * q @ k``, then ``softcap * tanh(score / softcap)`` if softcap is not 0."""

    scale: float
    softcap: float = 0.0


class _Visits:
    """Which of so many rows were visited, as long as none was visited twice."""

    __slots__ = ("_ranges", "_rows", "once")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ranges: list[tuple[int, int]] = []
        self.once = True

    def add(self, rows: slice | Tensor) -> bool:
        """Whether none of these was visited before; rows by number count as visited."""
        if not isinstance(rows, slice):
            self.once = False
            return False
        start, stop, _ = rows.indices(self._rows)
        self.once = self.once and all(stop <= begin or end <= start for begin, end in self._ranges)
        self._ranges.append((start, stop))
        return self.once

    def all_by(self, rows: slice | Tensor) -> bool:
        """Whether these are all rows."""
        return isinstance(rows, slice) and rows.indices(self._rows)[:2] == (0, self._rows)


class Accumulator:
    """The running result of local queries: ``out`` [tokens, heads, dim] and ``lse`` [tokens, heads], the latter in
    float32 (float64 for float64). Rows that have seen no key hold out = 0 and lse = -inf.

    As long as no row has seen a second block of keys, ``out`` is what the kernel gave, in its type; then float32
    (float64), since a result that is rounded after each block loses digits.
    """

    __slots__ = ("_device", "_lse", "_out", "_shape", "_visits", "dtype")

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        """``shape``: [tokens, heads, dim of the output]; ``like``: a tensor of the queries' type and device."""
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        """The type of sums."""
        self._shape = tuple(shape)
        self._device = like.device
        self._visits = _Visits(self._shape[0])
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    @classmethod
    def of_heads(cls, results: Sequence[Accumulator]) -> Accumulator:
        """The result of all heads from those of some, which follow each other and have visited the same rows."""
        joined = cls(
            (*results[0]._shape[:1], sum(each._shape[1] for each in results), results[0]._shape[2]), results[0].out
        )
        joined.dtype = results[0].dtype
        joined._out, joined._lse = (
            torch.cat(each, dim=1) for each in zip(*((r.out, r.lse) for r in results), strict=True)
        )
        joined._visits.once = False
        return joined

    @property
    def out(self) -> Tensor:
        return self._out if self._out is not None else self._begin(self.dtype)[0]

    @property
    def lse(self) -> Tensor:
        return self._lse if self._lse is not None else self._begin(self.dtype)[1]

    def _begin(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Makes the result of queries that have seen nothing, if there is none."""
        if self._out is None or self._lse is None:
            self._out = torch.zeros(self._shape, dtype=dtype, device=self._device)
            self._lse = torch.full(self._shape[:2], -torch.inf, dtype=self.dtype, device=self._device)
        return self._out, self._lse

    def widen(self) -> Tensor:
        """``out`` in the type of sums, from now on."""
        self._out = self.out.to(self.dtype)
        return self._out

    def merge(self, block_out: Tensor, block_lse: Tensor, rows: slice | Tensor) -> None:
        """Adds a block of keys that the queries ``rows`` have seen; ``block_out``: [rows, heads, dim], contiguous;
        ``block_lse``: [rows, heads].
        """
        if self._visits.add(rows):
            if self._visits.all_by(rows):
                self._out, self._lse = block_out, block_lse.to(self.dtype).contiguous()
                return
            out, lse = self._begin(block_out.dtype)
            if out.dtype == block_out.dtype:
                out[rows], lse[rows] = block_out, block_lse
                return
        out, lse = self.widen(), self.lse
        if isinstance(rows, slice):
            merge(out[rows], lse[rows], block_out, block_lse)
        else:
            merge(out, lse, block_out, block_lse, rows)


class GradSum:
    """The sum of gradients of rows, of which blocks are added.

    Into a tensor, in the type of that. Without one, the sum is what the kernel gave, in its type, as long as no row got
    a second block; then it has the type of sums.
    """

    __slots__ = ("_shape", "_total", "_visits", "dtype", "like")

    def __init__(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype, *, into: Tensor | None = None) -> None:
        """``like``: a tensor of the device; ``dtype``: of sums."""
        self._shape, self.like, self.dtype = tuple(shape), like, dtype
        self._total = into
        self._visits = None if into is not None else _Visits(self._shape[0])

    @classmethod
    def into(cls, tensor: Tensor) -> GradSum:
        """Adds to ``tensor``."""
        return cls(tensor.shape, tensor, tensor.dtype, into=tensor)

    @property
    def dim(self) -> int:
        return self._shape[-1]

    def with_dim(self, dim: int) -> GradSum:
        """A new sum like this one, of another last dimension."""
        return GradSum((*self._shape[:-1], dim), self.like, self.dtype)

    def total(self) -> Tensor:
        """The sum so far; zeros for rows without a block."""
        if self._total is None:
            self._total = torch.zeros(self._shape, dtype=self.dtype, device=self.like.device)
        return self._total

    def add(self, part: Tensor, rows: slice | Tensor) -> None:
        """Adds the gradients of ``rows``, each at most once in it; ``part`` may be kept, and is nobody else's."""
        if self._visits is not None and self._visits.add(rows):
            if self._visits.all_by(rows):
                self._total = part.contiguous()
                return
            if self._total is None:
                self._total = torch.zeros(self._shape, dtype=part.dtype, device=self.like.device)
            if self._total.dtype == part.dtype:
                self._total[rows] = part
                return
        total = self.total()
        if total.dtype != self.dtype:
            self._total = total = total.to(self.dtype)
        if isinstance(rows, slice):
            total[rows] += part
        else:
            total[rows] = total[rows] + part


Grads = tuple[GradSum, GradSum, GradSum]
"""Sums for queries, keys and values."""


Three = tuple[Tensor, Tensor, Tensor]
"""Tensors for queries, keys and values."""


class Backend(ABC):
    """Attention over tiles. Both methods are local and run on the current stream.

    q: [tokens, heads, dim], out, dout: [tokens, heads, v_dim]; k, dk: [keys, kv_heads, dim], v, dv: [keys, kv_heads,
    v_dim], rows may be strided; lse: [tokens, heads]. ``dim`` and ``v_dim`` differ only where ``own_v_dim`` says so;
    :class:`hdpcomm.attention.backends.dense.PaddedBackend` serves the others.
    """

    name: str
    own_v_dim = False
    """Whether the kernel takes a V with a head_dim of its own."""

    @abstractmethod
    def refuses(self, problem: Problem) -> str | None:
        """Why this backend cannot compute ``problem`` here, or None if it can."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type that q, k, v, dout must have for inputs of ``dtype``; the caller casts once per buffer."""
        return dtype

    @abstractmethod
    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        """Merges the attention over all tiles into ``result``, in the order of tiles."""

    @abstractmethod
    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        """Adds the tiles' contributions to ``grads`` (dq, dk, dv); ``out`` and ``lse`` are final, over all keys."""


def refuses_tensors(problem: Problem, dtypes: Sequence[torch.dtype], max_dim: int) -> str | None:
    """Why a fused CUDA kernel cannot take such tensors, or None."""
    if problem.device != "cuda":
        return f"it computes on CUDA devices; the tensors are on {problem.device}"
    if problem.dtype not in dtypes:
        return f"it has no {problem.dtype}"
    for dim in (problem.head_dim, problem.v_dim):
        if dim > max_dim or dim % 8:
            return f"it takes a head_dim of at most {max_dim}, a multiple of 8; got {dim}"
    return None

"""The interface of a backend: attention of local queries over a block of keys, with its LSE, and the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hdpcomm.attention import _kernels
from hdpcomm.attention.tiles import Tile

__all__ = ["Accumulator", "Backend", "Problem", "Score", "refuses_tensors"]


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
    masked: bool = False
    """Whether tiles have masks of one's own (:class:`hdpcomm.attention.BlockMask`)."""
    v_head_dim: int | None = None
    """That of V, where it differs from that of q and k."""
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


class Accumulator:
    """The running result of local queries: ``out`` [tokens, heads, dim] and ``lse`` [tokens, heads], float32 (float64
    for float64). Rows that have seen no key hold out = 0 and lse = -inf.
    """

    __slots__ = ("lse", "out")

    def __init__(self, shape: Sequence[int], like: torch.Tensor) -> None:
        """``shape``: [tokens, heads, dim of the output]; ``like``: a tensor of the queries' type and device."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.out = torch.zeros(tuple(shape), dtype=dtype, device=like.device)
        self.lse = torch.full(tuple(shape[:2]), -torch.inf, dtype=dtype, device=like.device)

    def merge(self, block_out: torch.Tensor, block_lse: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Adds a block of keys that the queries ``rows`` have seen; ``block_out``: [rows, heads, dim], contiguous;
        ``block_lse``: [rows, heads].
        """
        if isinstance(rows, slice):
            _kernels.merge(self.out[rows], self.lse[rows], block_out, block_lse)
        else:
            _kernels.merge(self.out, self.lse, block_out, block_lse, rows)


class Backend(Protocol):
    """Attention over tiles. Both methods are local and run on the current stream.

    q: [tokens, heads, dim], out, dout: [tokens, heads, v_dim]; k, dk: [keys, kv_heads, dim], v, dv: [keys, kv_heads,
    v_dim], rows may be strided; lse: [tokens, heads]. ``dim`` and ``v_dim`` differ only where ``own_v_dim`` says so;
    :class:`hdpcomm.attention.backends.padded.PaddedBackend` serves the others.
    """

    name: str
    own_v_dim: bool
    """Whether the kernel takes a V with a head_dim of its own."""

    def refuses(self, problem: Problem) -> str | None:
        """Why this backend cannot compute ``problem`` here, or None if it can."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type that q, k, v, dout must have for inputs of ``dtype``; the caller casts once per buffer."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Sequence[Tile],
        score: Score,
        result: Accumulator,
    ) -> None:
        """Merges the attention over all tiles into ``result``, in the order of tiles."""

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Sequence[Tile],
        score: Score,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Adds the tiles' contributions to ``grads`` (dq, dk, dv); ``out`` and ``lse`` are final, over all keys."""


def refuses_tensors(problem: Problem, dtypes: Sequence[torch.dtype], max_dim: int) -> str | None:
    """Why a fused CUDA kernel cannot take such tensors, or None."""
    if problem.masked:
        return "it has no masks of one's own"
    if problem.device != "cuda":
        return f"it computes on CUDA devices; the tensors are on {problem.device}"
    if problem.dtype not in dtypes:
        return f"it has no {problem.dtype}"
    for dim in (problem.head_dim, problem.v_dim):
        if dim > max_dim or dim % 8:
            return f"it takes a head_dim of at most {max_dim}, a multiple of 8; got {dim}"
    return None

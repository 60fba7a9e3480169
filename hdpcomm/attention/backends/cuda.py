"""Fused attention operators on CUDA: torch's flash (varlen), memory-efficient and cuDNN (one call a tile), and
flash-attn 2, where it is installed.

None of torch's has a softcap. The shape of their lse differs: flash returns [heads, tokens], the memory-efficient one
pads it to a multiple of 32 queries, and cuDNN adds a last dimension of 1. flash-attn is called by the functions
that its own autograd classes call, since its public ones take no log-sum-exp in backward (flash_attn_interface.py,
2.7.4).
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Accumulator, Backend, Grads, Problem, Score, Three, refuses_tensors
from hdpcomm.attention.backends.dense import DenseBackend, repeated_heads
from hdpcomm.attention.tiles import Tile
from hdpcomm.kernels.transfers import to_device

__all__ = ["CudnnBackend", "EfficientBackend", "FlashAttn2Backend", "FlashBackend", "VarlenBackend", "batches_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tiles of one kernel call."""

    left: int
    """Keys left of the diagonal that a query sees, -1 for all; the last query is aligned with the last key."""
    right: int
    """Keys right of the diagonal that a query sees, -1 for all; 0 is causal."""
    q_rows: Tensor | slice
    k_rows: Tensor | slice
    cu_q: Tensor
    """int32 [tiles + 1]"""
    cu_k: Tensor
    max_q: int
    max_k: int

    @property
    def causal(self) -> bool:
        """Whether the window is the plain causal mask, which kernels take as a flag."""
        return (self.left, self.right) == (-1, 0)


def _window(tile: Tile) -> tuple[int, int]:
    shift = tile.num_k - tile.num_q
    left = -1 if tile.low is None else shift - tile.low
    right = -1 if tile.high is None else tile.high - shift
    return left, right


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor | slice:
    """A slice if the ranges are consecutive, else their row numbers."""
    if all(a[1] == b[0] for a, b in itertools.pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return to_device(torch.cat([torch.arange(*r) for r in ranges]), device)


def _running_sum(sizes: Iterable[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32), device)


@lru_cache(maxsize=512)
def batches_of(tiles: tuple[Tile, ...], device: torch.device) -> tuple[Batch, ...]:
    """The calls for ``tiles``, in a fixed order."""
    groups: list[tuple[tuple[int, int], list[Tile]]] = []
    for tile in tiles:
        window = _window(tile)
        for other, members in groups:
            clash = any(
                (m.q_start < tile.q_stop and tile.q_start < m.q_stop)
                or (m.k_start < tile.k_stop and tile.k_start < m.k_stop)
                for m in members
            )
            if other == window and not clash:
                members.append(tile)
                break
        else:
            groups.append((window, [tile]))
    return tuple(
        Batch(
            left=left,
            right=right,
            q_rows=_rows([(t.q_start, t.q_stop) for t in members], device),
            k_rows=_rows([(t.k_start, t.k_stop) for t in members], device),
            cu_q=_running_sum([t.num_q for t in members], device),
            cu_k=_running_sum([t.num_k for t in members], device),
            max_q=max(t.num_q for t in members),
            max_k=max(t.num_k for t in members),
        )
        for (left, right), members in groups
    )


class VarlenBackend(Backend):
    """Base of the backends whose kernels take many sequences in one call (cu_seqlens); a subclass implements the two
    calls. Tiles go into one call if they have the same window and share neither queries nor keys, so that each gradient
    row is added to once per call, in a fixed order. Kernels of this kind align queries and keys at their ends."""

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, score: Score) -> tuple[Tensor, Tensor]:
        """(out [rows, heads, dim], lse [heads, rows] in float32)."""

    @abstractmethod
    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, batch: Batch, score: Score) -> Three:
        """(dq, dk, dv) of the rows; ``lse``: [heads, rows], contiguous."""

    def forward(self, qkv: Three, tiles: Sequence[Tile], score: Score, result: Accumulator) -> None:
        q, k, v = qkv
        for batch in batches_of(tuple(tiles), q.device):
            out, lse = self.call_forward(q[batch.q_rows], k[batch.k_rows], v[batch.k_rows], batch, score)
            result.merge(out.contiguous(), lse.transpose(0, 1), batch.q_rows)

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tiles: Sequence[Tile], score: Score, grads: Grads
    ) -> None:
        q, k, v = qkv
        for batch in batches_of(tuple(tiles), q.device):
            rows, keys = batch.q_rows, batch.k_rows
            row_lse = lse[rows].transpose(0, 1).contiguous()
            parts = self.call_backward(dout[rows], (q[rows], k[keys], v[keys]), out[rows], row_lse, batch, score)
            for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                grad.add(part, where)


_HALF = (torch.float16, torch.bfloat16)
_OLDEST = (2, 7)
"""Since this release the internal calls take window_size_left and window_size_right and return (out, lse, ...)."""
_INTERFACE = "flash_attn.flash_attn_interface"


def _refusal(problem: Problem, dtypes: Sequence[torch.dtype], capability: tuple[int, int], max_dim: int) -> str | None:
    """Why none of these operators can compute ``problem`` here, or None."""
    if (reason := refuses_tensors(problem, dtypes, max_dim)) is not None:
        return reason
    if problem.softcap:
        return "torch's CUDA operators have no softcap"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    have = torch.cuda.get_device_capability()
    if have < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}; the device has {have[0]}.{have[1]}"
    return None


class FlashBackend(VarlenBackend):
    """``aten::_flash_attention_forward`` with cu_seqlens."""

    name = "flash"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device == "cuda" and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention"
        return _refusal(problem, _HALF, (8, 0), 256)

    @staticmethod
    def _options(batch: Batch, score: Score) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": score.scale}
        if batch.left != -1 or batch.right > 0:
            options |= {"window_size_left": batch.left, "window_size_right": batch.right}
        return options

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, score: Score) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, 0.0, batch.causal, False,
            **self._options(batch, score),
        )  # fmt: skip
        return out, lse

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, batch: Batch, score: Score) -> Three:
        unused = torch.zeros(2, dtype=torch.uint64, device=dout.device)  # the dropout's random state
        parts: Three = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), *qkv, out, lse, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, 0.0, batch.causal,
            unused, unused[:0], **self._options(batch, score),
        )  # fmt: skip
        return parts


class EfficientBackend(DenseBackend):
    """``aten::_scaled_dot_product_efficient_attention``: also float32."""

    name = "efficient"
    own_v_dim = True

    def refuses(self, problem: Problem) -> str | None:
        if problem.windowed:
            return "it has no sliding window"
        return _refusal(problem, (*_HALF, torch.float32), (5, 0), 65536)

    def call_forward(self, qkv: Three, tile: Tile, score: Score) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *repeated_heads(qkv), None, True, 0.0, not tile.full, scale=score.scale
        )
        return out, lse[..., : out.shape[2]]

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, score: Score) -> Three:
        padded = torch.nn.functional.pad(lse.contiguous(), (0, -lse.shape[-1] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=dout.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout, *repeated_heads(qkv), None, out, padded, seed, seed, 0.0, [True, True, True, False], not tile.full,
            scale=score.scale,
        )  # fmt: skip
        heads = qkv[1].shape[1]
        return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)


class CudnnBackend(DenseBackend):
    """``aten::_scaled_dot_product_cudnn_attention``."""

    name = "cudnn"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device == "cuda" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return "this build of torch has no cuDNN"
        if problem.windowed:
            return "torch's operator passes no sliding window to cuDNN"
        if torch.are_deterministic_algorithms_enabled():
            return "its backward pass adds in no fixed order, and torch.use_deterministic_algorithms() is on"
        if problem.v_dim != problem.head_dim:
            return "it is called with one head_dim for all"
        return _refusal(problem, _HALF, (8, 0), 128)

    def call_forward(self, qkv: Three, tile: Tile, score: Score) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *qkv, None, True, 0.0, not tile.full, False, scale=score.scale
        )
        return out, lse.reshape(out.shape[:3])

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, score: Score) -> Three:
        seed = torch.zeros((), dtype=torch.int64, device=dout.device)
        parts: Three = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, *qkv, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, out.shape[2],
            qkv[1].shape[2], 0.0, not tile.full, scale=score.scale,
        )  # fmt: skip
        return parts


@lru_cache(maxsize=1)
def _version() -> tuple[int, ...] | None:
    """The version of flash-attn 2, or None where it is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    text = str(getattr(importlib.import_module("flash_attn"), "__version__", "0"))
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _options(batch: Batch, score: Score) -> dict[str, Any]:
    """The arguments that have the same names in both functions."""
    return {
        "cu_seqlens_q": batch.cu_q,
        "cu_seqlens_k": batch.cu_k,
        "max_seqlen_q": batch.max_q,
        "max_seqlen_k": batch.max_k,
        "softmax_scale": score.scale,
        "window_size_left": batch.left,
        "window_size_right": batch.right,
        "softcap": score.softcap,
    }


class FlashAttn2Backend(VarlenBackend):
    """``_flash_attn_varlen_forward`` and ``_flash_attn_varlen_backward`` of flash-attn 2."""

    name = "flash-attn"

    def refuses(self, problem: Problem) -> str | None:
        version = _version()
        if version is None:
            return "the package flash-attn is not installed"
        if version < _OLDEST or version[0] != 2:
            return f"flash-attn {'.'.join(map(str, version))} is installed; expected 2.7 or a later 2.x"
        return refuses_tensors(problem, _HALF, 256)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, score: Score) -> tuple[Tensor, Tensor]:
        run = importlib.import_module(_INTERFACE)._flash_attn_varlen_forward
        out, lse, *_ = run(
            q, k, v, **_options(batch, score), dropout_p=0.0, causal=batch.causal, alibi_slopes=None,
            return_softmax=False,
        )  # fmt: skip
        return out, lse

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, batch: Batch, score: Score) -> Three:
        run = importlib.import_module(_INTERFACE)._flash_attn_varlen_backward
        inputs = tuple(x.contiguous() for x in qkv)
        dq, dk, dv = (torch.empty_like(x) for x in inputs)
        run(
            dout.contiguous(), *inputs, out.contiguous(), lse, dq, dk, dv, **_options(batch, score), dropout_p=0.0,
            causal=batch.causal, alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv

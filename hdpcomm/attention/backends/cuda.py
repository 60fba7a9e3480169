"""torch's fused attention operators on CUDA: flash (varlen), memory-efficient and cuDNN (one call a tile).

None of them has a softcap. The shape of their lse differs: flash returns [heads, tokens], the memory-efficient one pads
it to a multiple of 32 queries, and cuDNN adds a last dimension of 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hdpcomm.attention.backends.base import Accumulator, Grads, Problem, Score, refuses_tensors
from hdpcomm.attention.backends.cpu import batched, lower
from hdpcomm.attention.backends.varlen import Batch, Three, VarlenBackend
from hdpcomm.attention.tiles import Tile

__all__ = ["CudnnBackend", "EfficientBackend", "FlashBackend"]

_HALF = (torch.float16, torch.bfloat16)
_Tensors = tuple[torch.Tensor, ...]


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

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, 0.0, batch.causal, False,
            **self._options(batch, score),
        )  # fmt: skip
        return out, lse

    def call_backward(
        self,
        dout: torch.Tensor,
        qkv: Three,
        out: torch.Tensor,
        lse: torch.Tensor,
        batch: Batch,
        score: Score,
    ) -> Three:
        unused = torch.zeros(2, dtype=torch.uint64, device=dout.device)  # the dropout's random state
        parts: Three = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), *qkv, out, lse, batch.cu_q, batch.cu_k, batch.max_q, batch.max_k, 0.0, batch.causal,
            unused, unused[:0], **self._options(batch, score),
        )  # fmt: skip
        return parts


class _DenseBackend(ABC):
    """Backends with one kernel call per tile, on [1, heads, rows, dim]; masks are aligned at the top left."""

    name: str
    own_v_dim = False

    @abstractmethod
    def refuses(self, problem: Problem) -> str | None: ...

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @abstractmethod
    def call_forward(self, qkv: _Tensors, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [1, heads, rows, dim], lse [1, heads, rows])."""

    @abstractmethod
    def call_backward(
        self, dout: torch.Tensor, qkv: _Tensors, out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float
    ) -> _Tensors:
        """(dq, dk, dv), shaped like ``qkv``."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Sequence[Tile],
        score: Score,
        result: Accumulator,
    ) -> None:
        for tile in (part for whole in tiles for part in lower(whole)):
            keys = (tile.k_start, tile.k_stop)
            qkv = (batched(q, tile.q_start, tile.q_stop), batched(k, *keys), batched(v, *keys))
            out, lse = self.call_forward(qkv, not tile.full, score.scale)
            rows = slice(tile.q_start, tile.q_stop)
            result.merge(out[0].transpose(0, 1).contiguous(), lse[0].transpose(0, 1), rows)

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
        grads: Grads,
    ) -> None:
        for tile in (part for whole in tiles for part in lower(whole)):
            rows, keys = (tile.q_start, tile.q_stop), (tile.k_start, tile.k_stop)
            qkv = (batched(q, *rows), batched(k, *keys), batched(v, *keys))
            tile_lse = lse[slice(*rows)].transpose(0, 1).unsqueeze(0).contiguous()
            parts = self.call_backward(
                batched(dout, *rows), qkv, batched(out, *rows), tile_lse, not tile.full, score.scale
            )
            for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
                grad.add(part[0].transpose(0, 1), slice(*where))


class EfficientBackend(_DenseBackend):
    """``aten::_scaled_dot_product_efficient_attention``: also float32."""

    name = "efficient"
    own_v_dim = True

    def refuses(self, problem: Problem) -> str | None:
        if problem.windowed:
            return "it has no sliding window"
        return _refusal(problem, (*_HALF, torch.float32), (5, 0), 65536)

    @staticmethod
    def _repeated(qkv: _Tensors) -> _Tensors:
        """Repeats the heads of k and v, since the operator has no grouped heads."""
        q, k, v = qkv
        times = q.shape[1] // k.shape[1]
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def call_forward(self, qkv: _Tensors, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *self._repeated(qkv), None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : out.shape[2]]

    def call_backward(
        self, dout: torch.Tensor, qkv: _Tensors, out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float
    ) -> _Tensors:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=dout.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout, *self._repeated(qkv), None, out, padded, seed, seed, 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
        heads = qkv[1].shape[1]
        return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)


class CudnnBackend(_DenseBackend):
    """``aten::_scaled_dot_product_cudnn_attention``."""

    name = "cudnn"

    def refuses(self, problem: Problem) -> str | None:
        if problem.device == "cuda" and not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return "this build of torch has no cuDNN"
        if problem.windowed:
            return "torch's operator passes no sliding window to cuDNN"
        if problem.v_dim != problem.head_dim:
            return "it is called with one head_dim for all"
        return _refusal(problem, _HALF, (8, 0), 128)

    def call_forward(self, qkv: _Tensors, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *qkv, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(out.shape[:3])

    def call_backward(
        self, dout: torch.Tensor, qkv: _Tensors, out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float
    ) -> _Tensors:
        seed = torch.zeros((), dtype=torch.int64, device=dout.device)
        parts: _Tensors = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, *qkv, out, lse.unsqueeze(-1), seed, seed, None, None, None, out.shape[2], qkv[1].shape[2],
            0.0, causal, scale=scale,
        )  # fmt: skip
        return parts

"""torch's fused attention operators on CUDA: flash (varlen), memory-efficient and cuDNN (one call a tile).

None of them has a softcap. The shape of their lse differs: flash returns [heads, tokens], the memory-efficient one pads
it to a multiple of 32 queries, and cuDNN adds a last dimension of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Problem, Score, Three, refuses_tensors
from hdpcomm.attention.backends.dense import DenseBackend
from hdpcomm.attention.backends.varlen import Batch, VarlenBackend
from hdpcomm.attention.tiles import Tile

__all__ = ["CudnnBackend", "EfficientBackend", "FlashBackend"]

_HALF = (torch.float16, torch.bfloat16)


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

    @staticmethod
    def _repeated(qkv: Three) -> Three:
        """Repeats the heads of k and v, since the operator has no grouped heads."""
        q, k, v = qkv
        times = q.shape[1] // k.shape[1]
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def call_forward(self, qkv: Three, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *self._repeated(qkv), None, True, 0.0, not tile.full, scale=scale
        )
        return out, lse[..., : out.shape[2]]

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, scale: float) -> Three:
        padded = torch.nn.functional.pad(lse.contiguous(), (0, -lse.shape[-1] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=dout.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout, *self._repeated(qkv), None, out, padded, seed, seed, 0.0, [True, True, True, False], not tile.full,
            scale=scale,
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
        if problem.v_dim != problem.head_dim:
            return "it is called with one head_dim for all"
        return _refusal(problem, _HALF, (8, 0), 128)

    def call_forward(self, qkv: Three, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *qkv, None, True, 0.0, not tile.full, False, scale=scale
        )
        return out, lse.reshape(out.shape[:3])

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, tile: Tile, scale: float) -> Three:
        seed = torch.zeros((), dtype=torch.int64, device=dout.device)
        parts: Three = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, *qkv, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, out.shape[2],
            qkv[1].shape[2], 0.0, not tile.full, scale=scale,
        )  # fmt: skip
        return parts

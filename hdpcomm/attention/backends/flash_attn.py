"""The flash-attn 2 package, where it is installed: the one fused backend with a softcap."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from hdpcomm.attention.backends.base import Problem, Score
from hdpcomm.attention.backends.varlen import Batch, VarlenBackend

__all__ = ["FlashAttn2Backend"]

_OLDEST = (2, 7)
"""Since this release the internal calls take window_size_left and window_size_right and return (out, lse, ...)."""


def _version() -> tuple[int, ...] | None:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    text = str(getattr(importlib.import_module("flash_attn"), "__version__", "0"))
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


class FlashAttn2Backend(VarlenBackend):
    """``flash_attn.flash_attn_interface._flash_attn_varlen_forward`` and its backward."""

    name = "flash-attn"

    def refuses(self, problem: Problem) -> str | None:
        version = _version()
        if version is None:
            return "the package flash-attn is not installed"
        if version < _OLDEST or version[0] != 2:
            return f"flash-attn {'.'.join(map(str, version))} is installed; expected 2.7 or a later 2.x"
        if problem.device != "cuda":
            return f"it computes on CUDA devices; the tensors are on {problem.device}"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"it has no {problem.dtype}"
        if problem.head_dim > 256 or problem.head_dim % 8:
            return f"it takes a head_dim of at most 256, a multiple of 8; got {problem.head_dim}"
        return None

    @staticmethod
    def _options(batch: Batch, score: Score) -> dict[str, Any]:
        return {
            "cu_seqlens_q": batch.cu_q,
            "cu_seqlens_k": batch.cu_k,
            "max_seqlen_q": batch.max_q,
            "max_seqlen_k": batch.max_k,
            "dropout_p": 0.0,
            "softmax_scale": score.scale,
            "causal": (batch.left, batch.right) == (-1, 0),
            "window_size_left": batch.left,
            "window_size_right": batch.right,
            "softcap": score.softcap,
            "alibi_slopes": None,
        }

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        out, lse, *_ = interface._flash_attn_varlen_forward(
            q, k, v, **self._options(batch, score), return_softmax=False
        )
        return out, lse

    def call_backward(
        self,
        dout: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        batch: Batch,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        q, k, v = (x.contiguous() for x in qkv)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        interface._flash_attn_varlen_backward(
            dout.contiguous(), q, k, v, out.contiguous(), lse, dq, dk, dv, **self._options(batch, score),
            deterministic=True,
        )  # fmt: skip
        return dq, dk, dv

"""The backend that uses the package flash-attn, where it is installed: the fused one with a softcap.

It calls the functions that flash-attn's own autograd classes call, since its public functions take no log-sum-exp in
backward. Source: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py (2.7.4).
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Problem, Score, Three, refuses_tensors
from hdpcomm.attention.backends.varlen import Batch, VarlenBackend

__all__ = ["FlashAttn2Backend"]

_OLDEST = (2, 7)
"""Since this release the internal calls take window_size_left and window_size_right and return (out, lse, ...)."""
_INTERFACE = "flash_attn.flash_attn_interface"


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
        return refuses_tensors(problem, (torch.float16, torch.bfloat16), 256)

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
            causal=batch.causal, alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv

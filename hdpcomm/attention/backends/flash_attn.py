"""Backends that use the flash-attn packages, where they are installed: the fused backends with a softcap.

They call the functions that flash-attn's own autograd classes call, since its public functions take no log-sum-exp in
backward. Sources: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py (2.7.4) and
hopper/flash_attn_interface.py (commit 01afd16d).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.attention.backends.base import Problem, Score, Three, refuses_tensors
from hdpcomm.attention.backends.varlen import Batch, VarlenBackend

__all__ = ["FlashAttn2Backend", "FlashAttn3Backend"]

_OLDEST = (2, 7)
"""Since this release the internal calls take window_size_left and window_size_right and return (out, lse, ...)."""
_INTERFACE_2 = "flash_attn.flash_attn_interface"
_INTERFACE_3 = "flash_attn_interface"


@lru_cache(maxsize=1)
def _version() -> tuple[int, ...] | None:
    """The version of flash-attn 2, or None where it is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    text = str(getattr(importlib.import_module("flash_attn"), "__version__", "0"))
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


@lru_cache(maxsize=1)
def _third() -> Any:
    """The module of flash-attn 3, or None where it is not installed."""
    return None if importlib.util.find_spec(_INTERFACE_3) is None else importlib.import_module(_INTERFACE_3)


def _options(batch: Batch, score: Score) -> dict[str, Any]:
    """The arguments that have the same names in all four functions."""
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


def _buffers(qkv: Three) -> tuple[Three, Three]:
    """(contiguous q, k, v; buffers for their gradients)."""
    q, k, v = (x.contiguous() for x in qkv)
    return (q, k, v), (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))


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
        run = importlib.import_module(_INTERFACE_2)._flash_attn_varlen_forward
        out, lse, *_ = run(
            q, k, v, **_options(batch, score), dropout_p=0.0, causal=batch.causal, alibi_slopes=None,
            return_softmax=False,
        )  # fmt: skip
        return out, lse

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, batch: Batch, score: Score) -> Three:
        run = importlib.import_module(_INTERFACE_2)._flash_attn_varlen_backward
        inputs, grads = _buffers(qkv)
        run(
            dout.contiguous(), *inputs, out.contiguous(), lse, *grads, **_options(batch, score), dropout_p=0.0,
            causal=batch.causal, alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return grads


class FlashAttn3Backend(VarlenBackend):
    """``_flash_attn_forward`` and ``_flash_attn_backward`` of flash-attn 3, for Hopper."""

    name = "flash-attn-3"

    def refuses(self, problem: Problem) -> str | None:
        module = _third()
        if module is None:
            return "the package flash-attn 3 (flash_attn_interface) is not installed"
        backward = getattr(module, "_flash_attn_backward", None)
        function = getattr(backward, "_init_fn", backward)  # what a torch custom operator was made from
        if function is None or not {"window_size_left", "is_causal"} <= set(inspect.signature(function).parameters):
            return "the installed flash-attn 3 has another interface; expected one with window_size_left and is_causal"
        return refuses_tensors(problem, (torch.float16, torch.bfloat16), 256)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, score: Score) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _third()._flash_attn_forward(q, k, v, **_options(batch, score), causal=batch.causal)
        return out, lse

    def call_backward(self, dout: Tensor, qkv: Three, out: Tensor, lse: Tensor, batch: Batch, score: Score) -> Three:
        (q, k, v), (dq, dk, dv) = _buffers(qkv)
        _third()._flash_attn_backward(
            dout.contiguous(), q, k, v, out.contiguous(), lse, dq=dq, dk=dk, dv=dv, **_options(batch, score),
            is_causal=batch.causal, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv

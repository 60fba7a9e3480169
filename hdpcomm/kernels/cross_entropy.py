"""Softmax cross-entropy that reads the logits twice and saves nothing of their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.linear_cross_entropy import VocabularyShard, row_gradient, row_losses
from hdpcomm.kernels.transfers import dtype_code, without_second_derivative

__all__ = ["CROSS_ENTROPY_DTYPES", "cross_entropy"]

CROSS_ENTROPY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types of logits that :func:`cross_entropy` takes."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """The loss of each token, fp32, differentiable in the logits: ``weight * (logsumexp(logits) - logits[label])``.

    Computes in fp32 for any type of logits, without an fp32 copy of them: forward reads them once; backward reads them
    once more and **overwrites them with the gradient**. So the logits must not be read after backward; autograd notices
    if another node saved them. Where that is not possible (logits that are a leaf of the graph or a view of one, or
    whose rows overlap), the gradient takes memory of its own.

    Args:
        logits: ``[..., columns]`` float32, bfloat16 or float16.
        labels: ``[...]`` int64, columns, or :data:`IGNORE` for a token without a loss (its
            loss and gradient are 0, whatever its logits).
        weights: ``[...]`` float32, factors of the tokens' losses; not differentiated. Default: 1.

    Returns: ``[...]`` float32. On CUDA, enqueued on the current stream.

    Raises:
        InvalidUsage: wrong shapes, types or devices; on the CPU, a label outside the vocabulary (on CUDA such a token's
            loss is NaN, since reading labels back would stop the stream); a second backward through overwritten logits.
    """
    _check(logits, labels, weights)
    columns = logits.shape[-1]
    if columns < 1:
        raise InvalidUsage(f"logits {tuple(logits.shape)} have no column; a vocabulary has at least one")
    rows = logits.reshape(-1, columns)
    if rows.stride(-1) != 1 or (rows.shape[0] > 1 and rows.stride(0) < columns):
        rows = rows.contiguous()
    job = _Job(VocabularyShard(0, columns, None), _is_temporary(logits))
    flat = None if weights is None else weights.detach().reshape(-1).contiguous()
    loss: Tensor = _CrossEntropy.apply(rows, labels.reshape(-1).contiguous(), flat, job)  # type: ignore[no-untyped-call]
    return loss.view(labels.shape)


@dataclass(slots=True)
class _Job:
    shard: VocabularyShard
    in_place: bool
    consumed: bool = False  # the gradient has overwritten the logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor, weights: Tensor | None, job: _Job) -> Tensor:
        losses, sums, _ = row_losses(rows, labels, weights, job.shard)
        ctx.job = job
        ctx.save_for_backward(rows, labels, weights, sums)
        return losses

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        job: _Job = ctx.job
        if job.consumed:
            raise InvalidUsage(
                "backward went through cross_entropy a second time, but its gradient has overwritten the logits; give "
                "it a copy of them (logits.clone()) for each"
            )
        rows, labels, weights, sums = ctx.saved_tensors
        grad = (
            rows.detach()
            if job.in_place
            else torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device)
        )
        row_gradient(rows, labels, weights, job.shard, sums, grads[0].float(), grad)
        if job.in_place:
            job.consumed = True
            torch.autograd.graph.increment_version(rows)  # autograd then refuses other uses of the saved logits
        return grad, None, None, None


def _is_temporary(logits: Tensor) -> bool:
    """Whether the logits are a result inside a graph, so that only the graph owns their memory."""
    base = logits._base if logits._is_view() else logits
    return logits.requires_grad and base is not None and not base.is_leaf


def _check(logits: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    dtype_code(logits, CROSS_ENTROPY_DTYPES)
    if logits.dim() == 0 or logits.shape[:-1] != labels.shape:
        raise InvalidUsage(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: one row of logits for each label was "
            "expected"
        )
    if labels.dtype != torch.int64:
        raise InvalidUsage(f"labels are {labels.dtype}; expected int64")
    if weights is not None and (weights.shape != labels.shape or weights.dtype != torch.float32):
        raise InvalidUsage(
            f"weights {tuple(weights.shape)} of {weights.dtype}; expected float32, one for each label: "
            f"{tuple(labels.shape)}"
        )
    for tensor in (labels, weights):
        if tensor is not None and tensor.device != logits.device:
            raise InvalidUsage(f"logits are on {logits.device}, labels or weights on {tensor.device}; move one")

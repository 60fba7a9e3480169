"""Token-level loss: the sum over all tokens of the step, divided by how many there are in the whole global batch.

Averaging by sequence, micro-batch or rank would weigh a token by where it landed; a sum does not depend on the plan, so
every rank adds up its own tokens and one reduction gives the exact gradient (ByteScale, arXiv 2502.21231, section 5.1,
equations 1 and 2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import CROSS_ENTROPY_DTYPES, IGNORE, LabelLoss, cross_entropy, loss_of_log_probs

__all__ = ["IGNORE", "next_token_labels", "summed_loss"]


def next_token_labels(tokens: Tensor) -> Tensor:
    """Labels ``[length]`` of one whole sequence: token i is to predict token i + 1; the last one has no label
    (:data:`IGNORE`).

    To be made before sharding: in a zigzag shard the next token often lies on another rank. Local.
    """
    labels = torch.full_like(tokens, IGNORE)
    labels[:-1] = tokens[1:]
    return labels


def summed_loss(logits: Tensor, labels: Tensor, weights: Tensor | LabelLoss | None = None) -> Tensor:
    """Cross-entropy summed over the tokens that have a label, in at least fp32.

    Backward writes the gradient in place of the logits (:func:`hdpcomm.kernels.cross_entropy`): do not read them after
    it. Logits of other types than float32, bfloat16 and float16 go through torch and stay as they are.

    Args:
        logits: ``[tokens, vocabulary]``; zero tokens are fine and give a zero that still has a graph, so that this rank
            takes part in the backward of its group.
        labels: ``[tokens]`` int64, :data:`IGNORE` where there is no loss.
        weights: ``[tokens]`` float32, factors of the tokens' losses; or what the labels' losses are. Default: 1.
    """
    if logits.shape[:-1] != labels.shape:
        raise InvalidUsage(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: one row of logits for each label was "
            "expected"
        )
    if weights is not None and not isinstance(weights, Tensor):
        return loss_of_log_probs(logits, labels, weights)
    if logits.dtype in CROSS_ENTROPY_DTYPES:
        return cross_entropy(logits, labels, weights=weights).sum()
    wide = torch.promote_types(logits.dtype, torch.float32)
    if weights is None:
        return F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORE, reduction="sum")
    return (weights * F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORE, reduction="none")).sum()

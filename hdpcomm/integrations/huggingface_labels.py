"""Labels of the models that transformers' Trainer trains: of next tokens, of tokens and of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_batch import sequences_of
from hdpcomm.integrations.huggingface_losses import LogitLoss, TokenMetrics, function_terms
from hdpcomm.models.heads import SEQUENCE
from hdpcomm.train.label_terms import Batch, LabelTerms, token_terms
from hdpcomm.train.losses import TokenLoss
from hdpcomm.train.sequences import Sequences

__all__ = ["ModelLabels"]

_REGRESSION, _CLASSES, _SEVERAL = "regression", "single_label_classification", "multi_label_classification"
"""Values of ``config.problem_type``."""


class ModelLabels:
    """The labels in batches for a model, and their losses as transformers computes them.

    Args:
        adapted: an :class:`hdpcomm.models.AdaptedCausalLM`.

    Attributes:
        loss: a function of logits in the place of the cross-entropy.
        dynamic: cross-entropies count as much as the probability of their label (DFT).
    """

    def __init__(self, adapted: Any) -> None:
        self.loss: LogitLoss | None = None
        self.dynamic = False
        self.of: str = adapted.labels_of
        self._config = adapted.causal_lm.config

    @property
    def padding(self) -> int | None:
        """The token that ends no sequence."""
        padding: int | None = self._config.get_text_config().pad_token_id
        return padding

    def sequences(self, batch: Mapping[str, Any]) -> Sequences:
        """See :func:`hdpcomm.integrations.huggingface_batch.sequences_of`. Local. Chooses the problem of a classifier
        of sequences whose configuration names none, as transformers does."""
        if self.of != SEQUENCE:
            return sequences_of(batch, self.of)
        config, labels = self._config, batch.get("labels")
        if config.problem_type is None and isinstance(labels, Tensor):
            numbers = _CLASSES if labels.dtype in (torch.int64, torch.int32) else _SEVERAL
            config.problem_type = _REGRESSION if config.num_labels == 1 else numbers
        targets = 0 if config.problem_type == _CLASSES else config.num_labels
        return sequences_of(batch, SEQUENCE, padding=self.padding, targets=targets)

    def terms(self, batch: Sequences, metrics: TokenMetrics | None = None) -> LabelTerms | None:
        """The losses of labels or targets; ``None``: each label's loss is its cross-entropy. Local.

        Args:
            metrics: get what they count, of next tokens.

        Raises: InvalidUsage: a function of logits, and targets that are no classes.
        """
        if batch.targets is None:
            if self.loss is None and metrics is None and not self.dynamic:
                return None
            return function_terms(batch.lengths, self.loss, metrics, dynamic=self.dynamic)
        if self.loss is not None:
            raise InvalidUsage(
                f"Trainer: a function of logits with problem_type={self._config.problem_type!r} is not supported with "
                "plans; leave out compute_loss_func and label_smoothing_factor"
            )
        function = _squared_errors if self._config.problem_type == _REGRESSION else _binary_cross_entropies
        columns = [str(k) for k in range(batch.targets.shape[1])]
        return token_terms(TokenLoss(function, columns, temperature=None), Batch(batch.lengths))


def _squared_errors(values: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    targets = torch.stack(list(columns.values()), 1)
    return (values.view(targets.shape) - targets).square().mean(1)


def _binary_cross_entropies(values: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    targets = torch.stack(list(columns.values()), 1)
    return F.binary_cross_entropy_with_logits(values.view(targets.shape), targets, reduction="none").mean(1)

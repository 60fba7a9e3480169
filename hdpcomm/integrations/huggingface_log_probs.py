"""Stand-in for the model where TRL computes a loss: it gives log-probabilities, or scores of sequences, that planned
passes have made.

TRL's trainers of preferences and policies call ``model(input_ids=, attention_mask=, labels=, fused_lm_head=True)`` and
compute their losses, whatever these are, from ``log_probs`` and ``entropy`` of what it gives
(:class:`hdpcomm.integrations.row_passes.RowPasses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_batch import sequences_of
from hdpcomm.integrations.row_passes import Sequences
from hdpcomm.models.heads import SEQUENCE
from hdpcomm.models.media import MediaEncoder
from hdpcomm.train.losses.loss import IGNORE
from hdpcomm.train.losses.shards import routes_of

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.integrations.row_passes import RowPasses, ScoredRows
    from hdpcomm.train.losses.label_terms import LabelTerms

__all__ = ["ComputedLoss", "LogProbModel", "ScoreModel"]

_KEYS = {"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache"}


@dataclass(frozen=True, slots=True)
class ComputedLoss:
    """A loss of log-probabilities, before its derivatives go into the model.

    Attributes:
        loss: the scalar with its graph.
        leaf: its value, of which the backward pass of the trainer leaves the derivative of what the trainer made of it.
        calls: of the model, that the loss was made of.
    """

    loss: Tensor
    leaf: Tensor
    calls: list[ScoredRows]

    def terms(self, call: ScoredRows, comm: Communicator, *, more: bool) -> LabelTerms:
        """The losses of a call's labels whose derivatives are those of the mean loss over the ranks. Collective.

        Args:
            more: other calls follow.
        """
        slopes = None
        if self.loss.requires_grad and self.leaf.grad is not None:
            upstream = self.leaf.grad.to(self.loss.dtype) / comm.size
            [slopes] = torch.autograd.grad(self.loss, call.values, upstream, allow_unused=True, retain_graph=more)
        return call.terms(slopes, comm)


class LogProbModel:
    """Called in the model's place, by all ranks alike.

    Args:
        temperature: divides the logits.
        routes: the experts that the tokens of each row take, ``[tokens, layers, top_k]``, the last one's left out or
            not; ``None``: as routers choose.
        keeps: whether the experts that tokens took are kept.

    Attributes:
        kept: by row of all calls, ``[tokens, layers with routers, top_k]``.
    """

    def __init__(
        self, passes: RowPasses, temperature: float, *, routes: Sequence[Any] | None = None, keeps: bool = False
    ) -> None:
        self._passes, self._temperature, self._keeps = passes, temperature, keeps
        self._routes = None if routes is None else iter(routes)
        self.kept: list[Tensor] = []
        self.calls: list[ScoredRows] = []
        """Calls by whose results the loss may have gradients."""

    def __call__(self, **arguments: Any) -> Any:
        """An object with what TRL reads: ``log_probs``, ``entropy``, ``label_mask``; what it only logs is 0."""
        from trl.trainer.utils import FusedCausalLMOutput

        own, where = _rows(arguments, self._passes.media)
        scored = self._scored(own, temperature=self._temperature, entropy=True)
        device = arguments["input_ids"].device
        none = torch.zeros(where.shape, dtype=scored.values.dtype)
        log_probs, entropy = (none.masked_scatter(where, row).to(device) for row in scored.values)
        none = none.to(device)
        return FusedCausalLMOutput(
            log_probs=log_probs, entropy=entropy, mean_logits=none, is_top1=none.bool(), label_mask=where.to(device)
        )

    def _scored(self, own: Sequences, **asked: Any) -> ScoredRows:
        if self._routes is not None:
            given = enumerate(zip(own.lengths, self._routes, strict=False))  # the rows of other calls follow
            rows = [routes_of({"routes": row}, i, length) for i, (length, row) in given]
            own = replace(own, routes=torch.cat([row.to(torch.int16) for row in rows if row is not None]))
        scored = self._passes.score(own, **asked, routes=self._keeps)
        if scored.routes is not None:
            self.kept += torch.split(scored.routes.to(torch.int16), own.lengths)
        if scored.values.requires_grad:
            self.calls.append(scored)
        return scored

    def __getattr__(self, name: str) -> Any:
        raise InvalidUsage(
            f"the loss asks the model for {name!r}; with plans it gets log-probabilities by "
            "model(input_ids=, attention_mask=, labels=, fused_lm_head=True), or scores of sequences, only: this "
            "version of TRL, or this loss, does not work with HybridDataParallel"
        )


class ScoreModel(LogProbModel):
    """Called in the place of a model that scores sequences, by TRL's RewardTrainer.

    Args:
        padding: the token that ends no sequence.
    """

    def __init__(self, passes: RowPasses, padding: int | None) -> None:
        super().__init__(passes, 1.0)
        self._padding = padding

    def __call__(self, **arguments: Any) -> Any:
        """``logits`` ``[rows, 1]``: the score of each row."""
        from transformers.modeling_outputs import SequenceClassifierOutput

        tokens, mask = arguments["input_ids"], arguments.get("attention_mask")
        rows = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.new_zeros(len(tokens))}
        own = sequences_of(rows, SEQUENCE, padding=self._padding)
        scores = self._scored(own, temperature=None, entropy=False).values[0]
        return SequenceClassifierOutput(logits=scores[:, None].to(tokens.device))


def _rows(arguments: Mapping[str, Any], media: MediaEncoder | None) -> tuple[Sequences, Tensor]:
    """(the rows of a call as sequences, which labels ``[rows, tokens - 1]`` there are). Raises InvalidUsage."""
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    tokens, mask, labels = (arguments.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if (
        not arguments.get("fused_lm_head")
        or given - _KEYS - set(media.names if media is not None else ())
        or not all(isinstance(x, Tensor) and x.dim() == 2 for x in (tokens, mask, labels))
    ):
        raise InvalidUsage(
            f"the loss calls the model with {sorted(given)}; with plans it may ask for log-probabilities of padded "
            "rows only (input_ids, attention_mask, labels and fused_lm_head, as TRL 1.16 does, and images of models "
            "that take them): leave out padding_free and losses of logits"
        )
    assert isinstance(labels, Tensor)
    assert isinstance(mask, Tensor)
    seen = mask.cpu().bool()
    labels = labels.cpu().masked_fill(~seen, IGNORE)
    first = seen.long().argmax(1)
    labels[torch.arange(len(labels)), first] = IGNORE  # nothing predicts a first token
    rows: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if media is not None:
        rows |= {name: arguments.get(name) for name in media.names}
    own = sequences_of(rows, media=media)
    return own, labels[:, 1:] != IGNORE

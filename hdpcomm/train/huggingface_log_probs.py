"""What stands in for the model where TRL computes a loss: it gives log-probabilities that planned passes have made.

TRL's trainers of preferences and policies call ``model(input_ids=, attention_mask=, labels=, fused_lm_head=True)`` and
compute their losses, whatever these are, from ``log_probs`` and ``entropy`` of what it gives. So the forward passes of
all ranks' rows run under one plan, TRL's own code makes the loss of the results, and its derivative by each of them
goes back into the model by a second run of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage
from hdpcomm.train.huggingface_batch import Sequences, gather_sequences, sequences_of
from hdpcomm.train.label_terms import Batch, KeptLogProbs, LabelTerms, given_terms, kept_terms
from hdpcomm.train.loss import IGNORE

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import PlannedStep

__all__ = ["ComputedLoss", "LogProbModel", "ScoredBatch"]

_KEYS = {"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache"}


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The rows of all ranks in one call of the model, and the results for this rank's.

    Attributes:
        batch, planned: of all ranks; ``labels``: the entries of the batch.
        entries: where in the batch the results of this rank's labels are.
        leaves: log-probabilities, and entropies, ``[rows, tokens - 1]``, of this rank's rows; leaves of the loss's
            graph.
        where: which elements of these have a label.
    """

    batch: Sequences
    labels: Batch
    planned: PlannedStep
    entries: Tensor
    leaves: tuple[Tensor, Tensor]
    where: Tensor


@dataclass(frozen=True, slots=True)
class ComputedLoss:
    """A loss of log-probabilities, before its derivatives go into the model.

    Attributes:
        loss: the scalar with its graph.
        leaf: its value, of which the backward pass of the trainer leaves the derivative of what the trainer made of it.
        calls: of the model, that the loss was made of.
        temperature: of the model.
    """

    loss: Tensor
    leaf: Tensor
    calls: list[ScoredBatch]
    temperature: float

    def terms(self, call: ScoredBatch, comm: Communicator, *, more: bool) -> LabelTerms:
        """The losses of a call's labels whose derivatives are those of the mean loss over the ranks. Collective.

        Args:
            more: other calls follow.
        """
        slopes = torch.zeros(2, call.labels.offsets[-1], dtype=call.leaves[0].dtype)
        found: tuple[Tensor | None, ...] = (None, None)
        if self.loss.requires_grad and self.leaf.grad is not None:
            upstream = self.leaf.grad.to(self.loss.dtype) / comm.size
            found = torch.autograd.grad(self.loss, call.leaves, upstream, allow_unused=True, retain_graph=more)
        for row, slope in zip(slopes, found, strict=True):
            if slope is not None:
                row[call.entries] = slope.cpu()[call.where]
        comm.all_reduce(slopes)
        return given_terms(slopes, self.temperature, call.labels)


class LogProbModel:
    """Called in the model's place, by all ranks alike.

    Args:
        plan: lengths of all ranks' rows to a plan on which they have agreed. Collective.
        run: forward passes of a plan over the rows of a batch. Collective.
        like: a parameter, for type and device of the results.
        temperature: divides the logits.
    """

    def __init__(
        self,
        plan: Callable[[list[int]], PlannedStep],
        run: Callable[[PlannedStep, Sequences, LabelTerms], object],
        comm: Communicator,
        like: Tensor,
        temperature: float,
    ) -> None:
        self._plan, self._run, self._comm, self._like, self._temperature = plan, run, comm, like, temperature
        self.calls: list[ScoredBatch] = []
        """Those whose results the loss may have gradients by."""

    def __call__(self, **arguments: Any) -> Any:
        """An object with what TRL reads: ``log_probs``, ``entropy``, ``label_mask``; what it only logs is 0."""
        from trl.trainer.utils import FusedCausalLMOutput

        own, where = _rows(arguments)
        batch = gather_sequences(own, self._comm)
        planned = self._plan(batch.lengths)
        labels = Batch(batch.lengths)
        kept = KeptLogProbs(labels, self._like, entropy=True, temperature=self._temperature)
        self._run(planned, batch, kept_terms(kept, labels))
        values = kept.sum(self._comm)
        first = labels.offsets[self._first(own)]
        entries = first + (own.labels != IGNORE).nonzero()[:, 0]
        device = arguments["input_ids"].device
        log_probs, entropy = (torch.zeros(where.shape, dtype=values.dtype) for _ in range(2))
        log_probs[where], entropy[where] = values[0, entries], values[1, entries]
        leaves = (log_probs.to(device), entropy.to(device))
        if torch.is_grad_enabled():
            leaves = (leaves[0].requires_grad_(), leaves[1].requires_grad_())
            self.calls.append(ScoredBatch(batch, labels, planned, entries, leaves, where))
        none = torch.zeros_like(log_probs, device=device)
        return FusedCausalLMOutput(
            log_probs=leaves[0], entropy=leaves[1], mean_logits=none, is_top1=none.bool(), label_mask=where.to(device)
        )

    def _first(self, own: Sequences) -> int:
        """Rows of the ranks before this one. Collective."""
        counts = torch.empty(self._comm.size, dtype=torch.int64)
        self._comm.all_gather(counts, torch.tensor([len(own.lengths)]))
        return int(counts[: self._comm.rank].sum())

    def __getattr__(self, name: str) -> Any:
        raise InvalidUsage(
            f"the loss asks the model for {name!r}; with plans it gets log-probabilities by "
            "model(input_ids=, attention_mask=, labels=, fused_lm_head=True) only: this version of TRL, or this loss, "
            "does not work with HybridDataParallel"
        )


def _rows(arguments: Mapping[str, Any]) -> tuple[Sequences, Tensor]:
    """(the rows of a call as sequences, which labels ``[rows, tokens - 1]`` there are). Raises InvalidUsage."""
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    tokens, mask, labels = (arguments.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if (
        not arguments.get("fused_lm_head")
        or given - _KEYS
        or not all(isinstance(x, Tensor) and x.dim() == 2 for x in (tokens, mask, labels))
    ):
        raise InvalidUsage(
            f"the loss calls the model with {sorted(given)}; with plans it may ask for log-probabilities of padded "
            "rows of text only (input_ids, attention_mask, labels and fused_lm_head, as TRL 1.16 does): leave out "
            "images, padding_free and losses of logits"
        )
    assert isinstance(labels, Tensor)
    assert isinstance(mask, Tensor)
    seen = mask.cpu().bool()
    labels = labels.cpu().masked_fill(~seen, IGNORE)
    first = seen.long().argmax(1)
    labels[torch.arange(len(labels)), first] = IGNORE  # nothing predicts a first token
    own = sequences_of({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return own, labels[:, 1:] != IGNORE

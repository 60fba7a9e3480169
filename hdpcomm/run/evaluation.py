"""The loss on text that is not trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hdpcomm.data import BatchReader, Corpus
from hdpcomm.errors import Error
from hdpcomm.train import IGNORE, Fetch, pack_shard
from hdpcomm.train.micro_batch import micro_batch_loss
from hdpcomm.train.reading import declared

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.plan import Planner, StepPlan

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation over all ranks.

    Attributes:
        step: steps that had been trained.
        loss: mean over all tokens of the held-out text that have a label, in nats.
        tokens: tokens with a label.
    """

    step: int
    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


BatchLoss = Callable[[Sequence[int], Fetch], torch.Tensor]
"""(lengths, reader) of a batch to this rank's part of it, as :meth:`hdpcomm.parallel.PipelineTrainer.evaluate`."""


def evaluate(
    model: nn.Module,
    planner: Planner,
    comm: Communicator,
    corpus: Corpus,
    *,
    tokens_per_step: int,
    step: int,
    batch_loss: BatchLoss | None = None,
) -> Evaluation:
    """The loss of ``model`` on the whole of ``corpus``, batch by batch in its order. Collective over ``comm``.

    Args:
        batch_loss: runs a batch in place of ``model``, of which it is then a part.

    The model is in evaluation mode meanwhile, and no gradient is kept. Raises: Error if the loss is not finite.
    """
    started = time.perf_counter()
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for ids in _batches(corpus, tokens_per_step):
                reader = declared(BatchReader(corpus, ids), comm)
                lengths = [int(corpus.lengths[sequence]) for sequence in ids]
                if batch_loss is not None:
                    total += batch_loss(lengths, reader)
                else:
                    total += _batch_loss(model, planner.plan(lengths), comm, reader, device)
    finally:
        model.train(training)
    comm.all_reduce(total)
    loss, tokens = total.tolist()
    if not tokens or not math.isfinite(loss):
        raise Error(f"the evaluation after step {step} has {int(tokens)} tokens with a label and a loss of {loss}")
    return Evaluation(step, loss / tokens, int(tokens), time.perf_counter() - started)


def _batch_loss(
    model: nn.Module, plan: StepPlan, comm: Communicator, reader: Fetch, device: torch.device
) -> torch.Tensor:
    """(summed loss, tokens with a label) of this rank's micro-batches."""
    total = torch.zeros(2, dtype=torch.float64)
    for micro_batch in plan.for_rank(comm.rank):
        group = cast("Communicator", comm.subset(micro_batch.ranks))
        packed = pack_shard(micro_batch, reader, comm=group, device=device)
        loss = micro_batch_loss(model, packed, group)
        comm.tick()
        total += torch.stack((loss.double(), (packed.labels != IGNORE).sum().double())).cpu()
    return total


def _batches(corpus: Corpus, tokens: int) -> list[tuple[int, ...]]:
    batches: list[list[int]] = [[]]
    room = tokens
    for sequence, length in enumerate(corpus.lengths.tolist()):
        if length > room and batches[-1]:
            batches.append([])
            room = tokens
        batches[-1].append(sequence)
        room -= length
    return [tuple(batch) for batch in batches if batch]

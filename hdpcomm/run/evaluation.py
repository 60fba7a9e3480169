"""The loss on text that is not trained on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from hdpcomm.data import BatchReader, Corpus
from hdpcomm.errors import Error
from hdpcomm.train import Trainer

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


def evaluate(trainer: Trainer, corpus: Corpus, *, tokens_per_step: int, step: int) -> Evaluation:
    """The loss of the trainer's model on the whole of ``corpus``, batch by batch in its order. Collective over its
    ranks.

    The model is in evaluation mode meanwhile, and no gradient is kept. Raises: Error if the loss is not finite.
    """
    started = time.perf_counter()
    model, comm = trainer.model, trainer.comm
    total = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        for ids in _batches(corpus, tokens_per_step):
            lengths = [int(corpus.lengths[sequence]) for sequence in ids]
            reader = BatchReader(corpus, ids)
            total += trainer.evaluate(lengths, reader, items=reader.items)
    finally:
        model.train(training)
    comm.all_reduce(total)
    loss, tokens = total.tolist()
    if not tokens or not math.isfinite(loss):
        raise Error(f"the evaluation after step {step} has {int(tokens)} tokens with a label and a loss of {loss}")
    return Evaluation(step, loss / tokens, int(tokens), time.perf_counter() - started)


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

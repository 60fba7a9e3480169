"""The loss on text that is not trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
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
        by_source: the loss on each path of the text, where there are several.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    by_source: Mapping[str, float] = field(default_factory=dict)

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
    totals = torch.zeros(len(corpus.sources), 2, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        for source, ids in _batches(corpus, tokens_per_step):
            lengths = [int(corpus.lengths[sequence]) for sequence in ids]
            reader = BatchReader(corpus, ids)
            totals[source] += trainer.evaluate(lengths, reader, items=reader.items)
    finally:
        model.train(training)
    comm.all_reduce(totals)
    loss, tokens = totals.sum(0).tolist()
    if not tokens or not math.isfinite(loss):
        raise Error(f"the evaluation after step {step} has {int(tokens)} tokens with a label and a loss of {loss}")
    rows = dict(zip(corpus.source_names, totals.tolist(), strict=True))
    each = {name: own / count for name, (own, count) in rows.items() if count}
    seconds = time.perf_counter() - started
    return Evaluation(step, loss / tokens, int(tokens), seconds, each if len(each) > 1 else {})


def _batches(corpus: Corpus, tokens: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(source, sequences) of each batch."""
    sources = corpus.documents[corpus.sequences[:, 0], 0]
    for source in np.unique(sources).tolist():
        batch: list[int] = []
        room = tokens
        for sequence in np.flatnonzero(sources == source).tolist():
            if (length := int(corpus.lengths[sequence])) > room and batch:
                yield source, tuple(batch)
                batch, room = [], tokens
            batch.append(sequence)
            room -= length
        yield source, tuple(batch)

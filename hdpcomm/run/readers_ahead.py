"""Readers of steps: images of the next one are decoded while the present one runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, cast

from hdpcomm.data import BatchReader, BatchSampler, Corpus
from hdpcomm.train.step.items import items_on_devices

if TYPE_CHECKING:
    from hdpcomm.models.media import MediaEncoder
    from hdpcomm.train import Trainer

__all__ = ["ReadersAhead"]


class ReadersAhead(AbstractContextManager["ReadersAhead"]):
    """The reader of each step. Where the corpus has images, a thread decodes those of the next step that this rank will
    encode; which these are follows from the batch alone. Local.

    Args:
        steps: of the run.
    """

    def __init__(self, corpus: Corpus, batches: BatchSampler, steps: int) -> None:
        self._corpus, self._batches, self._steps = corpus, batches, steps
        self._readers: dict[int, BatchReader] = {}
        self._closed = False
        self._pool = ThreadPoolExecutor(1, "hdpcomm-images") if corpus.num_images else None

    def take(self, step: int, trainer: Trainer) -> BatchReader:
        """The reader of a step, which begins now."""
        wanted = (step, step + 1) if self._pool is not None and step + 1 < self._steps else (step,)
        known, self._readers = self._readers, {}
        for each in wanted:
            self._readers[each] = known.get(each) or BatchReader(self._corpus, self._batches.batch(each).ids)
        if len(wanted) > 1 and step + 1 not in known:  # else another policy's step has asked
            assert self._pool is not None
            self._pool.submit(self._decode, self._readers[step + 1], trainer)
        return self._readers[step]

    def _decode(self, reader: BatchReader, trainer: Trainer) -> None:
        ranks = trainer.mesh.positions.flatten().tolist()
        lengths = [int(self._corpus.lengths[sequence]) for sequence in reader.ids]
        with suppress(Exception):  # the step itself meets what is wrong, and says so
            encoder = cast("MediaEncoder", trainer.model.media)
            placed = items_on_devices(reader.items, lengths, encoder, trainer.planner, trainer.mesh)
            for item in placed.of_device(ranks.index(trainer.mesh.comm.rank)):
                if self._closed:
                    return
                reader.media(int(placed.sequence[item]))["pixel_values"].of_image(int(placed.number[item]))

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # waits for one image at most

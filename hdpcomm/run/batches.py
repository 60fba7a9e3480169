"""The global batches of a run: of a corpus with an index, or of documents that become tokens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdpcomm.data import BatchReader, BatchSampler, Corpus, DocumentStream, LoaderService
from hdpcomm.errors import InvalidUsage
from hdpcomm.run.config import RunConfig
from hdpcomm.train.losses.shards import FetchParts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Batches", "LoadedBatches", "Loading", "batch_sampler"]


@dataclass(frozen=True, slots=True)
class Loading:
    """How the documents of a :class:`hdpcomm.data.DocumentStream` become tokens while a run trains; see
    :class:`hdpcomm.data.LoaderService`.

    Attributes:
        loaders: threads of each rank.
        prefetch: steps that are made ready ahead.
        folder: that the threads of all ranks share.
    """

    loaders: int = 1
    prefetch: int = 2
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise InvalidUsage(f"prefetch is {self.prefetch}; a run makes at least 1 step ready ahead, to plan it")


class Batches:
    """Data of a run, step by step: batches of a corpus, whose lengths are known and whose tokens are read when they are
    needed.

    Attributes:
        loader: of :class:`LoadedBatches`.
    """

    loader: LoaderService | None = None

    def __init__(self, corpus: Corpus, config: RunConfig, *, first_step: int) -> None:
        self._corpus, self._config, self._first = corpus, config, first_step
        self._sampler = batch_sampler(corpus, config)

    def lengths(self) -> Iterator[Sequence[int]]:
        """Lengths of each step's sequences, for the thread of a policy's plans."""
        sampler = batch_sampler(self._corpus, self._config)  # of its own, since a thread takes from it
        return (sampler.batch(step).lengths for step in range(self._first, self._config.steps))

    def fetch(self, step: int) -> FetchParts:
        """Reader of the sequences of a step, for the trainer."""
        return BatchReader(self._corpus, self._sampler.batch(step).ids)

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        """Where sequences of a step come from, by their numbers in it; without numbers all of them."""
        ids = self._sampler.batch(step).ids
        return [self._corpus.place_of(int(ids[number])) for number in sequences or range(len(ids))]


class LoadedBatches(Batches):
    """Batches of a stream of documents, by a loader service. Collective over ``comm``.

    Args:
        state: of the checkpoint from which the run goes on.
    """

    def __init__(
        self,
        comm: Communicator,
        stream: DocumentStream,
        config: RunConfig,
        loading: Loading,
        *,
        first_step: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._config, self._first = config, first_step
        self.loader: LoaderService = LoaderService(
            stream,
            tokens=config.tokens_per_step,
            seed=config.seed,
            loaders=loading.loaders,
            prefetch=loading.prefetch,
            comm=comm,
            state=state,
            folder=loading.folder,
        )

    def lengths(self) -> Iterator[Sequence[int]]:
        return (self.loader.batch(step).lengths for step in range(self._first, self._config.steps))

    def fetch(self, step: int) -> FetchParts:
        return self.loader.reader(step)

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        return [f"sequence {number} of the loader's step {step}" for number in sequences]


def batch_sampler(corpus: Corpus, config: RunConfig) -> BatchSampler:
    """The batches of a run on a corpus."""
    return corpus.sampler(tokens=config.tokens_per_step, seed=config.seed)

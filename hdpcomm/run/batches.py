"""The global batches of a run: of a corpus with an index, or of documents that become tokens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hdpcomm.data import BatchReader, BatchSampler, Corpus, DocumentStream, LoaderService
from hdpcomm.errors import InvalidUsage
from hdpcomm.run.config import RunConfig
from hdpcomm.train.shards import FetchParts

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Batches", "IndexedBatches", "LoadedBatches", "Loading", "batch_sampler"]


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


class Batches(Protocol):
    """Data of a run, step by step."""

    def lengths(self) -> Iterator[Sequence[int]]:
        """Lengths of each step's sequences, for the thread of a policy's plans."""

    def fetch(self, step: int) -> FetchParts:
        """Reader of the sequences of a step, for the trainer."""

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        """Where sequences of a step come from, by their numbers in it; without numbers all of them."""

    def stalled_s(self, step: int, since: float, until: float) -> float | None:
        """Seconds of that span of ``time.perf_counter()``, in which the step waited for its plan, that were waiting for
        tokens; ``None`` where there is nothing to wait for."""

    def done(self, steps: int) -> None:
        """So many steps have been trained by all policies."""

    def state(self, steps: int) -> dict[str, Any] | None:
        """State of the data for a checkpoint after so many steps."""

    def stop(self) -> None:
        """Ends what waits in other threads."""

    def close(self) -> None:
        """Ends all threads and processes."""


class IndexedBatches:
    """Batches of a corpus: lengths are known, tokens are read when they are needed."""

    def __init__(self, corpus: Corpus, config: RunConfig, *, first_step: int) -> None:
        self._corpus, self._config, self._first = corpus, config, first_step
        self._sampler = batch_sampler(corpus, config)

    def lengths(self) -> Iterator[Sequence[int]]:
        sampler = batch_sampler(self._corpus, self._config)  # of its own, since a thread takes from it
        return (sampler.batch(step).lengths for step in range(self._first, self._config.steps))

    def fetch(self, step: int) -> BatchReader:
        return BatchReader(self._corpus, self._sampler.batch(step).ids)

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        ids = self._sampler.batch(step).ids
        return [self._corpus.place_of(int(ids[number])) for number in sequences or range(len(ids))]

    def stalled_s(self, step: int, since: float, until: float) -> None:
        del step, since, until

    def done(self, steps: int) -> None:
        del steps

    def state(self, steps: int) -> None:
        del steps

    def stop(self) -> None:
        """There is nothing."""

    def close(self) -> None:
        """There is nothing."""


class LoadedBatches:
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
        self._loader = LoaderService(
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
        return (self._loader.batch(step).lengths for step in range(self._first, self._config.steps))

    def fetch(self, step: int) -> FetchParts:
        return self._loader.reader(step)

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        return [f"sequence {number} of the loader's step {step}" for number in sequences]

    def stalled_s(self, step: int, since: float, until: float) -> float:
        return self._loader.waited(step, since, until)

    def done(self, steps: int) -> None:
        self._loader.done(steps)

    def state(self, steps: int) -> dict[str, Any]:
        return self._loader.state(steps)

    def stop(self) -> None:
        self._loader.stop()

    def close(self) -> None:
        self._loader.close()


def batch_sampler(corpus: Corpus, config: RunConfig) -> BatchSampler:
    """The batches of a run on a corpus."""
    return corpus.sampler(tokens=config.tokens_per_step, seed=config.seed)

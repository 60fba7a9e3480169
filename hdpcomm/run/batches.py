"""The global batches of a run: of a corpus with an index, or of documents that become tokens meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hdpcomm.data import BatchReader, BatchSampler, Corpus, DocumentStream, LoaderService
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import StepPlan
from hdpcomm.run.config import RunConfig
from hdpcomm.train.shards import FetchParts, parts_of_rank

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["Batches", "IndexedBatches", "LoadedBatches", "Loading", "LoadingCosts", "batch_sampler"]


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


@dataclass(frozen=True, slots=True)
class LoadingCosts:
    """Costs of loading on this rank in a step.

    Attributes:
        stall_s: seconds in which the step waited for lengths or tokens.
        nbytes: that came to this rank.
        ready: steps that are ready and have not begun.
    """

    stall_s: float
    nbytes: int
    ready: int


class Batches(Protocol):
    """Data of a run, step by step."""

    def lengths(self) -> Iterator[Sequence[int]]:
        """Lengths of each step's sequences, for the thread of a policy's plans."""

    def on_plan(self, policy: str) -> Callable[[StepPlan], None] | None:
        """Told each plan as soon as it is made, in the order of the steps."""

    def fetch(self, step: int, policy: str) -> FetchParts:
        """Reader of the sequences of a step, for the trainer."""

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        """Where sequences of a step come from, by their numbers in it; without numbers all of them."""

    def costs(self, step: int, since: float, until: float) -> LoadingCosts | None:
        """Loading costs of the policy's step, which waited for its plan in that span of ``time.perf_counter()``."""

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

    def on_plan(self, policy: str) -> None:
        del policy

    def fetch(self, step: int, policy: str) -> BatchReader:
        del policy
        return BatchReader(self._corpus, self._sampler.batch(step).ids)

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        ids = self._sampler.batch(step).ids
        return [self._corpus.place_of(int(ids[number])) for number in sequences or range(len(ids))]

    def costs(self, step: int, since: float, until: float) -> None:
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
        plan_rank: this rank's number in plans; ``None``: it needs no tokens, between two stages of a pipeline.
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
        plan_rank: int | None,
    ) -> None:
        self._config, self._first, self._plan_rank = config, first_step, plan_rank
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

    def on_plan(self, policy: str) -> Callable[[StepPlan], None] | None:
        rank = self._plan_rank
        if rank is None:
            return None
        steps = itertools.count(self._first)
        return lambda plan: self._loader.prefetch(next(steps), parts_of_rank(plan, rank), policy)

    def fetch(self, step: int, policy: str) -> FetchParts:
        return self._loader.reader(step, policy)

    def names(self, step: int, sequences: Sequence[int]) -> list[str]:
        return [f"sequence {number} of the loader's step {step}" for number in sequences]

    def costs(self, step: int, since: float, until: float) -> LoadingCosts:
        stats = self._loader.take_stats()
        stall_s = stats.wait_s + self._loader.waited(step, since, until)
        return LoadingCosts(stall_s, stats.bytes_read, stats.ready)

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

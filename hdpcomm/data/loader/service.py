"""The loader service as one rank sees it: batches whose lengths are known, and this rank's parts of their tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hdpcomm.arguments import check_number, check_type, check_whole
from hdpcomm.data.build import cache_folder
from hdpcomm.data.loader.blocks import Blocks
from hdpcomm.data.loader.order import START, BlockPlace, LoadedBatch, StreamSampler
from hdpcomm.data.loader.stream import DocumentStream
from hdpcomm.errors import Aborted, CommTimeout, InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["LoaderService", "StepReader", "check_budget"]

DEADLINE_S = 300.0


class LoaderService:
    """Reads and tokenises documents while the run trains: threads make the tokens of blocks of documents, a sampler
    cuts them into batches as soon as the lengths are known, and each rank reads its parts of the sequences only.

    Every rank makes one with equal arguments (collective over ``comm``); after that its methods are local. A batch
    depends on the documents, the seed and the sampler's state alone, not on the number of threads. Use it
    as a context manager, or call :meth:`close`. Source: ByteScale (arXiv 2502.21231) section 7, remote dataloader.

    Args:
        stream: from :func:`open_stream`.
        tokens: the budget of a batch, at least ``stream.context``.
        seed: of the shuffle.
        loaders: threads of each rank.
        prefetch: steps that are made ready before they are asked for.
        comm: the ranks that train together; ``None``: this process alone.
        state: of :meth:`state`, to go on there.
        folder: of files that the ranks share; default: the cache of :func:`hdpcomm.data.open_corpus`.
        deadline_s: longest wait for anything.

    Raises:
        InvalidUsage: a sequence may be longer than ``tokens``; ranks that do not share ``folder``.

    Examples:
        >>> stream = open_stream([__file__], context=4096)
        >>> with LoaderService(stream, tokens=4096) as loader:
        ...     batch = loader.batch(0)
        ...     tokens, labels = loader.reader(0)(0)
        >>> len(tokens) == batch.lengths[0]
        True
    """

    def __init__(
        self,
        stream: DocumentStream,
        *,
        tokens: int,
        seed: int = 0,
        loaders: int = 1,
        prefetch: int = 2,
        comm: Communicator | None = None,
        state: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        check_type("LoaderService", "stream", stream, DocumentStream)
        check_whole("LoaderService", "tokens", tokens, least=1)
        check_whole("LoaderService", "seed", seed, least=0)
        check_whole("LoaderService", "prefetch", prefetch, least=0)
        check_whole("LoaderService", "loaders", loaders, least=1)
        check_budget(stream, tokens)
        self._deadline_s = check_number("LoaderService", "deadline_s", deadline_s, above=0)
        self._rank = 0 if comm is None else comm.rank
        self._prefetch = prefetch
        self._start = _checked_state(START if state is None else state)
        self._done = self._asked = int(self._start["step"])
        self._states: dict[int, Mapping[str, Any]] = {self._done: self._start}
        self._ready: dict[int, LoadedBatch] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._spans: dict[int, tuple[float, float]] = {}
        self._blocks = Blocks(
            stream, threads=loaders, folder=folder or cache_folder(), comm=comm, deadline_s=self._deadline_s
        )
        self._sampler = StreamSampler(
            len(stream.blocks),
            self._lengths,
            self._blocks.want,
            tokens=tokens,
            seed=seed,
            shuffled=stream.shuffled,
            state=self._start,
        )
        self._live: set[int] = set()
        self._thread = threading.Thread(target=self._work, name="hdpcomm-loader-sampler", daemon=True)
        self._thread.start()

    def batch(self, step: int) -> LoadedBatch:
        """The sequences of a step, with their lengths; waits for them. Steps are asked for in any order, but not those
        before the last :meth:`done`.

        Raises:
            InvalidUsage: a record is wrong; says where.
            CommTimeout: not within ``deadline_s``.
            Aborted: the service was closed meanwhile.
        """
        begun = time.perf_counter()
        with self._changed:
            if step < self._done:
                raise InvalidUsage(f"step {step} was asked for, and {self._done} steps are done; ask for a later one")
            self._asked = max(self._asked, step + 1)
            self._changed.notify_all()
            ready = self._changed.wait_for(
                lambda: step in self._ready or self._failure is not None or self._closed, self._deadline_s
            )
            if step in self._ready:
                self._spans.setdefault(step, (begun, time.perf_counter()))
                return self._ready[step]
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise Aborted("the loader was closed while it waited for a batch")
            assert not ready
        raise CommTimeout(
            f"rank {self._rank}: step {step} was not ready within {self._deadline_s:g} s: reading or the tokenizer is "
            "stuck or too slow; give more --loaders, or build the data before (hdpcomm data build)"
        )

    def reader(self, step: int) -> StepReader:
        """``fetch`` for :meth:`hdpcomm.train.Trainer.step`."""
        return StepReader(self._blocks, self.batch(step))

    def done(self, steps: int) -> None:
        """So many steps have been trained: nothing of those before will be asked for. All ranks have come as far as the
        end of the step before, so that none reads them."""
        with self._changed:
            self._done = max(self._done, steps)
            self._asked = max(self._asked, self._done)
            for ready in [step for step in self._ready if step < self._done - 1]:
                del self._ready[ready]
            for before in [step for step in self._states if step < self._done]:
                del self._states[before]
            for step in [step for step in self._spans if step < self._done]:
                del self._spans[step]
            batches = list(self._ready.values())
            self._changed.notify_all()
        self._blocks.forget(self._live | {sequence.block for batch in batches for sequence in batch.sequences})

    def state(self, steps: int) -> dict[str, Any]:
        """The sampler's state after so many steps, at least as many as :meth:`done` was told: plain numbers, for JSON.
        Equal on every rank."""
        if steps > self._done:
            self.batch(steps - 1)
        with self._changed:
            if steps < self._done or steps not in self._states:
                raise InvalidUsage(f"the state after {steps} steps was asked for, and {self._done} steps are done")
            return dict(self._states[steps])

    def waited(self, step: int, since: float, until: float) -> float:
        """Seconds of that span of ``time.perf_counter()`` in which somebody waited for the batch of ``step``."""
        begun, ended = self._spans.get(step, (0.0, 0.0))
        return max(0.0, min(until, ended) - max(since, begun))

    def stop(self) -> None:
        """Ends what waits, with :class:`hdpcomm.errors.Aborted`. Does not wait; :meth:`close` does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._blocks.stop()

    def close(self) -> None:
        """Ends all threads, after the document that each is reading, and, with the last rank, the files. Local: no
        other rank is waited for; those that still read may get an error. A thread that does not come back from
        its document within 10 s is left behind with a warning; it does not keep the process from ending."""
        self.stop()
        self._thread.join()
        self._blocks.close()

    def __enter__(self) -> LoaderService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        """Keeps batches ready; in a thread of its own."""
        step = self._done
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or step < max(self._asked, self._done + self._prefetch)  # noqa: B023
                    )
                    if self._closed:
                        return
                batch = self._sampler.next()
                with self._changed:
                    self._live = self._sampler.live()
                    self._ready[batch.step] = batch
                    self._states[batch.step + 1] = batch.state
                    self._changed.notify_all()
                step = batch.step + 1
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _lengths(self, place: BlockPlace) -> npt.NDArray[np.int64]:
        return self._blocks.corpus(place).lengths


@dataclass(frozen=True, slots=True)
class StepReader:
    """Gives the sequences of a step, whole or in parts, as :class:`hdpcomm.train.losses.shards.FetchParts`."""

    blocks: Blocks
    batch: LoadedBatch

    def __call__(self, place: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of the sequence at ``place`` of the batch."""
        return self.part(place, 0, self.batch.sequences[place].length)

    def part(self, place: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of a part of it; reads no more than that."""
        sequence = self.batch.sequences[place]
        return self.blocks.corpus(sequence.at).part(sequence.number, start, stop)


def check_budget(stream: DocumentStream, tokens: int) -> None:
    """Raises: InvalidUsage if a sequence may be longer than the budget of a batch."""
    if tokens < stream.context:
        raise InvalidUsage(
            f"a step of {tokens:,} tokens cannot hold a sequence of {stream.context:,}; raise --tokens-per-step to at "
            f"least {stream.context:,} or lower --context to {tokens:,}"
        )


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        whole = {name: int(state[name]) for name in ("step", "epoch", "window", "taken", "seen")}
        return {**whole, "waiting": [[int(number) for number in row] for row in state["waiting"]]}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidUsage(f"this is no state of a loader ({error!r}); give what state() returned") from None

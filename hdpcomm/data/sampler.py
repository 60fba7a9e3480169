"""Global batches by a budget of tokens, computed from lengths and a seed alone, so all ranks get the same."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdpcomm.arguments import check_number, check_whole
from hdpcomm.errors import InvalidUsage

__all__ = ["BatchSampler", "GlobalBatch", "checked_weights"]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The sequences of one training step over all ranks.

    Attributes:
        step: number of the step, from 0.
        epoch: number of complete passes through the corpus before this step; of a mixture, through the source that has
            been passed most often.
        ids: numbers of the sequences in the corpus.
        lengths: tokens of the sequences, in the same order.
    """

    step: int
    epoch: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(self.lengths)


_NONE = GlobalBatch(step=-1, epoch=0, ids=(), lengths=())


class BatchSampler:
    """Cuts a seeded shuffle of the corpus into batches that hold at most ``tokens`` tokens each.

    A batch takes sequences in the order of the shuffle. A sequence that does not fit any more is kept for the next
    batch, until ``LOOKAHEAD`` are kept, so that batches are nearly full. Every epoch is shuffled anew
    and contains each sequence exactly once; its last batch may be smaller. Two samplers with equal arguments give equal
    batches, so ranks need not communicate. Local.

    With ``weights`` it is a mixture without end: each source is shuffled by itself, epoch after epoch, and the next
    sequence comes from the source that is furthest behind its share of the tokens. Where other weights begin, shares
    are counted anew, and what was kept for later batches goes back in front of its source.

    Args:
        lengths: ``[sequences]`` tokens of each sequence of the corpus.
        tokens: the budget of a batch, at least the longest length.
        ramp: (tokens, steps): the budget rises from so many tokens (at least the longest length) to ``tokens`` over the
            first steps.
        seed: seed of the shuffle.
        sources: ``[sequences]`` the source of each sequence, from 0; with ``weights`` only.
        weights: of the tokens of each source, which need not sum up to 1; or these by the first step that has them, 0
            among them, as ``{0: (0.7, 0.3), 1000: (0.5, 0.5)}``, in which a source may be 0 for a while.

    Raises:
        InvalidUsage: no sequences, a length below 1, a sequence that no batch can hold, a weight that is not above 0,
            or one of a source without sequences; steps without 0.

    Examples:
        >>> sampler = BatchSampler([3, 1, 2], tokens=3, seed=0)
        >>> sorted(sampler.batch(0).ids + sampler.batch(1).ids)
        [0, 1, 2]
    """

    LOOKAHEAD = 256

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.int64],
        *,
        tokens: int,
        seed: int = 0,
        ramp: tuple[int, int] | None = None,
        sources: npt.NDArray[np.int64] | None = None,
        weights: Sequence[float] | Mapping[int, Sequence[float]] = (),
    ) -> None:
        try:
            given = np.asarray(lengths)
        except ValueError as error:
            raise InvalidUsage(f"lengths is {reprlib.repr(lengths)}; a list of whole numbers was expected") from error
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise InvalidUsage(f"lengths is {lengths!r}, of type {given.dtype}; whole numbers of 64 bits were expected")
        self._lengths = given.astype(np.int64)
        if self._lengths.ndim != 1 or not len(self._lengths):
            raise InvalidUsage(
                f"lengths has the shape {self._lengths.shape}; a list of at least one length was expected"
            )
        if int(self._lengths.min()) < 1:
            raise InvalidUsage(
                f"a sequence of {int(self._lengths.min())} tokens was given; every sequence needs at least 1"
            )
        check_whole("BatchSampler", "seed", seed, least=0)
        check_whole("BatchSampler", "tokens", tokens)
        longest = int(self._lengths.max())
        if tokens < longest:
            raise InvalidUsage(
                f"a step of {tokens:,} tokens cannot hold the longest sequence of {longest:,}; raise "
                f"--tokens-per-step to at least {longest:,} or lower --context to {tokens:,}"
            )
        first, self._rise = (tokens, 1) if ramp is None else ramp
        self._tokens, self._least = tokens, min(tokens, max(first, longest))
        self._seed = seed
        phases = checked_weights("BatchSampler", weights)
        self._shares = {step: tuple(each / sum(values) for each in values) for step, values in phases.items()}
        self._sources = np.asarray(sources if sources is not None else [])
        self._of_source: list[npt.NDArray[np.int64]] = []
        if self._shares:
            if self._sources.shape != self._lengths.shape:
                wrong = self._sources.shape
                raise InvalidUsage(f"sources has the shape {wrong}; the source of each sequence was expected")
            self._of_source = [np.flatnonzero(self._sources == source) for source in range(len(self._shares[0]))]
            if empty := [source for source, ids in enumerate(self._of_source) if not len(ids)]:
                raise InvalidUsage(f"source {empty[0]} of the mixture has no sequences; leave it out")
        self._latest = _NONE
        self._rewind()

    def batch(self, step: int) -> GlobalBatch:
        """The batch of a step. Fast for rising steps; for an earlier step, all batches from step 0 are made again."""
        check_whole("batch()", "step", step, least=0)
        if step < self._latest.step:
            self._rewind()
        while self._latest.step < step:
            self._latest = self._next()
        return self._latest

    def __iter__(self) -> Iterator[GlobalBatch]:
        """All batches from step 0, without end."""
        step = 0
        while True:
            yield self.batch(step)
            step += 1

    def _rewind(self) -> None:
        self._start_epoch(0)
        self._latest = _NONE
        self._latest = self._next()

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._shares:
            self._coming_of = [self._shuffled(source) for source in range(len(self._of_source))]
            self._coming = self._mixture(self._shares[0])
        else:
            order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(len(self._lengths))
            self._coming = iter(order.tolist())
        self._window = list(itertools.islice(self._coming, self.LOOKAHEAD))

    def _mixture(self, shares: Sequence[float]) -> Iterator[int]:
        """The sequences of all sources, without end, so that each has its share of the tokens at any time."""
        drawn = {source: 0.0 for source, share in enumerate(shares) if share}
        while True:
            source = min(drawn, key=lambda each: (drawn[each], each))
            sequence = next(self._coming_of[source])
            drawn[source] += int(self._lengths[sequence]) / shares[source]
            yield sequence

    def _change(self, shares: Sequence[float]) -> None:
        for source, coming in enumerate(self._coming_of):
            kept = [sequence for sequence in self._window if self._sources[sequence] == source]
            self._coming_of[source] = itertools.chain(kept, coming)
        self._coming = self._mixture(shares)
        self._window = list(itertools.islice(self._coming, self.LOOKAHEAD))

    def _shuffled(self, source: int) -> Iterator[int]:
        for epoch in itertools.count():
            self._epoch = max(self._epoch, epoch)
            order = np.random.Generator(np.random.PCG64([self._seed, epoch, source + 1]))
            yield from order.permutation(self._of_source[source]).tolist()

    def _next(self) -> GlobalBatch:
        if self._latest.step + 1 in self._shares and self._latest.step >= 0:
            self._change(self._shares[self._latest.step + 1])
        if not self._window:
            self._start_epoch(self._epoch + 1)
        share = min(1.0, (self._latest.step + 1) / self._rise)
        room, taken, waiting = self._least + int(share * (self._tokens - self._least)), [], []
        coming = itertools.chain(self._window, self._coming)
        for sequence in coming:
            length = int(self._lengths[sequence])
            if length <= room:
                room -= length
                taken.append(sequence)
            else:
                waiting.append(sequence)
            if len(waiting) == self.LOOKAHEAD or not room:
                break
        self._window = waiting + list(itertools.islice(coming, self.LOOKAHEAD - len(waiting)))
        lengths = tuple(int(self._lengths[sequence]) for sequence in taken)
        return GlobalBatch(step=self._latest.step + 1, epoch=self._epoch, ids=tuple(taken), lengths=lengths)


def checked_weights(op: str, weights: Sequence[float] | Mapping[int, Sequence[float]]) -> dict[int, tuple[float, ...]]:
    """Weights of each source by the first step that has them; empty: no mixture. Local. Raises: InvalidUsage."""
    phases = weights if isinstance(weights, Mapping) else {0: weights} if len(weights) else {}
    for step, values in phases.items():
        check_whole(op, "a step of weights", step, least=0)
        if np.ndim(values) != 1 or np.shape(values) != np.shape(phases.get(0, ())) or not np.any(values):
            raise InvalidUsage(
                f"the weights from step {step} on are {values}; give one for each source, not all 0, and those from "
                "step 0 on, too"
            )
        for weight in values:
            check_number(op, "weights", weight, **({"least": 0} if len(phases) > 1 else {"above": 0}))
    if never := [source for source, values in enumerate(zip(*phases.values(), strict=True)) if not any(values)]:
        raise InvalidUsage(f"source {never[0]} of the mixture has the weight 0 at all steps; leave it out")
    return {step: tuple(map(float, values)) for step, values in phases.items()}

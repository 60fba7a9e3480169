"""The order of the sequences of a :class:`DocumentStream`, cut into batches as their lengths become known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdpcomm.errors import InvalidUsage

__all__ = ["START", "BlockPlace", "LengthsOf", "LoadedBatch", "SequencePlace", "StreamSampler", "Want"]

Lengths = npt.NDArray[np.int64]


class BlockPlace(NamedTuple):
    """A block, and its position in the shuffled order over all epochs; the position says which server makes it."""

    position: int
    block: int


class SequencePlace(NamedTuple):
    """A sequence: the one with this ``number`` among those of its block."""

    position: int
    block: int
    number: int
    length: int

    @property
    def at(self) -> BlockPlace:
        return BlockPlace(self.position, self.block)


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """The sequences of one training step over all ranks, with their lengths in tokens.

    Attributes:
        step, epoch: as those of :class:`hdpcomm.data.GlobalBatch`.
        state: of the sampler after this batch, see :meth:`StreamSampler.state`.
    """

    step: int
    epoch: int
    sequences: tuple[SequencePlace, ...]
    state: Mapping[str, Any]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sequence.length for sequence in self.sequences)


LengthsOf = Callable[[BlockPlace], Lengths]
"""Tokens of each sequence of a block; waits until they are known."""

Want = Callable[[Sequence[BlockPlace]], None]
"""Told which blocks are needed next."""


START: Mapping[str, Any] = {"step": 0, "epoch": 0, "window": 0, "taken": 0, "seen": 0, "waiting": ()}
"""The state of a sampler that has made no batch."""


class StreamSampler:
    """Cuts the stream into batches that hold at most ``tokens`` tokens each.

    In every epoch the blocks are shuffled, and the sequences of ``shuffled`` blocks in a row are shuffled together. A
    sequence that does not fit any more is kept for the next batch, until ``LOOKAHEAD`` are kept. Every epoch contains
    each sequence once. Two samplers with equal arguments, or one that goes on from the other's state, give equal
    batches, whoever makes the tokens, and whenever.

    Args:
        blocks: how many there are.
        tokens: the budget of a batch; no sequence is longer.
        want: called before ``lengths_of`` is asked for blocks.
        state: what :meth:`state` gave; ``None``: from step 0.
    """

    LOOKAHEAD = 256

    def __init__(
        self,
        blocks: int,
        lengths_of: LengthsOf,
        want: Want,
        *,
        tokens: int,
        seed: int,
        shuffled: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._blocks, self._lengths_of, self._want = blocks, lengths_of, want
        self._tokens, self._seed, self._shuffled = tokens, seed, shuffled
        self._windows = -(-blocks // shuffled)
        start = START if state is None else state
        self._step, self._epoch, self._window = int(start["step"]), int(start["epoch"]), int(start["window"])
        self._taken, self._seen = int(start["taken"]), int(start["seen"])
        self._waiting = deque(SequencePlace(*map(int, row)) for row in start["waiting"])
        self._coming: list[SequencePlace] | None = None

    def state(self) -> dict[str, Any]:
        """Plain numbers, for JSON: the next step, the place in the stream, and the sequences that are kept."""
        return {
            "step": self._step,
            "epoch": self._epoch,
            "window": self._window,
            "taken": self._taken,
            "seen": self._seen,
            "waiting": [list(sequence) for sequence in self._waiting],
        }

    def next(self) -> LoadedBatch:
        """The batch of the next step. Raises: InvalidUsage if a whole epoch has no sequence."""
        taken: list[SequencePlace] = []
        while not taken:
            taken = self._fill()
            if not taken:
                if not self._seen:
                    raise InvalidUsage(
                        "the data has no document with a token to train on (every text is empty, or the conversations "
                        "have no answers); give files with text in them"
                    )
                self._epoch, self._window, self._taken, self._seen = self._epoch + 1, 0, 0, 0
        step, self._step = self._step, self._step + 1
        return LoadedBatch(step, self._epoch, tuple(taken), self.state())

    def live(self) -> set[int]:
        """Blocks of sequences that are kept, or still to come in this window and the next."""
        coming = self._places(self._epoch, self._window) + self._places(*self._after())
        return {sequence.block for sequence in self._waiting} | {place.block for place in coming}

    def _fill(self) -> list[SequencePlace]:
        room, taken = self._tokens, []
        waiting = self._waiting
        kept: list[SequencePlace] = []
        while room and len(kept) < self.LOOKAHEAD:
            sequence = waiting.popleft() if waiting else self._pull()
            if sequence is None:
                break
            if sequence.length <= room:
                room -= sequence.length
                taken.append(sequence)
            else:
                kept.append(sequence)
        waiting.extendleft(reversed(kept))
        return taken

    def _pull(self) -> SequencePlace | None:
        """The next one of the stream; ``None`` at the end of the epoch."""
        while self._window < self._windows:
            if self._coming is None:
                self._coming = self._opened()
            if self._taken < len(self._coming):
                self._taken += 1
                return self._coming[self._taken - 1]
            self._window, self._taken, self._coming = self._window + 1, 0, None
        return None

    def _opened(self) -> list[SequencePlace]:
        """The sequences of the current window, shuffled; waits for their lengths."""
        places = self._places(self._epoch, self._window)
        self._want(places + self._places(*self._after()))
        found = [
            SequencePlace(*place, number, length)
            for place in places
            for number, length in enumerate(self._lengths_of(place).tolist())
        ]
        if not self._taken:
            self._seen += len(found)
        generator = np.random.Generator(np.random.PCG64([self._seed, self._epoch, self._window, 1]))
        return [found[i] for i in generator.permutation(len(found)).tolist()]

    def _after(self) -> tuple[int, int]:
        """(epoch, window) after the current one."""
        return (self._epoch, self._window + 1) if self._window + 1 < self._windows else (self._epoch + 1, 0)

    def _places(self, epoch: int, window: int) -> list[BlockPlace]:
        order = _order(self._seed, epoch, self._blocks)
        first = window * self._shuffled
        return [
            BlockPlace(epoch * self._blocks + place, int(order[place]))
            for place in range(first, min(self._blocks, first + self._shuffled))
        ]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, blocks: int) -> Lengths:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(blocks)

"""The unit that a group of ranks runs together: :class:`MicroBatch` and its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MicroBatch", "PlannedSlice", "SequenceFragment", "SequenceInfo", "format_ranks"]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as ranges: ``0-3,7``."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = previous = ordered[0]
    for rank in [*ordered[1:], -2]:
        if rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence of the step: its position in the planned lengths, and its tokens.

    Positions after the last one are those of the plan's fragments.
    """

    id: int
    length: int


@dataclass(frozen=True, slots=True)
class SequenceFragment:
    """A slice of a sequence or tree of the step: tokens ``[start, stop)``, alone in a micro-batch.

    Those of a tree are in depth-first order.

    The slices of a sequence follow each other on the same ranks, in ring order, with no other micro-batch between: a
    forward pass sees what those before it have kept, and backward passes run from the last slice to the first.

    Attributes:
        sequence: the position of the sequence or tree in the planned lengths, or the id of the part of a tree.
    """

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """Which slice of a sequence a micro-batch is.

    Attributes:
        sequence: of its :class:`SequenceFragment`.
        number: 0 for its first slice.
        bounds: where the slices of the sequence begin, and its length.
        rows: of the plan's table, of all slices in order.
    """

    sequence: int
    number: int
    bounds: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def start(self) -> int:
        """Its first token."""
        return self.bounds[self.number]

    @property
    def stop(self) -> int:
        """The token after its last one."""
        return self.bounds[self.number + 1]

    @property
    def last(self) -> bool:
        """Whether no slice follows."""
        return self.number == len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that a group of ranks runs together, as one pack.

    Attributes:
        index: place in the global order of the step.
        ranks: global ranks in ring order; a rank's position in this tuple is its position in the zigzag.
        sequences: the sequences of the pack, in order.
        offload_ratio: share of the activations (of all layers but two) that goes to host memory, in [0, 1].
        predicted_s: predicted seconds of forward and backward pass.
    """

    index: int
    ranks: tuple[int, ...]
    sequences: tuple[SequenceInfo, ...]
    offload_ratio: float
    predicted_s: float

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def tokens_held(self) -> int:
        """The most tokens that one of the ranks holds."""
        return sum(-(-sequence.length // len(self.ranks)) for sequence in self.sequences)

    def describe(self, start_s: float, planned: PlannedSlice | None = None) -> str:
        """One line for people; ``start_s``: when the micro-batch starts; ``planned``: the slice that it is."""
        several = len(self.sequences) > 1
        what = f"{len(self.sequences)} sequences" if several else f"sequence {self.sequences[0].id}"
        if planned is not None:
            what = f"slice {planned.number + 1} of {len(planned.rows)} of sequence {planned.sequence}"
        offload = f", offload {self.offload_ratio:.2f}" if self.offload_ratio else ""
        return (
            f"#{self.index}: {what}, {self.tokens:,} tokens on {len(self.ranks)} ranks ({format_ranks(self.ranks)}), "
            f"{start_s:.6g} to {start_s + self.predicted_s:.6g} s{offload}"
        )

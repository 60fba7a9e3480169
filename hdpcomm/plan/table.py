"""The micro-batches of a plan as arrays: :class:`PlanTable`, a tenth of the memory and of the time of objects."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage

__all__ = ["COLUMNS", "MicroBatch", "PlanTable", "PlannedSlice", "SequenceFragment", "SequenceInfo", "format_ranks"]


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


COLUMNS: dict[str, type[np.generic]] = {
    "index": np.int64,
    "rank_bounds": np.int64,
    "ranks": np.int32,
    "sequence_bounds": np.int64,
    "ids": np.int64,
    "lengths": np.int64,
    "offload_ratio": np.float64,
    "predicted_s": np.float64,
}
"""The columns of a table, in order, and the type of each."""


def _sizes(bounds: Sequence[int]) -> Iterator[int]:
    return map(operator.sub, bounds[1:], bounds)


def _bounds(counts: Iterable[int]) -> NDArray[np.int64]:
    return np.array([0, *accumulate(counts)], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PlanTable:
    """Micro-batches as read-only arrays; row i is number i of them, by rising index.

    Attributes:
        index: int64 ``[micro_batches]``, places in the global order.
        rank_bounds: int64 ``[micro_batches + 1]``; the ranks of row i are ``ranks[rank_bounds[i]:rank_bounds[i + 1]]``.
        ranks: int32 ``[places]``, each group in ring order.
        sequence_bounds: int64 ``[micro_batches + 1]``, the same for ``ids`` and ``lengths``.
        ids: int64 ``[sequences]``.
        lengths: int64 ``[sequences]``, in tokens.
        offload_ratio: float64 ``[micro_batches]``.
        predicted_s: float64 ``[micro_batches]``.

    Raises:
        InvalidUsage: arrays of other types, or whose lengths and bounds do not belong together.
    """

    index: NDArray[np.int64]
    rank_bounds: NDArray[np.int64]
    ranks: NDArray[np.int32]
    sequence_bounds: NDArray[np.int64]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offload_ratio: NDArray[np.float64]
    predicted_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name, kind in COLUMNS.items():
            array = getattr(self, name)
            flat = isinstance(array, np.ndarray) and array.ndim == 1 and array.flags.c_contiguous
            if not flat or array.dtype != kind:
                raise InvalidUsage(
                    f"{name} of a plan's table is {array!r:.80}, expected a contiguous array of {kind.__name__}"
                )
            array.flags.writeable = False
        rows = len(self.index)
        if len(self.offload_ratio) != rows or len(self.predicted_s) != rows or len(self.ids) != len(self.lengths):
            sizes = ", ".join(f"{name} {len(array)}" for name, array in zip(COLUMNS, self.columns(), strict=True))
            raise InvalidUsage(f"the columns of a plan's table have lengths that do not belong together: {sizes}")
        for name, bounds, held in (
            ("rank_bounds", self.rank_bounds, self.ranks),
            ("sequence_bounds", self.sequence_bounds, self.ids),
        ):
            inside = len(bounds) == rows + 1 and bounds[0] == 0 and bounds[-1] == len(held)
            if not inside or (bounds[1:] < bounds[:-1]).any():
                raise InvalidUsage(
                    f"{name} of a plan's table do not rise from 0 to {len(held)} over {rows} micro-batches: the table "
                    "is damaged"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanTable, self.columns()

    def __len__(self) -> int:
        return len(self.index)

    def columns(self) -> tuple[NDArray[Any], ...]:
        """All arrays, in the order of :data:`COLUMNS`."""
        return tuple(getattr(self, each.name) for each in fields(self))

    @classmethod
    def of(cls, batches: Sequence[MicroBatch]) -> PlanTable:
        """The arrays of micro-batches.

        Raises:
            InvalidUsage: they hold something that is no number, or one that its array cannot hold.
        """

        def whole(values: Iterable[Any], kind: type[np.generic]) -> NDArray[Any]:
            return np.array(list(map(operator.index, values)), dtype=kind)

        try:
            return cls(
                index=whole((batch.index for batch in batches), np.int64),
                rank_bounds=_bounds(len(batch.ranks) for batch in batches),
                ranks=whole((rank for batch in batches for rank in batch.ranks), np.int32),
                sequence_bounds=_bounds(len(batch.sequences) for batch in batches),
                ids=whole((each.id for batch in batches for each in batch.sequences), np.int64),
                lengths=whole((each.length for batch in batches for each in batch.sequences), np.int64),
                offload_ratio=np.array([float(batch.offload_ratio) for batch in batches], dtype=np.float64),
                predicted_s=np.array([float(batch.predicted_s) for batch in batches], dtype=np.float64),
            )
        except (OverflowError, ValueError, TypeError, AttributeError) as error:
            raise InvalidUsage(
                f"the micro-batches of a plan hold what no plan does ({type(error).__name__}: {error}): expected whole "
                "numbers as index, ranks (below 2^31), ids and lengths, and numbers as offload ratio and seconds"
            ) from error

    def micro_batches(self, first: int = 0, last: int | None = None) -> tuple[MicroBatch, ...]:
        """Rows ``first`` to ``last - 1`` (default: all) as objects."""
        until = len(self) if last is None else last
        rank_bounds, sequence_bounds = (
            each[first : until + 1].tolist() for each in (self.rank_bounds, self.sequence_bounds)
        )
        ranks = iter(self.ranks[rank_bounds[0] : rank_bounds[-1]].tolist())
        own = slice(sequence_bounds[0], sequence_bounds[-1])
        sequences = map(SequenceInfo, self.ids[own].tolist(), self.lengths[own].tolist())
        numbers = (each[first:until].tolist() for each in (self.index, self.offload_ratio, self.predicted_s))
        return tuple(
            MicroBatch(index, tuple(islice(ranks, group)), tuple(islice(sequences, count)), offload_ratio, predicted_s)
            for index, offload_ratio, predicted_s, group, count in zip(
                *numbers, _sizes(rank_bounds), _sizes(sequence_bounds), strict=True
            )
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """The micro-batches as plain Python objects, those of a plan's JSON form."""
        return [
            {
                "index": batch.index,
                "ranks": list(batch.ranks),
                "sequences": [{"id": each.id, "length": each.length} for each in batch.sequences],
                "offload_ratio": batch.offload_ratio,
                "predicted_s": batch.predicted_s,
            }
            for batch in self.micro_batches()
        ]

    @classmethod
    def of_dicts(cls, items: Sequence[Any]) -> PlanTable:
        """Reads :meth:`to_dicts` back. Raises: what its parts raise that are none, and InvalidUsage."""
        return cls.of(
            [
                MicroBatch(
                    int(item["index"]),
                    tuple(map(int, item["ranks"])),
                    tuple(SequenceInfo(int(each["id"]), int(each["length"])) for each in item["sequences"]),
                    float(item["offload_ratio"]),
                    # Plans written before the field had its present name say "seconds".
                    float(item["predicted_s"] if "predicted_s" in item else item["seconds"]),
                )
                for item in items
            ]
        )

    def followed_by(self, other: PlanTable) -> PlanTable:
        """The rows of both, with rising indices."""
        mine, theirs = (dict(zip(COLUMNS, table.columns(), strict=True)) for table in (self, other))
        for name in ("rank_bounds", "sequence_bounds"):
            mine[name], theirs[name] = mine[name][:-1], theirs[name] + mine[name][-1]
        theirs["index"] = theirs["index"] + (int(mine["index"][-1]) + 1 if len(self) else 0)
        return PlanTable(**{name: np.concatenate([mine[name], theirs[name]]) for name in COLUMNS})

    def group_sizes(self) -> NDArray[np.int64]:
        """Ranks of each micro-batch."""
        return np.diff(self.rank_bounds)

    def rows_of_ranks(self) -> NDArray[np.int64]:
        """The row of each entry of ``ranks``."""
        return np.repeat(np.arange(len(self)), self.group_sizes())

    def rows_of_sequences(self) -> NDArray[np.int64]:
        """The row of each entry of ``ids``."""
        return np.repeat(np.arange(len(self)), np.diff(self.sequence_bounds))

    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each micro-batch."""
        return self._sums(self.lengths)

    def tokens_held(self) -> NDArray[np.int64]:
        """The most tokens that one rank of each micro-batch holds."""
        sizes = np.maximum(self.group_sizes(), 1)[self.rows_of_sequences()]
        return self._sums(-(-self.lengths // sizes))

    def _sums(self, of_sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_sequences)])
        return np.asarray(np.diff(sums[self.sequence_bounds]))

    def rows_by_rank(self, num_ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of all ranks, rank after rank and rising, and the bounds of each rank's.

        Raises:
            InvalidUsage: a rank that is not below ``num_ranks``.
        """
        wrong = (self.ranks < 0) | (self.ranks >= num_ranks)
        if wrong.any():
            place = int(wrong.argmax())
            raise InvalidUsage(
                f"micro-batch {self.index[self.rows_of_ranks()[place]]} has rank {self.ranks[place]}, expected 0 to "
                f"{num_ranks - 1}"
            )
        bounds = np.cumsum(np.concatenate([[0], np.bincount(self.ranks, minlength=num_ranks)]))
        return self.rows_of_ranks()[np.argsort(self.ranks, kind="stable")], bounds

    def timeline(self, num_ranks: int) -> list[float]:
        """Predicted start of each micro-batch: when the last of its ranks is free."""
        ready = [0.0] * num_ranks
        starts = []
        ranks, bounds = self.ranks.tolist(), self.rank_bounds.tolist()
        for row, predicted_s in enumerate(self.predicted_s.tolist()):
            group = ranks[bounds[row] : bounds[row + 1]]
            start = ready[group[0]] if len(group) == 1 else max(ready[rank] for rank in group)
            starts.append(start)
            for rank in group:
                ready[rank] = start + predicted_s
        return starts

    def most_peers(self) -> int:
        """The largest number of ranks that one rank sends to or receives from in its rings."""
        shared = self.group_sizes()[self.rows_of_ranks()] > 1
        following = np.arange(1, len(self.ranks) + 1)
        nonempty = self.group_sizes() > 0
        following[self.rank_bounds[1:][nonempty] - 1] = self.rank_bounds[:-1][nonempty]
        sender = self.ranks[shared].astype(np.int64)
        receiver = self.ranks[following[shared]].astype(np.int64)
        pairs = np.unique(np.concatenate([sender << 32 | receiver, receiver << 32 | sender]))
        return int(np.bincount(pairs >> 32).max()) if len(pairs) else 0

"""Atoms: the runs of keys that the same ranks need, by which messages and tiles are planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdpcomm.attention.tiles import Span

__all__ = ["Atoms", "atom_spans", "run_starts"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Runs of keys of one sequence and one owner that the same ranks need, ordered by (sequence, position)."""

    sequence: Int64
    """The segment of a tree that the keys are of; always 0 in a masked pack."""
    start: Int64
    stop: Int64
    owner: Int64
    row: Int64
    """First row on the owner."""
    needed: npt.NDArray[np.bool_]
    """[atoms, N]: whether the rank needs the atom; False for the owner."""

    @property
    def rows(self) -> Int64:
        return self.stop - self.start


def run_starts(*joints: npt.NDArray[np.bool_]) -> Int64:
    """Where runs begin; each of ``joints`` says, for items 1, 2, ..., whether they continue the item before."""
    return np.concatenate(([0], np.flatnonzero(~np.logical_and.reduce(joints)) + 1))


def atom_spans(atoms: Atoms, chosen: Int64, row: Int64) -> dict[int, list[Span]]:
    """For each sequence: runs of the atoms ``chosen`` that are consecutive both in the sequence and in the buffer."""
    if not len(chosen):
        return {}
    sequence, start, stop = atoms.sequence[chosen], atoms.start[chosen], atoms.stop[chosen]
    first = run_starts(
        sequence[1:] == sequence[:-1], start[1:] == stop[:-1], row[1:] == row[:-1] + stop[:-1] - start[:-1]
    )
    last = np.concatenate((first[1:], [len(chosen)])) - 1
    spans: dict[int, list[Span]] = {}
    for s, a, b, r in np.stack([sequence[first], start[first], stop[last], row[first]], axis=1).tolist():
        spans.setdefault(s, []).append(Span(a, b, r))
    return spans

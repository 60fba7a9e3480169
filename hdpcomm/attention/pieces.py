"""Layouts of packs that are not plain sequences: which rank holds which runs of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdpcomm.attention._kernels import Rows
from hdpcomm.attention.tiles import Span

if TYPE_CHECKING:
    from hdpcomm.attention.atoms import Atoms
    from hdpcomm.attention.tiles import Band, Tile

__all__ = ["Pieces", "local_rows"]

Int64 = npt.NDArray[np.int64]


def local_rows(owner: Int64, count: Int64, size: int) -> Int64:
    """First local row of each piece, if every rank holds its pieces one after the other."""
    row = np.zeros_like(count)
    for rank in range(size):
        mine = owner == rank
        row[mine] = np.cumsum(count[mine]) - count[mine]
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(ABC):
    """Pieces, none empty, by rising row of the pack; each lies in one segment, and a rank holds its pieces in order."""

    size: int
    """N, the number of ranks."""
    segment: Int64
    """[pieces], never falling."""
    start: Int64
    """[pieces]: position of the first token."""
    source: Int64
    """[pieces]: first row in the pack."""
    count: Int64
    """[pieces]: tokens."""
    owner: Int64
    """[pieces]: the rank."""
    row: Int64
    """[pieces]: first row on the owner."""

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return int(self.count.sum())

    def rows(self, rank: int) -> int:
        """Tokens that ``rank`` holds."""
        return int(self.count[self.owner == rank].sum())

    def segments(self, rank: int) -> Int64:
        """[pieces of the rank, 3]: (local row, row in the pack, rows)."""
        mine = self.owner == rank
        return np.stack([self.row[mine], self.source[mine], self.count[mine]], axis=1)

    def first_positions(self, rank: int) -> Int64:
        """[pieces of the rank]: position of the first token."""
        first: Int64 = self.start[self.owner == rank]
        return first

    def own_spans(self, rank: int) -> dict[int, list[Span]]:
        """By segment: the tokens of ``rank``, with their rows."""
        mine = self.owner == rank
        spans: dict[int, list[Span]] = {}
        for s, a, n, row in zip(
            *(x[mine].tolist() for x in (self.segment, self.start, self.count, self.row)), strict=True
        ):
            spans.setdefault(s, []).append(Span(a, a + n, row))
        return spans

    def grouped(self, size: int) -> Pieces:
        """The layout of groups of ``size`` neighbours; a group holds what its members hold."""
        owner = self.owner // size
        return replace(self, size=self.size // size, owner=owner, row=local_rows(owner, self.count, self.size // size))

    def member_rows(self, whole: Pieces, group: int, size: int) -> tuple[Rows, ...]:
        """For each member of ``group``: copies from its rows to the group's; ``whole``: :meth:`grouped`."""
        chosen = [self.owner == group * size + member for member in range(size)]
        return tuple(Rows(np.stack([whole.row[m], self.row[m], self.count[m]], axis=1)) for m in chosen)

    @property
    @abstractmethod
    def facts(self) -> tuple[str, str]:
        """Text that is the same on two ranks only if they mean the same pack, and a summary of it for messages."""

    @abstractmethod
    def atoms(self, band: Band) -> Atoms:
        """All runs of keys, with the ranks that need them."""

    @abstractmethod
    def tiles(self, rank: int, k_spans: dict[int, list[Span]], band: Band) -> list[Tile]:
        """Tiles of the queries of ``rank`` and the keys ``k_spans`` (by segment), each pair once."""

    @abstractmethod
    def pairs(self, band: Band) -> float:
        """(query, key) pairs that the mask allows, on all ranks."""

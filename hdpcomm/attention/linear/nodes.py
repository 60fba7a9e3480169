"""The runs of tokens of a pack that ranks compute, and which run follows which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hdpcomm.attention.layout import Layout
from hdpcomm.attention.tree_layout import TreeLayout

__all__ = ["Nodes", "TokenLayout", "nodes_of"]

Int64 = npt.NDArray[np.int64]
TokenLayout: TypeAlias = Layout | TreeLayout
"""Layout of the tokens that a linear layer takes: a pack of sequences, or a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """All runs of all ranks, each after the one that it follows."""

    owner: Int64
    row: Int64
    """First row on the owner."""
    count: Int64
    """Tokens; of plain sequences maybe 0."""
    parent: Int64
    """The run that it follows; -1: a sequence or a tree begins."""
    carrier: npt.NDArray[np.bool_]
    """Whether a run of another rank follows, at once or later."""
    level: Int64
    """Runs before it on the way from the root; of runs that carry nothing, only those that carry nothing either."""


def nodes_of(layout: TokenLayout) -> Nodes:
    """The runs of a pack; pure and local."""
    return _of_tree(layout) if isinstance(layout, TreeLayout) else _of_zigzag(layout)


def _of_zigzag(layout: Layout) -> Nodes:
    """The heads of all sequences on rank 0, 1, ..., both pieces on the last rank, and the tails on the way back.

    All sequences are alike, with empty runs where they are short, so that all their states go together."""
    size, last = layout.size, 2 * layout.size - 2
    place = np.arange(last + 1)
    owner = np.minimum(place, last - place)
    counts = np.diff(layout.bounds, axis=1)
    if size > 1:
        counts = np.concatenate(
            [counts[:, : size - 1], counts[:, size - 1 : size + 1].sum(1, keepdims=True), counts[:, size + 1 :]], axis=1
        )
    else:
        counts = counts.sum(axis=1, keepdims=True)
    rows = np.empty_like(counts)
    for rank in range(size):
        mine = counts[:, owner == rank]  # one run or two of each sequence
        ends = np.cumsum(mine.reshape(-1)).reshape(mine.shape)
        rows[:, owner == rank] = ends - mine
    sequences = len(counts)
    parent = np.arange(sequences)[:, None] * (last + 1) + place - 1
    parent[:, 0] = -1
    carrier = np.broadcast_to(place < last, counts.shape)
    level = np.broadcast_to(np.where(place < last, place, 0), counts.shape)
    return Nodes(
        np.broadcast_to(owner, counts.shape).reshape(-1), rows.reshape(-1), counts.reshape(-1), parent.reshape(-1),
        carrier.reshape(-1), level.reshape(-1),
    )  # fmt: skip


def _of_tree(layout: TreeLayout) -> Nodes:
    """The pieces of the tree; one that alone follows the piece before it, on the same rank, is one run with it."""
    pieces = np.arange(len(layout.segment))
    last_piece = np.searchsorted(layout.segment, np.arange(len(layout.tree)), side="right") - 1
    begins = np.append(True, layout.segment[1:] != layout.segment[:-1])[: len(pieces)]
    above = layout.tree.parents[layout.segment]
    before = np.where(begins, np.where(above >= 0, last_piece[above], -1), pieces - 1)
    followers = np.bincount(before[before >= 0], minlength=len(pieces))
    joined = (before == pieces - 1) & (pieces > 0)
    joined[1:] &= (layout.owner[1:] == layout.owner[:-1]) & (followers[:-1] == 1)
    first = np.flatnonzero(~joined)
    node = np.cumsum(~joined) - 1
    parent = np.where(before[first] >= 0, node[before[first]], -1)
    owner = layout.owner[first]
    count = np.bincount(node, weights=layout.count, minlength=len(first)).astype(np.int64)
    carrier, level = _ways(owner.tolist(), parent.tolist())
    return Nodes(
        owner, layout.row[first], count, parent, np.array(carrier, dtype=bool), np.array(level, dtype=np.int64)
    )


def _ways(owner: list[int], parent: list[int]) -> tuple[list[bool], list[int]]:
    """(carrier, level) of each run."""
    carrier, level = [False] * len(owner), [0] * len(owner)
    for node in range(len(owner) - 1, -1, -1):
        above = parent[node]
        if above >= 0 and (carrier[node] or owner[above] != owner[node]):
            carrier[above] = True
    for node, above in enumerate(parent):
        if above >= 0 and carrier[node] == carrier[above]:
            level[node] = level[above] + 1
    return carrier, level

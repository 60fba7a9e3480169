"""The runs of tokens of a pack that ranks compute, and which run follows which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hdpcomm.attention.layout import Layout
from hdpcomm.attention.tree_layout import TreeLayout, is_sliced, past_tokens

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
    given: int = 0
    """So many first ones have no tokens, each for a state that was kept of a slice before; alone in their level."""
    wanted: int = 0
    """So many last ones have no tokens, each for a state that is kept for a slice after; alone in theirs, the last."""


def nodes_of(layout: TokenLayout, keys: TreeLayout | None = None) -> Nodes:
    """The runs of a pack; pure and local. ``keys``: of a slice, the layout of all tokens up to its end."""
    if not isinstance(layout, TreeLayout):
        return _of_zigzag(layout)
    return _of_tree(layout, layout if keys is None else keys)


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


def _of_tree(layout: TreeLayout, keys: TreeLayout) -> Nodes:
    """The pieces of the tree; one that alone follows the piece before it, on the same rank, is one run with it.

    In a slice also the states after tokens before its first one, or its end, that later tokens begin with.
    """
    tree, first = layout.tree, layout.first_token
    given = wanted = np.zeros(0, dtype=np.int64)
    if is_sliced(keys):
        given, wanted = (past_tokens(tree, cut, 1) for cut in keys.bounds[keys.number : keys.number + 2])
    pieces, token = np.arange(len(layout.segment)), layout.source + first
    previous = tree.previous[token]
    before = np.where(previous >= first, _piece_of(token, previous), -1)
    followed = np.concatenate([before[before >= 0], _piece_of(token, wanted[wanted >= first])])
    joined = (before == pieces - 1) & (pieces > 0)
    joined[1:] &= (layout.owner[1:] == layout.owner[:-1]) & (np.bincount(followed, minlength=len(pieces))[:-1] == 1)
    heads, run = np.flatnonzero(~joined), np.cumsum(~joined) - 1
    after = np.concatenate([previous[heads], wanted])  # the token that each run or wanted state follows
    kept = np.where(after >= 0, np.searchsorted(given, after), -1)
    parent = np.where(after >= first, len(given) + run[_piece_of(token, after)], kept)
    parent = np.concatenate([np.full(len(given), -1), parent])
    holders = (keys.owner[_piece_of(keys.source, tokens)] for tokens in (given, wanted))
    owner = np.insert(np.concatenate(list(holders)), len(given), layout.owner[heads])
    count = np.bincount(run, weights=layout.count, minlength=len(heads)).astype(np.int64)
    row, count = (np.pad(each, (len(given), len(wanted))) for each in (layout.row[heads], count))
    carrier, level = _ways(owner.tolist(), parent.tolist(), range(len(given), len(given) + len(heads)))
    return Nodes(owner, row, count, parent, np.array(carrier), np.array(level), len(given), len(wanted))


def _piece_of(start: Int64, tokens: Int64) -> Int64:
    """The pieces that hold ``tokens``; ``start``: the first token of each, rising."""
    found: Int64 = np.searchsorted(start, tokens, side="right") - 1
    return found


def _ways(owner: list[int], parent: list[int], runs: range) -> tuple[list[bool], list[int]]:
    """(carrier, level) of each of the ``runs``, and of the kept states before and behind them."""
    carrier, level = [node not in runs for node in range(len(owner))], [0] * len(owner)
    for node in range(len(owner) - 1, -1, -1):
        above = parent[node]
        if above >= 0 and (carrier[node] or owner[above] != owner[node]):
            carrier[above] = True
    for node, above in enumerate(parent):
        if above >= 0 and carrier[node] == carrier[above]:
            level[node] = level[above] + 1
        elif runs.start and node in runs and carrier[node]:  # kept states are alone in their level
            level[node] = 1
    last = max((level[node] for node in runs if carrier[node]), default=0) + 1
    return carrier, level[: runs.stop] + [last] * (len(owner) - runs.stop)

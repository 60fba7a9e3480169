"""Which rank computes which runs of tokens of a recurrence, and which states go from rank to rank.

A run is consecutive tokens of one rank; it starts with the state that the run before it ended with, in the same
sequence or, on a tree, in the parent segment: all children of a segment start from one state, and in backward the
gradients of their initial states add up there. A run that other ranks' runs follow, at once or later, is a *carrier*.
Carriers are taken level by level (a level is one more than that of the run before), with messages between the levels;
all other runs of a rank, its *forest*, need no rank after them and come last.

Pure and local: every rank computes the same from the layout, for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.attention.layout import SequenceLayout
from hdpcomm.attention.tiles import Int64
from hdpcomm.attention.tree_layout import TokenLayout, TreeLayout, past_tokens
from hdpcomm.kernels.transfers import to_device

__all__ = ["ForestLevel", "Links", "Message", "Part", "Stage", "StatePlan", "state_plan"]


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
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


def _of_zigzag(layout: SequenceLayout) -> _Nodes:
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
    return _Nodes(
        np.broadcast_to(owner, counts.shape).reshape(-1), rows.reshape(-1), counts.reshape(-1), parent.reshape(-1),
        carrier.reshape(-1), level.reshape(-1),
    )  # fmt: skip


def _of_tree(layout: TreeLayout, keys: TreeLayout) -> _Nodes:
    """The pieces of the tree; one that alone follows the piece before it, on the same rank, is one run with it.

    In a slice also the states after tokens before its first one, or its end, that later tokens begin with.
    """
    tree, first = layout.tree, layout.first_token
    given = wanted = np.zeros(0, dtype=np.int64)
    if keys.sliced:
        given, wanted = (past_tokens(tree, cut, 1) for cut in keys.slice_bounds[keys.number : keys.number + 2])
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
    return _Nodes(owner, row, count, parent, np.array(carrier), np.array(level), len(given), len(wanted))


def _piece_of(start: Int64, tokens: Int64) -> Int64:
    """The pieces that hold ``tokens``; ``start``: the first token of each, rising."""
    pieces: Int64 = np.searchsorted(start, tokens, side="right") - 1
    return pieces


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


class Links:
    """Pairs (source, target) of runs and states: each target is the sum of its sources."""

    def __init__(self, source: Int64, target: Int64) -> None:
        self.source, self.target = source, target
        self._on_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def transposed(self) -> Links:
        return Links(self.target, self.source)

    def _rounds(self) -> list[tuple[Int64, Int64]]:
        """The pairs, such that no target is twice in a round: sums then have one order on any device."""
        order = np.argsort(self.target, kind="stable")
        target = self.target[order]
        turn = np.arange(len(target)) - np.searchsorted(target, target)
        return [(self.source[order][turn == i], target[turn == i]) for i in range(int(turn.max(initial=-1)) + 1)]

    def add(self, into: Tensor, states: Tensor) -> Tensor:
        """Adds rows of ``states`` to those of ``into``, in place."""
        if into.device not in self._on_device:
            rounds = [tuple(to_device(torch.from_numpy(x), into.device) for x in pair) for pair in self._rounds()]
            self._on_device[into.device] = [(source, target) for source, target in rounds]
        for source, target in self._on_device[into.device]:
            into.index_add_(0, target, states.index_select(0, source))
        return into


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Runs of one rank that are taken at once: its carriers of one level, or its forest."""

    place: int
    """Number of the part on its rank, by rising level."""
    count: int
    """Initial states: one for each carrier; of a forest, the states that come from carriers."""
    before: Links
    """From the rank's slots to the initial states."""
    after: Links
    """From the final states to the rank's slots; none of a forest."""

    @property
    def transposed(self) -> Part:
        return Part(self.place, self.count, self.after.transposed, self.before.transposed)


@dataclass(frozen=True, slots=True)
class Message:
    """``count`` states from the slots of one rank to those of another."""

    source: int
    source_slot: int
    target: int
    target_slot: int
    count: int

    @property
    def transposed(self) -> Message:
        return Message(self.target, self.target_slot, self.source, self.source_slot, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The parts of all ranks that are taken next, and the messages after them."""

    parts: dict[int, Part]
    messages: tuple[Message, ...]

    def exchanges(self, rank: int) -> tuple[list[tuple[int, slice]], list[tuple[int, slice]]]:
        """(peer, slots) of what ``rank`` sends, and of what it receives."""
        sends = [(m.target, slice(m.source_slot, m.source_slot + m.count)) for m in self.messages if m.source == rank]
        recvs = [(m.source, slice(m.target_slot, m.target_slot + m.count)) for m in self.messages if m.target == rank]
        return sends, recvs


@dataclass(frozen=True, slots=True, eq=False)
class ForestLevel:
    """Runs of a forest that can be taken at once."""

    starts: Int64
    lengths: Int64
    links: Links
    """From what comes before to the initial states: the forest's own (first level), the finals of the level before."""


class StatePlan:
    """The parts of every rank and the messages between them; see :func:`state_plan`.

    Attributes:
        slots: for each rank, how many states it holds for others and from others.
        runs: for each rank, (first local row, tokens) of the carriers of each part; None: the part is a forest.
        forests: for each rank, the levels of its forest; empty: it has none.
        given: for each rank, with how many kept states a slice begins; they are its first part.
        wanted: for each rank, how many states it keeps of a slice; they are the last part of its carriers.
    """

    def __init__(self, nodes: _Nodes, size: int) -> None:
        self.size = size
        edges = _Edges(nodes, size)
        self.slots = edges.slots
        self.runs: list[list[tuple[Int64, Int64] | None]] = [[] for _ in range(size)]
        self.forests: list[tuple[ForestLevel, ...]] = [() for _ in range(size)]
        first, last = (
            np.split(nodes.owner, [nodes.given])[0],
            np.split(nodes.owner, [len(nodes.owner) - nodes.wanted])[1],
        )
        self.given, self.wanted = (np.bincount(each, minlength=size).tolist() for each in (first, last))
        self._stages: list[Stage] = []
        for level, groups in _grouped(nodes):
            parts = {}
            for rank, mine in groups:
                parts[rank] = Part(len(self.runs[rank]), len(mine), edges.before(mine, rank), edges.after(mine))
                self.runs[rank].append((nodes.row[mine], nodes.count[mine]))
            self._stages.append(Stage(parts, edges.messages.get(level, ())))
        forests = {}
        for rank in range(size):
            mine = np.flatnonzero(~nodes.carrier & (nodes.owner == rank))
            if len(mine):
                self.forests[rank], wanted = _forest(nodes, mine)
                forests[rank] = Part(len(self.runs[rank]), len(wanted), edges.at(wanted, rank), _NO_LINKS)
                self.runs[rank].append(None)
        self._stages.append(Stage(forests, ()))
        self.messages = sum(len(stage.messages) for stage in self._stages)
        self._load(nodes)

    def _load(self, nodes: _Nodes) -> None:
        """Loads that the choice of the exchange depends on."""
        size, carried = self.size, nodes.carrier
        of_rank = np.bincount(nodes.owner, weights=nodes.count, minlength=size)
        of_carriers = np.bincount(nodes.owner[carried], weights=nodes.count[carried], minlength=size)
        levels = int(nodes.level[carried].max(initial=-1)) + 1
        of_part = np.zeros((levels, size))
        np.add.at(of_part, (nodes.level[carried], nodes.owner[carried]), nodes.count[carried])
        self.tokens = float(of_rank.max(initial=0))
        """Most tokens of a rank."""
        self.carried_tokens = float(of_carriers.max(initial=0))
        """Most tokens of a rank's carriers."""
        chain = float(of_part.max(axis=1).sum() + (of_rank - of_carriers).max(initial=0))
        self.waiting_tokens = chain - self.tokens
        """Tokens of the longest chain of parts beyond those of a rank: what an exchange without maps waits for."""
        self.hops = [max(m.count for m in stage.messages) for stage in self._stages if stage.messages]
        """States of the largest message between each level and the next."""
        self.carriers = int(np.bincount(nodes.owner[carried], minlength=size).max(initial=0))
        """Most carriers of a rank."""

    def ends(self, rank: int) -> tuple[int | None, int | None]:
        """The parts of a rank that stand for kept states with which a slice begins, and for those that it keeps."""
        carriers = sum(runs is not None for runs in self.runs[rank])
        return (0 if self.given[rank] else None), (carriers - 1 if self.wanted[rank] else None)

    def stages(self, *, backward: bool) -> list[Stage]:
        """In the order in which they are taken; in backward, the messages before a level in place of those after it."""
        if not backward:
            return self._stages
        before = [(), *(stage.messages for stage in self._stages[:-1])]
        return [
            Stage({r: p.transposed for r, p in stage.parts.items()}, tuple(m.transposed for m in messages))
            for stage, messages in zip(self._stages[::-1], before[::-1], strict=True)
        ]


_NO_LINKS = Links(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class _Edges:
    """The pairs (carrier, rank that has a run after it), each with a slot on the carrier's rank and, if that is another
    one, on the rank after it."""

    def __init__(self, nodes: _Nodes, size: int) -> None:
        self._nodes, self._size = nodes, size
        children = np.flatnonzero(nodes.parent >= 0)
        children = children[nodes.carrier[nodes.parent[children]]]
        keys = np.sort(nodes.parent[children] * size + nodes.owner[children])
        self._keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
        self.carrier, self.target = np.divmod(self._keys, size)
        self.source = nodes.owner[self.carrier]
        self.level = nodes.level[self.carrier]
        order = np.lexsort((self.carrier, self.target, self.level, self.source))
        self._slot = _numbered(self.source, order)
        own = np.bincount(self.source, minlength=size)
        away = self.source != self.target
        order = np.lexsort((self.carrier, self.source, self.level, self.target))
        order = order[away[order]]
        self._far_slot = np.where(away, own[self.target] + _numbered(self.target, order), self._slot)
        self.slots: list[int] = (own + np.bincount(self.target[away], minlength=size)).tolist()

    def at(self, carriers: Int64, rank: int) -> Links:
        """From the slots of ``rank`` that hold the final states of ``carriers`` to 0, 1, ..."""
        edge = np.searchsorted(self._keys, carriers * self._size + rank)
        return Links(self._far_slot[edge], np.arange(len(carriers)))

    def before(self, runs: Int64, rank: int) -> Links:
        """From the slots of ``rank`` to the initial states of its ``runs``."""
        parent = self._nodes.parent[runs]
        following = np.flatnonzero(parent >= 0)
        return Links(self.at(parent[following], rank).source, following)

    def after(self, runs: Int64) -> Links:
        """From the final states of ``runs``, rising carriers of one rank, to its slots."""
        first, last = (np.searchsorted(self.carrier, runs, side=side) for side in ("left", "right"))
        count = last - first
        edge = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
        return Links(np.repeat(np.arange(len(runs)), count), self._slot[edge])

    @cached_property
    def messages(self) -> dict[int, tuple[Message, ...]]:
        """Messages after each level, by (source, target)."""
        away = np.flatnonzero(self.source != self.target)
        order = away[np.lexsort((self._slot[away], self.target[away], self.source[away], self.level[away]))]
        pairs = np.stack([self.level[order], self.source[order], self.target[order]], axis=1)
        first = np.flatnonzero(np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))) if len(order) else order
        count = np.diff(np.append(first, len(order)))
        slots = np.stack([self._slot[order[first]], self._far_slot[order[first]], count], axis=1)
        by_level: dict[int, tuple[Message, ...]] = {}
        for (level, source, target), (here, there, n) in zip(pairs[first].tolist(), slots.tolist(), strict=True):
            by_level[level] = (*by_level.get(level, ()), Message(source, here, target, there, n))
        return by_level


def _grouped(nodes: _Nodes) -> Iterator[tuple[int, list[tuple[int, Int64]]]]:
    """(level, [(rank, its carriers)]) by rising level."""
    carriers = np.flatnonzero(nodes.carrier)
    order = carriers[np.lexsort((carriers, nodes.owner[carriers], nodes.level[carriers]))]
    level, owner = nodes.level[order], nodes.owner[order]
    joint = (level[1:] != level[:-1]) | (owner[1:] != owner[:-1])
    groups = np.split(order, np.flatnonzero(joint) + 1) if len(order) else []
    for at, members in groupby(groups, key=lambda group: int(nodes.level[group[0]])):
        yield at, [(int(nodes.owner[group[0]]), group) for group in members]


def _numbered(owner: Int64, order: Int64) -> Int64:
    """For the items ``order``: their number among those of one owner; 0 for others. ``order`` is by owner first."""
    number = np.zeros(len(owner), dtype=np.int64)
    number[order] = np.arange(len(order)) - np.searchsorted(owner[order], owner[order])
    return number


def _forest(nodes: _Nodes, mine: Int64) -> tuple[tuple[ForestLevel, ...], Int64]:
    """(levels of the runs ``mine`` of one rank, the carriers whose final states they start with)."""
    parent = nodes.parent[mine]
    carried = parent >= 0
    carried[carried] = nodes.carrier[parent[carried]]
    wanted = np.unique(parent[carried])
    levels = []
    above = wanted
    for depth in range(int(nodes.level[mine].max()) + 1):
        here = mine[nodes.level[mine] == depth]
        following = np.flatnonzero(nodes.parent[here] >= 0)
        links = Links(np.searchsorted(above, nodes.parent[here[following]]), following)
        levels.append(ForestLevel(nodes.row[here], nodes.count[here], links))
        above = here
    return tuple(levels), wanted


@lru_cache(maxsize=128)
def state_plan(layout: TokenLayout, keys: TokenLayout) -> StatePlan:
    """The plan of a pack of sequences or of a tree. Pure and local.

    ``keys``: of a slice, the layout of all tokens up to its end. Each state that the slices after it begin with stays
    on the rank that ends with it.
    """
    plain = layout.tree is None
    nodes = (
        _of_zigzag(cast(SequenceLayout, layout))
        if plain
        else _of_tree(cast(TreeLayout, layout), cast(TreeLayout, keys))
    )
    return StatePlan(nodes, layout.size)

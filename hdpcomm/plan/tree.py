"""A prefix tree of trajectories: :class:`Tree`. Imports no torch."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hdpcomm.errors import InvalidUsage

__all__ = ["TrajectoryTree", "Tree", "TreeFragment", "join_trees", "tree_of", "trees_of_prompts"]

Int64: TypeAlias = "npt.NDArray[np.int64]"


class Tree:
    """Segments of tokens that share prefixes, in depth-first order. In attention it takes the place of ``cu_seqlens``.

    A token sees the tokens of its segment's ancestors and, causally, those of its own segment. Its position is the
    number of tokens before it on the way from the root. Several roots are several trees of one pack; a root without
    children is a plain sequence. Immutable; trees with the same parents and lengths are equal.

    Attributes:
        parents: int64 [segments], the parent of each segment, -1 for a root.
        lengths: int64 [segments], tokens of each segment.
        starts: int64 [segments], position of the first token of each segment.
        ends: int64 [segments], one past the last descendant of each segment.
        num_tokens: tokens of all segments.
        squares: twice the (query, key) pairs of the causal mask, in the unit in which a sequence has length^2.

    Args:
        parents: -1 for a root. A parent comes before its children, and all descendants of a segment before its next
            sibling (depth-first).
        lengths: at least 1.

    Raises:
        InvalidUsage: a circle, a child before its parent, another order, a length below 1.

    Examples:
        >>> tree = Tree([-1, 0, 0], [4096, 512, 300])  # a prompt with two answers
        >>> tree.num_tokens, tree.num_trajectories, tree.starts.tolist()
        (4908, 2, [0, 4096, 4096])
    """

    def __init__(self, parents: Sequence[int] | npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any]) -> None:
        self.parents, self.lengths = _integers("parents", parents), _integers("lengths", lengths)
        if len(self.parents) != len(self.lengths):
            raise InvalidUsage(
                f"a tree has {len(self.parents)} parents and {len(self.lengths)} lengths; expected one of each for "
                "every segment"
            )
        starts, ends = _walk(self.parents.tolist(), self.lengths.tolist())
        self.starts, self.ends = _frozen(np.array(starts, dtype=np.int64)), _frozen(np.array(ends, dtype=np.int64))
        self.num_tokens = int(self.lengths.sum())
        self.squares = float((self.lengths * (2 * self.starts + self.lengths)).sum())
        self._hash = hash((self.parents.tobytes(), self.lengths.tobytes()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return (
            self._hash == other._hash
            and np.array_equal(self.parents, other.parents)
            and np.array_equal(self.lengths, other.lengths)
        )

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return len(self.parents)

    def __repr__(self) -> str:
        shown = [x.tolist() if len(x) <= 12 else f"{x[:12].tolist()}..." for x in (self.parents, self.lengths)]
        return f"Tree(parents={shown[0]}, lengths={shown[1]})"

    @property
    def rows(self) -> Int64:
        """[segments]: the first token of each segment in the pack."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def depth(self) -> int:
        """Tokens of the longest way from a root to a leaf."""
        return int((self.starts + self.lengths).max(initial=0))

    @cached_property
    def trajectories(self) -> Int64:
        """[segments]: leaves below each segment, or 1 for a leaf: how many trajectories share its tokens."""
        leaf = self.ends == np.arange(len(self)) + 1
        below = np.concatenate(([0], np.cumsum(leaf)))
        return _frozen(below[self.ends] - below[:-1])

    @property
    def num_trajectories(self) -> int:
        """Leaves of the tree."""
        return int((self.ends == np.arange(len(self)) + 1).sum())

    @cached_property
    def previous(self) -> Int64:
        """[tokens]: place in the pack of the token before each token on its way from the root; -1 for a first one."""
        before = np.arange(self.num_tokens, dtype=np.int64) - 1
        last = np.append(self.rows + self.lengths - 1, -1)
        before[self.rows] = last[self.parents]  # the parent of a root is -1, the last entry
        return _frozen(before)

    def path(self, segment: int) -> list[int]:
        """The segments from the root down to ``segment``."""
        found = [segment]
        while (parent := int(self.parents[found[-1]])) >= 0:
            found.append(parent)
        return found[::-1]

    def token_places(self, segments: Sequence[int] | Int64) -> Int64:
        """Places in the pack of the tokens of ``segments``, in their order."""
        chosen = np.asarray(segments, dtype=np.int64)
        lengths = self.lengths[chosen]
        first = np.repeat(self.rows[chosen] - (np.cumsum(lengths) - lengths), lengths)
        places: Int64 = first + np.arange(int(lengths.sum()))
        return places

    def span(self, first: int, end: int) -> tuple[Int64, Int64, Int64]:
        """The segments with tokens of [first, end), depth-first, the position of the first one in each, and how many
        it has."""
        rows = self.rows
        chosen = np.arange(int(np.searchsorted(rows, first, side="right")) - 1, int(np.searchsorted(rows, end)))
        rows = rows[chosen]
        start, stop = np.maximum(rows, first), np.minimum(rows + self.lengths[chosen], end)
        return chosen, self.starts[chosen] + start - rows, stop - start

    def part(self, segments: Sequence[int] | Int64) -> Tree:
        """The tree of ``segments``, rising, each with all its ancestors."""
        chosen = np.asarray(segments, dtype=np.int64)
        place = np.full(len(self) + 1, -2, dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        place[-1] = -1
        parents = place[self.parents[chosen]]
        if (np.diff(chosen) <= 0).any() or (parents == -2).any():
            raise InvalidUsage(
                f"{chosen.tolist()} are no part of a tree: give rising segments with all their ancestors"
            )
        return Tree(parents, self.lengths[chosen])


@dataclass(frozen=True, eq=False)
class TrajectoryTree:
    """Trajectories of a batch that share prefixes, with each shared prefix once.

    Attributes:
        tree: the segments; a trajectory is a way from the root to the end of a segment.
        trajectories: which of the batch are in this tree.
        last_segments: for each of these, the segment that it ends with.
    """

    tree: Tree
    trajectories: tuple[int, ...]
    last_segments: tuple[int, ...]

    def token_places(self, trajectory: int) -> Int64:
        """Places in the tree of the tokens of one of the given trajectories. Raises InvalidUsage if it is not here."""
        if trajectory not in self.trajectories:
            raise InvalidUsage(f"trajectory {trajectory} is not in this tree, which holds {list(self.trajectories)}")
        last = self.last_segments[self.trajectories.index(trajectory)]
        return self.tree.token_places(self.tree.path(last))


def trees_of_prompts(lengths: Sequence[int], prompts: Sequence[tuple[Hashable, int]]) -> list[TrajectoryTree]:
    """Trees of the answers to each prompt, for a step that computes a prompt once. Local; tokens are not needed.

    Args:
        lengths: tokens of each sequence, a prompt and its answer.
        prompts: for each sequence the name of its prompt and the prompt's tokens.

    Returns: one for each prompt that has several answers.

    Raises:
        InvalidUsage: a prompt of no tokens or longer than its sequence, or of several lengths.

    Examples:
        >>> [shared] = trees_of_prompts([12, 15, 9], [("a", 10), ("a", 10), ("b", 5)])
        >>> shared.tree, shared.trajectories
        (Tree(parents=[-1, 0, 0], lengths=[10, 2, 5]), (0, 1))
    """
    if len(prompts) != len(lengths):
        raise InvalidUsage(f"{len(prompts)} prompts were given for {len(lengths)} sequences; give one for each")
    answers: dict[Hashable, list[int]] = {}
    for i, (name, tokens) in enumerate(prompts):
        answers.setdefault(name, []).append(i)
        if not 1 <= tokens <= lengths[i] or tokens != prompts[answers[name][0]][1]:
            raise InvalidUsage(
                f"prompt {name!r} has {tokens} tokens in sequence {i} of {lengths[i]} tokens; expected at least one, "
                "at most all of them, and the same number in each sequence of that prompt"
            )
    made = []
    for members in answers.values():
        if len(members) == 1:
            continue
        prompt = prompts[members[0]][1]
        longer = [i for i in members if lengths[i] > prompt]
        tree = Tree([-1, *[0] * len(longer)], [prompt, *(lengths[i] - prompt for i in longer)])
        last = {i: place + 1 for place, i in enumerate(longer)}
        made.append(TrajectoryTree(tree, tuple(members), tuple(last.get(i, 0) for i in members)))
    return made


@dataclass(frozen=True, slots=True)
class TreeFragment:
    """A part of a tree of the step that runs as a tree of its own.

    Attributes:
        tree: the tree's position in the planned lengths.
        segments: the segments of the part, rising, each with all its ancestors.
        repeated: for each of them, whether another fragment trains it, and this one only needs it as a prefix.
    """

    tree: int
    segments: tuple[int, ...]
    repeated: tuple[bool, ...]


def tree_of(number: int, items: Sequence[int | Tree], fragments: Sequence[object]) -> Tree | None:
    """The tree that an id of a plan means, or the part of one that a fragment is; ``None``: a plain sequence, or a
    slice."""
    if number < len(items):
        item = items[number]
        return item if isinstance(item, Tree) else None
    fragment = fragments[number - len(items)]
    if not isinstance(fragment, TreeFragment):
        return None
    tree = items[fragment.tree]
    assert isinstance(tree, Tree)  # the plan was checked against the items
    return tree.part(fragment.segments)


def join_trees(trees: Sequence[Tree | int]) -> Tree:
    """One tree with all the roots of ``trees``, in order; an int is a plain sequence of as many tokens."""
    parts = [tree if isinstance(tree, Tree) else Tree([-1], [tree]) for tree in trees]
    first = np.cumsum([0, *(len(part) for part in parts)])
    parents = [np.where(part.parents < 0, -1, part.parents + at) for part, at in zip(parts, first, strict=False)]
    nothing = [np.zeros(0, dtype=np.int64)]
    return Tree(np.concatenate(parents or nothing), np.concatenate([part.lengths for part in parts] or nothing))


def _integers(name: str, values: Any) -> Int64:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidUsage(
            f"{name} of a tree are {reprlib.repr(values)}, of shape {array.shape} and type {array.dtype}; expected a "
            "list of integers, one for each segment"
        )
    return _frozen(array.astype(np.int64))


def _frozen(array: Int64) -> Int64:
    array.setflags(write=False)
    return array


def _walk(parents: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """(starts, ends) of the segments. Raises InvalidUsage where these are not depth-first segments."""
    starts: list[int] = []
    path: list[int] = []
    ends = [len(parents)] * len(parents)
    for segment, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        if length < 1:
            raise InvalidUsage(
                f"segment {segment} of the tree has {length} tokens, expected at least 1: leave empty segments out and "
                "hang their children on their parent"
            )
        if not -1 <= parent < segment:
            raise InvalidUsage(
                f"segment {segment} of the tree has the parent {parent}: {_wrong_parent(parents, segment)}"
            )
        while path and path[-1] != parent:
            ends[path.pop()] = segment
        if parent >= 0 and not path:
            raise InvalidUsage(
                f"segment {segment} of the tree has the parent {parent}, whose descendants had ended before segment "
                f"{ends[parent]}; expected depth-first order, all descendants of a segment before its next sibling"
            )
        starts.append(starts[parent] + lengths[parent] if parent >= 0 else 0)
        path.append(segment)
    return starts, ends


def _wrong_parent(parents: list[int], segment: int) -> str:
    seen, at = {segment}, parents[segment]
    while 0 <= at < len(parents):
        if at in seen:
            return "following the parents leads round a circle; every segment must lead to a root, whose parent is -1"
        seen.add(at)
        at = parents[at]
    if segment < parents[segment] < len(parents):
        return "a child before its parent; expected depth-first order, parents first"
    return f"there are {len(parents)} segments; expected the index of an earlier one, or -1 for a root"

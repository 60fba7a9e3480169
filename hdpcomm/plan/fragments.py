"""Cuts trees that are larger than a rank's capacity into parts, where computing prefixes again costs less."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from hdpcomm.arguments import check_whole
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.cost import CostModel
from hdpcomm.plan.specs import ClusterSpec
from hdpcomm.plan.step import StepPlan
from hdpcomm.plan.tree import Tree, TreeFragment

_LONGEST = 2**40  # tokens

__all__ = ["Jobs", "cut_tree", "jobs_of", "squares_by_id"]


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs of the solver: the sequences and trees of a step, and the fragments in the place of trees that were cut.

    Attributes:
        tokens: of each job.
        squares: sums of squared lengths, of each job; empty if all jobs are plain sequences.
        fragments: of the trees that were cut.
        ids: the id of each job in the plan; empty if they are the positions in ``tokens``.
        trees: by position, of jobs that are trees.
    """

    tokens: list[int]
    squares: list[float]
    fragments: tuple[TreeFragment, ...] = ()
    ids: Sequence[int] = ()
    trees: Mapping[int, Tree] = field(default_factory=dict)


def jobs_of(items: Sequence[int | Tree], cost: CostModel, cluster: ClusterSpec, capacity: int) -> Jobs:
    """The jobs of a step; cuts trees that are larger than ``capacity`` where that is cheaper. Pure and local."""
    if isinstance(items, (str, bytes, Mapping)) or not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise InvalidUsage(f"plan() got the lengths {items!r}; give a list of whole numbers (or trees)")
    kinds = set(map(type, items))
    if not any(issubclass(kind, Tree) for kind in kinds):
        tokens = _checked(cast(list[int], list(items))) if kinds == {int} else _tokens(items)
        return Jobs(tokens, cost.squares(np.array(tokens, dtype=np.float64)).tolist() if cost.limited else [])
    _tokens([item.num_tokens if isinstance(item, Tree) else item for item in items])
    cut = _cut_trees(items, cost, cluster, capacity)
    whole = [(i, item) for i, item in enumerate(items) if i not in cut]
    fragments = tuple(fragment for parts in cut.values() for fragment in parts)
    parts = [item for _, item in whole]
    for fragment in fragments:
        tree = items[fragment.tree]
        assert isinstance(tree, Tree)
        parts.append(tree.part(fragment.segments))
    return Jobs(
        tokens=[part.num_tokens if isinstance(part, Tree) else int(part) for part in parts],
        squares=[cost.item_squares(part) for part in parts],
        fragments=fragments,
        ids=[*(i for i, _ in whole), *range(len(items), len(items) + len(fragments))] if cut else (),
        trees={place: part for place, part in enumerate(parts) if isinstance(part, Tree)},
    )


def squares_by_id(plan: StepPlan, trees: Mapping[int, Tree], cost: CostModel) -> dict[int, float]:
    """Attention costs in squared tokens, of the trees of a plan, given by id, and of all slices. Local."""
    found = {number: cost.item_squares(tree) for number, tree in trees.items()}
    for planned in plan.slices.values():
        place = plan.table.sequence_bounds[planned.rows[planned.number]]
        item = trees.get(planned.sequence, planned.bounds[-1])
        found[int(plan.table.ids[place])] = cost.item_squares(item, planned.start, planned.stop)
    return found


def _tokens(lengths: Sequence[Any]) -> list[int]:
    """The lengths as ints. Raises InvalidUsage for anything else, of which int() would cut something off."""
    try:
        sizes = list(map(operator.index, lengths))
        plain = bool not in set(map(type, lengths))
    except (TypeError, RuntimeError):
        plain = False
    if not plain:
        for i, length in enumerate(lengths):
            check_whole("plan()", f"the length of sequence {i}", length)
    return _checked(sizes)


def _checked(sizes: list[int]) -> list[int]:
    if sizes and max(sizes) > _LONGEST:
        wrong = sizes.index(max(sizes))
        raise InvalidUsage(f"sequence {wrong} has {sizes[wrong]} tokens, expected at most 2^40: cut it")
    return sizes


def cut_tree(tree: Tree, limit: int) -> list[tuple[list[int], list[bool]]]:
    """Parts of at most ``limit`` tokens (more where one way to a leaf has more), as (segments, repeated): leaves in
    order, as many in a part as fit with their ways from the root."""
    lengths = tree.lengths.tolist()
    parts: list[tuple[list[int], list[bool]]] = []
    waiting: list[int] = []  # segments since the last leaf, to be added with the next one
    held = added = 0
    for segment, end in enumerate(tree.ends.tolist()):
        waiting.append(segment)
        added += lengths[segment]
        if end != segment + 1:
            continue
        if not parts or held + added > limit:
            before = tree.path(waiting[0])[:-1]
            parts.append((before, [True] * len(before)))
            held = sum(lengths[s] for s in before)
        parts[-1][0].extend(waiting)
        parts[-1][1].extend([False] * len(waiting))
        held += added
        waiting, added = [], 0
    return parts


def _cut_trees(
    items: Sequence[int | Tree], cost: CostModel, cluster: ClusterSpec, capacity: int
) -> dict[int, list[TreeFragment]]:
    """The fragments of each tree that is better cut, by its position in ``items``.

    A tree that fits one rank is left whole. For a larger one, parts for 1, 2, 4, ... ranks are compared with the whole
    on as many ranks as it needs, by seconds x ranks.
    """
    cut = {}
    for i, item in enumerate(items):
        if isinstance(item, Tree) and item.num_tokens > capacity:
            parts = _cheapest_parts(item, cost, cluster, capacity)
            if len(parts) > 1:
                cut[i] = [TreeFragment(i, tuple(segments), tuple(repeated)) for segments, repeated in parts]
    return cut


def _rank_seconds(squares: float, tokens: int, cost: CostModel, cluster: ClusterSpec, capacity: int) -> float:
    """Seconds x ranks of so many tokens on the fewest ranks that hold them; infinite if the cluster does not."""
    size = -(-tokens // capacity)
    if size > cluster.ranks:
        return math.inf
    inside, near = size <= cluster.node_ranks, size <= cluster.domain_ranks
    return size * cost.load_seconds(squares, tokens, size, one_node=inside, one_domain=near)


def _cheapest_parts(
    tree: Tree, cost: CostModel, cluster: ClusterSpec, capacity: int
) -> list[tuple[list[int], list[bool]]]:
    """Empty: the whole tree is cheaper, or no part fits."""
    needed = -(-tree.num_tokens // capacity)
    whole = cost.item_squares(tree)
    least = _rank_seconds(whole, tree.num_tokens, cost, cluster, capacity)
    if len(tree.parents) > 1 and tree.parents[1:].min() >= 0:  # one root, which every part after the first repeats
        root = int(tree.lengths[0])
        if least <= cost.load_seconds(whole + cost.item_squares(root), tree.num_tokens + root):
            return []
    starts, tokens = tree.starts.astype(np.float64), tree.lengths.tolist()
    squares = cost.squares(starts + tree.lengths, starts).tolist()
    best: list[tuple[list[int], list[bool]]] = []
    ranks = 1
    while ranks < needed and ranks <= cluster.ranks:
        parts = cut_tree(tree, ranks * capacity)
        sums = [(float(sum(squares[s] for s in part)), sum(tokens[s] for s in part)) for part, _ in parts]
        total = sum(_rank_seconds(*load, cost, cluster, capacity) for load in sums)
        if total < least:
            least, best = total, parts
        ranks *= 2
    return best

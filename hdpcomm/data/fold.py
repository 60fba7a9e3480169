"""Folds trajectories that share prefixes into trees: :func:`fold`."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import TrajectoryTree, Tree

__all__ = ["FoldedTree", "fold"]

Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class FoldedTree(TrajectoryTree):
    """Trajectories that begin with the same token, with each shared prefix once.

    Attributes:
        tokens: ``[tree.num_tokens]`` int64.
        weights: ``[tree.num_tokens]`` float32, the loss weight of each token as what is to be predicted: the sum over
            the trajectories that contain it.
    """

    tokens: Tensor
    weights: Tensor


def fold(
    trajectories: Sequence[Sequence[int] | npt.NDArray[Any] | Tensor],
    weights: Sequence[Sequence[float] | npt.NDArray[Any] | Tensor | None] | None = None,
) -> list[FoldedTree]:
    """Trees of token lists, by a trie; one for each first token, in the order of the first trajectory of each.

    A rank of a :class:`hdpcomm.train.Trainer` takes them by ``trainer.step([f.tree for f in folded], lambda i:
    (folded[i].tokens, folded[i].weights))``. Sorting the trajectories takes the most time: for thousands of thousands
    of tokens each well below a second. Local.

    Args:
        trajectories: tokens (not negative) of each, at least one.
        weights: for each trajectory the loss weight of each of its tokens, as what is to be predicted (0 for a prompt,
            an advantage, ...); ``None``: 1 for all. That of a first token does not matter, as nothing predicts it.

    Raises:
        InvalidUsage: an empty trajectory, negative tokens, or weights that do not fit.

    Examples:
        >>> [folded] = fold([[5, 6, 7, 8], [5, 6, 9]])
        >>> folded.tree, folded.tokens.tolist(), folded.weights.tolist()
        (Tree(parents=[-1, 0, 0], lengths=[2, 2, 1]), [5, 6, 7, 8, 9], [2.0, 2.0, 1.0, 1.0, 1.0])
    """
    given = [_tokens(i, trajectory) for i, trajectory in enumerate(trajectories)]
    factors = _weights(given, weights)
    keys = [tokens.astype(">i8").tobytes() for tokens in given]  # sorts as the tokens do
    order = sorted(range(len(given)), key=keys.__getitem__)
    groups: dict[int, list[int]] = {}
    for i in order:
        groups.setdefault(int(given[i][0]), []).append(i)
    folded = [_fold_group([given[i] for i in group], [factors[i] for i in group], group) for group in groups.values()]
    return sorted(folded, key=lambda tree: min(tree.trajectories))


def _tokens(i: int, trajectory: Any) -> Int64:
    tokens = trajectory.detach().cpu().numpy() if isinstance(trajectory, Tensor) else np.asarray(trajectory)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0:
        raise InvalidUsage(
            f"trajectory {i} is {reprlib.repr(trajectory)}, of shape {tokens.shape} and type {tokens.dtype}"
            f"{', with negative tokens' if tokens.size and np.issubdtype(tokens.dtype, np.integer) else ''}; expected "
            "a list of at least one token, integers that are not negative"
        )
    return tokens.astype(np.int64)


def _weights(given: list[Int64], weights: Any) -> list[Floats]:
    if weights is None:
        return [np.ones(len(tokens), dtype=np.float32) for tokens in given]
    if len(weights) != len(given):
        raise InvalidUsage(
            f"{len(weights)} lists of weights were given for {len(given)} trajectories; expected as many"
        )
    found = []
    for i, (tokens, factors) in enumerate(zip(given, weights, strict=True)):
        values = np.ones(len(tokens)) if factors is None else np.asarray(factors)
        if values.shape != tokens.shape or not np.isfinite(values).all():
            raise InvalidUsage(
                f"the weights of trajectory {i} are {reprlib.repr(factors)}, "
                f"of shape {values.shape}; expected {len(tokens)} finite numbers, one "
                "for each token"
            )
        found.append(values.astype(np.float32))
    return found


def _shared(a: Int64, b: Int64) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    at = int(different.argmax()) if n else 0
    return at if n and different[at] else n


def _fold_group(sequences: list[Int64], factors: list[Floats], ids: list[int]) -> FoldedTree:
    """The tree of sorted sequences with the same first token."""
    shared = [0, *(_shared(a, b) for a, b in pairwise(sequences))]
    cuts = _branches(shared)
    parents: list[int] = []
    lengths: list[int] = []
    tokens: list[Int64] = []
    path: list[tuple[int, int, int]] = []  # (segment, tokens of the way to its end, first token in the tree)
    total, leaves, weights = 0, [], np.zeros(sum(map(len, sequences)), dtype=np.float32)
    for sequence, own_weights, depth, branches in zip(sequences, factors, shared, cuts, strict=True):
        while path and path[-1][1] > depth:
            path.pop()
        edges = [depth, *(cut for cut in branches if cut < len(sequence)), len(sequence)]
        for a, b in pairwise(edges):
            if a == b:
                continue
            parents.append(path[-1][0] if path else -1)
            lengths.append(b - a)
            tokens.append(sequence[a:b])
            path.append((len(parents) - 1, b, total))
            total += b - a
        begin = 0
        for _, end, first in path:
            weights[first : first + end - begin] += own_weights[begin:end]
            begin = end
        leaves.append(path[-1][0])
    order = np.argsort(ids)
    return FoldedTree(
        tree=Tree(parents, lengths),
        tokens=torch.from_numpy(np.concatenate(tokens)),
        weights=torch.from_numpy(weights[:total].copy()),
        trajectories=tuple(ids[i] for i in order),
        last_segments=tuple(leaves[i] for i in order),
    )


def _branches(shared: list[int]) -> list[list[int]]:
    """For each sequence, rising: after how many tokens later ones leave the part of it that is not shared with the
    sequence before. ``shared``: tokens that each shares with the one before."""
    found: list[list[int]] = []
    pending: list[int] = []  # rising
    for depth in reversed(shared):
        first = len(pending)
        while first and pending[first - 1] > depth:
            first -= 1
        found.append(pending[first:])
        del pending[first:]
        if not pending or pending[-1] != depth:
            pending.append(depth)
    return found[::-1]

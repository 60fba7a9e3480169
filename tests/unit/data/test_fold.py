"""fold() builds the trie of trajectories: every trajectory is a way through the tree, every prefix is there once."""

import random

import numpy as np
import pytest
import torch

from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage


def nodes_of_trie(trajectories):
    """Number of tokens of a trie of single tokens, written as nested dictionaries."""
    root, nodes = {}, 0
    for trajectory in trajectories:
        at = root
        for token in trajectory:
            nodes += token not in at
            at = at.setdefault(token, {})
    return nodes


@pytest.mark.parametrize("seed", range(60))
def test_any_trajectories(seed):
    rng = random.Random(seed)
    made = [[rng.randrange(3) for _ in range(rng.randint(1, 6))]]
    for _ in range(rng.randint(0, 14)):
        start = rng.choice(made)
        made.append(start[: rng.randint(0, len(start))] + [rng.randrange(3) for _ in range(rng.randint(1, 5))])
    weights = [[rng.random() for _ in trajectory] for trajectory in made]
    folded = fold(made, weights)
    assert sum(f.tree.num_tokens for f in folded) == nodes_of_trie(made)
    assert sorted(i for f in folded for i in f.trajectories) == list(range(len(made)))
    assert [min(f.trajectories) for f in folded] == sorted(min(f.trajectories) for f in folded)
    for f in folded:
        sums = np.zeros(f.tree.num_tokens)
        for i in f.trajectories:
            places = f.token_places(i)
            assert f.tokens[places].tolist() == made[i]
            sums[places] += weights[i]
        np.testing.assert_allclose(f.weights.numpy(), sums, rtol=1e-5)
        children = [s for s, parent in enumerate(f.tree.parents) if parent >= 0]
        ends = set(f.last_segments)
        for s in range(len(f.tree)):  # no segment could be longer: it branches, or a trajectory ends there
            assert sum(f.tree.parents[c] == s for c in children) != 1 or s in ends


def test_kinds_of_input():
    [folded] = fold([torch.tensor([7, 8]), np.array([7, 9], dtype=np.int32), [7, 8]])
    assert folded.tokens.tolist() == [7, 8, 9]
    assert folded.weights.tolist() == [3.0, 2.0, 1.0]
    assert folded.last_segments == (1, 2, 1)
    assert fold([]) == []
    assert fold([[1, 2]], [None])[0].weights.tolist() == [1.0, 1.0]
    with pytest.raises(InvalidUsage, match=r"trajectory 5 is not in this tree, which holds \[0, 1, 2\]"):
        folded.token_places(5)


def test_bad_input():
    with pytest.raises(InvalidUsage, match=r"trajectory 1 is .*, of shape \(0,\)"):
        fold([[1], []])
    with pytest.raises(InvalidUsage, match="with negative tokens"):
        fold([[1, -2]])
    with pytest.raises(InvalidUsage, match="float64; expected a list of at least one token"):
        fold([[1.5]])
    with pytest.raises(InvalidUsage, match="1 lists of weights were given for 2 trajectories"):
        fold([[1], [2]], [[1.0]])
    with pytest.raises(InvalidUsage, match=r"weights of trajectory 0 are .*, of shape \(1,\); expected 2 finite"):
        fold([[1, 2]], [[1.0]])
    with pytest.raises(InvalidUsage, match="expected 1 finite numbers"):
        fold([[1]], [[float("nan")]])

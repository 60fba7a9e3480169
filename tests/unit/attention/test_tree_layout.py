"""Trees as packs: checks, positions, and a sharding that gives every rank as much work and as many tokens."""

import random

import pytest
import torch

from hdpcomm.attention import (
    Tree,
    as_pack,
    local_cu_seqlens,
    positions,
    shard,
    unshard,
)
from hdpcomm.attention.ring import find_atoms, ring_plan
from hdpcomm.attention.tiles import Band
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.tree import join_trees
from tests.harness.tree_oracle import random_tree, trajectories

CAUSAL = Band(None, 0)

BAD = {
    "itself": ([-1, 1], [3, 3], "segment 1 of the tree has the parent 1: following the parents leads round a circle"),
    "circle": ([-1, 2, 1], [3, 3, 3], "segment 1 .* parent 2: following the parents leads round a circle"),
    "child first": ([1, -1], [3, 3], "segment 0 .* parent 1: a child before its parent"),
    "no such parent": ([-1, 7], [3, 3], "parent 7: there are 2 segments"),
    "below a root": ([-1, -2], [3, 3], "parent -2: there are 2 segments"),
    "order": ([-1, 0, 0, 1], [3, 3, 3, 3], "parent 1, whose descendants had ended before segment 2; expected depth-"),
    "empty": ([-1, 0], [3, 0], "segment 1 of the tree has 0 tokens, expected at least 1"),
    "negative": ([-1], [-5], "segment 0 of the tree has -5 tokens"),
    "sizes": ([-1, 0], [3], "2 parents and 1 lengths"),
    "floats": ([-1.0], [3], "parents of a tree .* float64; expected a list of integers"),
    "matrix": ([-1], [[3]], r"lengths of a tree are .* of shape \(1, 1\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_trees_are_refused(name):
    parents, lengths, message = BAD[name]
    with pytest.raises(InvalidUsage, match=message):
        Tree(parents, lengths)


def test_what_a_tree_knows():
    tree = Tree([-1, 0, 1, 0, -1], [10, 4, 2, 5, 3])
    assert tree.starts.tolist() == [0, 10, 14, 10, 0]
    assert tree.ends.tolist() == [4, 3, 3, 4, 5]
    assert tree.rows.tolist() == [0, 10, 14, 16, 21]
    assert (tree.num_tokens, tree.num_trajectories, tree.depth, len(tree)) == (24, 3, 16, 5)
    assert tree.trajectories.tolist() == [2, 1, 1, 1, 1]
    assert tree.previous[[0, 1, 10, 14, 16, 21]].tolist() == [-1, 0, 9, 13, 9, -1]
    assert tree.path(2) == [0, 1, 2]
    assert tree.token_places([2, 4]).tolist() == [14, 15, 21, 22, 23]
    assert tree.part([0, 3]) == Tree([-1, 0], [10, 5]) == join_trees([Tree([-1, 0], [10, 5])])
    assert join_trees([tree, 7]) == Tree([-1, 0, 1, 0, -1, -1], [10, 4, 2, 5, 3, 7])
    assert tree != Tree([-1, 0, 1, 0, 0], [10, 4, 2, 5, 3])
    assert hash(tree) == hash(Tree([-1, 0, 1, 0, -1], [10, 4, 2, 5, 3]))
    assert len(join_trees([])) == 0
    with pytest.raises(InvalidUsage, match="no part of a tree"):
        tree.part([0, 2])
    with pytest.raises(ValueError, match="read-only"):
        tree.lengths[0] = 5


@pytest.mark.parametrize("seed", range(20))
def test_squares_and_pairs_by_the_definition(seed):
    parents, lengths = random_tree(random.Random(seed), segments=9, longest=40)
    tree = Tree(parents, lengths)
    for window in (None, 1, 6, 1000):
        seen = {  # (query, key) of all trajectories, each once
            (places[i], places[j])
            for places in trajectories(parents, lengths)
            for i in range(len(places))
            for j in range(max(0, i - (window or len(places)) + 1), i + 1)
        }
        band = Band(None if window is None else 1 - window, 0)
        layout = as_pack(tree).layout(3)
        assert layout.pairs(layout, band) == len(seen)
        if window is None:
            assert tree.squares == 2 * len(seen) - tree.num_tokens


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(8))
def test_shards_are_a_partition_with_positions(size, seed):
    parents, lengths = random_tree(random.Random(seed), segments=10, longest=60)
    tree = Tree(parents, lengths)
    depth = torch.cat([torch.arange(n) + int(start) for n, start in zip(lengths, tree.starts, strict=True)])
    x = torch.arange(tree.num_tokens)
    parts = [shard(x, tree, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(unshard(parts, tree), x)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank, part in enumerate(parts):
        assert torch.equal(positions(tree, rank=rank, size=size), depth[part])


WORK = {
    "prompt with 8 answers": ([-1, *[0] * 8], [4096, *[512] * 8], 0.001),
    "prompt with 3 answers": ([-1, 0, 0, 0], [1000, 700, 90, 200], 0.04),
    "chain": ([-1, 0, 1, 2], [1000, 300, 20, 500], 0.01),
    "many sequences": ([-1] * 40, list(range(100, 140)), 0.04),
    "one of them long": ([-1] * 9, [*[50] * 8, 4000], 0.04),
    "deep": ([-1, *range(60)], [30] * 61, 0.04),
}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", WORK)
def test_ranks_have_equal_work(name, size):
    parents, lengths, limit = WORK[name]
    layout = as_pack(Tree(parents, lengths)).layout(size)
    work = []
    for rank in range(size):
        plan = ring_plan(layout, layout, CAUSAL, rank=rank)
        work.append(sum(tile.pairs for step in plan.steps for tile in step.tiles))
    assert sum(work) == layout.pairs(layout, CAUSAL)
    assert max(work) <= (1 + limit) * sum(work) / size + 2


def test_whole_answers_stay_on_one_rank():
    layout = as_pack(Tree([-1, *[0] * 8], [4096, *[512] * 8])).layout(4)
    assert [len(set(layout.owner[layout.segment == s])) for s in range(9)] == [4, *[1] * 8]
    atoms = find_atoms(layout, layout, CAUSAL)
    assert int((atoms.rows * atoms.needed.sum(axis=1)).sum()) == 3 * 4096  # the prompt, to all others
    assert not atoms.needed[atoms.sequence > 0].any()


def test_trees_of_their_own_send_nothing():
    layout = as_pack(Tree([-1, 0, -1, 2], [50, 20, 50, 20])).layout(2)
    assert not find_atoms(layout, layout, CAUSAL).needed.any()


def test_what_takes_no_tree_says_so():
    tree = Tree([-1], [5])
    with pytest.raises(InvalidUsage, match="only packs of plain sequences"):
        local_cu_seqlens(tree, rank=0, size=1)
    with pytest.raises(InvalidUsage, match="the tokens of the pack are 5"):
        shard(torch.zeros(6), tree, rank=0, size=1)

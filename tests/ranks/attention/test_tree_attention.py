"""Attention on prefix trees equals dense attention on every trajectory by itself: forward and gradients.

HDPCOMM_TEST_TREES: how many random trees (default 24).
"""

import os
import random

import pytest
import torch

from tests.harness.tree_oracle import TreeCase, check, random_tree

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
TREES = int(os.environ.get("HDPCOMM_TEST_TREES", "24"))
SHARED = ([-1, 0, 0, 2, 2, 0, -1, -1, 7], [40, 17, 9, 1, 23, 30, 5, 3, 11])


def any_case(seed):
    rng = random.Random(seed)
    parents, lengths = random_tree(rng, segments=rng.randint(1, 12), longest=rng.choice([30, 300]))
    kv_heads, group = rng.choice([(1, 1), (1, 2), (2, 2), (2, 1), (1, 4)])
    size = 1 + seed % 4
    heads = kv_heads * group
    variants = ["auto", "ring", "gather"]
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        variants.append("ulysses")
    return TreeCase(
        size=size,
        parents=parents,
        lengths=lengths,
        heads=heads,
        kv_heads=kv_heads,
        dim=rng.choice([4, 8, 16]),
        dtype=rng.choice([torch.float64, torch.float32]),
        window=rng.choice([None, None, 1, 7, 50, 400]),
        sinks=rng.random() < 0.2,
        seed=seed,
        options={"variant": rng.choice(variants)},
    )


@pytest.mark.parametrize("seed", range(TREES))
def test_random_trees(seed):
    case = any_case(seed)
    check(case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "hybrid"])
def test_every_variant(variant, window):
    check(TreeCase(4, *SHARED, heads=4, kv_heads=2, window=window, options={"variant": variant}), 1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("parents", "lengths"),
    [([-1], [1]), ([-1], [50]), ([-1, 0], [1, 1]), ([-1] * 9, [4] * 9), ([-1, 0, 1, 2], [9, 1, 30, 2])],
    ids=["a token", "a sequence", "two tokens", "sequences", "a chain"],
)
def test_trees_without_branches(parents, lengths, size):
    check(TreeCase(size, parents, lengths), 1e-10)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_cpu_backend(backend):
    check(TreeCase(3, *SHARED, heads=4, kv_heads=2, window=9, options={"backend": backend}), 1e-10)
    check(TreeCase(3, *SHARED, heads=4, kv_heads=2, options={"backend": backend}), 1e-10)

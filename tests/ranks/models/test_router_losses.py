"""Losses of routers, over the layers of all stages, beside plain code on each sequence alone."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import SlicedSequence, as_pack
from hdpcomm.models.moe import AddedLosses, RouterLosses, RouterWeights, path_sums
from hdpcomm.plan import Tree
from hdpcomm.testing import run_threads

EXPERTS, TOP_K, LAYERS = 5, 2, 4
BOTH = RouterLosses(balance=0.7, z=0.2)
ADDED = {
    "joint": AddedLosses(RouterLosses(balance=1.0), 0, TOP_K, EXPERTS),
    "softmax": AddedLosses(BOTH, LAYERS, TOP_K, EXPERTS),
    "sigmoid": AddedLosses(BOTH, LAYERS, TOP_K, EXPERTS, sigmoid=True),
    "z": AddedLosses(RouterLosses(z=0.3), LAYERS, TOP_K, EXPERTS),
}
"""Joint: of the common means of all layers; else the mean over layers of the losses of each."""


def any_tree(rng, branches):
    """Segments in depth-first order, and the labels of the sequences that end with each; without branches, roots."""
    parents, path = [], []
    for segment in range(rng.randint(1, 7)):
        path = path[: rng.randint(0, len(path))] if branches else []
        parents.append(path[-1] if path else -1)
        path.append(segment)
    tree = Tree(parents, [rng.randint(1, 9) for _ in parents])
    leaf = tree.ends == np.arange(len(tree)) + 1
    return tree, [float(rng.randint(0, 3)) if end or rng.random() < 0.4 else 0.0 for end in leaf]


def plain(logits, tree, labels, last_tokens, added):
    """Losses and their derivative; ``logits``: [layers, tokens, experts]. The z-loss is that of the labels' tokens, the
    balance loss that of the ways that end with each segment."""
    logits = logits.clone().requires_grad_()
    losses, total = added.losses, 0.0
    for segment, count in enumerate(labels):
        own = logits[:, torch.from_numpy(tree.token_places(tree.path(segment)))]
        groups = [own.flatten(0, 1)] if not added.layers else list(own)
        for group in groups:
            scores = group.sigmoid() if added.sigmoid else group.exp()
            chosen = group.argsort(-1, descending=True)[:, :TOP_K]
            often = torch.stack([(chosen == expert).sum().double() for expert in range(EXPERTS)]) / len(group)
            shares = (scores / scores.sum(1, keepdim=True)).mean(0)
            total = total + losses.balance * count * EXPERTS * (often * shares).sum() / len(groups)
        squares = logits[:, last_tokens[segment]].exp().sum(-1).log().square()
        total = total + losses.z * count * squares.mean()
    total.backward()
    return total.item(), logits.grad


def in_stages(parts, weights, comm, cuts, added):
    """The loss of a pack's shard; ``parts``: logits of this rank by stage. What a stage gives leaves its graph, as a
    message does; returns the loss and what takes its gradient back through the stages."""
    carried, roots = None, []
    for place, logits in enumerate(parts):
        given = None if carried is None else carried.detach().requires_grad_()
        if given is not None:
            roots.append((carried, given))
        carried = added.total(list(logits), weights, cuts, comm, before=given, last=place == len(parts) - 1)

    def backward():
        if carried.requires_grad:
            carried.backward()
        for out, given in reversed(roots):
            if out.requires_grad:
                out.backward(given.grad)

    return carried.detach(), backward


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sequences", "tree", "sliced", "sliced tree"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_stages_of_any_pack(added, seed, kind, ranks):
    rng = random.Random(seed)
    tree, labels = any_tree(rng, "tree" in kind)
    if kind == "sliced":
        tree, labels = Tree([-1], [17]), [3.0]
    logits = torch.randn(LAYERS, tree.num_tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).double()
    bounds = sorted({0, tree.num_tokens, *rng.choices(range(tree.num_tokens), k=3)})
    stages = sorted(rng.choices(range(LAYERS + 1), k=rng.randint(0, 2)))  # some without a router
    branched = "tree" in kind
    loss, gradient = plain(logits, tree, labels, tree.rows, added)

    def rank():
        with hdp.init() as comm:
            whole = as_pack(tree if branched else torch.tensor([0, *tree.lengths.cumsum()]))
            sliced = SlicedSequence(bounds, tree)
            packs = [sliced.slice(k) for k in range(len(sliced))] if "sliced" in kind else [whole]
            given, found, total = [], torch.zeros_like(logits), 0.0
            for pack in packs:
                mine = pack.places(comm.rank, comm.size)
                own = logits[:, mine].clone().requires_grad_()
                first = comm.rank == 0 and pack.begins
                ends = torch.tensor(labels, dtype=torch.float64) * first if pack.branched else None
                by_token = torch.zeros(tree.num_tokens, dtype=torch.float64)
                by_token[tree.rows] = torch.tensor(labels, dtype=torch.float64)  # anywhere in a sequence
                weights = RouterWeights(by_token[mine], ends)
                parts = [own[a:b] for a, b in pairwise([0, *stages, LAYERS])]
                value, back = in_stages(parts, weights, comm, pack, added)
                total += value
                given.append((mine, own, back))
            for mine, own, back in reversed(given):
                back()
                found[:, mine] += own.grad
            comm.all_reduce(found)
            total = total.reshape(1)
            comm.all_reduce(total)
            return total.item(), found

    for value, found in run_threads(rank, ranks):
        assert value == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert float((found - gradient).norm()) <= 1e-10 * float(gradient.norm()) + 1e-13


@pytest.mark.parametrize("seed", range(5))
def test_sums_over_ways(seed):
    tree, _ = any_tree(random.Random(seed), branches=True)
    x = torch.randn(2, len(tree), 3, dtype=torch.float64)
    want = torch.stack([x[:, tree.path(segment)].sum(1) for segment in range(len(tree))], 1)
    assert torch.allclose(path_sums(x, tree.ends), want, rtol=0, atol=1e-12)

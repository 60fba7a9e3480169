"""Training on prefix trees gives the gradients of the separate trajectories, on any number of ranks, cut or not."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt
from hdpcomm.plan import POLICIES, ClusterSpec, CostModel, Planner, SequenceFragment, Tree
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import FixedPlanner
from tests.harness.plain_llama import router_losses, sequence_logits, sequence_loss

CONFIG = LlamaConfig(vocabulary=38, layers=2, hidden=32, heads=4, kv_heads=2, ffn=48)
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4, ring_step=1e-4)
LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}


def rollouts(seed=0):
    """Trajectories that share prefixes, and a few that share nothing; with loss weights."""
    rng = random.Random(seed)

    def text(length):
        return [rng.randrange(CONFIG.vocabulary) for _ in range(length)]

    prompt = text(40)
    turn = [*prompt, *text(13)]
    found = [[*prompt, *text(n)] for n in (20, 1, 7)] + [[*turn, *text(n)] for n in (9, 30)] + [prompt[:25], text(12)]
    weights = [[0.0] * min(25, len(t)) + [rng.choice([1.0, 0.5, 2.0]) for _ in t[25:]] for t in found]
    weights[-1] = [1.0] * 12
    return found, weights


@functools.cache
def wanted(dtype):
    """(loss, gradients) of the trajectories, each by itself, on one process."""
    trajectories, weights = rollouts()
    model = Llama(CONFIG, seed=3, dtype=dtype)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for tokens, factors in zip(trajectories, weights, strict=True):
        losses = [sequence_loss(leaves, CONFIG, torch.tensor(tokens[: n + 1])) for n in range(len(tokens))]
        total = total + sum(w * (b - a) for a, b, w in zip(losses, losses[1:], factors[1:], strict=False))
    loss = total / sum(sum(factors[1:]) for factors in weights)
    loss.backward()
    return loss.item(), {name: leaf.grad for name, leaf in leaves.items()}


def step(make_model, planner, items, fetch, **options):
    """(loss, gradients by name, metrics) of each rank."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = make_model()
            trainer = Trainer(
                model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm, max_grad_norm=None, **options
            )
            metrics = trainer.step(items, fetch)
            return metrics.loss, {name: p.grad.clone() for name, p in model.named_parameters()}, metrics

    return run_threads(rank, planner.cluster.ranks, timeout=60.0)


def compare(results, loss, gradients, limit):
    for found, grads, _ in results:
        assert abs(found - loss) <= limit * abs(loss)
        for name, gradient in gradients.items():
            error = float((grads[name] - gradient).norm() / gradient.norm())
            assert error <= limit, (name, error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_policies(ranks, policy, dtype):
    trajectories, weights = rollouts()
    folded = fold(trajectories, weights)
    planner = Planner(None, ClusterSpec(ranks, -(-180 // ranks)), policy, COST)
    results = step(
        lambda: Llama(CONFIG, seed=3, dtype=dtype),
        planner,
        [f.tree for f in folded],
        lambda i: (folded[i].tokens, folded[i].weights),
    )
    compare(results, *wanted(dtype), LIMIT[dtype])
    assert results[0][2].tokens == sum(f.tree.num_tokens for f in folded)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_trees_that_are_cut(ranks):
    """No rank holds the tree, so that prefixes are computed again; every token is trained once nevertheless."""
    trajectories, weights = rollouts()
    folded = fold(trajectories, weights)
    items = [f.tree for f in folded]
    planner = Planner(None, ClusterSpec(ranks, 100), "balanced", CostModel(1e-9, 1e-6, ring_step=10.0))
    plan = planner.plan(items)
    planner.validate(plan, items)
    assert len(plan.fragments) > 1
    results = step(
        lambda: Llama(CONFIG, seed=3, dtype=torch.float64),
        planner,
        items,
        lambda i: (folded[i].tokens, folded[i].weights),
    )
    compare(results, *wanted(torch.float64), 1e-10)
    assert results[0][2].tokens > sum(tree.num_tokens for tree in items)


@pytest.mark.parametrize("plan", ["whole", "cut", "slices"])
def test_losses_of_routers_share_the_weight_of_a_token_evenly(plan):
    """Also where trajectories give a token other weights, or one ends inside of another."""
    config = replace(CONFIG, experts=4, router_aux_loss=0.3, router_z_loss=0.05)
    balance, squares = replace(config, router_z_loss=0.0), replace(config, router_aux_loss=0.0)
    folded = fold(*rollouts())
    items = [f.tree for f in folded]
    model = Llama(config, seed=3, dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for f in folded:
        shares = f.weights.double() / torch.from_numpy(np.repeat(f.tree.trajectories, f.tree.lengths))
        for leaf in (f.tree.trajectories == 1).nonzero()[0].tolist():
            if f.tree.ends[leaf] != leaf + 1:
                continue
            places = torch.from_numpy(f.tree.token_places(f.tree.path(leaf)))
            tokens, own = f.tokens[places], shares[places]
            logits, routers = sequence_logits(weights, config, tokens)
            total = total + (own[1:] * nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")).sum()
            total = total + own[1:].sum() * router_losses(routers, balance, [0])
            for place, share in enumerate(own[1:]):
                total = total + share * router_losses(routers, squares, [place])
    loss = total / sum(float(f.weights.double()[f.tree.previous >= 0].sum()) for f in folded)
    loss.backward()
    planner = Planner(None, ClusterSpec(2, 90), "balanced", COST)
    if plan == "cut":
        planner = Planner(None, ClusterSpec(2, 100), "balanced", CostModel(1e-9, 1e-6, ring_step=10.0))
        assert len(planner.plan(items).fragments) > 1
    if plan == "slices":
        planner = FixedPlanner(2, 1, in_slices(2, items))
    results = step(
        lambda: Llama(config, seed=3, dtype=torch.float64), planner, items,
        lambda i: (folded[i].tokens, folded[i].weights),
    )  # fmt: skip
    compare(results, loss.item(), {name: leaf.grad for name, leaf in weights.items()}, 1e-10)


def in_slices(ranks, trees):
    """Every tree on all ranks, in slices that begin at branches and inside of segments."""
    everyone, made = tuple(range(ranks)), []
    for i, tree in enumerate(trees):
        bounds = sorted({*tree.rows.tolist(), tree.num_tokens // 2, tree.num_tokens})
        made += [(everyone, SequenceFragment(i, a, b)) for a, b in pairwise(bounds)]
    return made


def huggingface_model(dtype=torch.float32):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype)


@pytest.mark.parametrize("how", ["whole", "slices"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_huggingface_llama_equals_separate_trajectories(ranks, how):
    trajectories, weights = rollouts()
    plain = huggingface_model()
    total = torch.zeros(())
    for tokens, factors in zip(trajectories, weights, strict=True):
        ids = torch.tensor(tokens)
        losses = nn.functional.cross_entropy(plain(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        total = total + (losses * torch.tensor(factors[1:])).sum()
    loss = total / sum(sum(factors[1:]) for factors in weights)
    loss.backward()
    want = {"model." + name: p.grad for name, p in plain.named_parameters()}
    folded = fold(trajectories, weights)
    models = [adapt(huggingface_model(), check=False) for _ in range(ranks)]
    planner = Planner(None, ClusterSpec(ranks, -(-180 // ranks)), "balanced", COST)
    if how == "slices":
        planner = FixedPlanner(ranks, 1, in_slices(ranks, [f.tree for f in folded]))
    results = step(
        lambda: models.pop(),
        planner,
        [f.tree for f in folded],
        lambda i: (folded[i].tokens, folded[i].weights),
    )
    compare(results, loss.item(), want, 1e-5)


class Bag(nn.Module):
    """A model that gives logits, and leaves labels to the trainer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(CONFIG.vocabulary, 8)
        self.head = nn.Linear(8, CONFIG.vocabulary)

    def forward(self, tokens, *, positions, cu_seqlens, comm):  # noqa: ARG002
        return self.head(self.table(tokens))


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_model_that_gives_logits_and_a_mixed_batch(own_loss):
    """Trees beside plain sequences with labels of their own; default weights are the numbers of trajectories."""
    tree, tokens, sequence = Tree([-1, 0, 0], [5, 3, 2]), torch.arange(10), torch.tensor([3, 1, 4, 1, 5])
    labels = torch.tensor([1, -100, 1, 5, 30])
    plain = Bag()
    losses = [
        nn.functional.cross_entropy(plain.head(plain.table(t[:-1])), t[1:], reduction="sum")
        for t in (torch.arange(8), torch.tensor([0, 1, 2, 3, 4, 8, 9]))
    ]
    losses.append(nn.functional.cross_entropy(plain.head(plain.table(sequence)), labels, reduction="sum"))
    loss = sum(losses) / (7 + 6 + 4)
    loss.backward()

    def loss_of(logits, labels, weights=None):
        rows = -logits.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
        rows = torch.where(labels >= 0, rows, 0.0)
        return (rows if weights is None else rows * weights).sum()

    models = [Bag(), Bag()]  # not in the ranks' threads, which share torch's seed
    results = step(
        models.pop,
        Planner(None, ClusterSpec(2, 8), "static", COST),
        [tree, 5],
        lambda i: [tokens, (sequence, labels)][i],
        loss=loss_of if own_loss else None,
    )
    compare(results, loss.item(), {name: p.grad for name, p in plain.named_parameters()}, 1e-5)


def test_bad_trees_in_training():
    tree = Tree([-1, 0, 0], [5, 3, 2])

    def error(fetch):
        def rank():
            with hdp.init() as comm:
                model = Bag()
                planner = Planner(None, ClusterSpec(1, 20), "static", COST)
                trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm)
                with pytest.raises(InvalidUsage) as info:
                    trainer.step([tree], fetch)
                return str(info.value)

        return run_threads(rank, 1, timeout=30)[0]

    assert "fetch(0) gave tokens of shape (9,)" in error(lambda _: torch.arange(9))
    assert "gave weights of shape (10,) and torch.int64; the step was planned for a tree" in error(
        lambda _: (torch.arange(10), torch.arange(10))
    )
    assert "the weights of trees do not sum up to more than 0" in error(lambda _: (torch.arange(10), torch.zeros(10)))

"""Models with multi-head latent attention and linear layers on prefix trees, in the trainer: the gradients of the
separate trajectories by transformers' own model."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.data import fold
from hdpcomm.models import adapt
from hdpcomm.parallel import split_model
from hdpcomm.plan import ClusterSpec, CostModel, Planner, SequenceFragment
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer

pytest.importorskip("transformers", minversion="5.23")

from tests.harness.families import VOCABULARY, model_of
from tests.harness.pipelines import FixedPlanner

FAMILIES = ("deepseek-v3", "deepseek-v32", "qwen3-next", "kimi-linear", "mamba2")
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4, ring_step=1e-4)


def plain_model(family):
    router = {"output_router_logits": False} if family == "qwen3-next" else {}
    return model_of(family, **router)


def rollouts():
    """Trajectories with loss weights: two turns after one prompt, answers to each, and one that shares nothing."""
    rng = random.Random(5)

    def text(length):
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    prompt = text(33)
    turn = [*prompt, *text(13)]
    found = [[*prompt, *text(n)] for n in (20, 1)] + [[*turn, *text(n)] for n in (9, 30)] + [text(12)]
    weights = [[0.0] * min(20, len(t)) + [rng.choice([1.0, 0.5, 2.0]) for _ in t[20:]] for t in found]
    weights[-1] = [1.0] * 12
    return found, weights


def alone(family):
    """(loss, gradients): every trajectory by itself, on one process."""
    trajectories, weights = rollouts()
    model = plain_model(family)
    total = torch.zeros(())
    for tokens, factors in zip(trajectories, weights, strict=True):
        ids = torch.tensor(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        losses = nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total = total + (losses * torch.tensor(factors[1:])).sum()
    loss = total / sum(sum(factors[1:]) for factors in weights)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def wanted():
    return {family: alone(family) for family in FAMILIES}


def step(family, planner, folded, **options):
    """(loss, gradients by name) of each rank, with models adapted with ``options``."""
    models = [adapt(plain_model(family), check=False, **options) for _ in range(planner.cluster.ranks)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = models[comm.rank]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None)
            loss = trainer.step([f.tree for f in folded], lambda i: (folded[i].tokens, folded[i].weights)).loss
            return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return run_threads(rank, planner.cluster.ranks, timeout=60.0)


def compare(results, wanted, limit=1e-5):
    loss, gradients = wanted
    for found, grads in results:
        assert found == pytest.approx(loss, rel=limit)
        for name, gradient in gradients.items():
            wrong = float((grads["model." + name] - gradient).norm())
            assert wrong <= limit * float(gradient.norm()) + 1e-9, (name, wrong)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_separate_trajectories(family, ranks, wanted):
    folded = fold(*rollouts())
    planner = Planner(None, ClusterSpec(ranks, -(-130 // ranks)), "balanced", COST)
    compare(step(family, planner, folded), wanted[family])


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next"])
def test_all_ranks_share_every_tree_with_recomputation(family, wanted):
    folded = fold(*rollouts())
    planner = Planner(None, ClusterSpec(3, 44), "static", COST)
    plan = planner.plan([f.tree for f in folded])
    assert any(len(batch.ranks) == 3 for rank in range(3) for batch in plan.for_rank(rank))
    compare(step(family, planner, folded, recompute="full"), wanted[family])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_in_slices(family, recompute, ranks, wanted):
    folded = fold(*rollouts())
    big = max(range(len(folded)), key=lambda i: folded[i].tree.num_tokens)
    tree, everyone = folded[big].tree, tuple(range(ranks))
    bounds = [0, 20, 21, *tree.rows[2:].tolist(), tree.num_tokens - 1, tree.num_tokens]
    parts = [(everyone, SequenceFragment(big, a, b)) for a, b in pairwise(bounds)]
    rest = [((0,), (i,)) for i in range(len(folded)) if i != big]
    planner = FixedPlanner(ranks, 1, [*parts, *rest])
    compare(step(family, planner, folded, recompute=recompute), wanted[family])


def test_trees_that_are_cut(wanted):
    """Two fragments compute the prompt each, and its states with it."""
    folded = fold(*rollouts())
    planner = Planner(None, ClusterSpec(2, 84), "balanced", CostModel(1e-9, 1e-6, ring_step=10.0))
    assert planner.plan([f.tree for f in folded]).fragments
    compare(step("qwen3-next", planner, folded), wanted["qwen3-next"])


@pytest.mark.parametrize("send", ["latent", "kv"])
def test_whatever_mla_sends(send, wanted, monkeypatch):
    chosen = []
    monkeypatch.setattr("hdpcomm.attention.api.choose_send", lambda *_: chosen.append(send) or send)
    planner = Planner(None, ClusterSpec(3, 44), "static", COST)
    compare(step("deepseek-v3", planner, fold(*rollouts())), wanted["deepseek-v3"])
    assert chosen


def routed_alone(family):
    """(loss, gradients) of trajectories with transformers' loss of routers, each by itself; all labels count once."""
    model, total = model_of(family), 0.0
    labels = sum(len(tokens) - 1 for tokens in rollouts()[0])
    for tokens in rollouts()[0]:
        ids = torch.tensor(tokens)[None]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (len(tokens) - 1) / labels
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plans_of_routed(folded):
    """By name: on 1 to 3 ranks, cut, in slices, in stages."""
    big = max(range(len(folded)), key=lambda i: folded[i].tree.num_tokens)
    tree = folded[big].tree
    bounds = [0, 20, 21, *tree.rows[2:].tolist(), tree.num_tokens - 1, tree.num_tokens]
    rest = [((0,), (i,)) for i in range(len(folded)) if i != big]
    sliced = [*(((1, 0), SequenceFragment(big, a, b)) for a, b in pairwise(bounds)), *rest]
    cut = Planner(None, ClusterSpec(2, 84), "balanced", CostModel(1e-9, 1e-6, ring_step=10.0))
    assert cut.plan([f.tree for f in folded]).fragments
    return {
        **{f"{n} ranks": Planner(None, ClusterSpec(n, -(-130 // n)), "static", COST) for n in (1, 2, 3)},
        "cut": cut,
        "slices": FixedPlanner(2, 1, sliced),
        "stages": Planner(None, ClusterSpec(2, 65, pipeline=2), "balanced", COST),
        "slices in stages": FixedPlanner(2, 2, sliced),
    }


@pytest.mark.parametrize("plan", ["1 ranks", "2 ranks", "3 ranks", "cut", "slices", "stages", "slices in stages"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-next"])
def test_routers_losses_are_those_of_separate_trajectories(family, plan):
    folded = fold(rollouts()[0])
    planner = plans_of_routed(folded)[plan]
    stages, size = planner.cluster.pipeline, planner.cluster.ranks * planner.cluster.pipeline
    models = [adapt(model_of(family), check=False) for _ in range(size)]

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            mesh = hdp.Mesh(comm, pipeline=stages)
            parts = split_model(models[comm.rank], stages, check=False)[mesh.stage :: stages] if stages > 1 else []
            held = nn.ModuleList(parts or [models[comm.rank]])
            optimizer = torch.optim.SGD(held.parameters(), lr=0.0)
            trainer = Trainer(parts or held[0], optimizer, planner, mesh, max_grad_norm=None)
            loss = trainer.step([f.tree for f in folded], lambda i: (folded[i].tokens, folded[i].weights)).loss
            told = trainer.evaluate([f.tree for f in folded], lambda i: (folded[i].tokens, folded[i].weights))
            comm.all_reduce(told)
            assert float(told[0] / told[1]) == pytest.approx(loss, rel=1e-6)
            names = lambda part, name: part.name_in_model(name) if parts else name
            return loss, {names(part, n): p.grad for part in held for n, p in part.named_parameters()}

    loss, gradients = routed_alone(family)
    results = run_threads(rank, size, timeout=60.0)
    for found, own in results:
        assert found == pytest.approx(loss, rel=1e-5)
        for name, gradient in own.items():
            want = gradients[name.removeprefix("model.")]
            assert float((gradient - want).norm()) <= 1e-5 * float(want.norm()) + 1e-9, name
    assert {name for _, own in results for name in own} == {f"model.{name}" for name in gradients}

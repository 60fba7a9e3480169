"""Steps whose trees run in slices: the gradients of the trajectories one by one, on one process.

HDPCOMM_TEST_SLICED_PLANS: how many random plans (default 16).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import fold
from hdpcomm.models import Llama, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner, SequenceFragment, Tree, trees_of_prompts
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.mesh_shapes import DENSE
from tests.harness.pipelines import COST, SEED, FixedPlanner, gradients_of, trainer_of
from tests.harness.plain_losses import PLAIN, batch_loss
from tests.ranks.parallel import test_expert
from tests.ranks.train.test_log_prob_losses import BALANCED, answers
from tests.ranks.train.test_tree_training import CONFIG, rollouts, wanted

PLANS = int(os.environ.get("HDPCOMM_TEST_SLICED_PLANS", "16"))
FOLDED = fold(*rollouts())
ITEMS = [each.tree for each in FOLDED]
BIG = max(range(len(ITEMS)), key=lambda i: ITEMS[i].num_tokens)
TOKENS = ITEMS[BIG].num_tokens
AT_BRANCHES = (*ITEMS[BIG].rows.tolist(), TOKENS)


def slices(tree, bounds):
    return [SequenceFragment(tree, a, b) for a, b in pairwise(bounds)]


def plan_of(ranks, bounds):
    """The large tree on all ranks in slices, the other ones behind it."""
    everyone = tuple(reversed(range(ranks)))
    others = tuple(i for i in range(len(ITEMS)) if i != BIG)
    return [*((everyone, each) for each in slices(BIG, bounds)), ((ranks - 1,), others)]


def random_cuts(rng, length, most=9):
    count = rng.randint(2, min(length, most))
    return (0, *sorted(rng.sample(range(1, length), count - 1)), length)


def read(i):
    return FOLDED[i].tokens, FOLDED[i].weights


def one_step(planner, *, recompute="none", offload=False, dtype=torch.float64, fetch=read, items=ITEMS, **options):
    """(metrics, gradients by name and part) of each rank."""
    stages = planner.cluster.pipeline

    def rank():
        torch.set_num_threads(1)
        more = dict(options)
        with hdp.init() as comm:
            if stages > 1 or planner.cluster.tensor > 1:
                trainer = trainer_of(
                    comm, planner, CONFIG, dtype, recompute=recompute, offload=offload, max_grad_norm=None, **more
                )
                metrics = trainer.step(items, fetch)
                return metrics, gradients_of(trainer)
            model = Llama(CONFIG, seed=3, dtype=dtype)
            set_recompute(model, recompute)
            if offload:
                pool = PinnedPool(8 << 20, device="cpu")
                more["offload"] = ActivationOffload(pool, model, min_bytes=1, resident_layers=0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None, **more)
            metrics = trainer.step(items, fetch)
            return metrics, {(name, None): p.grad.clone() for name, p in model.named_parameters()}

    return run_threads(rank, planner.cluster.ranks * stages * planner.cluster.tensor, timeout=60.0)


def check(results, limit=1e-10):
    loss, gradients = wanted(torch.float64)
    seen = set()
    for metrics, found in results:
        assert metrics.loss == pytest.approx(loss, rel=limit)
        for (name, part), gradient in found.items():
            plain = "embedding.weight" if name not in gradients else name
            want = gradients[plain] if part is None else part.take(gradients[plain])
            assert float((gradient - want).norm()) <= limit * float(want.norm()), name
            seen.add(plain)
    assert seen == gradients.keys()


@pytest.mark.parametrize("how", ["plain", "recompute", "offload", "both"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("bounds", [(0, 30, 31, 80, TOKENS), AT_BRANCHES], ids=["anywhere", "at branches"])
def test_gradients_are_those_of_the_trajectories(ranks, stages, how, bounds):
    offload, recompute = how in ("offload", "both"), "full" if how in ("recompute", "both") else "none"
    planner = FixedPlanner(ranks, stages, plan_of(ranks, bounds), ratio=0.6 if offload else 0.0)
    check(one_step(planner, offload=offload, recompute=recompute))


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans(seed):
    """Trees in 2 to 9 slices, or whole, on any ranks."""
    rng = random.Random(seed)
    ranks, stages, tensor = rng.choice(
        [(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 1), (3, 2, 1), (1, 2, 2), (2, 1, 2)]
    )
    batches = []
    for i, tree in enumerate(ITEMS):
        group = tuple(rng.sample(range(ranks), rng.randint(1, ranks)))
        if i == BIG or rng.random() < 0.5:
            batches.append([(group, each) for each in slices(i, random_cuts(rng, tree.num_tokens))])
        else:
            batches.append([(group, (i,))])
    rng.shuffle(batches)
    planner = FixedPlanner(ranks, stages, [each for several in batches for each in several], tensor=tensor)
    check(one_step(planner, recompute=rng.choice(["none", "full", 1])))


def test_every_token_is_a_slice():
    small = min(range(len(ITEMS)), key=lambda i: ITEMS[i].num_tokens)
    others = [((0, 1), (i,)) for i in range(len(ITEMS)) if i != small]
    parts = [((0, 1), each) for each in slices(small, range(ITEMS[small].num_tokens + 1))]
    check(one_step(FixedPlanner(2, 1, [*parts, *others])))


@pytest.mark.parametrize("split", [False, True])
def test_split_backward_passes(split):
    check(one_step(FixedPlanner(2, 2, plan_of(2, (0, 50, 60, TOKENS)), split=split)))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parts_of_weights(zero):
    """Three steps give the losses of trees as a whole."""

    def losses(batches):
        def rank():
            torch.set_num_threads(1)
            with hdp.init() as comm:
                model = Llama(CONFIG, seed=3, dtype=torch.float64)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                trainer = Trainer(model, optimizer, FixedPlanner(2, 1, batches), comm, zero=zero)
                return [trainer.step(ITEMS, read).loss for _ in range(3)]

        return run_threads(rank, 2)

    found, want = losses(plan_of(2, (0, 30, 31, 80, TOKENS))), losses([((0, 1), tuple(range(len(ITEMS))))])
    for got, exact in zip(found, want, strict=True):
        assert got == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "config"),
    [("grpo", DENSE), ("gspo", DENSE), ("ppo", DENSE), ("grpo", BALANCED), ("ppo", BALANCED)],
)
def test_prompts_that_are_computed_once_in_slices(name, config, ranks):
    """Labels of a branch, and means over answers, do not see where slices begin."""
    made, prompts = answers()
    lengths = [len(each["tokens"]) for each in made]
    trees = trees_of_prompts(lengths, prompts)
    loss, gradients = batch_loss(Llama(config, seed=SEED, dtype=torch.float64), made, name)

    class Sliced(Planner):
        """Trees on all ranks in slices, the others in turn; plans without trees are long."""

        def plan(self, lengths):
            rest = [i for i, item in enumerate(lengths) if not isinstance(item, Tree)]
            batches = [((n % ranks,), (i,)) for n, i in enumerate(rest)]
            for i, tree in enumerate(lengths):
                if isinstance(tree, Tree):
                    bounds = sorted({0, *tree.rows[1:].tolist(), *(tree.rows[2:] - 1).tolist(), 3, tree.num_tokens})
                    batches += [(tuple(range(ranks)), SequenceFragment(i, a, b)) for a, b in pairwise(bounds)]
            made = FixedPlanner(ranks, 1, batches).plan(lengths)
            return replace(made, makespan_s=1.0 if len(rest) < len(lengths) else 2.0)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(config, seed=SEED, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            planner = Sliced(None, ClusterSpec(ranks, 1000), cost_model=COST)
            trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None, loss=PLAIN[name][0])
            metrics = trainer.step(lengths, made.__getitem__, trees=trees)
            told = trainer.evaluate(lengths, made.__getitem__, trees=trees)
            comm.all_reduce(told)
            return metrics, {key: p.grad for key, p in model.named_parameters()}, told

    for metrics, found, told in run_threads(rank, ranks):
        assert metrics.tokens < sum(lengths), "no tree ran"
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        assert float(told[0] / told[1]) == pytest.approx(loss, rel=1e-10)
        for key, gradient in gradients.items():
            assert float((found[key] - gradient).norm()) <= 1e-10 * float(gradient.norm()), key


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 2)])
def test_plans_of_the_planner(ranks, stages):
    """Also of trees that were cut into fragments."""
    kinds = set()
    for capacity, ring_step in ((180 // ranks, 1e-6), (100 // ranks, 10.0)):
        cost = CostModel(1e-6, 1e-5, ring_step=ring_step)
        planner = Planner(None, ClusterSpec(ranks, capacity, pipeline=stages), cost_model=cost, slices=8)
        plan = planner.plan(ITEMS)
        kinds |= {each.sequence >= len(ITEMS) for each in plan.slices.values()}
        check(one_step(planner))
    assert False in kinds
    if ranks == 1:
        assert True in kinds


def test_a_tree_that_fits_the_ranks_no_other_way():
    memory, cost = MemoryModel(30, kept=0.1), CostModel(1e-6, 1e-5)
    planner = Planner(None, ClusterSpec(2, 30), cost_model=cost, memory=memory, slices=16)
    assert BIG in {each.sequence for each in planner.plan(ITEMS).slices.values()}
    check(one_step(planner))


@pytest.mark.parametrize("how", ["plain", "recompute", "offload"])
@pytest.mark.parametrize(("ranks", "expert"), [(2, 2), (4, 2)])
def test_expert_ranks(ranks, expert, how):
    """Gradients are those of the trajectories as plain sequences on the same ranks."""
    config = replace(test_expert.CONFIG, router_aux_loss=0.3)
    trajectories = rollouts()[0]
    trajectories.pop(-2)  # a prefix of others, whose labels a tree's weights do not tell from theirs
    folded = fold(trajectories)
    trees, alone = [f.tree for f in folded], [torch.tensor(tokens) for tokens in trajectories]
    big = max(range(len(trees)), key=lambda i: trees[i].num_tokens)
    pair = (ranks - 1, 0)
    batches = [(pair, each) for each in slices(big, (0, 30, 31, 80, trees[big].num_tokens))]
    batches += [((ranks - 2,), (i,)) for i in range(len(trees)) if i != big]

    def gradients(items, fetch, batches, **options):
        def rank():
            torch.set_num_threads(1)
            with hdp.init() as comm:
                planner = FixedPlanner(ranks, 1, batches, ratio=0.6 if how == "offload" else 0.0)
                trainer = test_expert.trainer_of(
                    comm, planner, config, torch.float64, expert, max_grad_norm=None, **options
                )
                loss = trainer.step(items, fetch).loss
                return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

        return run_threads(rank, ranks)

    more = {"recompute": "full" if how == "recompute" else "none", "offload": how == "offload"}
    found = gradients(trees, lambda i: (folded[i].tokens, folded[i].weights), batches, **more)
    lengths = [len(each) for each in alone]
    want = gradients(lengths, alone.__getitem__, [((i % ranks,), (i,)) for i in range(len(lengths))])
    for (got, own), (loss, theirs) in zip(found, want, strict=True):
        assert got == pytest.approx(loss, rel=1e-10)
        for name, gradient in theirs.items():
            assert float((own[name] - gradient).norm()) <= 1e-10 * float(gradient.norm()) + 1e-14, name

"""Steps whose long sequences run in slices, of models with experts: routers' losses are those of whole sequences, and
ranks that share experts run slices of several sequences at the same time."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import SlicedSequence
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama
from hdpcomm.parallel import expert_parallel, split_model
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import CONFIG, SEED, FixedPlanner, one_step, tokens_of, wanted
from tests.ranks.parallel import test_expert
from tests.ranks.parallel.test_sliced import LENGTHS, PLANS, any_plan, check, plain_step, plan_of, slices

SPARSE = dataclasses.replace(
    CONFIG, vocabulary=62, ffn=24, experts=4, top_k=2, router_aux_loss=0.05, router_z_loss=0.02
)
UNTIED = dataclasses.replace(SPARSE, tied_embeddings=False)


def run(planner, dtype=torch.float64, **options):
    """On all ranks: (metrics, gradients, ...)."""
    cluster = planner.cluster
    if cluster.pipeline == cluster.tensor == 1:
        return run_threads(lambda: plain_step(planner, dtype, SPARSE, **options), cluster.ranks)
    ranks = cluster.ranks * cluster.pipeline * cluster.tensor
    return run_threads(lambda: one_step(planner, SPARSE, dtype, LENGTHS, **options), ranks)


@pytest.mark.parametrize("how", ["plain", "recompute", "fp32"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 4)])
def test_routers_losses(ranks, stages, how):
    dtype = torch.float32 if how == "fp32" else torch.float64
    results = run(
        FixedPlanner(ranks, stages, plan_of(ranks)), dtype, recompute="full" if how == "recompute" else "none"
    )
    check(results, dtype, SPARSE)
    assert results[0][0].expert_tokens_mean == sum(LENGTHS) * SPARSE.top_k / SPARSE.experts


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans(seed):
    ranks, stages, tensor, batches = any_plan(seed)
    planner = FixedPlanner(ranks, stages, batches, tensor=tensor, split=stages > 1 and seed % 2 == 0)
    check(run(planner, recompute=random.Random(seed).choice(["none", "full", 1])), torch.float64, SPARSE)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (3, 1), (1, 2)])  # all take rings
def test_one_slice_is_the_sequence(ranks, stages):
    """To the last bit."""
    everyone, rest = tuple(reversed(range(ranks))), [((0,), (1, 2, 3)), ((ranks - 1,), (4, 5, 6, 7))]
    sliced = run(FixedPlanner(ranks, stages, [(everyone, each) for each in slices(0, (0, 110))] + rest))
    whole = run(FixedPlanner(ranks, stages, [(everyone, (0,)), *rest]))
    for (got, found, *_), (want, of_whole, *_) in zip(sliced, whole, strict=True):
        assert got.loss == want.loss
        assert found.keys() == of_whole.keys()
        for name, gradient in of_whole.items():
            assert torch.equal(found[name], gradient), name


def test_a_loop_of_ones_own():
    """The last slice gives the loss of the sequence; one that comes before the others have run is refused."""
    tokens = tokens_of(LENGTHS, SPARSE)[0]
    labels = torch.cat((tokens[1:], torch.tensor([-100])))
    with hdp.init() as comm:
        model = Llama(SPARSE, seed=SEED, dtype=torch.float64)

        def loss(pack, first, end):
            places = {"positions": torch.arange(first, end), "cu_seqlens": pack, "comm": comm}
            return model(tokens[first:end], **places, labels=labels[first:end])

        whole = loss(torch.tensor([0, 110]), 0, 110)
        sliced = SlicedSequence([0, 30, 31, 110])
        found = [loss(sliced.slice(k), a, b) for k, (a, b) in enumerate([(0, 30), (30, 31), (31, 110)])]
        assert sum(found).item() == pytest.approx(whole.item(), rel=1e-12)
        sliced = SlicedSequence([0, 30, 31, 110])
        first = loss(sliced.slice(0), 0, 30)
        with pytest.raises(InvalidUsage, match="1 of its 3 slices have run: run the forward passes of all slices"):
            first.backward()


CROSSED = [
    *(((0, 2), each) for each in slices(0, (0, 20, 21, 60, 90, 110))),
    *(((3,), each) for each in slices(3, (0, 30, 33))),
    *(((1,), each) for each in slices(6, (0, 10, 20, 30, 40))),
    ((1, 3), (1, 2)),
    *(((3, 0), each) for each in slices(5, (0, 9, 18))),
    ((0,), (4,)),
    ((2,), (7,)),
]
"""Sequences in 5, 2, 4 and 2 slices at the same time on ranks that share experts, and rings across their groups."""
PAIR = [
    *(((0,), each) for each in slices(0, (0, 50, 51, 110))),
    *(((1,), each) for each in slices(3, (0, 5, 6, 20, 30, 33))),
    ((1,), (1, 2)),
    *(((1, 0), each) for each in slices(6, (0, 40))),
    ((0,), (4, 5)),
    ((1,), (7,)),
]


def run_with_experts(planner, expert, dtype=torch.float64, **options):
    """On all ranks, each of them with some of the experts: (metrics, gradients, bytes that were offloaded)."""
    cluster = planner.cluster
    if cluster.pipeline > 1:
        step = lambda: test_expert.one_step_of_pipelines(planner, UNTIED, LENGTHS, **options)
    else:
        step = lambda: test_expert.one_step(planner, test_expert.CONFIG, dtype, expert, LENGTHS, **options)
    return run_threads(step, cluster.ranks * cluster.pipeline * cluster.tensor)


@pytest.mark.parametrize("how", ["plain", "recompute", "offload", "fp32"])
@pytest.mark.parametrize(
    ("batches", "ranks", "expert"), [(PAIR, 2, 2), (CROSSED, 4, 2), (CROSSED, 4, 4), (plan_of(4), 4, 2)]
)
def test_expert_ranks(batches, ranks, expert, how):
    planner = FixedPlanner(ranks, 1, batches, ratio=0.6 if how == "offload" else 0.0)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    dtype = torch.float32 if how == "fp32" else torch.float64
    results = run_with_experts(planner, expert, dtype, **more)
    test_expert.check(results, test_expert.CONFIG, dtype, LENGTHS)


@pytest.mark.parametrize("how", ["plain", "recompute", "offload", "split"])
@pytest.mark.parametrize(("batches", "ranks", "chunks"), [(PAIR, 2, 1), (PAIR, 2, 2), (CROSSED, 4, 1), (CROSSED, 4, 2)])
def test_expert_ranks_in_pipelines(batches, ranks, chunks, how):
    ratio, split = 0.6 if how == "offload" else 0.0, how == "split"
    planner = FixedPlanner(ranks, 2, batches, ratio=ratio, chunks=chunks, split=split)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    results = run_with_experts(planner, 2, **more)
    test_expert.check(results, UNTIED, torch.float64, LENGTHS)


@pytest.mark.parametrize("stages", [1, 2])
def test_one_slice_is_the_sequence_on_expert_ranks(stages):
    rest = [((1,), (3, 6)), ((0,), (1, 2)), ((1,), (4, 5, 7))]
    plans = [((0,), each) for each in slices(0, (0, 110))] + rest, [((0,), (0,)), *rest]
    sliced, whole = (run_with_experts(FixedPlanner(2, stages, batches), 2) for batches in plans)
    for (got, found, _), (want, of_whole, _) in zip(sliced, whole, strict=True):
        assert got.loss == want.loss
        assert found.keys() == of_whole.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in of_whole.items())


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans_on_expert_ranks(seed):
    ranks, stages, tensor = random.Random(seed).choice([(2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1)])
    batches = any_plan(seed, ranks)[3]
    results = run_with_experts(FixedPlanner(ranks, stages, batches, tensor=tensor), 2)
    config = UNTIED if stages > 1 else test_expert.CONFIG
    # the blocks of tensor ranks are filled up
    rows = results[0][0].expert_tokens_mean * config.experts / config.top_k
    assert rows == sum(LENGTHS) if tensor == 1 else rows >= sum(LENGTHS)
    test_expert.check(results, config, torch.float64, LENGTHS, rows=rows)


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_of_the_planner(stages):
    cluster = ClusterSpec(2, 30 if stages == 1 else 60, pipeline=stages, expert=2)
    memory = MemoryModel(cluster.capacity, kept=0.1)
    planner = Planner(None, cluster, cost_model=CostModel(1e-6, 1e-5), memory=memory, slices=8)
    assert 0 in {each.sequence for each in planner.plan(LENGTHS).slices.values()}
    config = UNTIED if stages > 1 else test_expert.CONFIG
    test_expert.check(run_with_experts(planner, 2), config, torch.float64, LENGTHS)


def test_evaluation():
    """Each slice runs once, and the routers' losses are those of whole sequences."""

    def rank():
        sequences = tokens_of(LENGTHS, test_expert.CONFIG)
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = test_expert.trainer_of(comm, FixedPlanner(4, 1, CROSSED), test_expert.CONFIG, torch.float64, 2)
            total = trainer.evaluate(LENGTHS, sequences.__getitem__)
            comm.all_reduce(total)
            return float(total[0] / total[1])

    loss, _ = wanted(test_expert.CONFIG, torch.float64, LENGTHS)
    assert run_threads(rank, 4) == pytest.approx([loss] * 4, rel=1e-10)


def trainer_of(comm, planner, zero):
    if planner.cluster.pipeline == 1:
        return test_expert.trainer_of(comm, planner, UNTIED, torch.float64, 2, lr=0.3, zero=zero)
    mesh = Mesh(comm, pipeline=2, expert=2)
    stages = split_model(Llama(UNTIED, seed=SEED + 10 * mesh.hdp_rank, dtype=torch.float64), 2)[mesh.stage :: 2]
    for stage in stages:
        expert_parallel(stage, mesh)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.3)
    return Trainer(stages, optimizer, planner, mesh, zero=zero)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parts_of_weights(zero, stages):
    """Gradients leave in the order in which backward passes end, those without tokens among them."""
    whole = [((0, 2), (0,)), ((3,), (1, 2, 3)), ((1,), (4, 5)), ((2,), (6, 7))]

    def losses(batches, zero):
        def rank():
            sequences = tokens_of(LENGTHS, UNTIED)
            torch.set_num_threads(1)
            with hdp.init() as comm:
                made = trainer_of(comm, FixedPlanner(4, stages, batches), zero)
                return [round(made.step(LENGTHS, sequences.__getitem__).loss, 9) for _ in range(3)]

        return run_threads(rank, 4 * stages)

    found = losses(CROSSED, zero)
    assert found == losses(whole, 1)
    assert found[0][0] > found[0][2]

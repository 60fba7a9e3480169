"""Steps whose long sequences run in slices, of models with experts: routers' losses are those of whole sequences."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import SlicedSequence
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama
from hdpcomm.testing import run_threads
from tests.harness.pipelines import CONFIG, SEED, FixedPlanner, one_step, tokens_of
from tests.ranks.parallel.test_sliced import LENGTHS, PLANS, any_plan, check, plain_step, plan_of, slices

SPARSE = dataclasses.replace(
    CONFIG, vocabulary=62, ffn=24, experts=4, top_k=2, router_aux_loss=0.05, router_z_loss=0.02
)


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
    for (got, found, *_), (want, wanted, *_) in zip(sliced, whole, strict=True):
        assert got.loss == want.loss
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
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

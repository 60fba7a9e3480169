"""Experts that tokens took once are taken again, on any ranks: losses and gradients of plain code that is told them."""

from __future__ import annotations

import functools

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, set_recompute
from hdpcomm.plan import ClusterSpec, MemoryModel, Planner, Tree
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.mesh_shapes import DENSE, Shape, trainer_of
from tests.harness.pipelines import COST, SEED
from tests.harness.plain_llama import sequence_logits
from tests.harness.plain_losses import PLAIN, batch_loss, log_probs_of
from tests.ranks.train.test_log_prob_losses import EXPERTS, LENGTHS, descend, groups_of, rollouts, same

SHAPES = {
    "one": Shape(1, config=EXPERTS),
    "hdp 3": Shape(3, config=EXPERTS),
    "ep 2": Shape(2, expert=2, config=EXPERTS),
    "tp 2": Shape(2, tensor=2, config=EXPERTS),
    "pp 2": Shape(2, pipeline=2, config=EXPERTS),
    "pp 2 tp 2 ep 2": Shape(2, pipeline=2, tensor=2, expert=2, config=EXPERTS),
}


def routes_for(lengths, seed=4, layers=EXPERTS.layers, dtype=torch.uint8):
    """Two different experts for each token and layer, whatever its router wants."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(length, layers, EXPERTS.experts, generator=generator).topk(EXPERTS.top_k).indices.to(dtype)
        for length in lengths
    ]


@functools.cache
def routed():
    return [{**each, "routes": own} for each, own in zip(rollouts(), routes_for(LENGTHS), strict=True)]


@functools.cache
def wanted(name):
    return batch_loss(Llama(EXPERTS, seed=SEED, dtype=torch.float64), routed(), name)


def test_the_oracle_sees_the_routes():
    model = Llama(EXPERTS, seed=SEED, dtype=torch.float64)
    assert abs(wanted("sft")[0] - batch_loss(model, rollouts(), "sft")[0]) > 1e-7


def check(shape, name, prepare=lambda _: None, **options):
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            loss = PLAIN[name][0]
            trainer = trainer_of(comm, shape, optimizer=descend, norm=None, capacity=128, loss=loss, **options)
            prepare(trainer)
            before = {key: x.clone() for key, x in trainer.state_dict()["model"].items()}
            metrics = trainer.step(LENGTHS, lambda i: routed()[i], groups=groups_of(name))
            after = trainer.state_dict()["model"]
            # Passes that only give a loss its log-probabilities train nothing, and do not count; rows that fill up a
            # tensor rank's block do.
            even = sum(LENGTHS) * EXPERTS.top_k / EXPERTS.experts
            assert metrics.expert_tokens_mean == pytest.approx(even, rel=0.05)
            return metrics.loss, {key: before[key] - after[key] for key in before}

    for found, changed in run_threads(rank, shape.ranks):
        assert found == pytest.approx(wanted(name)[0], rel=1e-10)
        same(changed, wanted(name)[1])


@pytest.mark.parametrize("name", ["sft", "grpo", "dpo"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_plain_code_that_is_told_the_routes(shape, name):
    check(SHAPES[shape], name)


@pytest.mark.parametrize("shape", ["hdp 3", "ep 2", "pp 2"])
def test_layers_that_run_again_take_them_again(shape):
    def recompute(trainer):
        for chunk in trainer.runner.passes.chunks:
            set_recompute(getattr(chunk, "model", chunk), "full")

    check(SHAPES[shape], "grpo", recompute)


def test_with_parts_of_weights():
    check(SHAPES["hdp 3"], "grpo", zero=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_of_given_routes_and_the_routes_that_were_taken(shape):
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, SHAPES[shape], capacity=128)
            own, told = [], []
            plain = trainer.log_probs(LENGTHS, lambda i: rollouts()[i], routes=own)[0]
            given = trainer.log_probs(LENGTHS, lambda i: routed()[i], routes=told)[0]
            again = trainer.log_probs(LENGTHS, lambda i: {**rollouts()[i], "routes": own[i]})[0]
            return plain, own, given, told, again

    weights = dict(Llama(EXPERTS, seed=SEED, dtype=torch.float64).named_parameters())
    for plain, own, given, told, again in run_threads(rank, SHAPES[shape].ranks):
        for i, each in enumerate(routed()):
            tokens, labels = each["tokens"], each["labels"]
            scores = sequence_logits(weights, EXPERTS, tokens)[1]
            best = torch.stack([each.sort(descending=True).indices[:, :2] for each in scores], dim=1)
            assert own[i].dtype == torch.uint8
            assert torch.equal(own[i].long(), best)
            assert torch.equal(told[i], each["routes"])
            assert torch.equal(again[i], plain[i])
            values, _, where = log_probs_of(weights, EXPERTS, tokens, labels, routes=each["routes"])
            assert torch.allclose(given[i][where], values, rtol=0, atol=1e-12)


def test_results_at_one_rank():
    def rank():
        with hdp.init() as comm:
            trainer, routes = trainer_of(comm, SHAPES["ep 2"], capacity=128), []
            trainer.log_probs(LENGTHS, lambda i: rollouts()[i], root=1, routes=routes)
            return [len(each) for each in routes]

    assert run_threads(rank, 2) == [[], list(LENGTHS)]


def one_rank(fetch, lengths=LENGTHS, ranks=1, planner=None, config=EXPERTS, loss=None):
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(config, seed=SEED, dtype=torch.float64)
            own = planner or Planner(None, ClusterSpec(ranks, 128), cost_model=COST)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            metrics = Trainer(model, optimizer, own, comm, max_grad_norm=None, loss=loss).step(lengths, fetch)
            return metrics, {name: p.grad for name, p in model.named_parameters()}

    return run_threads(rank, ranks)


def plain_gradients(sequences, routes):
    """(mean loss of next tokens, gradients), each sequence with its routes."""
    weights = {
        name: p.detach().clone().requires_grad_()
        for name, p in Llama(EXPERTS, seed=SEED, dtype=torch.float64).named_parameters()
    }
    total, labels = torch.zeros((), dtype=torch.float64), 0
    for tokens, own in zip(sequences, routes, strict=True):
        logits = sequence_logits(weights, EXPERTS, tokens, own)[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        labels += len(tokens) - 1
    (total / labels).backward()
    return float(total.detach()) / labels, {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_next_tokens_and_a_sequence_over_all_ranks(dtype):
    lengths = (70, 9, 1, 14)
    sequences = [torch.randint(EXPERTS.vocabulary, (length,)) for length in lengths]
    routes = routes_for(lengths, dtype=dtype)
    loss, gradients = plain_gradients(sequences, routes)
    planner = Planner(None, ClusterSpec(3, 30), cost_model=COST)
    fetch = lambda i: {"tokens": sequences[i], "routes": routes[i]}
    for metrics, found in one_rank(fetch, lengths, 3, planner):
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        same(found, gradients)


def test_tokens_without_a_route_take_their_own_as_the_last_one_of_vllm():
    """A router chooses for rows with -1, and for a last row that is not there."""
    lengths = (40, 9, 1)
    sequences = [torch.randint(EXPERTS.vocabulary, (length,)) for length in lengths]
    given = [each.to(torch.int16) for each in routes_for(lengths)]
    for each in given:
        each[::3] = -1
        each[1::5, 0, 1] = -1
    weights = dict(Llama(EXPERTS, seed=SEED, dtype=torch.float64).named_parameters())

    def own(tokens, routes):
        """The experts that are taken: the scores of a layer follow from the routes of those before it."""
        routes = torch.cat((routes[:-1], torch.full_like(routes[:1], -1)))
        for layer in range(EXPERTS.layers):
            scores = sequence_logits(weights, EXPERTS, tokens, routes.clamp(min=0))[1][layer]
            best = scores.sort(descending=True).indices[:, :2].to(routes.dtype)
            routes[:, layer] = torch.where((routes[:, layer] < 0).any(1, keepdim=True), best, routes[:, layer])
        return routes

    taken = [own(*each) for each in zip(sequences, given, strict=True)]
    loss, gradients = plain_gradients(sequences, taken)
    planner = Planner(None, ClusterSpec(2, 30), cost_model=COST)
    for metrics, found in one_rank(lambda i: {"tokens": sequences[i], "routes": given[i][:-1]}, lengths, 2, planner):
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        same(found, gradients)


def test_slices():
    """Each slice runs twice, and has routes of its own tokens."""
    lengths = (70, 9)
    sequences, routes = [torch.randint(EXPERTS.vocabulary, (length,)) for length in lengths], routes_for(lengths)
    loss, gradients = plain_gradients(sequences, routes)
    memory = MemoryModel(30, kept=0.1)
    planner = Planner(None, ClusterSpec(2, 30), cost_model=COST, memory=memory, slices=8)
    assert planner.plan(lengths).slices
    fetch = lambda i: {"tokens": sequences[i], "routes": routes[i]}
    for metrics, found in one_rank(fetch, lengths, 2, planner):
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        same(found, gradients)


def test_trees():
    """Tokens that trajectories share have one route."""
    prompt = torch.randint(EXPERTS.vocabulary, (9,))
    answers = [torch.randint(EXPERTS.vocabulary, (n,)) for n in (6, 3)]
    sequences = [torch.cat((prompt, answer)) for answer in answers]
    tree = Tree([-1, 0, 0], [9, 6, 3])
    tokens = torch.cat((prompt, *answers))
    (routes,) = routes_for([18])
    own = [torch.cat((routes[:9], routes[9:15])), torch.cat((routes[:9], routes[15:]))]
    loss, gradients = plain_gradients(sequences, own)
    for ranks in (1, 2):
        planner = Planner(None, ClusterSpec(ranks, 12 if ranks == 2 else 20), cost_model=COST)
        for metrics, found in one_rank(lambda _: {"tokens": tokens, "routes": routes}, [tree], ranks, planner):
            assert metrics.loss == pytest.approx(loss, rel=1e-10)
            same(found, gradients)


def test_what_is_given_is_checked():
    def step(change, **more):
        with pytest.raises(InvalidUsage) as error:
            one_rank(
                lambda i: {**rollouts()[i], "routes": change(routed()[i]["routes"], i)}, loss=PLAIN["sft"][0], **more
            )
        return str(error.value)

    assert "; expected the numbers of experts [" in step(lambda x, _: x[2:])
    assert "torch.float32; expected the numbers of experts" in step(lambda x, _: x.float())
    assert "numbers from -2 to 1; the model" in step(lambda x, _: x.long() - 2)
    assert "numbers from 1 to 4; the model has 2 layers with routers" in step(lambda x, _: x + 1)
    assert "routes are of 3 layers" in step(lambda x, _: x[:, [0, 1, 0]])
    assert "and 1 experts a token" in step(lambda x, _: x[..., :1])
    assert "give the same ones for all sequences" in step(lambda x, i: x if i else None)
    assert "give all of them, for the same layers" in step(lambda x, i: x if i else x[:, :1])
    assert "which has no routers that are known" in step(lambda x, _: x, config=DENSE)

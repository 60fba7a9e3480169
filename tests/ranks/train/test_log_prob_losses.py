"""Losses of log-probabilities under any plan equal those of plain code on each trajectory alone, in one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import fold
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, PlannedStep, Planner, TrajectoryTree, Tree, trees_of_prompts
from hdpcomm.testing import run_threads
from hdpcomm.train import IGNORE, GroupLoss, TokenLoss, Trainer, rollout
from hdpcomm.train.losses import dapo, dpo, grpo, gspo, ppo
from tests.harness.mesh_shapes import DENSE, SHAPES, Shape, trainer_of
from tests.harness.pipelines import COST, SEED
from tests.harness.plain_losses import PLAIN, batch_loss, log_probs_of

# (prompt, answer): an answer longer than the ranks' capacity, one of one token, an empty one.
SIZES = ((5, 70), (5, 9), (5, 1), (5, 0), (12, 14), (12, 3), (1, 20), (30, 2))
LENGTHS = tuple(a + b for a, b in SIZES)
PAIRS = (0, 0, 1, 1, 2, 2, 3, 3)


@functools.cache
def rollouts():
    generator = torch.Generator().manual_seed(9)
    made = []
    for i, (prompt, answer) in enumerate(SIZES):
        tokens = torch.randint(DENSE.vocabulary, (prompt + answer,), generator=generator)
        old = -4.2 + 0.4 * torch.randn(answer, generator=generator, dtype=torch.float64)
        advantage = 0.0 if i == 4 else float(torch.randn((), generator=generator))
        made.append(
            rollout(
                tokens[:prompt],
                tokens[prompt:],
                old_log_probs=old,
                ref_log_probs=old + 0.2 * torch.randn(answer, generator=generator, dtype=torch.float64),
                advantages=torch.tensor(advantage, dtype=torch.float64),
            )
        )
    return made


@functools.cache
def wanted(config, name):
    return batch_loss(Llama(config, seed=SEED, dtype=torch.float64), rollouts(), name)


def groups_of(name):
    return PAIRS if PLAIN[name][0].function.__class__.__name__ == "_Preference" else None


def descend(module):
    return torch.optim.SGD(module.parameters(), lr=1.0)


def step(shape, name, **options):
    """On each rank: the loss of a step and, by what it changed, its gradient."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(
                comm, shape, optimizer=descend, norm=None, capacity=128, loss=PLAIN[name][0], **options
            )
            before = {key: x.clone() for key, x in trainer.state_dict()["model"].items()}
            metrics = trainer.step(LENGTHS, lambda i: rollouts()[i], groups=groups_of(name))
            after = trainer.state_dict()["model"]
            return metrics.loss, {key: before[key] - after[key] for key in before}

    return run_threads(rank, shape.ranks)


def same(found, gradients, prefix=""):
    for key, gradient in gradients.items():
        assert (found[prefix + key] - gradient).norm() <= 1e-10 * (1e-3 + gradient.norm()), key


def check(shape, name, **options):
    loss, gradients = wanted(shape.config, name)
    for found, changed in step(shape, name, **options):
        assert found == pytest.approx(loss, rel=1e-10)
        same(changed, gradients)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(PLAIN))
def test_losses_and_gradients_are_those_of_plain_code(name, ranks):
    check(Shape(ranks), name)


DENSE_SHAPES = [name for name, shape in SHAPES.items() if shape.config is DENSE]


@pytest.mark.parametrize("shape", DENSE_SHAPES)
@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "dpo"])
def test_on_meshes(shape, name):
    check(SHAPES[shape], name)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["ppo", "gspo", "dpo"])
def test_with_parts_of_weights(name, zero):
    check(Shape(3), name, zero=zero)
    check(SHAPES["hdp 2 pp 2"], name, zero=zero)


def test_log_probabilities_on_every_mesh():
    model = Llama(DENSE, seed=SEED, dtype=torch.float64)
    weights = dict(model.named_parameters())
    plain = [log_probs_of(weights, DENSE, each["tokens"], each["labels"], 0.7) for each in rollouts()]

    def rank(shape, root):
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape, capacity=128)
            return trainer.log_probs(LENGTHS, lambda i: rollouts()[i], entropy=True, temperature=0.7, root=root)

    for name, root in zip((*DENSE_SHAPES, "one"), itertools.cycle((None, 1)), strict=False):
        shape = SHAPES.get(name, Shape(1))
        root = None if shape.ranks == 1 else root
        for place, (log_probs, entropies) in enumerate(run_threads(rank, shape.ranks, shape, root)):
            if root not in (None, place):
                assert log_probs == entropies == []
                continue
            for i, (values, theirs, where) in enumerate(plain):
                assert log_probs[i].dtype == torch.float64
                assert torch.allclose(log_probs[i][where], values, rtol=0, atol=1e-12)
                assert torch.allclose(entropies[i][where], theirs, rtol=0, atol=1e-12)
                rest = rollouts()[i]["labels"] == IGNORE
                assert not log_probs[i][rest].any()
                assert not entropies[i][rest].any()


EXPERTS = LlamaConfig(
    vocabulary=64, layers=2, hidden=16, heads=2, kv_heads=2, ffn=12, experts=4, top_k=2,
    router_aux_loss=0.0, router_z_loss=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [Shape(2, expert=2, config=EXPERTS), Shape(2, pipeline=2, tensor=2, expert=2, config=EXPERTS)],
    ids=["ep 2", "pp 2 tp 2 ep 2"],
)
@pytest.mark.parametrize("name", ["ppo", "gspo", "dpo"])
def test_with_experts_on_other_ranks(shape, name):
    check(shape, name)


BALANCED = dataclasses.replace(EXPERTS, router_aux_loss=0.3, router_z_loss=0.05)


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(ranks, config=BALANCED) for ranks in (1, 2, 3)),
        Shape(2, pipeline=2, config=BALANCED),
        Shape(1, pipeline=2, tensor=2, config=BALANCED),
        Shape(2, pipeline=2, expert=2, config=BALANCED, split=True),
    ],
    ids=["1", "2", "3", "hdp 2 pp 2", "pp 2 tp 2", "pp 2 ep 2"],
)
@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo"])
def test_losses_of_routers(shape, name):
    """Each label adds those of its own sequence, by the factor that its own loss has."""
    check(shape, name)


def test_a_queue_gives_sequences_to_whoever_is_free():
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(DENSE, seed=SEED, dtype=torch.float64)
            planner = Planner(None, ClusterSpec(2, 64), cost_model=COST, queue=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            return {
                name: Trainer(model, optimizer, planner, comm, max_grad_norm=None, loss=PLAIN[name][0])
                .step(LENGTHS, lambda i: rollouts()[i], groups=groups_of(name))
                .loss
                for name in ("grpo", "dpo")
            }

    for found in run_threads(rank, 2):
        for name, loss in found.items():
            assert loss == pytest.approx(wanted(DENSE, name)[0], rel=1e-10)


@pytest.mark.parametrize("policy", ["static", "naive", "pow2", "balanced"])
@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_every_policy_and_steps_planned_before(name, policy):
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(DENSE, seed=SEED, dtype=torch.float64)
            planner = Planner(None, ClusterSpec(3, 40), policy, COST)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None, loss=PLAIN[name][0])
            planned = PlannedStep(LENGTHS, planner.plan(LENGTHS), 0.0)
            metrics = trainer.step(planned, lambda i: rollouts()[i], groups=groups_of(name))
            return metrics.loss, {key: p.grad for key, p in model.named_parameters()}

    loss, gradients = wanted(DENSE, name)
    for found, own in run_threads(rank, 3):
        assert found == pytest.approx(loss, rel=1e-10)
        same(own, gradients)


def one_rank(loss, fetch=None, lengths=LENGTHS, groups=None, model=None, ranks=1, trees=()):
    """The results of one step on each rank, with small weights' gradients."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            made = Llama(DENSE, seed=SEED, dtype=torch.float64) if model is None else model()
            planner = cheap_fixed(ranks, 128)
            optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
            trainer = Trainer(
                made, optimizer, planner, comm, max_grad_norm=None,
                loss=loss(comm) if isinstance(loss, type(lambda: 0)) else loss,
            )  # fmt: skip
            metrics = trainer.step(lengths, fetch or (lambda i: rollouts()[i]), groups=groups, trees=trees)
            return metrics, {name: p.grad for name, p in made.named_parameters()}

    return run_threads(rank, ranks)


def test_a_loss_that_couples_the_whole_batch():
    """The square of the mean over all labels of all sequences: one group."""

    def square(log_probs, _):
        return torch.cat(list(log_probs)).mean().square()

    plain, _ = wanted(DENSE, "sft")
    for metrics, gradients in one_rank(GroupLoss(square), groups=[7] * len(LENGTHS), ranks=2):
        assert metrics.loss == pytest.approx(plain**2, rel=1e-10)
        for name, gradient in wanted(DENSE, "sft")[1].items():
            assert torch.allclose(gradients[name], 2 * plain * gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "groups", [["a", "a", "b", "b", "c", "c", "d", "d"], torch.tensor(PAIRS)], ids=["names", "tensor"]
)
def test_groups_by_name(groups):
    for metrics, _ in one_rank(PLAIN["dpo"][0], groups=groups, ranks=2):
        assert metrics.loss == pytest.approx(wanted(DENSE, "dpo")[0], rel=1e-10)
    with pytest.raises(InvalidUsage, match=r"groups has \[0\]; expected the number or the name"):
        one_rank(PLAIN["dpo"][0], groups=[[0]] * len(LENGTHS))


def test_a_function_that_fails_on_one_rank_ends_the_step_on_all():
    def fails(log_probs, _):
        if len(log_probs[0]) == 70:
            raise ZeroDivisionError("the longest answer")
        return log_probs[0].sum()

    with pytest.raises(ZeroDivisionError, match="the longest answer"):
        one_rank(GroupLoss(fails), ranks=3)


def test_without_old_log_probabilities_the_policy_is_the_one_that_sampled():
    def fetch(i):
        return {key: x for key, x in rollouts()[i].items() if key != "old_log_probs"}

    [(metrics, gradients)] = one_rank(dapo(), fetch)
    labels = [int((each["labels"] != IGNORE).sum()) for each in rollouts()]
    mean = sum(n * float(each["advantages"]) for n, each in zip(labels, rollouts(), strict=True)) / sum(labels)
    assert metrics.loss == pytest.approx(-mean)
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    "loss",
    [
        TokenLoss(lambda log_probs, _: torch.ones_like(log_probs)),
        TokenLoss(lambda log_probs, _: log_probs.detach() * 2),
        TokenLoss(lambda log_probs, _: 0.0 * log_probs, entropy=True),
        GroupLoss(lambda *_: torch.ones(())),
    ],
)
def test_losses_without_a_gradient(loss):
    [(metrics, gradients)] = one_rank(loss)
    assert metrics.grad_norm == 0.0
    assert not any(gradient.any() for gradient in gradients.values())


def test_all_tokens_clipped_and_advantages_of_zero_have_no_gradient():
    def clipped(i):
        return {**rollouts()[i], "old_log_probs": -100.0, "advantages": 1.0}

    assert one_rank(grpo(kl=0.0), clipped)[0][0].grad_norm == 0.0
    assert one_rank(grpo(kl=0.0), lambda i: {**rollouts()[i], "advantages": 0.0})[0][0].grad_norm == 0.0


def test_a_batch_of_empty_answers_has_no_loss():
    empty = [rollout([1, 2, 3], [], advantages=1.0), rollout([4], [], advantages=2.0)]
    for loss in (grpo(kl=0.0), gspo()):
        [(metrics, _)] = one_rank(loss, empty.__getitem__, (3, 1))
        assert metrics.loss == 0.0
    with pytest.raises(InvalidUsage, match="no token of this batch has a label"):
        one_rank(dapo(), empty.__getitem__, (3, 1))


class Logits(torch.nn.Module):
    """A model that gives logits and knows nothing of labels."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, **places):
        return self.model(tokens, **places)


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_models_that_give_logits(name):
    def model():
        return Logits(Llama(DENSE, seed=SEED, dtype=torch.float64))

    loss, gradients = wanted(DENSE, name)
    for metrics, found in one_rank(PLAIN[name][0], groups=groups_of(name), model=model, ranks=2):
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        same(found, gradients, prefix="model.")


def test_ranks_with_other_losses_or_groups_are_told():
    with pytest.raises(Mismatch):
        one_rank(lambda comm: grpo(0.1 + 0.1 * comm.rank), ranks=2)
    with pytest.raises(Mismatch):
        one_rank(lambda comm: TokenLoss(len if comm.rank else max), ranks=2)


def test_what_fetch_gives_is_checked():
    def without(*names):
        return lambda i: {key: x for key, x in rollouts()[i].items() if key not in names}

    with pytest.raises(InvalidUsage, match=r"gave the columns .* and the loss needs \['ref_log_probs'\]"):
        one_rank(grpo(), without("ref_log_probs"))
    with pytest.raises(InvalidUsage, match=r"gave no columns, and the loss needs \['advantages'\]"):
        one_rank(dapo(), lambda i: (rollouts()[i]["tokens"], rollouts()[i]["labels"]))
    with pytest.raises(InvalidUsage, match=r"gave 'advantages' of shape \(3,\)"):
        one_rank(dapo(), lambda i: {**rollouts()[i], "advantages": torch.zeros(3)})
    with pytest.raises(InvalidUsage, match="tokens = None"):
        one_rank(dapo(), without("tokens"))
    with pytest.raises(InvalidUsage, match="give the same ones for all sequences"):
        one_rank(dapo(), lambda i: rollouts()[i] if i else without("old_log_probs")(i))


def test_losses_are_checked():
    with pytest.raises(InvalidUsage, match=r"gave shape \(\) for \d+ labels; expected a loss for each"):
        one_rank(TokenLoss(lambda log_probs, _: log_probs.sum()))
    with pytest.raises(InvalidUsage, match=r"the loss of the group of sequences \[0\] is a tensor of shape"):
        one_rank(GroupLoss(lambda log_probs, _: log_probs[0]))
    with pytest.raises(InvalidUsage, match="a group has 1"):
        one_rank(dpo())
    with pytest.raises(InvalidUsage, match="groups are of a GroupLoss"):
        one_rank(grpo(), groups=PAIRS)
    with pytest.raises(InvalidUsage, match="groups has 1 elements for 8 sequences"):
        one_rank(dpo(), groups=[0])
    with pytest.raises(InvalidUsage, match=r"per is \"batch\"|per is 'batch'"):
        TokenLoss(len, per="batch")
    with pytest.raises(InvalidUsage, match="temperature is 0"):
        GroupLoss(len, temperature=0)
    with pytest.raises(InvalidUsage, match="columns has"):
        TokenLoss(len, columns=["tokens"])
    with pytest.raises(InvalidUsage, match="dual_clip is 1"):
        ppo(dual_clip=1.0)
    with pytest.raises(InvalidUsage, match="label_smoothing is"):
        dpo(kind="ipo", label_smoothing=0.1)
    with pytest.raises(InvalidUsage, match="prompt not empty"):
        rollout([], [1])
    with pytest.raises(InvalidUsage, match="one for each of the answer's 2 tokens"):
        rollout([1], [2, 3], advantages=[1.0])


def test_layers_that_drop_out_and_routers_with_losses_are_refused():
    class Dropping(Llama):
        def run_layers(self, *args, **places):
            hidden, added = super().run_layers(*args, **places)
            return torch.nn.functional.dropout(hidden, 0.1, self.training), added

    with pytest.raises(InvalidUsage, match="two forward passes of the model in training mode differ"):
        one_rank(dpo(), model=lambda: Dropping(DENSE, dtype=torch.float64))
    with pytest.raises(InvalidUsage, match="routers add a loss for each label, and the trainer's loss is a GroupLoss"):
        one_rank(dpo(), model=lambda: Llama(BALANCED, dtype=torch.float64))


def test_trees_are_refused():
    with pytest.raises(InvalidUsage, match="sequence 0 is a tree"):
        one_rank(dapo(), lengths=[Tree([-1, 0, 0], [3, 2, 2])])


PROMPTS = (("a", 9), ("b", 20), ("c", 4))
ANSWERS = ((6, 1, 0, 11, 3), (2, 30, 5, 5), (3,))
"""Tokens of the answers to each prompt; one is empty, and two trees are too large for a rank."""


@functools.cache
def answers():
    """(sequences as ``fetch`` gives them, the name and tokens of each one's prompt)."""
    generator = torch.Generator().manual_seed(4)
    made, of = [], []
    for (name, tokens), sizes in zip(PROMPTS, ANSWERS, strict=True):
        prompt = torch.randint(DENSE.vocabulary, (tokens,), generator=generator)
        for size in sizes:
            old = -4.2 + 0.4 * torch.randn(size, generator=generator, dtype=torch.float64)
            made.append(
                rollout(
                    prompt,
                    torch.randint(DENSE.vocabulary, (size,), generator=generator),
                    old_log_probs=old,
                    ref_log_probs=old + 0.1,
                    advantages=float(torch.randn((), generator=generator)),
                )
            )
            of.append((name, tokens))
    order = torch.randperm(len(made), generator=generator).tolist()  # answers to a prompt need not be side by side
    return [made[i] for i in order], [of[i] for i in order]


def cheap_fixed(ranks, capacity, **cluster):
    """Work is all that a plan looks at, so trees are shorter."""
    cost = CostModel(attention=1e-6, linear=1e-5, fixed=1e-6, ring_step=1e-6)
    return Planner(None, ClusterSpec(ranks, capacity, **cluster), cost_model=cost)


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 200), (1, 60), (2, 40), (3, 30), (4, 16)])
@pytest.mark.parametrize(
    ("name", "config"),
    [("grpo", DENSE), ("gspo", DENSE), ("ppo", DENSE), ("grpo", BALANCED), ("ppo", BALANCED), ("dr_grpo", BALANCED)],
)
def test_prompts_are_computed_once(name, config, ranks, capacity):
    made, prompts = answers()
    lengths = [len(each["tokens"]) for each in made]
    trees = trees_of_prompts(lengths, prompts)
    assert len(trees) == 2
    loss, gradients = batch_loss(Llama(config, seed=SEED, dtype=torch.float64), made, name)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(config, seed=SEED, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            planner = cheap_fixed(ranks, capacity)
            trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None, loss=PLAIN[name][0])
            metrics = trainer.step(lengths, made.__getitem__, trees=trees)
            scored, _ = trainer.log_probs(lengths, made.__getitem__, trees=trees)
            told = trainer.evaluate(lengths, made.__getitem__, trees=trees)
            comm.all_reduce(told)
            return metrics, {key: p.grad for key, p in model.named_parameters()}, scored, told

    weights = dict(Llama(config, seed=SEED, dtype=torch.float64).named_parameters())
    plain = [log_probs_of(weights, config, each["tokens"], each["labels"], PLAIN[name][0].temperature) for each in made]
    for metrics, found, scored, told in run_threads(rank, ranks):
        assert metrics.tokens < sum(lengths), "no tree ran"
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        assert float(told[0] / told[1]) == pytest.approx(loss, rel=1e-10)
        same(found, gradients)
        for mine, (theirs, _, where) in zip(scored, plain, strict=True):
            assert torch.allclose(mine[where], theirs, rtol=0, atol=1e-12)
            assert int((mine != 0).sum()) == len(where)


@pytest.mark.parametrize(
    ("name", "shape", "zero"),
    [
        ("gspo", SHAPES["hdp 2 pp 2"], 0),
        ("gspo", SHAPES["hdp 2 pp 2"], 3),
        ("grpo", Shape(2, pipeline=2, config=BALANCED), 0),
        ("ppo", Shape(2, pipeline=2, expert=2, config=BALANCED), 1),
    ],
    ids=["zero 0", "zero 3", "routers", "experts"],
)
def test_prompts_are_computed_once_in_pipelines(name, shape, zero):
    made, prompts = answers()
    lengths = [len(each["tokens"]) for each in made]
    loss, gradients = batch_loss(Llama(shape.config, seed=SEED, dtype=torch.float64), made, name)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, shape, optimizer=descend, norm=None, capacity=80, loss=PLAIN[name][0], zero=zero)
            before = {key: x.clone() for key, x in trainer.state_dict()["model"].items()}
            metrics = trainer.step(lengths, made.__getitem__, trees=trees_of_prompts(lengths, prompts))
            after = trainer.state_dict()["model"]
            return metrics, {key: before[key] - after[key] for key in before}

    for metrics, found in run_threads(rank, 4):
        assert metrics.tokens < sum(lengths), "no tree ran"
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        same(found, gradients)


@pytest.mark.parametrize("config", [DENSE, BALANCED], ids=["dense", "routers"])
def test_branches_of_agents_by_their_tokens(config):
    """Turns that branch twice, labels in shared turns too: each trajectory counts by itself."""
    lists = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 8, 9, 1, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8], [5, 6]]
    made = [
        {"tokens": torch.tensor(tokens), "advantages": float(i - 2), "old_log_probs": -4.0, "ref_log_probs": -4.1}
        for i, tokens in enumerate(lists)
    ]
    lengths = [len(tokens) for tokens in lists]
    for each in made:
        each["labels"] = torch.cat((each["tokens"][1:], torch.tensor([IGNORE])))
    loss, gradients = batch_loss(Llama(config, seed=SEED, dtype=torch.float64), made, "grpo")

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(config, seed=SEED, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = Trainer(model, optimizer, cheap_fixed(2, 16), comm, max_grad_norm=None, loss=grpo(0.15))
            metrics = trainer.step(lengths, made.__getitem__, trees=fold(lists))
            return metrics, {key: p.grad for key, p in model.named_parameters()}

    for metrics, found in run_threads(rank, 2):
        assert metrics.tokens < sum(lengths), "no tree ran"
        assert metrics.loss == pytest.approx(loss, rel=1e-10)
        same(found, gradients)


def test_wrong_trees_of_prompts():
    made, prompts = answers()
    lengths = [len(each["tokens"]) for each in made]
    trees = trees_of_prompts(lengths, prompts)
    with pytest.raises(InvalidUsage, match="one for each"):
        trees_of_prompts(lengths, prompts[1:])
    with pytest.raises(InvalidUsage, match="the same number in each sequence"):
        trees_of_prompts([5, 6], [("a", 3), ("a", 4)])
    with pytest.raises(InvalidUsage, match="with its length, in one tree"):
        one_rank(grpo(), made.__getitem__, [length + 1 for length in lengths], trees=trees)
    unused = TrajectoryTree(Tree([-1, 0, 0], [2, 1, 1]), (0, 1), (1, 1))
    with pytest.raises(InvalidUsage, match="no trajectory ends with segment 2"):
        one_rank(grpo(), made.__getitem__, [3, 3], trees=[unused])
    with pytest.raises(InvalidUsage, match="has other tokens in the prefix"):
        one_rank(
            grpo(), lambda i: {**made[i], "tokens": made[i]["tokens"] + (i == trees[0].trajectories[1])}, lengths,
            trees=trees,
        )  # fmt: skip
    with pytest.raises(InvalidUsage, match="trees= are of a loss of log-probabilities"):
        one_rank(None, made.__getitem__, lengths, trees=trees)

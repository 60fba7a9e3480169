"""Critics: values of tokens, and losses of values, beside plain code on each sequence alone, in float64."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.nn import functional as F

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel import split_model, tensor_parallel
from hdpcomm.plan import ClusterSpec, Planner, trees_of_prompts
from hdpcomm.testing import run_threads
from hdpcomm.train import IGNORE, GroupLoss, TokenLoss, Trainer
from tests.harness.pipelines import COST

pytest.importorskip("transformers")

from tests.harness.tiny_huggingface import in_float64, tiny

PROMPT, LENGTHS = 6, [36, 8, 15, 7, 20, 9]


@functools.cache
def drawn():
    return in_float64(tiny("TokenClassification", num_labels=1, classifier_dropout=0.0))


def critic():
    """Threads share the random numbers of which weights are drawn."""
    return copy.deepcopy(drawn())


def rows():
    """Three prompts with two answers each; the tokens of answers have values and returns."""
    draw = torch.Generator().manual_seed(4)
    prompts = [torch.randint(64, (PROMPT,), generator=draw) for _ in range(3)]
    made = []
    for i, length in enumerate(LENGTHS):
        tokens = torch.cat((prompts[i // 2], torch.randint(64, (length - PROMPT,), generator=draw)))
        labels = torch.full((length,), IGNORE)
        labels[PROMPT - 1 :] = 0
        returns = torch.randn(length, generator=draw, dtype=torch.float64)
        made.append({"tokens": tokens, "labels": labels, "returns": returns})
    return made


def clipped(values, columns):
    errors = values - columns["returns"]
    return torch.maximum(errors.square(), errors.clamp(-0.2, 0.2).square())


def preferred(values, _):
    return -F.logsigmoid(values[0][-1] - values[1].mean())


LOSSES = {
    "tokens": TokenLoss(clipped, ["returns"], per="sequences", temperature=None),
    "pairs": GroupLoss(preferred, temperature=None),
}


def alone(name):
    """(values, loss, gradients) of each sequence by itself."""
    model = critic()
    values = [model(each["tokens"][None]).logits[0, :, 0] for each in rows()]
    picked = [value[each["labels"] == 0] for value, each in zip(values, rows(), strict=True)]
    if name == "pairs":
        losses = [preferred(picked[i : i + 2], None) for i in range(0, len(picked), 2)]
    else:
        losses = [
            clipped(value, {"returns": each["returns"][each["labels"] == 0]}).mean()
            for value, each in zip(picked, rows(), strict=True)
        ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return [value.detach() for value in values], loss.item(), {key: p.grad for key, p in model.named_parameters()}


def trainer_of(comm, loss, model, capacity=32):
    planner = Planner(None, ClusterSpec(comm.size, capacity), cost_model=COST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Trainer(hdp.adapt(model), optimizer, planner, comm, max_grad_norm=None, loss=loss)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(("ranks", "capacity", "shares"), [(1, 64, False), (2, 32, True), (3, 32, False)])
def test_values_and_gradients_are_those_of_plain_code(name, ranks, capacity, shares):
    wanted, loss, gradients = alone(name)
    trees = trees_of_prompts(LENGTHS, [(i // 2, PROMPT) for i in range(len(LENGTHS))]) if shares else ()

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = critic()
            trainer = trainer_of(comm, LOSSES[name], model, capacity)
            found = trainer.values(LENGTHS, lambda i: rows()[i]["tokens"], trees=trees)
            groups = [i // 2 for i in range(len(LENGTHS))] if name == "pairs" else None
            metrics = trainer.step(LENGTHS, rows().__getitem__, groups=groups, trees=trees)
            return found, metrics.loss, {key: p.grad for key, p in model.named_parameters()}

    for found, its_loss, its_gradients in run_threads(rank, ranks):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        assert its_loss == pytest.approx(loss, rel=1e-10)
        torch.testing.assert_close(its_gradients, gradients, rtol=1e-10, atol=1e-10)


def test_what_has_no_values_is_refused():
    causal_lm = tiny()
    drawn()

    def rank():
        with hdp.init() as comm:
            with pytest.raises(InvalidUsage, match="the loss is one of outputs"):
                trainer_of(comm, LOSSES["tokens"], copy.deepcopy(causal_lm))
            with pytest.raises(InvalidUsage, match="one output for each token"):
                trainer_of(comm, None, copy.deepcopy(causal_lm)).values([3], lambda _: torch.arange(3))
            adapted = hdp.adapt(critic())
            with pytest.raises(InvalidUsage, match="a classifier, which stages of a pipeline do not know"):
                split_model(adapted, 2)
            with pytest.raises(InvalidUsage, match="a classifier, whose last layer tensor ranks do not share"):
                tensor_parallel(adapted, hdp.Mesh(comm, tensor=2))

    run_threads(rank, 2)
    with pytest.raises(InvalidUsage, match="entropy=True with temperature=None"):
        TokenLoss(clipped, temperature=None, entropy=True)

"""Rows that ranks have of their own, with losses made rank by rank: the gradients of one process."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.integrations.row_passes import PlanSettings, RowPasses, Sequences
from hdpcomm.measure import costs
from hdpcomm.models import Llama
from hdpcomm.plan import CostModel, Tree
from hdpcomm.run.model import spec_of
from hdpcomm.testing import run_threads
from hdpcomm.train import IGNORE
from hdpcomm.train.step.passes import Passes
from hdpcomm.train.step.runner import Runner, StepSettings
from tests.harness.mesh_shapes import DENSE
from tests.harness.pipelines import COST, SEED
from tests.harness.plain_losses import log_probs_of

# By rank: one with a long row, one with a row of a single token, which has no label, one with more rows.
ROWS = ((60, 3), (1, 9), (4, 2, 5))
TEMPERATURE = 0.8


def rows_of(rank, lengths=None):
    draw = torch.Generator().manual_seed(rank)
    lengths = list(lengths or ROWS[rank])
    tokens = torch.randint(DENSE.vocabulary, (sum(lengths),), generator=draw)
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    return Sequences(lengths, tokens, labels)


def answers_of(rank):
    """Answers to two prompts, of which every rank has some, and one row of its own; one has no prompt."""
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(DENSE.vocabulary, (length,), generator=draw) for length in (30, 11)]
    draw = torch.Generator().manual_seed(rank)
    parts = [(prompts[0], 4 + rank), (prompts[1], 1), (prompts[0], 9), (prompts[1][:0], 6 + rank)]
    rows = [torch.cat((prompt, torch.randint(DENSE.vocabulary, (own,), generator=draw))) for prompt, own in parts]
    labels = [torch.cat((row[1:], torch.tensor([IGNORE]))) for row in rows]
    for label, (prompt, _) in zip(labels, parts, strict=True):
        label[: max(0, len(prompt) - 1)] = IGNORE
    return Sequences([len(row) for row in rows], torch.cat(rows), torch.cat(labels))


KINDS = {
    "whole": StepSettings(bucket_bytes=1 << 12),
    "shared": StepSettings(zero=1, bucket_bytes=1 << 12),
    "parts": StepSettings(zero=3),
    "narrow": StepSettings(dtype=torch.bfloat16, bucket_bytes=1 << 12),
}


def loss_of(values, rank):
    """Each rank's own function of all its log-probabilities and entropies at once."""
    log_probs, entropies = values
    return (rank + 1.0) * torch.logsumexp(log_probs, 0) + (log_probs * entropies).mean()


def plain_values(weights, own):
    rows = zip(own.tokens.split(own.lengths), own.labels.split(own.lengths), strict=True)
    found = [log_probs_of(weights, DENSE, tokens, labels, TEMPERATURE)[:2] for tokens, labels in rows]
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def expected(ranks, steps, rows_of=rows_of):
    """(values of each rank, gradients of the mean loss over the ranks)."""
    model = Llama(DENSE, seed=SEED, dtype=torch.float64)
    weights = dict(model.named_parameters())
    values = [plain_values(weights, rows_of(rank)) for rank in range(ranks)]
    loss = sum(loss_of(each, rank) for rank, each in enumerate(values)) / ranks * steps
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    return [torch.stack(each).detach() for each in values], gradients


def passes_of(comm, kind, capacity, cost=COST, **plans):
    model = Llama(DENSE, seed=SEED, dtype=torch.float64)
    mesh = Mesh(comm, placement=range(comm.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = KINDS[kind]
    runner = Runner(Passes([model], mesh), optimizer, settings)
    return (
        model,
        runner,
        RowPasses(model, mesh, runner, str, plans=PlanSettings(capacity, cost, **plans), spec=spec_of(DENSE)),
    )


def add(rows, comm, ends, rows_of=rows_of, trees=0):
    own = rows_of(comm.rank)
    scored = rows.score(own, temperature=TEMPERATURE, entropy=True)
    [slopes] = torch.autograd.grad(loss_of(scored.values, comm.rank), scored.values)
    assert sum(isinstance(item, Tree) for item in scored.planned.lengths) == trees
    rows.train(scored.planned, scored.batch, terms=scored.terms(slopes / comm.size, comm), ends=ends)
    return scored.values.detach()


def test_a_model_that_takes_no_trees_runs_without():
    values, _ = expected(1, 1, answers_of)
    with hdp.init() as comm:
        model = Llama(DENSE, seed=SEED, dtype=torch.float64)
        model.takes_trees = False
        mesh = Mesh(comm, placement=[0])
        rows = RowPasses(model, mesh, Runner(Passes([model], mesh)), str, plans=PlanSettings(cost_model=COST))
        with torch.no_grad():
            scored = rows.score(answers_of(0), temperature=TEMPERATURE, entropy=True)
    assert not any(isinstance(item, Tree) for item in scored.planned.lengths)
    torch.testing.assert_close(scored.values, values[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["whole", "shared"])
@pytest.mark.parametrize(("ranks", "capacity", "steps"), [(1, None, 1), (2, None, 2), (3, 64, 1), (2, 40, 2)])
def test_values_and_gradients_are_those_of_plain_code(ranks, capacity, steps, kind):
    values, gradients = expected(ranks, steps)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model, runner, rows = passes_of(comm, kind, capacity)
            runner.zero()
            for place in range(steps):
                found = add(rows, comm, ends=place == steps - 1 and steps > 1)
            runner.reduce()
            torch.testing.assert_close(found, values[comm.rank], rtol=1e-12, atol=1e-12)
            norm = runner.clip(None)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            runner.update()  # by the gradients
            return norm, {name: before[name] - p.detach() for name, p in model.named_parameters()}

    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    for norm, found in run_threads(rank, ranks):
        assert norm == pytest.approx(float(total), rel=1e-10)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 1e-10 * (1e-3 + gradient.norm()), name


def check_rows(ranks, of_rank, plan, *, ends=True, trees=0, ran=lambda *_: True):
    """Values and gradients are those of plain code.

    Args:
        plan: arguments of :func:`passes_of`.
        ran: of (passes, plan as it ran): whether what is tested took part.
    """
    values, gradients = expected(ranks, 1, of_rank)

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model, runner, rows = passes_of(comm, "whole", **plan)
            runner.zero()
            found = add(rows, comm, ends, of_rank, trees=trees)
            runner.reduce()  # unless the passes have ended the step
            assert ran(rows, runner.ran)
            torch.testing.assert_close(found, values[comm.rank], rtol=1e-12, atol=1e-12)
            runner.finish()
            return {name: p.grad.clone() for name, p in model.named_parameters()}

    for found in run_threads(rank, ranks):
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 1e-10 * (1e-3 + gradient.norm()), name


@pytest.mark.parametrize(("ranks", "capacity"), [(1, None), (2, None), (3, 24)], ids=["one", "two", "trees are cut"])
def test_prompts_of_several_ranks_are_computed_once(ranks, capacity):
    check_rows(ranks, answers_of, {"capacity": capacity}, ends=False, trees=1 if ranks == 1 else 2)


# The longest row has 60 tokens.
WAYS = {
    "slices": (rows_of, {"capacity": 20, "slices": 4}, lambda _, plan: plan.slices),
    "offload": (  # behind passes that hide any copy
        rows_of,
        {"capacity": 20, "offload": 1 << 20, "cost": CostModel(attention=1e-6, linear=1.0)},
        lambda rows, _: rows.offloaded_bytes > 0,
    ),
    "queue": (
        partial(rows_of, lengths=[40, 2, 3, 4, 6, 8, 7, 5]),
        {"capacity": 80, "queue": True, "cost": CostModel(1e-4, 1e-2, fixed=1e-3, ring_step=1e-3)},
        lambda _, plan: plan.queued,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_do_not_fit_and_rows_that_wait(way, monkeypatch):
    monkeypatch.setattr("hdpcomm.integrations.row_passes.SMALLEST_OFFLOAD", 1)
    of_rank, plan, ran = WAYS[way]
    check_rows(2, of_rank, plan, ran=ran)


def test_trees_that_do_not_fit_run_row_by_row():
    check_rows(2, answers_of, {"capacity": 16, "slices": 2}, ran=lambda _, plan: plan.slices)


def test_what_a_rank_holds_is_given_with_slices_and_offload():
    with hdp.init() as comm:
        for options in ({"slices": 2}, {"offload": 1 << 20}):
            with pytest.raises(InvalidUsage, match="give capacity="):
                passes_of(comm, "whole", None, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_that_are_measured_leave_no_gradients(kind, monkeypatch):
    """They have no memory of their own either, but for the sums."""
    measured, own = costs.forward_backward, threading.local()

    def checked(model, *args, **more):
        seconds = measured(model, *args, **more)
        sums = own.runner.gradients.sums
        flat = None if kind == "parts" else sums.flat.untyped_storage().data_ptr()
        assert all(p.grad is None or p.grad.untyped_storage().data_ptr() == flat for p in model.parameters())
        own.passes += 1
        return seconds

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            _, runner, rows = passes_of(comm, kind, None, cost=None)
            own.runner, own.passes = runner, 0
            runner.zero()
            rows.plan(Sequences([9, 5], torch.zeros(14, dtype=torch.int64), torch.zeros(14, dtype=torch.int64)))
            assert own.passes > 3
            runner.reduce()
            return runner.clip(None)

    monkeypatch.setattr(costs, "forward_backward", checked)
    assert run_threads(rank, 2) == [0.0, 0.0]


def test_ranks_that_ask_for_other_things_are_told():
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(DENSE, seed=SEED, dtype=torch.float64)
            mesh = Mesh(comm, placement=range(comm.size))
            runner = Runner(Passes([model], mesh))
            rows = RowPasses(
                model, mesh, runner, lambda: f"temperature {comm.rank}", plans=PlanSettings(cost_model=COST)
            )
            with contextlib.suppress(Mismatch):
                rows.score(rows_of(comm.rank), temperature=1.0, entropy=False)
                return False
            return True

    assert run_threads(rank, 2) == [True, True]


def copies_of_quantised():
    from torch.testing._internal.two_tensor import TwoTensor

    torch.set_num_threads(1)
    with hdp.init() as comm:
        model = Llama(DENSE, seed=SEED, dtype=torch.float64)
        wrapped = TwoTensor(torch.ones(3), torch.zeros(3))
        model.register_parameter("quantised", torch.nn.Parameter(wrapped, requires_grad=False))
        values = {name: each.clone() for name, each in model.state_dict().items() if name != "quantised"}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        runner = Runner(Passes([model], Mesh(comm, placement=range(comm.size))), optimizer, KINDS["parts"])
        copies = runner.copied_weights(model.state_dict(keep_vars=True), keep=True)
        assert copies.pop("quantised").a.data_ptr() == wrapped.a.data_ptr()
        return copies.keys() == values.keys() and all(torch.equal(copies[name], values[name]) for name in values)


def test_quantised_weights_are_not_copied():
    """torchao's types refuse ``to(copy=True)``, and never change."""
    assert run_threads(copies_of_quantised, 2) == [True, True]

"""The trainer: equal ranks, errors on every rank, labels, clipping, runs on a corpus."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import open_corpus
from hdpcomm.errors import Error, InvalidUsage, Mismatch
from hdpcomm.measure import profile_cost_model
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, PlanAhead, Planner
from hdpcomm.run import RunConfig
from hdpcomm.run import train as run
from hdpcomm.testing import run_threads, spawn
from hdpcomm.train import IGNORE, Trainer, next_token_labels

CONFIG = LlamaConfig(vocabulary=32, layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)
CONFIG_OF_BYTES = LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24)
COST = CostModel(attention=1e-6, linear=1e-5, fixed=1e-4)
LENGTHS = (30, 4, 9, 1)


def fetch(i):
    return torch.arange(LENGTHS[i]) * (i + 3) % 32


def trainer_of(comm, *, lr=1e-2, capacity=16, policy="balanced", **options):
    torch.set_num_threads(1)
    model = Llama(CONFIG, seed=comm.rank).to(comm.device)
    planner = Planner(None, ClusterSpec(comm.size, capacity), policy, COST)
    return Trainer(model, torch.optim.AdamW(model.parameters(), lr=lr), planner, comm, **options)


def on_ranks(size, work, **options):
    def rank():
        with hdp.init() as comm:
            return work(comm, trainer_of(comm, **options))

    return run_threads(rank, size, timeout=30.0)


def test_ranks_stay_equal_bit_by_bit_and_the_loss_falls():
    def work(_, trainer):
        metrics = [trainer.step(LENGTHS, fetch) for _ in range(6)]
        return metrics, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    first, again = on_ranks(3, work), on_ranks(3, work)
    for metrics, weights in first:
        assert torch.equal(weights, first[0][1])
        assert metrics == first[0][0]
    assert torch.equal(first[0][1], again[0][1])  # the same from run to run
    metrics = first[0][0]
    assert [m.step for m in metrics] == list(range(6))
    assert metrics[-1].loss < metrics[0].loss
    for m in metrics:
        assert (m.tokens, m.longest) == (44, 30)
        assert m.longest_ranks >= 2
        assert m.bytes_sent > 0
        assert m.seconds > 0
        assert m.processor_s > 0
        assert 0 <= m.idle_share <= 1


def test_steps_take_plans_that_were_made_ahead():
    def ahead(_, trainer):
        with PlanAhead(trainer.planner, [LENGTHS] * 3) as steps:
            planned = list(steps)
        trainer.planner = None  # the steps plan nothing themselves
        return [trainer.step(each, fetch) for each in planned]

    def inside(_, trainer):
        return [trainer.step(LENGTHS, fetch) for _ in range(3)]

    for made_ahead, made_inside in zip(on_ranks(2, ahead), on_ranks(2, inside), strict=True):
        for one, other in zip(made_ahead, made_inside, strict=True):
            assert (one.loss, one.grad_norm, one.predicted_s) == (other.loss, other.grad_norm, other.predicted_s)
            assert one.planning_s > 0
            assert 0 <= one.plan_wait_s <= one.seconds
            assert other.plan_wait_s >= other.planning_s


def test_one_rank_sends_nothing():
    (metrics,) = on_ranks(1, lambda _, trainer: trainer.step(LENGTHS, fetch), capacity=64)
    assert metrics.bytes_sent == 0


def test_bytes_sent_are_those_of_all_ranks():
    def work(comm, trainer):
        before = comm.stats()["bytes_sent"]
        metrics = trainer.step(LENGTHS, fetch)
        return metrics.bytes_sent, comm.stats()["bytes_sent"] - before

    results = on_ranks(3, work)
    told, really = results[0][0], sum(own for _, own in results)
    assert told <= really <= told + 3 * 200  # the metrics' own reduction comes after the count


def test_the_wait_of_a_rank_without_work_is_counted_as_idle():
    def work(_, trainer):
        trainer.step([600], lambda _: torch.arange(600) % 32)
        return trainer.step([600], lambda _: torch.arange(600) % 32).idle_share

    # How much depends on the machine; a rank that works less than the other waits for it in any case.
    assert 0 < on_ranks(2, work, capacity=1000, policy="naive")[0] < 1


def test_different_lengths_raise_mismatch_on_every_rank_and_the_next_step_works():
    def work(comm, trainer):
        lengths = (30, 4, 9, 2) if comm.rank == 1 else LENGTHS
        with pytest.raises(Mismatch) as caught:
            trainer.step(lengths, fetch)
        return str(caught.value), caught.value.rank, trainer.step(LENGTHS, fetch).tokens

    for rank, (message, told, tokens) in enumerate(on_ranks(3, work)):
        assert "ranks 0, 2: " in message
        assert "; rank 1: " in message
        assert (told, tokens) == (rank, 44)


def test_labels_of_ones_own():
    def work(_, trainer):
        def masked(i):
            labels = next_token_labels(fetch(i))
            labels[: LENGTHS[i] // 2] = IGNORE  # as in fine-tuning: no loss on the prompt
            return fetch(i), labels

        return trainer.step(LENGTHS, masked).loss, trainer.runner.gradients.sums.flat.clone()

    one, many = on_ranks(1, work, capacity=64, lr=0.0)[0], on_ranks(3, work, lr=0.0)[0]
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    torch.testing.assert_close(many[1], one[1], rtol=1e-4, atol=1e-6)


def test_labels_that_are_not_shifted_are_refused():
    def work(_, trainer):
        ids = [fetch(i) for i in range(4)]
        with pytest.raises(
            InvalidUsage, match=r"fetch\(0\) gave labels that equal the tokens at all 30 labelled places"
        ):
            trainer.step(LENGTHS, lambda i: (ids[i], ids[i].clone()))
        return True

    assert on_ranks(1, work, capacity=64) == [True]


def test_a_sequence_of_one_token_repeated_may_equal_its_labels():
    def work(_, trainer):
        return trainer.step((20,), lambda _: (torch.full((20,), 3), torch.full((20,), 3))).tokens

    assert on_ranks(1, work, capacity=64) == [20]


@pytest.mark.parametrize("options", [{}, {"zero": 1}])
@pytest.mark.parametrize("freeze", [True, False])
def test_parameters_frozen_or_unfrozen_later_are_refused(freeze, options):
    def rank():
        with hdp.init() as comm:
            model = Llama(CONFIG).requires_grad_(True)
            model.blocks[0].requires_grad_(freeze)
            planner = Planner(None, ClusterSpec(comm.size, 16), "balanced", COST)
            trained = [p for p in model.parameters() if p.requires_grad]
            trainer = Trainer(model, torch.optim.AdamW(trained), planner, comm, **options)
            trainer.step(LENGTHS, fetch)
            model.blocks[0].requires_grad_(not freeze)
            with pytest.raises(
                InvalidUsage, match=rf"were \d+ {'' if freeze else 'un'}frozen \(as .*after the trainer was"
            ):
                trainer.step(LENGTHS, fetch)
            model.blocks[0].requires_grad_(freeze)
            return trainer.step(LENGTHS, fetch).step

    assert run_threads(rank, 2, timeout=30.0) == [1, 1]


def test_gradients_are_clipped_by_the_global_norm():
    def work(_, trainer):
        return trainer.step(LENGTHS, fetch).grad_norm, float(trainer.runner.gradients.sums.flat.norm())

    for before, after in on_ranks(2, work, max_grad_norm=1e-3):
        assert before > 1e-2
        assert after == pytest.approx(1e-3, rel=1e-5)


@pytest.mark.parametrize(
    ("lengths", "wrong", "message"),
    [
        ((1, 1), lambda _: torch.zeros(1, dtype=torch.int64), "no token of this batch has a label"),
        ((), fetch, "no token of this batch has a label"),
        ((40, 4), fetch, "40"),  # the planner names the sequence and the limits
        ((4, 9), lambda _: torch.arange(3), r"fetch\(\d\) gave tokens of shape \(3,\)"),
        ((4,), lambda _: torch.zeros(4), "torch.float32; the step was planned for int64"),
        ((4,), lambda _: (torch.arange(4), torch.arange(5)), r"fetch\(0\) gave labels of shape \(5,\)"),
    ],
)
def test_bad_batches(lengths, wrong, message):
    def work(_, trainer):
        before = [p.clone() for p in trainer.model.parameters()]
        with pytest.raises(InvalidUsage, match=message):
            trainer.step(lengths, wrong)
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))

    on_ranks(1, work)


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update():
    def work(comm, trainer):
        with torch.no_grad():
            trainer.model.norm.weight.fill_(math.nan)
        before = trainer.model.head.weight.clone()
        with pytest.raises(
            Error, match=r"step 0: the loss is nan, in micro-batches of seq.*; lower the learning rate"
        ) as caught:
            trainer.step(LENGTHS, fetch)
        assert torch.equal(before, trainer.model.head.weight)
        assert caught.value.rank == comm.rank

    on_ranks(2, work)


def test_an_error_of_one_rank_ends_the_others():
    def broken(i):
        if i == 1:
            raise RuntimeError("disk on fire")
        return fetch(i)

    with pytest.raises(RuntimeError, match="disk on fire"):
        on_ranks(3, lambda _, trainer: trainer.step(LENGTHS, broken))


def test_bad_arguments():
    def work(comm, trainer):
        planner = Planner(None, ClusterSpec(3, 16), "balanced", COST)
        with pytest.raises(InvalidUsage, match=r"the planner plans for 3 ranks and the communicator has 2"):
            Trainer(trainer.model, trainer.optimizer, planner, comm)
        with pytest.raises(InvalidUsage, match="max_grad_norm is 0"):
            Trainer(trainer.model, trainer.optimizer, trainer.planner, comm, max_grad_norm=0)

    on_ranks(2, work)


def test_a_trainer_on_some_of_the_ranks():
    """The plan's ranks are positions in the trainer's communicator, whatever global ranks these are."""

    def rank():
        with hdp.init() as world:
            comm = world.subset([3, 1])
            return None if comm is None else trainer_of(comm).step(LENGTHS, fetch).loss

    alone = on_ranks(2, lambda _, trainer: trainer.step(LENGTHS, fetch).loss)
    assert run_threads(rank, 4, timeout=30.0) == [None, alone[0], None, alone[0]]


def test_bf16_is_near_fp32():
    def rank(dtype):
        with hdp.init() as comm:
            model = Llama(CONFIG, dtype=dtype)
            planner = Planner(None, ClusterSpec(comm.size, 16), "balanced", COST)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), planner, comm, max_grad_norm=None)
            return trainer.step(LENGTHS, fetch).loss, trainer.runner.gradients.sums.flat.clone()

    (loss, grads), (low_loss, low_grads) = (
        run_threads(rank, 3, dtype, timeout=30.0)[0] for dtype in (torch.float32, torch.bfloat16)
    )
    assert low_loss == pytest.approx(loss, rel=1e-2)
    assert (low_grads - grads).norm() < 5e-2 * grads.norm()


def test_every_rank_gets_the_same_cost_model():
    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return profile_cost_model(Llama(CONFIG), comm, longest=64)

    for size in (1, 3):
        models = run_threads(rank, size, timeout=60.0)
        assert all(model == models[0] for model in models)
        assert models[0].seconds([64]) > 0
    with pytest.raises(InvalidUsage, match="longest is 0"):
        run_threads(lambda: profile_cost_model(Llama(CONFIG), hdp.init(), longest=0), 1)


def train_corpus(folder):
    torch.set_num_threads(1)
    corpus = open_corpus([folder], context=300)
    config = RunConfig(
        model=CONFIG_OF_BYTES,
        policies=("balanced", "naive", "static"),
        steps=4,
        capacity=150,
        tokens_per_step=900,
    )
    with hdp.init() as comm:
        return run(comm, corpus, config)


def test_a_run_trains_alike_with_every_policy(tmp_path):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"some text {i} " * (i * i + 1))
    results = spawn(train_corpus, 3, str(tmp_path), timeout=100.0)
    for result in results:
        assert (result.ranks, result.transport) == (3, "shm")
        assert list(result.steps) == ["balanced", "naive", "static"]
        losses = [[step.loss for step in steps] for steps in result.steps.values()]
        assert losses == [[step.loss for step in steps] for steps in results[0].steps.values()]
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], rel=1e-4)  # the same batches from the same weights
        assert losses[0][-1] < losses[0][0]
    assert {step.longest_ranks for step in results[0].steps["static"]} == {3}


def test_the_first_plan_is_begun_before_there_is_a_model(tmp_path, monkeypatch):
    """No step runs before it under which it could be made."""
    (tmp_path / "a.txt").write_text("x" * 3000)
    module = sys.modules["hdpcomm.run.loop"]
    order = []

    class Plans(PlanAhead):
        def __init__(self, *args, **options):
            order.append("plans")
            super().__init__(*args, **options)

    def trainer(*args, **options):
        order.append("trainer")
        return Trainer(*args, **options)

    monkeypatch.setattr(module, "PlanAhead", Plans)
    monkeypatch.setattr(sys.modules["hdpcomm.run.pipelines"], "Trainer", trainer)
    config = RunConfig(model=CONFIG_OF_BYTES, steps=1, capacity=300, tokens_per_step=900)
    with hdp.init() as comm:
        assert len(run(comm, open_corpus([tmp_path], context=300), config).steps["balanced"]) == 1
    assert order == ["plans", "trainer"]


def test_runs_check_their_limits(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    corpus = open_corpus([tmp_path], context=1000)
    message = (
        "longest sequence has 1,000 tokens, and 2 ranks with a capacity of 300 tokens hold 600; raise --capacity to "
        "at least 500 or --ranks to 4, or lower --context to 600"
    )
    with pytest.raises(InvalidUsage, match=message):
        run_threads(lambda: run(hdp.init(), corpus, RunConfig(capacity=300)), 2)
    with pytest.raises(InvalidUsage, match="raise --tokens-per-step to at least 1,000"):
        run_threads(lambda: run(hdp.init(), corpus, RunConfig(capacity=500, tokens_per_step=900)), 2)
    for bad in (
        {"steps": 0},
        {"policies": ("fast",)},
        {"policies": ()},
        {"lr": 0.0},
        {"capacity": 0},
        {"dtype": "fp16"},
        {"zero": 4},
        {"recompute": 3},
        {"recompute": "half"},
    ):
        with pytest.raises(InvalidUsage):
            RunConfig(**bad)


def test_ranks_that_update_differently_are_named_in_the_first_step():
    def work(comm, trainer):
        found = []
        for change in ("lr", "clip"):
            before = trainer.optimizer.param_groups[0]["lr"], trainer.max_grad_norm
            if comm.rank == 1 and change == "lr":
                trainer.optimizer.param_groups[0]["lr"] = 0.5
            elif comm.rank == 1:
                trainer.max_grad_norm = 0.25
            weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
            with pytest.raises(
                Mismatch, match=r"the optimizer's settings of ranks \[1\] are not those of ranks \[0, 2\]"
            ):
                trainer.step(LENGTHS, fetch)
            found.append(all(map(torch.equal, weights, trainer.model.parameters())))
            trainer.optimizer.param_groups[0]["lr"], trainer.max_grad_norm = before
        return found, trainer.step(LENGTHS, fetch).tokens

    assert on_ranks(3, work) == [([True, True], 44)] * 3


@pytest.mark.parametrize("token", [-1, 31])
def test_tokens_outside_of_the_vocabulary_are_told(token):
    model = Llama(LlamaConfig(vocabulary=31, layers=1, hidden=16, heads=2, kv_heads=1, ffn=24))
    planner = Planner(None, ClusterSpec(1, 64), cost_model=CostModel(1e-6, 1e-5))
    with hdp.init() as comm:
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm)
        with pytest.raises(InvalidUsage, match=rf"fetch\(1\) gave the token {token}; .* tokens 0 to 30: use its"):
            trainer.step((4, 4), lambda i: torch.tensor([1, 2, token if i else 3, 4]))
        assert trainer.step((4,), lambda _: torch.tensor([1, 2, 3, 4])).tokens == 4

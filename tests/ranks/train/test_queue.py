"""Steps whose short sequences wait in a queue: gradients, who runs what, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import SharedCounter
from hdpcomm.errors import Aborted, Error, Mismatch
from hdpcomm.models import Llama, LlamaConfig, set_recompute
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, PlanAhead, Planner, SequenceInfo, StepPlan
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.plain_llama import batch_gradients
from tests.harness.small_buckets import make_trainer

CONFIG = LlamaConfig(vocabulary=61, layers=2, hidden=32, heads=4, kv_heads=2, ffn=48)
COST = CostModel(attention=1e-4, linear=1e-2, fixed=1e-3, ring_step=1e-3)
# The first one takes three ranks of 40 tokens, two more take two; one has a single token; two have equal lengths.
LENGTHS = (110, 1, 7, 33, 2, 18, 40, 5, 64, 3, 12, 29, 18, 50, 9)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def tokens_of(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(CONFIG.vocabulary, (length,), generator=generator) for length in lengths]


TOKENS = tokens_of(LENGTHS)


class QueuePlanner(Planner):
    """One micro-batch on all ranks, and a queue of the others, all named for the last rank of their pool."""

    def __init__(self, ranks: int, pools: int = 1) -> None:
        super().__init__(None, ClusterSpec(ranks=ranks, capacity=1000), cost_model=COST)
        self.pools = pools

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        ranks = self.cluster.ranks
        batches = [MicroBatch(0, tuple(range(ranks)), (SequenceInfo(0, lengths[0]),), 0.0, 1.0)]
        for i in range(1, len(lengths)):
            last = max(rank for rank in range(ranks) if rank % self.pools == i % self.pools)
            batches.append(MicroBatch(i, (last,), (SequenceInfo(i, lengths[i]),), 0.0, 1.0))
        queued, pools = len(lengths) - 1, self.pools
        return StepPlan("by hand", ranks, tuple(batches), 1.0, 1.0, 0.0, 0.0, queued=queued, queue_pools=pools)


def gradients(
    planner: Any,
    size: int,
    dtype: torch.dtype = torch.float64,
    recompute: str = "none",
    steps: int = 1,
    transport: str = "shm",
    **options: Any,
) -> list[Any]:
    """By rank: losses, gradients of the last step, the sequences that the rank has read in it, its metrics, the plan as
    it ran."""

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=3 + comm.rank, dtype=dtype)
            set_recompute(model, recompute)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = make_trainer(model, optimizer, planner, comm, max_grad_norm=None, **options)
            losses, read = [], []

            def fetch(i: int) -> torch.Tensor:
                read.append(i)
                return TOKENS[i]

            for _ in range(steps):
                read.clear()
                metrics = trainer.step(LENGTHS, fetch)
                losses.append(metrics.loss)
            found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
            return losses, found, read, metrics, trainer.ran

    return run_threads(rank, size, transport=transport, timeout=60.0)


@pytest.fixture(scope="module")
def wanted() -> dict[torch.dtype, Any]:
    return {dtype: batch_gradients(Llama(CONFIG, seed=3, dtype=dtype), TOKENS) for dtype in TOLERANCE}


def check(results: list[Any], wanted: Any, dtype: torch.dtype) -> None:
    loss, expected = wanted[dtype]
    limit = TOLERANCE[dtype]
    for losses, found, _, _, ran in results:
        for each in losses:
            assert abs(each - loss) <= limit * abs(loss)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= limit * gradient.norm(), name
            assert torch.equal(found[name], results[0][1][name]), f"{name} is not the same on all ranks"
        ran.validate(LENGTHS)
        assert ran.hash == results[0][4].hash


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "pools"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 4)])
def test_the_gradients_are_those_of_a_single_device(size: int, pools: int, dtype: torch.dtype, wanted: Any) -> None:
    check(gradients(QueuePlanner(size, pools), size, dtype, steps=2), wanted, dtype)


def test_ranks_of_a_device_take_from_a_queue(wanted: Any) -> None:
    check(gradients(QueuePlanner(3), 3, transport="sim"), wanted, torch.float64)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_plans_of_the_planner_have_queues_that_run(recompute: str, wanted: Any) -> None:
    planner = Planner(None, ClusterSpec(4, 40), cost_model=COST, queue=True)
    plan = planner.plan(LENGTHS)
    assert plan.queued > 0
    results = gradients(planner, 4, recompute=recompute)
    check(results, wanted, torch.float64)
    for place, (_, _, read, metrics, ran) in enumerate(results):
        assert sorted(read) == sorted(s.id for batch in ran.for_rank(place) for s in batch.sequences)
        assert metrics.queued == plan.queued
        assert metrics.moved == sum(
            a.ranks != b.ranks for a, b in zip(plan.micro_batches, ran.micro_batches, strict=True)
        )


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 1, "bucket_bytes": 64}, {"dtype": torch.float64}])
def test_sharded_optimizers_take_queues(options: dict[str, Any], wanted: Any) -> None:
    for losses, _, _, _, ran in gradients(QueuePlanner(3), 3, steps=2, **options):
        assert all(abs(loss - wanted[torch.float64][0]) <= 1e-12 * loss for loss in losses)
        ran.validate(LENGTHS)


def test_a_rank_that_is_slow_runs_less() -> None:
    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=3)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), QueuePlanner(3), comm)

            def fetch(i: int) -> torch.Tensor:
                if comm.rank == 2 and i > 0:
                    others_have_the_rest.wait(30.0)
                return TOKENS[i]

            def told(i: int) -> torch.Tensor:
                if i == len(LENGTHS) - 1:
                    others_have_the_rest.set()
                return fetch(i)

            metrics = trainer.step(LENGTHS, told)
            return metrics, trainer.ran.for_rank(comm.rank)  # type: ignore[union-attr]

    others_have_the_rest = threading.Event()
    results = run_threads(rank, 3, timeout=60.0)
    assert len(results[2][1]) <= 2  # the one of all ranks, and the one that it waits in
    assert results[0][0].moved >= len(LENGTHS) - 2
    assert sum(len(own) for _, own in results) == len(LENGTHS) - 1 + 3


def test_plans_that_were_made_ahead_and_steps_without_a_queue_take_turns() -> None:
    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            queued = Planner(None, ClusterSpec(2, 80), cost_model=COST, queue=True)
            static = Planner(None, ClusterSpec(2, 80), cost_model=COST)
            model = Llama(CONFIG, seed=3)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), static, comm)
            with PlanAhead(queued, [LENGTHS] * 20) as ahead:
                found = []
                for planned in ahead:
                    found += [trainer.step(planned, TOKENS.__getitem__), trainer.step(LENGTHS, TOKENS.__getitem__)]
            return found

    for metrics in run_threads(rank, 2, timeout=60.0):
        assert [each.queued > 0 for each in metrics] == [True, False] * 20
        assert metrics[-1].loss < metrics[0].loss


def test_ranks_of_which_only_some_plan_a_queue_are_told() -> None:
    def rank() -> str:
        with hdp.init() as comm:
            planner = Planner(None, ClusterSpec(2, 80), cost_model=COST, queue=comm.rank == 1)
            model = Llama(CONFIG, seed=3)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm)
            with pytest.raises(Mismatch) as caught:
                trainer.step(LENGTHS, TOKENS.__getitem__)
            return str(caught.value)

    for text in run_threads(rank, 2, timeout=60.0):
        assert "different plans" in text


@pytest.mark.parametrize("runs", [0, 2])
def test_a_micro_batch_that_ran_twice_or_never_ends_the_step(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared counter skips a number once, or gives one a second time."""
    ask: Callable[..., int] = SharedCounter.fetch_add
    answers = iter([True])

    def wrong(counter: SharedCounter) -> int:
        if next(answers, False):
            return ask(counter, 2) + 1 if runs == 0 else 0
        return ask(counter)

    monkeypatch.setattr(SharedCounter, "fetch_add", wrong)

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=3)
            before = [p.detach().clone() for p in model.parameters()]
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), QueuePlanner(2), comm)
            with pytest.raises(Error, match=f"of the queue was run {runs} times in one step, once was expected"):
                trainer.step(LENGTHS, TOKENS.__getitem__)
            kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            return kept, trainer.step(LENGTHS, TOKENS.__getitem__).queued

    for kept, queued in run_threads(rank, 2, timeout=60.0):
        assert kept
        assert queued == len(LENGTHS) - 1


def test_steps_that_fail_give_their_counter_back() -> None:
    def rank() -> list[str]:
        torch.set_num_threads(1)
        texts = []
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=3)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), QueuePlanner(2), comm)

            def broken(_: int) -> torch.Tensor:
                raise OSError("the disk is gone")

            for _ in range(40):  # more often than a rank has counters
                with pytest.raises(OSError, match="the disk is gone"):
                    trainer.step(LENGTHS, broken)
            comm.resync()
            texts.append(str(trainer.step(LENGTHS, TOKENS.__getitem__).queued))
        return texts

    assert run_threads(rank, 2, timeout=60.0) == [[str(len(LENGTHS) - 1)]] * 2


def test_ranks_are_told_that_the_owner_of_the_counter_has_given_up() -> None:
    gave_up = threading.Event()

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=3)
            trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), QueuePlanner(3), comm)

            def broken(i: int) -> torch.Tensor:
                if i > 0 and comm.rank == 0:
                    raise OSError("the disk is gone")
                if i > 0:
                    gave_up.wait(30.0)
                return TOKENS[i]

            with pytest.raises(OSError if comm.rank == 0 else Aborted) as caught:
                trainer.step(LENGTHS, broken)
            gave_up.set()
            comm.resync()
            return str(caught.value), trainer.step(LENGTHS, TOKENS.__getitem__).queued

    found = run_threads(rank, 3, timeout=60.0)
    assert found[0][0] == "the disk is gone"
    assert all("rank 0 has given up the step" in text and "error of rank 0" in text for text, _ in found[1:])
    assert all(queued == len(LENGTHS) - 1 for _, queued in found)

"""Reductions beside last backward passes that exchange messages: when they begin, and the bits of those after it."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import NotFinite, PeerLost
from hdpcomm.models import Llama, LlamaConfig, compile_layers, expert_group, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.parallel.program import plan_program
from hdpcomm.plan import Planner, SequenceFragment
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.zero.gradients import WholeSums
from tests.harness.pipelines import FixedPlanner, tokens_of
from tests.harness.small_buckets import make_trainer

DENSE = LlamaConfig(vocabulary=62, layers=4, hidden=16, heads=4, kv_heads=2, ffn=24)
UNTIED = dataclasses.replace(DENSE, tied_embeddings=False)
SPARSE = dataclasses.replace(UNTIED, layers=3, experts=4, top_k=1)
LENGTHS = (23, 9, 30, 5, 1, 12)

RING = [((0,), (0, 1)), ((1,), (2,)), ((1, 0), (3, 4, 5))]
OPEN = [((0, 1), (0, 1)), ((1,), (2, 3, 4, 5))]
APART = [((0,), (0, 1, 2)), ((1,), (3, 4)), ((1,), (5,))]
IDLE = [((0,), (0, 1, 2)), ((0,), (3, 4, 5))]
SLICED = [
    ((0,), (1, 2)),
    ((1,), (3, 4, 5)),
    *(((1, 0), SequenceFragment(0, *bounds)) for bounds in ((0, 7), (7, 9), (9, 23))),
]
GROUPS = [((0,), (0,)), ((2,), (1,)), ((0,), (2,)), ((1,), (3,)), ((1, 0), (4, 5))]
CROSSED = [((0, 2), (0, 1)), ((3,), (2, 3)), ((3,), (4, 5))]
FOUR = [((3, 1), (0,)), ((2,), (1,)), ((0, 2), (2, 3)), ((1, 3), (4, 5))]


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan on a mesh, and the HDP ranks (of the first stage) whose reductions begin beside their last pass."""

    hdp: int
    batches: Sequence[Any]
    early: Sequence[int]
    config: LlamaConfig = DENSE
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    chunks: int = 1
    split: bool = False
    seconds: Sequence[float] | None = None

    @property
    def ranks(self) -> int:
        return self.hdp * self.pipeline * self.tensor


CASES = {
    "ring": Case(2, RING, (0, 1)),
    "ring, untied": Case(2, RING, (0, 1), UNTIED),
    "the ring is not the last of both": Case(2, OPEN, (1,)),
    "no ring": Case(2, APART, (0, 1)),
    "a rank without passes": Case(2, IDLE, (0,)),
    "two rings": Case(4, FOUR, (0, 1, 2, 3)),
    "tp": Case(2, APART, (0, 1), tensor=2),
    "tp and a ring": Case(2, RING, (0, 1), UNTIED, tensor=2),
    "tp, not the last of both": Case(2, OPEN, (), tensor=2),
    "tp, a rank that has never had a pass": Case(2, IDLE, (), tensor=2),
    "ep": Case(2, APART, (0, 1), SPARSE, expert=2),
    "ep, a rank without tokens": Case(2, IDLE, (0, 1), SPARSE, expert=2),
    "ep, groups with other numbers of waves": Case(4, GROUPS, (0, 1, 2, 3), SPARSE, expert=2),
    "ep, a ring between groups that is not the last of both": Case(4, CROSSED, (), SPARSE, expert=2),
    "ep and rings": Case(4, FOUR, (0, 1, 2, 3), SPARSE, expert=2),
    "pp": Case(2, APART, (0, 1), pipeline=2),
    "pp and a ring": Case(2, RING, (0, 1), UNTIED, pipeline=2),
    "pp, not the last of both": Case(2, OPEN, (), pipeline=2),
    "pp, interleaved": Case(2, RING, (0, 1), pipeline=2, chunks=2),
    "pp, split backward": Case(2, RING, (), pipeline=2, split=True),
    "slices": Case(2, SLICED, (0, 1)),
    "slices, tp": Case(2, SLICED, (0, 1), UNTIED, tensor=2),
    "slices, ep": Case(2, SLICED, (0, 1), SPARSE, expert=2),
    "slices, pp": Case(2, SLICED, (0, 1), pipeline=2),
    "pp, tp, ep": Case(2, APART, (0, 1), dataclasses.replace(SPARSE, layers=4), pipeline=2, tensor=2, expert=2),
}


def trainer_of(comm: hdp.Communicator, case: Case, planner: Planner, **options: Any) -> Trainer:
    mesh = Mesh(comm, pipeline=case.pipeline, tensor=case.tensor, expert=case.expert)
    model = Llama(case.config, seed=3, dtype=options.pop("wide", torch.float64))
    parts: Any = split_model(model, case.pipeline * case.chunks)[mesh.stage :: mesh.pipeline]
    parts = parts if case.pipeline > 1 else [model]
    for part in parts:
        expert_parallel(part, mesh)
        tensor_parallel(part, mesh)
        options.get("change", lambda _: None)(part)
    options.pop("change", None)
    blocks = [block for part in parts for block in part.blocks]
    pool = PinnedPool(8 << 20, device="cpu") if options.pop("offload", False) else None
    if pool is not None:
        options["offload"] = ActivationOffload(pool, blocks, min_bytes=1, resident_layers=0)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters() if p.requires_grad], lr=0.0)
    whole = parts if case.pipeline > 1 else model
    return make_trainer(whole, optimizer, planner, mesh, max_grad_norm=None, bucket_bytes=1500, **options)


class Noted:
    """The reductions that each rank has begun inside of a backward pass since the last look: the layers, counted from
    the last one, to which it had come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[int, list[int]] = {}
        start = WholeSums._start

        def noted(sums: WholeSums, place: int) -> None:
            if torch._C._current_graph_task_id() != -1:
                self.begun.setdefault(threading.get_ident(), []).append(sums._entered)
            start(sums, place)

        monkeypatch.setattr(WholeSums, "_start", noted)

    def take(self) -> list[int]:
        return self.begun.pop(threading.get_ident(), [])


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    sums = trainer.runner.gradients
    assert sums is not None
    return [sums.own(bucket).clone() for bucket in sums.buckets]


def run(case: Case, noted: Noted, transport: str = "shm", offload: bool = False, **options: Any) -> list[Any]:
    """By rank: (HDP rank, stage, the layers of reductions inside of passes, losses, gradients), each step by step."""
    tokens = tokens_of(LENGTHS, case.config)
    planner = FixedPlanner(
        case.hdp, case.pipeline, case.batches, ratio=0.6 if offload else 0.0,
        chunks=case.chunks, tensor=case.tensor, split=case.split, seconds=case.seconds,
    )  # fmt: skip

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, case, planner, offload=offload, **options)
            layers, losses, sums = [], [], []
            for _ in range(3):
                losses.append(trainer.step(LENGTHS, lambda i: tokens[i]).loss)
                layers.append(noted.take())
                sums.append(gradients(trainer))
            return trainer.mesh.hdp_rank, trainer.mesh.stage, layers, losses, sums

    return run_threads(rank, case.ranks, transport=transport)


def check(results: Sequence[Any], early: Sequence[int]) -> None:
    for hdp_rank, stage, layers, losses, sums in results:
        for begun in layers[1:]:  # in the first one nothing is known of the gradients' order
            assert (len(begun) > 1) == (hdp_rank in early and stage == 0), (hdp_rank, stage, layers)
        assert losses == losses[:1] * len(losses) == results[0][3]
        for later in sums[1:]:
            assert all(map(torch.equal, sums[0], later))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_reductions_begin_where_all_ranks_of_the_last_pass_have_it_last(
    name: str, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(run(CASES[name], Noted(monkeypatch), zero=zero), CASES[name].early)


@pytest.mark.parametrize("shape", [{"tensor": 2}, {"expert": 2, "config": SPARSE}, {"pipeline": 2}])
def test_reductions_beside_a_long_pass_begin_when_as_much_is_left_as_the_shortest_takes(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its ranks would wait inside of it for those that have shorter ones."""
    batches = [((0,), (0, 1)), ((1,), (2,)), ((0,), (3, 4)), ((1,), (5,))]
    case = Case(2, batches, (0, 1), seconds=[1.0, 1.0, 2.0, 1.0], **{"config": UNTIED} | shape)
    results = run(case, Noted(monkeypatch), zero=1)
    check(results, case.early)
    first, half = case.pipeline, case.config.layers // case.pipeline // 2 + 1  # the head is on the last stage
    for hdp_rank, stage, begun, *_ in results:
        if not stage and case.expert == 1:  # expert ranks have one pass together
            assert [min(each) for each in begun[1:]] == [first if hdp_rank else max(first, half)] * 2


def test_with_experts_reductions_begin_behind_the_exchanges_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that go between the same ranks would wait for them, and what follows computes longer."""
    inside, found = threading.local(), []
    exchanged, start = expert_group._exchanged, WholeSums._start

    def counted(*args: Any) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            inside.count = getattr(inside, "count", 0) + 1
        return exchanged(*args)

    def noted(sums: WholeSums, place: int) -> None:
        if torch._C._current_graph_task_id() != -1:
            found.append((sums._entered, inside.count))
        start(sums, place)

    begin = WholeSums.begin_pass

    def begun(sums: WholeSums, *args: Any) -> None:
        inside.count = 0
        begin(sums, *args)

    monkeypatch.setattr(expert_group, "_exchanged", counted)
    monkeypatch.setattr(WholeSums, "_start", noted)
    monkeypatch.setattr(WholeSums, "begin_pass", begun)
    case, tokens = CASES["ep"], tokens_of(LENGTHS, SPARSE)

    def rank() -> None:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, case, FixedPlanner(2, 1, case.batches), zero=1)
            for _ in range(3):
                trainer.step(LENGTHS, lambda i: tokens[i])

    run_threads(rank, 2)
    assert {entered for entered, _ in found} == {1, 2, 3}
    assert all(count == 2 * entered for entered, count in found)


def test_passes_that_end_together_reduce_beside_all_of_them() -> None:
    plan = FixedPlanner(3, 1, [((0,), (0,)), ((1, 2), (1,)), ((0,), (2,))], seconds=[1.0, 3.0, 2.0]).plan([5, 5, 5])
    assert [plan_program(plan, rank).overlap() for rank in range(3)] == pytest.approx([1.0, 2 / 3, 2 / 3])
    plan = FixedPlanner(4, 1, [((0, 1), (0,)), ((1,), (1,)), ((2,), (2,))]).plan([5, 5, 5])
    assert [plan_program(plan, rank).overlap() for rank in range(4)] == [0.0] * 4  # rank 0 may not, so none does


@pytest.mark.parametrize("tensor", [1, 2])
def test_who_takes_the_last_of_a_queue_reduces_beside_it(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, tokens = Noted(monkeypatch), tokens_of(LENGTHS, DENSE)

    class Queue(FixedPlanner):
        def plan(self, lengths: Any) -> Any:
            return dataclasses.replace(super().plan(lengths), queued=len(LENGTHS) - 1)

    batches = [((0, 1), (0,)), *(((1,), (i,)) for i in range(1, len(LENGTHS)))]
    case = Case(2, batches, (), tensor=tensor)
    planner = Queue(2, 1, batches, tensor=tensor)

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer, found = trainer_of(comm, case, planner, zero=1), []
            for _ in range(4):
                trainer.step(LENGTHS, lambda i: tokens[i])
                assert trainer.ran is not None
                took_last = trainer.mesh.hdp_rank in trainer.ran.micro_batches[-1].ranks
                found.append((took_last, noted.take(), gradients(trainer)))
            return found

    for steps in run_threads(rank, case.ranks):
        for *_, sums in steps:
            for first, again in zip(steps[0][2], sums, strict=True):
                torch.testing.assert_close(first, again, rtol=1e-10, atol=1e-12)
        for took_last, begun, _ in steps[1:]:
            assert (len(begun) > 1) == (took_last and tensor == 1)


@pytest.mark.parametrize("name", ["tp and a ring", "ep and rings", "pp, tp, ep"])
def test_on_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(CASES[name], Noted(monkeypatch), transport="sim", zero=1), CASES[name].early)


def frozen(model: nn.Module) -> None:
    """The embedding and the first layer, behind which no backward pass goes."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embedding", "blocks.0")))


def recomputed(model: nn.Module) -> None:
    set_recompute(model, "full")


def never_used(model: nn.Module) -> None:
    """A parameter in each layer that no pass reaches."""
    for block in model.blocks:
        block.never = nn.Parameter(torch.ones(9, dtype=torch.float64))


@pytest.mark.parametrize("change", [frozen, recomputed, never_used])
@pytest.mark.parametrize("name", ["ring, untied", "tp and a ring", "ep, a rank without tokens"])
def test_models_whose_gradients_come_otherwise(
    name: str, change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(CASES[name], config=dataclasses.replace(CASES[name].config, tied_embeddings=False))
    check(run(case, Noted(monkeypatch), zero=1, change=change), case.early)


@pytest.mark.parametrize("name", ["tp and a ring", "slices", "pp and a ring"])
def test_activations_in_host_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(CASES[name], Noted(monkeypatch), offload=True, zero=1), CASES[name].early)


def test_a_bucket_of_experts_that_no_token_has_reached_holds_back_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one short sequence, in which most experts of each rank get no rows."""
    case = dataclasses.replace(CASES["ep"], config=dataclasses.replace(SPARSE, experts=16))
    check(run(case, Noted(monkeypatch), zero=1), (0, 1))


def test_gradients_are_those_of_bf16_without_early_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["tp and a ring"]
    check(run(case, Noted(monkeypatch), zero=1, dtype=torch.bfloat16, wide=torch.float32), case.early)


class Sums(nn.Module):
    """Layers of which the first one's weight is used again behind the last: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(62, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.early = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 62)
        self.double()

    def forward(self, tokens: torch.Tensor, **where: Any) -> torch.Tensor:
        x = self.embedding(tokens)
        scaled = self.layers[2].weight * self.early  # its gradient comes when all layers' have come
        for layer in self.layers:
            x = x + layer(x).tanh()
        comm = where["comm"]
        if comm.size > 1:  # as a ring, an operation of the pass
            x = x + 0 * Exchanged.apply(x, comm)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x @ scaled)


class Exchanged(torch.autograd.Function):
    """A reduction in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: hdp.Communicator) -> torch.Tensor:
        ctx.comm = comm
        comm.all_reduce(torch.ones(3))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.comm.all_reduce(torch.ones(3))
        return gradient, None


def test_layers_that_come_in_other_orders_are_reduced_after_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, tokens = Noted(monkeypatch), tokens_of(LENGTHS, DENSE)
    planner = FixedPlanner(2, 1, RING)

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            model = Sums()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            trainer = make_trainer(model, optimizer, planner, comm, max_grad_norm=None, bucket_bytes=600)
            found = []
            for _ in range(3):
                trainer.step(LENGTHS, lambda i: tokens[i])
                found.append((noted.take(), gradients(trainer)))
            return found

    for steps in run_threads(rank, 2):
        for _, sums in steps[1:]:
            assert all(map(torch.equal, steps[0][1], sums))


def test_a_step_that_is_no_number_and_another_trainer_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, tokens, case = Noted(monkeypatch), tokens_of(LENGTHS, DENSE), CASES["tp and a ring"]
    planner = FixedPlanner(2, 1, case.batches, tensor=2)

    def rank() -> Any:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, case, planner, zero=1)
            trainer.step(LENGTHS, lambda i: tokens[i])
            wanted = gradients(trainer)
            weight = list(trainer.model.parameters())[-1]  # of the norm before the head
            before = weight.detach().clone()
            with torch.no_grad():
                weight.fill_(float("nan"))
            with pytest.raises(NotFinite):
                trainer.step(LENGTHS, lambda i: tokens[i])
            with torch.no_grad():
                weight.copy_(before)
            noted.take()
            trainer.step(LENGTHS, lambda i: tokens[i])
            assert len(noted.take()) > 1
            assert all(map(torch.equal, wanted, gradients(trainer)))
            other = make_trainer(
                trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.0), planner, trainer.mesh,
                max_grad_norm=None, bucket_bytes=1500,
            )  # fmt: skip
            losses = [other.step(LENGTHS, lambda i: tokens[i]).loss for _ in range(2)]
            assert len(noted.take()) > 1
            assert losses[0] == losses[1]
            return True

    assert all(run_threads(rank, 4))


def compiled(model: nn.Module) -> None:
    compile_layers(model, backend="aot_eager")


def test_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's layers round otherwise: torch does not know yet that numbers of tokens differ."""
    for *_, layers, _, sums in run(CASES["ring, untied"], Noted(monkeypatch), zero=1, change=compiled):
        assert all(len(begun) > 1 for begun in layers[1:])
        assert all(map(torch.equal, sums[1], sums[2]))
        for first, later in zip(sums[0], sums[1], strict=True):
            torch.testing.assert_close(first, later, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["tp and a ring", "ep and rings", "pp and a ring"])
def test_an_error_beside_reductions_reaches_all_ranks(name: str) -> None:
    case, others = CASES[name], []
    tokens = tokens_of(LENGTHS, case.config)
    planner = FixedPlanner(case.hdp, case.pipeline, case.batches, tensor=case.tensor)

    def rank() -> None:
        torch.set_num_threads(1)
        with hdp.init() as comm:
            trainer = trainer_of(comm, case, planner, zero=1)
            for _ in range(2):
                trainer.step(LENGTHS, lambda i: tokens[i])

            def fail(_: torch.Tensor) -> None:
                raise ArithmeticError("planted")

            if comm.rank == 0:
                trainer.model.blocks[1].attention.q.weight.register_hook(fail)
            try:
                trainer.step(LENGTHS, lambda i: tokens[i])
            except PeerLost:
                others.append(comm.rank)
                raise

    with pytest.raises((ArithmeticError, PeerLost), match="planted"):
        run_threads(rank, case.ranks, timeout=60.0)
    assert sorted(others) == list(range(1, case.ranks))


def test_any_plans_in_turn() -> None:
    """Other plans in each step, on ranks of other speeds: no step waits for ever, and its gradients are those of a
    trainer that has seen no step before."""
    lengths, tokens = LENGTHS, tokens_of(LENGTHS, SPARSE)
    draw = random.Random(int(os.environ.get("HDPCOMM_TEST_BESIDE_SEED", "0")))

    def plan(ranks: int) -> Any:
        groups = [draw.sample(range(ranks), draw.choice([1, 1, 2, ranks])) for _ in range(4)]
        return [*((tuple(group), (i,)) for i, group in enumerate(groups)), ((draw.randrange(ranks),), (4, 5))]

    for hdp_ranks, shape in ((2, {"tensor": 2}), (2, {"pipeline": 2}), (4, {"expert": 2}), (3, {})):
        case = Case(hdp_ranks, (), (), SPARSE if "expert" in shape else DENSE, **shape)
        plans = [plan(case.hdp) for _ in range(int(os.environ.get("HDPCOMM_TEST_BESIDE_STEPS", "6")))]
        planners = [FixedPlanner(case.hdp, case.pipeline, each, tensor=case.tensor) for each in plans]

        def rank(case: Case = case, planners: Sequence[FixedPlanner] = planners) -> Any:
            torch.set_num_threads(1)
            with hdp.init() as comm:
                trainer, found = trainer_of(comm, case, planners[0], zero=1), []
                for step, planner in enumerate([*planners, *planners]):
                    trainer.planner = trainer.runner.passes.planner = planner
                    if case.pipeline == 1:
                        trainer.runner.passes.planner = None
                    time.sleep(0.01 * ((comm.rank + step) % 2))
                    trainer.step(lengths, lambda i: tokens[i])
                    found.append(gradients(trainer))
                return found

        for found in run_threads(rank, case.ranks):
            for first, again in zip(found[: len(plans)], found[len(plans) :], strict=True):
                assert all(map(torch.equal, first, again))

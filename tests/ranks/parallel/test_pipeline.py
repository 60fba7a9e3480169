"""Pipelines beside HDP: gradients of one process, any plan without deadlock, and clear errors."""

from __future__ import annotations

import dataclasses
import functools
import os
import random

import numpy as np
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.parallel import split_model
from hdpcomm.plan import ClusterSpec, ModelSpec, Planner, SequenceFragment, Tree, stage_work
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from tests.harness.pipelines import (
    CONFIG,
    COST,
    FixedPlanner,
    check_gradients,
    one_step,
    part_of,
    tokens_of,
    trainer_of,
    wanted,
)

LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}
LENGTHS = (110, 1, 7, 33, 2, 18, 40, 5, 64, 3, 12, 29)
# On two HDP ranks: 7 micro-batches on rank 0 and 3 on rank 1, rings in both orders, one token on two ranks.
UNEVEN = (
    ((0, 1), (0,)), ((0,), (2, 3)), ((0,), (4,)), ((1, 0), (1, 8)), ((0,), (5,)), ((1,), (6, 7, 9)), ((0,), (10,)),
    ((0,), (11,)),
)  # fmt: skip
PLANS = int(os.environ.get("HDPCOMM_TEST_PIPELINE_PLANS", "12"))


def run_steps(world, *args, transport="shm", **options):
    return run_threads(lambda: one_step(*args, **options), world, transport=transport)


def check(results, config, dtype, lengths):
    check_gradients([r[1] for r in results], results[0][0], config, dtype, lengths, LIMIT[dtype])
    assert all(r[0] == results[0][0] for r in results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("how", ["plain", "recompute", "offload", "both"])
def test_gradients_are_those_of_one_process(how, dtype):
    offload, recompute = how in ("offload", "both"), how in ("recompute", "both")
    planner = FixedPlanner(2, 2, UNEVEN, ratio=0.6 if offload else 0.0)
    more = {"offload": offload, "recompute": "full" if recompute else "none"}
    results = run_steps(4, planner, CONFIG, dtype, LENGTHS, **more)
    check(results, CONFIG, dtype, LENGTHS)
    for rank, (_, _, read, moved) in enumerate(results):
        assert sorted(read) == sorted(s for ranks, sequences in UNEVEN if rank % 2 in ranks for s in sequences)
        assert (moved > 0) == offload


@pytest.mark.parametrize(
    ("ranks", "tensor", "chunks", "how", "dtype"),
    [
        (1, 2, 1, "plain", torch.float64),
        (1, 2, 1, "recompute", torch.float32),
        (1, 2, 2, "offload", torch.float64),
        (2, 2, 1, "plain", torch.float32),
        (2, 2, 1, "recompute", torch.float64),
        (2, 2, 1, "offload", torch.float64),
    ],
)
def test_pipelines_whose_stages_tensor_ranks_share(ranks, tensor, chunks, how, dtype):
    """PP 2 x TP 2 and HDP 2 x PP 2 x TP 2, interleaved as well."""
    batches = UNEVEN if ranks == 2 else [((0,), sequences) for _, sequences in UNEVEN]
    planner = FixedPlanner(ranks, 2, batches, ratio=0.6 if how == "offload" else 0.0, chunks=chunks, tensor=tensor)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    config = dataclasses.replace(CONFIG, vocabulary=62)
    results = run_steps(ranks * 2 * tensor, planner, config, dtype, LENGTHS, **more)
    check(results, config, dtype, LENGTHS)
    assert all((r[3] > 0) == (how == "offload") for r in results)


@pytest.mark.parametrize("how", ["plain", "recompute", "offload"])
def test_interleaved_stages(how):
    planner = FixedPlanner(2, 2, UNEVEN, chunks=2, ratio=0.6 if how == "offload" else 0.0)
    more = {"offload": how == "offload", "recompute": "full" if how == "recompute" else "none"}
    results = run_steps(4, planner, CONFIG, torch.float64, LENGTHS, **more)
    check(results, CONFIG, torch.float64, LENGTHS)
    assert all((r[3] > 0) == (how == "offload") for r in results)


def test_middle_stages_read_nothing_and_stages_may_be_uneven():
    planner = FixedPlanner(1, 3, [((0,), (0, 1)), ((0,), (2,)), ((0,), (3, 4, 5))])
    lengths = (30, 1, 17, 2, 9, 3)
    results = run_steps(3, planner, CONFIG, torch.float64, lengths, layers=(1, 2, 1))
    check(results, CONFIG, torch.float64, lengths)
    assert [sorted(r[2]) for r in results] == [list(range(6)), [], list(range(6))]


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ((2, 5), {}),
        ((5, 1, 1), {"split": True}),
        ((2, 1, 3, 1), {"chunks": 2}),
        ((1, 6), {"slices": True}),
        ((1, 1, 4, 1), {"slices": True, "chunks": 2}),
    ],
)
def test_stages_of_different_work(layers, options):
    """The order of the passes is that of stages that differ."""
    config = dataclasses.replace(CONFIG, layers=7, vocabulary=67)
    spec = ModelSpec(7, config.hidden, config.heads, config.kv_heads, config.ffn, config.vocabulary)
    batches = list(UNEVEN)
    if options.pop("slices", False):
        bounds = [(0, 30), (30, 31), (31, 80), (80, 110)]
        batches[:1] = [((0, 1), SequenceFragment(0, *each)) for each in bounds]
    planner = FixedPlanner(2, len(layers) // options.get("chunks", 1), batches, **options)
    work = stage_work(spec, layers)
    planner = planner.with_costs(COST, dataclasses.replace(planner.cluster, stage_work=work))
    results = run_steps(2 * planner.cluster.pipeline, planner, config, torch.float64, LENGTHS, layers=layers)
    check(results, config, torch.float64, LENGTHS)


def test_untied_embeddings_and_bf16():
    config = LlamaConfig(vocabulary=29, layers=2, hidden=24, heads=3, kv_heads=1, ffn=40, tied_embeddings=False)
    planner = FixedPlanner(2, 2, [((0, 1), (0,)), ((0,), (1, 2)), ((1,), (3,))])
    lengths = (50, 3, 19, 8)
    check(run_steps(4, planner, config, torch.float64, lengths), config, torch.float64, lengths)
    narrow = run_steps(4, planner, config, torch.bfloat16, lengths)
    assert narrow[0][0].loss == pytest.approx(wanted(config, torch.float64, lengths)[0], rel=1e-2)


def test_one_stage_is_the_trainer_without_pipelines():
    planner = Planner(None, ClusterSpec(2, 80), cost_model=COST)
    check(run_steps(2, planner, CONFIG, torch.float64, LENGTHS), CONFIG, torch.float64, LENGTHS)


def test_the_devices_of_streams_run_it_too():
    planner = FixedPlanner(2, 2, UNEVEN)
    results = run_steps(4, planner, CONFIG, torch.float32, LENGTHS, transport="sim")
    check(results, CONFIG, torch.float32, LENGTHS)


def random_plan(seed):
    """(HDP ranks, devices, chunks, batches, lengths): pipelines with 1 to 12 micro-batches each, unequal numbers."""
    draw = random.Random(seed)
    hdp, stages = draw.choice([(1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1)])
    chunks = 2 if stages == 2 and draw.random() < 0.5 else 1
    batches, lengths = [], []
    wanted_counts = [draw.randint(1, 12) for _ in range(hdp)]
    counts = [0] * hdp
    while any(count < want for count, want in zip(counts, wanted_counts, strict=True)):
        free = [rank for rank in range(hdp) if counts[rank] < wanted_counts[rank]]
        group = draw.sample(free, draw.randint(1, len(free)))
        sequences = tuple(range(len(lengths), len(lengths) + draw.randint(1, 3)))
        lengths += [draw.choice([1, 2, 3, draw.randint(1, 40)]) for _ in sequences]
        batches.append((tuple(group), sequences))
        for rank in group:
            counts[rank] += 1
    return hdp, stages, chunks, batches, (*lengths[:-1], lengths[-1] + 1)  # at least one label


SMALL = LlamaConfig(vocabulary=13, layers=4, hidden=8, heads=2, kv_heads=1, ffn=8)


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans_run_without_deadlock(seed):
    """A dozen by default; HDPCOMM_TEST_PIPELINE_PLANS gives another number. Half of them on simulated devices."""
    hdp_ranks, devices, chunks, batches, lengths = random_plan(seed)
    stages = devices * chunks
    layers = [4 // stages + (stage < 4 % stages) for stage in range(stages)]
    planner = FixedPlanner(hdp_ranks, devices, batches, chunks=chunks)
    results = run_steps(
        hdp_ranks * devices, planner, SMALL, torch.float64, lengths, layers=layers, transport=("shm", "sim")[seed % 2],
    )  # fmt: skip
    check(results, SMALL, torch.float64, lengths)


EVEN = dataclasses.replace(SMALL, vocabulary=14)


def weights_after(steps, trainer, batches):
    losses = []
    for step in range(steps):
        sequences = batches[step % len(batches)]
        losses.append(trainer.step([len(s) for s in sequences], lambda i, s=sequences: s[i]).loss)
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@functools.cache
def thirty_steps_of_one_process():
    def one():
        with hdp.init() as comm:
            model = Llama(EVEN, seed=3, dtype=torch.float64)
            planner = Planner(None, ClusterSpec(1, 400), cost_model=COST)
            return weights_after(30, Trainer(model, adamw(model.parameters()), planner, comm), thirty_batches())

    return run_threads(one, 1)[0]


def thirty_batches():
    return [tokens_of(lengths, EVEN) for lengths in (LENGTHS, (90, 3, 3, 70, 22), (1, 40, 2, 2, 100, 9, 17))]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("tensor", [1, 2])
def test_thirty_training_steps_are_those_of_one_process(tensor):
    """HDP 2 x PP 2, and x TP 2: with AdamW, clipping, and the planner's own plans, on batches that differ."""

    def pipelined():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            planner = Planner(None, ClusterSpec(2, 64, pipeline=2, tensor=tensor), cost_model=COST)
            trainer = trainer_of(comm, planner, EVEN, torch.float64)
            trainer.optimizer = adamw(trainer.model.parameters())
            losses, weights = weights_after(30, trainer, thirty_batches())
            (stage,) = trainer.stages
            named = {(stage.name_in_model(name), part_of(stage, name)): weight for name, weight in weights.items()}
            return losses, named, trainer.num_parameters()

    losses, weights = thirty_steps_of_one_process()
    assert losses[-1] < losses[0]
    whole = {**weights, "head.weight": weights["embedding.weight"]}
    for found_losses, found, count in run_threads(pipelined, 4 * tensor):
        assert found_losses == pytest.approx(losses, rel=1e-10)
        assert count == sum(weight.numel() for weight in weights.values())
        for (name, part), weight in found.items():
            want = whole[name] if part is None else part.take(whole[name])
            assert (weight - want).norm() <= 1e-8 * want.norm(), name


def test_trees_go_through_pipelines():
    tree = Tree(parents=(-1, 0, 0), lengths=(9, 12, 7))
    lengths = (tree, 25)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(61, (28,), generator=generator), torch.randint(61, (25,), generator=generator)]

    def pipelined():
        with hdp.init() as comm:
            planner = Planner(None, ClusterSpec(2, 64, pipeline=2), cost_model=COST)
            trainer = trainer_of(comm, planner, CONFIG, torch.float64)
            return trainer.step(lengths, lambda i: tokens[i]).loss

    def one():
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=3, dtype=torch.float64)
            planner = Planner(None, ClusterSpec(1, 100), cost_model=COST)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            return Trainer(model, optimizer, planner, comm).step(lengths, lambda i: tokens[i]).loss

    want = run_threads(one, 1)[0]
    assert run_threads(pipelined, 4) == pytest.approx([want] * 4, rel=1e-12)


class OtherOrder(FixedPlanner):
    """Two passes that do not depend on each other in the other order, on one rank."""

    def __init__(self, rank):
        super().__init__(2, 2, UNEVEN)
        self.rank = rank

    def schedule(self, plan):
        schedule = super().schedule(plan)
        if self.rank != 3:
            return schedule
        rows = schedule.passes.tolist()
        at = next(n for n in range(len(rows) - 1) if rows[n][0] != rows[n + 1][0])
        rows[at], rows[at + 1] = rows[at + 1], rows[at]
        return dataclasses.replace(schedule, passes=np.array(rows, dtype=np.int32))


def test_ranks_that_disagree_are_told_and_the_next_step_works():
    def rank():
        with hdp.init() as comm:
            planner = OtherOrder(comm.rank)
            trainer = trainer_of(comm, planner, CONFIG, torch.float64, max_grad_norm=None)
            sequences = tokens_of(LENGTHS, CONFIG)
            with pytest.raises(Mismatch, match=r"ranks 0, 1, 2: \w+; rank 3: "):
                trainer.step(LENGTHS, lambda i: sequences[i])
            planner.rank = 0
            return trainer.step(LENGTHS, lambda i: sequences[i]).loss

    want = wanted(CONFIG, torch.float64, LENGTHS)[0]
    assert run_threads(rank, 4) == pytest.approx([want] * 4, rel=1e-10)


def errors_of(make):
    """What ``make(comm)`` raises on each of four ranks."""

    def rank():
        with hdp.init() as comm:
            with pytest.raises((InvalidUsage, Mismatch)) as caught:
                make(comm)
            comm.barrier()  # the communicator still works
            return f"{type(caught.value).__name__}: {caught.value}"

    return run_threads(rank, 4)


def make(comm, *, ranks=2, stages=2, mesh=None, stage=None, number=None, config=CONFIG, **options):
    mesh = mesh or Mesh(comm, pipeline=2)
    if stage is None:
        stage = split_model(Llama(config), 2)[mesh.stage if number is None else number]
    planner = Planner(None, ClusterSpec(ranks, 100, pipeline=stages), cost_model=COST)
    own = stage.parameters() if isinstance(stage, torch.nn.Module) else [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(own, lr=0.1)
    return Trainer(stage, optimizer, planner, mesh, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ranks": 4},
            "InvalidUsage: the planner plans for 4 ranks of 2 x 1 devices (pipeline x tensor) with 1 stages each",
        ),
        ({"stages": 1}, "InvalidUsage: the planner plans for 2 ranks of 1 x 1 devices"),
        ({"stage": []}, "InvalidUsage: the model is a list; give this rank's stages"),
        ({"max_grad_norm": 0.0}, "InvalidUsage: Trainer: max_grad_norm is 0.0, expected a finite number above 0"),
        ({"stage": torch.nn.Linear(2, 2)}, "InvalidUsage: the model is a Linear; give this rank's stages"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    for told in errors_of(lambda comm: make(comm, **options)):
        assert told.startswith(message)


def test_the_stage_of_another_rank_is_refused():
    told = errors_of(lambda comm: make(comm, number=1 - comm.rank // 2))
    assert all("is stage" in each and "and was given the layers" in each for each in told)
    told = errors_of(lambda comm: make(comm, mesh=Mesh(comm, pipeline=2, tensor=2)))
    assert all("is cut for the tensor ranks []" in each for each in told)


def test_ranks_with_other_meshes_or_cuts_are_told():
    def other_mesh(comm):
        order = [0, 1, 2, 3] if comm.rank != 2 else [1, 0, 2, 3]
        make(comm, mesh=Mesh(comm, pipeline=2, placement=order))

    told = errors_of(other_mesh)
    assert all(each.startswith("Mismatch: ") for each in told)
    assert "than the ranks [2]" in told[0]
    assert "than the ranks [0, 1, 3]" in told[2]

    def other_cut(comm):
        layers = (1, 3) if comm.rank == 3 else (2, 2)
        make(comm, stage=split_model(Llama(CONFIG), 2, layers=layers)[comm.rank // 2])

    assert all("which do not follow each other" in each for each in errors_of(other_cut))


def test_ranks_that_train_other_parameters_are_told():
    def frozen(*wanted):
        def attempt(comm):
            stage = split_model(Llama(CONFIG), 2)[comm.rank // 2]
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_(comm.rank not in wanted or (len(wanted) == 1 and "norm" in name))
            make(comm, stage=stage)

        return attempt

    told = errors_of(frozen(3))
    assert all(each.startswith("Mismatch: the ranks [3] train other parameters than the other ranks") for each in told)
    told = errors_of(frozen(0, 1))
    assert all(each.startswith("InvalidUsage: stage 0 has no parameter with requires_grad") for each in told)


@pytest.mark.parametrize(
    ("stages", "layers", "message"),
    [
        (3, None, "4 layers cannot be cut into 3 stages"),
        (0, None, "cannot be cut into 0 stages"),
        (2, (4,), r"layers of the stages are \[4\] for 2 stages"),
        (2, (4, 0), "one number of at least 1 for each"),
        (2, (1, 2), "with that sum"),
    ],
)
def test_models_that_cannot_be_cut(stages, layers, message):
    with pytest.raises(InvalidUsage, match=message):
        split_model(Llama(CONFIG), stages, layers=layers)
    with pytest.raises(InvalidUsage, match="got a Linear"):
        split_model(torch.nn.Linear(1, 1), 1)

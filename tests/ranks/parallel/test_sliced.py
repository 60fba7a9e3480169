"""Steps whose long sequences run in slices: the gradients of one process, with and without pipelines.

HDPCOMM_TEST_SLICED_PLANS: how many random plans (default 16).
"""

from __future__ import annotations

import dataclasses
import os
import random
from functools import partial
from itertools import pairwise

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, set_recompute
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, Planner, SequenceFragment
from hdpcomm.testing import run_threads
from hdpcomm.train import Trainer
from hdpcomm.train.losses import GroupLoss, TokenLoss, sft
from tests.harness.pipelines import CONFIG, SEED, FixedPlanner, check_gradients, one_step, tokens_of, trainer_of

LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}
HOW = ["plain", "fp32", "recompute", "offload", "both", "split"]
BOUNDS = [(0, 60, 110), (0, 30, 31, 80, 110), (0, 7, 20, 55, 56, 110)]
LENGTHS = (110, 1, 7, 33, 2, 18, 40, 5)
EVEN = dataclasses.replace(CONFIG, vocabulary=62)
SHALLOW = dataclasses.replace(CONFIG, layers=2)
PLANS = int(os.environ.get("HDPCOMM_TEST_SLICED_PLANS", "16"))


def squared(log_probs, columns):  # noqa: ARG001
    return log_probs**2


def spread(log_probs, columns):  # noqa: ARG001
    """A loss of each group that is no sum over labels."""
    return sum(each.sum() for each in log_probs).square() * 1e-3


def slices(sequence, bounds):
    return [SequenceFragment(sequence, a, b) for a, b in pairwise(bounds)]


def plan_of(ranks, bounds=(0, 30, 31, 80, 110), second=(0, 20, 33)):
    """Sequence 0 on all ranks in slices, sequence 3 on the last one, others between."""
    everyone = tuple(reversed(range(ranks)))
    last = ranks - 1
    return [
        ((0,), (2,)),
        *((everyone, each) for each in slices(0, bounds)),
        ((0,), (1, 4)),
        *(((last,), each) for each in slices(3, second)),
        ((0,), (5,)),
        (everyone, (6,)),
        ((last,), (7,)),
    ]


def plain_step(planner, dtype, config=CONFIG, *, recompute="none", offload=False, fetch=None, **options):
    """On each rank, a thread: (metrics, gradients)."""
    sequences = tokens_of(LENGTHS, config)
    torch.set_num_threads(1)
    with hdp.init() as comm:
        model = Llama(config, seed=SEED + 10 * comm.rank, dtype=dtype)
        set_recompute(model, recompute)
        if offload:
            options["offload"] = ActivationOffload(
                PinnedPool(8 << 20, device="cpu"), model, min_bytes=1, resident_layers=0
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Trainer(model, optimizer, planner, comm, max_grad_norm=None, **options)
        total = trainer.evaluate(LENGTHS, lambda i: sequences[i])
        comm.all_reduce(total)
        metrics = trainer.step(LENGTHS, sequences.__getitem__ if fetch is None else fetch(sequences))
        assert abs(float(total[0] / total[1]) - metrics.loss) <= LIMIT[dtype] * metrics.loss
        return metrics, {(name, None): p.grad.clone() for name, p in model.named_parameters()}


def check(results, dtype, config=CONFIG):
    check_gradients([r[1] for r in results], results[0][0], config, dtype, LENGTHS, LIMIT[dtype])
    assert all(r[0] == results[0][0] for r in results)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, "plain"), (1, "both"), (2, "fp32"), (2, "recompute"), (2, "offload"), (3, "plain"), (3, "both")],
)
def test_without_a_pipeline(ranks, how):
    dtype = torch.float32 if how == "fp32" else torch.float64
    offload, recompute = how in ("offload", "both"), how in ("recompute", "both")
    planner = FixedPlanner(ranks, 1, plan_of(ranks), ratio=0.6 if offload else 0.0)
    more = {"offload": offload, "recompute": "full" if recompute else "none"}
    check(run_threads(lambda: plain_step(planner, dtype, SHALLOW, **more), ranks), dtype, SHALLOW)


@pytest.mark.parametrize(
    ("ranks", "stages", "how"),
    [(ranks, stages, how) for ranks, stages in ((1, 2), (2, 4)) for how in ("plain", "both", "split")]
    + [(2, 2, how) for how in ("fp32", "recompute", "offload")],
)
def test_in_pipelines(ranks, stages, how):
    dtype = torch.float32 if how == "fp32" else torch.float64
    offload, recompute = how in ("offload", "both"), how in ("recompute", "both")
    planner = FixedPlanner(ranks, stages, plan_of(ranks), ratio=0.6 if offload else 0.0, split=how == "split")
    more = {"offload": offload, "recompute": "full" if recompute else "none"}
    run = lambda: one_step(planner, CONFIG, dtype, LENGTHS, **more)
    check(run_threads(run, ranks * stages), dtype)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_several_stages_on_a_device(ranks, how):
    """With each of the bounds for every number of ranks; random plans have others."""
    bounds = BOUNDS[(HOW.index(how) + ranks) % len(BOUNDS)]
    dtype = torch.float32 if how == "fp32" else torch.float64
    offload, recompute = how in ("offload", "both"), how in ("recompute", "both")
    ratio, split = 0.6 if offload else 0.0, how == "split"
    planner = FixedPlanner(ranks, 2, plan_of(ranks, bounds), ratio=ratio, chunks=2, split=split)
    more = {"offload": offload, "recompute": "full" if recompute else "none"}
    run = lambda: one_step(planner, CONFIG, dtype, LENGTHS, **more)
    check(run_threads(run, 2 * ranks), dtype)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parts_of_weights(zero):
    planner = FixedPlanner(2, 1, plan_of(2))
    losses = run_threads(lambda: losses_of(planner, zero), 2)
    assert losses == run_threads(
        lambda: losses_of(FixedPlanner(2, 1, [((0,), (0, 1, 2, 3)), ((1,), (4, 5, 6, 7))]), 1), 2
    )


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_leave_before_a_slice_waits_for_others(zero):
    """Rank 1 has two passes of its own that come after one with rank 0, which then waits for rank 1 in a slice."""
    both = (1, 0)
    batches = [(both, (0,)), ((1,), (1,)), ((1,), (2,)), *((both, each) for each in slices(3, (0, 20, 33)))]
    batches += [((0,), (4, 5, 6, 7))]
    deep = dataclasses.replace(CONFIG, layers=6)  # more layers than gradients may wait for
    losses = run_threads(lambda: losses_of(FixedPlanner(2, 1, batches), zero, deep), 2)
    assert losses[0] == losses[1]


def losses_of(planner, zero, config=CONFIG):
    sequences = tokens_of(LENGTHS, config)
    torch.set_num_threads(1)
    with hdp.init() as comm:
        if planner.cluster.pipeline == planner.cluster.tensor == 1:
            model = Llama(config, seed=SEED, dtype=torch.float64)
            trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), planner, comm, zero=zero)
        else:
            trainer = trainer_of(comm, planner, config, torch.float64, lr=0.3, zero=zero)
        return [round(trainer.step(LENGTHS, sequences.__getitem__).loss, 9) for _ in range(3)]


def any_plan(seed, known=0):
    """(HDP ranks, devices, tensor ranks, micro-batches) at random: some sequences in slices of any length.

    ``known``: HDP ranks that are given.
    """
    rng = random.Random(seed)
    ranks, stages, tensor = rng.choice(
        [(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]
    )
    ranks = known or ranks
    batches, waiting = [], []
    for sequence, length in enumerate(LENGTHS):
        group = tuple(rng.sample(range(ranks), rng.randint(1, ranks)))
        if length > 1 and rng.random() < 0.5:
            count = rng.randint(1, min(length, rng.choice([2, 5, 9])))
            bounds = [0, *sorted(rng.sample(range(1, length), count - 1)), length]
            batches.append([(group, each) for each in slices(sequence, bounds)])
        elif rng.random() < 0.3:
            waiting.append(sequence)
        else:
            batches.append([(group, (sequence, *waiting))])
            waiting = []
    if waiting:
        batches.append([((0,), tuple(waiting))])
    rng.shuffle(batches)
    return ranks, stages, tensor, [batch for several in batches for batch in several]


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans(seed):
    ranks, stages, tensor, batches = any_plan(seed)
    recompute = random.Random(seed).choice(["none", "full", 1])
    planner = FixedPlanner(ranks, stages, batches, tensor=tensor, chunks=1 + (stages == 2 and seed % 2))
    if stages == tensor == 1:
        results = run_threads(lambda: plain_step(planner, torch.float64, recompute=recompute), ranks)
    else:
        more = {"recompute": recompute}
        results = run_threads(lambda: one_step(planner, EVEN, torch.float64, LENGTHS, **more), ranks * stages * tensor)
    check(results, torch.float64, CONFIG if stages == tensor == 1 else EVEN)


@pytest.mark.parametrize("seed", range(PLANS // 4))
def test_random_plans_with_parts_of_weights(seed):
    """With more layers than gradients may wait for."""
    ranks, stages, tensor, batches = any_plan(seed, known=2 + seed % 2)
    planner = FixedPlanner(ranks, stages, batches, tensor=tensor, chunks=1 + (stages == 2 and seed % 2))
    deep = dataclasses.replace(EVEN, layers=8)
    whole, *parts = (
        run_threads(partial(losses_of, planner, zero, deep), ranks * stages * tensor, timeout=60.0)
        for zero in (0, 2, 3)
    )
    assert parts == [whole, whole]


@pytest.mark.parametrize(
    ("ranks", "stages", "chunks", "how"),
    [(2, 2, 1, "split"), (2, 2, 2, "plain"), (2, 2, 2, "split"), (3, 4, 1, "plain")],
)
def test_plans_of_the_planner(ranks, stages, chunks, how):
    cluster = ClusterSpec(ranks, 60, pipeline=stages, chunks=chunks, split_backward=how == "split")
    planner = Planner(None, cluster, cost_model=CostModel(1e-6, 1e-5), slices=8)
    plan = planner.plan(LENGTHS)
    assert 0 in {each.sequence for each in plan.slices.values()}
    run = lambda: one_step(planner, CONFIG, torch.float64, LENGTHS)
    check(run_threads(run, ranks * stages), torch.float64)


def test_a_sequence_that_fits_the_ranks_no_other_way():
    memory = MemoryModel(30, kept=0.1)
    planner = Planner(None, ClusterSpec(2, 30), cost_model=CostModel(1e-6, 1e-5), memory=memory, slices=8)
    assert len(planner.plan(LENGTHS).slices) == 3
    check(run_threads(lambda: plain_step(planner, torch.float64), 2), torch.float64)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_sequence_whose_keys_fit_in_host_memory_alone(recompute):
    memory = MemoryModel(12, offloadable=0.5, copy_s=1e-9, host_tokens=500, kept=0.3, kept_offloaded=0.05)
    planner = Planner(None, ClusterSpec(2, 12), cost_model=CostModel(1e-6, 1e-5), memory=memory, slices=8)
    plan = planner.plan(LENGTHS)
    assert [each.number for each in plan.slices.values()] == [0, 1, 2, 3]
    assert all(plan.micro_batches[index].offload_ratio == 1 for index in plan.slices)
    run = lambda: plain_step(planner, torch.float64, offload=True, recompute=recompute)
    check(run_threads(run, 2), torch.float64)


@pytest.mark.parametrize(
    ("ranks", "stages", "how"), [(1, 1, "plain"), (3, 1, "recompute"), (1, 2, "recompute"), (2, 2, "plain")]
)
def test_losses_of_log_probabilities(ranks, stages, how):
    """The mean over tokens has the gradients of the model's own loss."""
    planner, more = FixedPlanner(ranks, stages, plan_of(ranks)), {"recompute": "full" if how == "recompute" else "none"}

    def run():
        if stages == 1:
            return plain_step(planner, torch.float64, loss=sft(), **more)
        return one_step(planner, CONFIG, torch.float64, LENGTHS, loss=sft(), **more)

    check(run_threads(run, ranks * stages), torch.float64)


@pytest.mark.parametrize("loss", [TokenLoss(squared, per="sequences"), GroupLoss(spread)], ids=["answers", "groups"])
@pytest.mark.parametrize("stages", [1, 2])
def test_losses_of_whole_sequences(stages, loss):
    """Means over a sequence, and losses of several together, do not see where slices begin."""

    def run(batches):
        planner = FixedPlanner(2, stages, batches)
        if stages == 1:
            return lambda: plain_step(planner, torch.float64, loss=loss)
        return lambda: one_step(planner, CONFIG, torch.float64, LENGTHS, loss=loss)

    whole = [((0, 1), (0, 1, 2)), ((1,), (3, 4)), ((0,), (5, 6, 7))]
    found, wanted = (run_threads(run(batches), 2 * stages) for batches in (plan_of(2), whole))
    for got, want in zip(found, wanted, strict=True):
        assert got[0].loss == pytest.approx(want[0].loss, rel=1e-10)
        assert got[1].keys() == want[1].keys()
        for name, gradient in want[1].items():
            assert float((got[1][name] - gradient).norm()) <= 1e-10 * float(gradient.norm()) + 1e-14, name


class Noise(torch.nn.Module):
    """Dropout that notes its draws, pass by pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.drawn = inner, []

    def forward(self, x, *args, **more):
        self.drawn.append(torch.rand(x.shape, dtype=x.dtype))
        return self.inner(x * self.drawn[-1], *args, **more)


class Replayed(Noise):
    """Noise of given draws, row by row of the sequence."""

    def forward(self, x, *args, **more):
        return self.inner(x * self.drawn[0], *args, **more)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_slice_draws_the_same_numbers_again(recompute):
    bounds = (0, 30, 31, 80, 110)

    def step(batches, layer):
        sequences = tokens_of(LENGTHS[:1], CONFIG)
        torch.manual_seed(5)
        with hdp.init() as comm:
            model = Llama(CONFIG, seed=SEED, dtype=torch.float64)
            set_recompute(model, recompute)
            model.blocks[1].ffn = layer(model.blocks[1].ffn)
            trainer = Trainer(
                model,
                torch.optim.SGD(model.parameters(), lr=0.0),
                FixedPlanner(1, 1, batches),
                comm,
                max_grad_norm=None,
            )
            trainer.step(LENGTHS[:1], sequences.__getitem__)
            after = float(torch.rand(()))
            return model.blocks[1].ffn.drawn, [p.grad.clone() for p in model.parameters()], after

    drawn, gradients, after = step([((0,), each) for each in slices(0, bounds)], Noise)
    kept, again = drawn[:3], drawn[3:]
    ran = list(reversed(again if recompute == "none" else again[::2]))  # a checkpoint computes each once more
    for first, second in zip(kept, ran, strict=False):
        assert torch.equal(first, second)
    assert not any(torch.equal(a[:1], b[:1]) for a, b in pairwise(ran))
    _, wanted, _ = step([((0,), (0,))], lambda inner: _replayed(inner, ran))
    for got, want in zip(gradients, wanted, strict=True):
        assert float((got - want).norm()) <= 1e-10 * float(want.norm())
    assert after == step([((0,), each) for each in slices(0, bounds)], Noise)[2]


def _replayed(inner, draws):
    layer = Replayed(inner)
    layer.drawn = [torch.cat([each.flatten(0, -2) for each in draws])]
    return layer


class Parts:
    """Reads parts, and notes how many tokens."""

    def __init__(self, sequences):
        self.sequences, self.read = sequences, 0

    def __call__(self, i):
        return self.part(i, 0, len(self.sequences[i]))

    def part(self, i, start, stop):
        self.read += stop - start
        tokens = self.sequences[i]
        return tokens[start:stop], torch.cat([tokens[1:], torch.tensor([-100])])[start:stop]


def test_a_rank_reads_its_parts_of_slices_only():
    readers = []

    def fetch(sequences):
        readers.append(Parts(sequences))
        return readers[-1]

    planner = FixedPlanner(2, 1, plan_of(2))
    check(run_threads(lambda: plain_step(planner, torch.float64, fetch=fetch), 2), torch.float64)
    assert sum(reader.read for reader in readers) == sum(LENGTHS)


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([((0, 1), each) for each in slices(0, (0, 30, 100))], "is not among the 8 given items"),
        (
            [((0, 1), SequenceFragment(0, 0, 30)), ((0, 1), SequenceFragment(0, 40, 110))],
            "parts that follow each other",
        ),
        (
            [((0, 1), SequenceFragment(0, 0, 30)), ((1, 0), SequenceFragment(0, 30, 110))],
            r"slice 1 of sequence 0 on ranks \[1, 0\]; expected ranks \[0, 1\]",
        ),
        (
            [((0, 1), SequenceFragment(0, 0, 30)), ((1,), (1,)), ((0, 1), SequenceFragment(0, 30, 110))],
            "with nothing between it and the slice before it",
        ),
    ],
)
def test_slices_that_cannot_run_are_refused(batches, told):
    rest = [((0,), (i,)) for i in range(1, 8) if ((1,), (i,)) not in batches]
    plan = FixedPlanner(2, 1, [*batches, *rest]).plan(LENGTHS)
    with pytest.raises(InvalidUsage, match=told):
        plan.validate(LENGTHS)

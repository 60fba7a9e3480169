"""Waves of ranks that share experts: who runs when, and that nobody waits for ever."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import NamedTuple

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel import plan_program
from hdpcomm.parallel.program import KEEP
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Planner, SequenceFragment, SequenceInfo, StepPlan
from hdpcomm.plan.waves import blocks_of, make_waves, plan_waves
from tests.harness.programs import check_programs, pipeline_programs

PLANS = int(os.environ.get("HDPCOMM_TEST_WAVE_PLANS", "60"))


class Turn(NamedTuple):
    batch: MicroBatch | None
    keeps: bool = False


def turns_of(plan, rank, size, *, training=True):
    """The turns of a rank, action by action: a slice that no later one follows keeps nothing."""
    program = plan_program(plan, rank, expert=size, training=training)
    turns = [Turn(program.batches[each.done.micro_batch], each.kind == KEEP) for each in program.actions]
    kept = {index for index, planned in plan.slices.items() if not planned.last}
    return [Turn(None, True) if turn.keeps and turn.batch and turn.batch.index not in kept else turn for turn in turns]


def plan_of(ranks, batches):
    """Each rank's share of a micro-batch is 8 tokens."""
    made = tuple(MicroBatch(i, tuple(own), (SequenceInfo(i, 8 * len(own)),), 0.0, 1.0) for i, own in enumerate(batches))
    return StepPlan("by hand", ranks, made, 1.0, 1.0, 0.0, 0.0)


def sliced_plan(generator, ranks, count):
    """Random groups of ranks run a micro-batch each, or a sequence in slices of 8 tokens on a rank."""
    batches, fragments = [], []
    for sequence in range(count):
        own = generator.sample(range(ranks), generator.randint(1, ranks))
        slices = generator.choice([0, 0, 1, 2, 3, 5])
        batches += [(own, count + len(fragments) + k) for k in range(slices)] or [(own, sequence)]
        tokens = 8 * len(own)
        fragments += [SequenceFragment(sequence, k * tokens, (k + 1) * tokens) for k in range(slices)]
    made = tuple(
        MicroBatch(i, tuple(own), (SequenceInfo(number, 8 * len(own)),), 0.0, 1.0)
        for i, (own, number) in enumerate(batches)
    )
    return StepPlan("by hand", ranks, made, 1.0, 1.0, 0.0, 0.0, fragments=tuple(fragments))


def deadlock(orders, size):
    """Runs what each rank does in turn, by a model of blocking operations: the ranks that are left waiting.

    orders: of each rank its turns. A pass has two layers of a ring over the ranks of the micro-batch and an exchange
    over the group, there and, but for what slices keep, back.
    """
    programs = []
    for rank, order in enumerate(orders):
        first = rank // size * size
        programs.append([])
        for number, (batch, keeps) in enumerate(order):
            for part in range(2 if keeps else 4):
                ring = (rank,) if batch is None else batch.ranks
                programs[-1].append((("ring", batch and batch.index, keeps, part), ring))
                programs[-1].append((("experts", first, number, part), tuple(range(first, first + size))))
    while any(programs):
        heads = [program[0] if program else (None, ()) for program in programs]
        ready = [rank for rank, (name, needs) in enumerate(heads) if name and all(heads[n][0] == name for n in needs)]
        if not ready:
            return [rank for rank, program in enumerate(programs) if program]
        for rank in ready:
            programs[rank].pop(0)
    return []


def waves(plan, size):
    return [turns_of(plan, rank, size) for rank in range(plan.num_ranks)]


def test_random_plans_run_to_their_end_and_each_micro_batch_once():
    generator = random.Random(7)
    for _ in range(PLANS):
        size, groups = generator.choice([(1, 3), (2, 1), (2, 3), (4, 2), (3, 2)])
        ranks = size * groups
        batches = [generator.sample(range(ranks), generator.randint(1, ranks)) for _ in range(generator.randint(1, 12))]
        plan = plan_of(ranks, batches)
        orders = waves(plan, size)
        assert deadlock(orders, size) == []
        for rank, order in enumerate(orders):
            assert [batch for batch, _ in order if batch] == list(plan.for_rank(rank))
            assert len(order) == len(orders[rank // size * size])
        for first in range(0, ranks, size):
            group = orders[first : first + size]
            for turns in zip(*group, strict=True):
                assert any(batch for batch, _ in turns), "a wave of a group without a micro-batch"


def test_pairing_micro_batches_by_their_number_would_wait_for_ever():
    plan = plan_of(4, [(0,), (3,), (0, 2), (1, 3)])
    by_number = [list(map(Turn, plan.for_rank(rank))) for rank in range(4)]
    longest = max(map(len, by_number))
    by_number = [order + [Turn(None)] * (longest - len(order)) for order in by_number]
    assert deadlock(by_number, 2) == [0, 1, 2, 3]
    assert deadlock(waves(plan, 2), 2) == []


def test_without_passes_for_others_they_would_wait():
    plan = plan_of(2, [(0,), (0,), (0, 1)])
    assert deadlock([list(map(Turn, plan.for_rank(rank))) for rank in range(2)], 2) == [0, 1]
    assert [batch and batch.index for batch, _ in turns_of(plan, 1, 2)] == [None, None, 2]


def test_random_slices_run_to_their_end():
    generator = random.Random(11)
    for _ in range(PLANS):
        size, groups = generator.choice([(1, 3), (2, 1), (2, 3), (4, 2), (3, 2)])
        plan = sliced_plan(generator, size * groups, generator.randint(1, 8))
        orders = waves(plan, size)
        assert deadlock(orders, size) == []
        for rank, order in enumerate(orders):
            own = plan.for_rank(rank)
            kept = [batch for batch, keeps in order if batch and keeps]
            assert kept == [batch for batch in own if batch.index in plan.slices and not plan.slices[batch.index].last]
            whole = [batch for batch, keeps in order if batch and not keeps]
            assert sorted(batch.index for batch in whole) == [batch.index for batch in own]
            place = {turn: number for number, turn in enumerate(order)}
            for batch, following in pairs_of_slices(plan, own):
                assert place[Turn(following)] < place[Turn(batch)]
                if not plan.slices[following.index].last:
                    assert place[Turn(batch, True)] < place[Turn(following, True)]
            forward_only = turns_of(plan, rank, 1, training=False)
            assert forward_only == list(map(Turn, own))


def pairs_of_slices(plan, batches):
    """Micro-batches that are a slice and the next one of its sequence."""
    known = [(batch, plan.slices[batch.index]) for batch in batches if batch.index in plan.slices]
    for (batch, one), (following, other) in pairwise(known):
        if one.sequence == other.sequence:
            yield batch, following


def test_a_rank_of_a_wave_without_a_slice_would_run_another_pass():
    """Waves as they are without slices have forward passes beside whole ones."""
    generator = random.Random(4)
    plan = next(plan for plan in iter(lambda: sliced_plan(generator, 4, 6), None) if len(plan.slices) > 6)
    whole = plan_of(4, [batch.ranks for batch in plan.micro_batches])
    mixed = [
        [Turn(batch, keeps=bool(batch) and batch.index in plan.slices) for batch, _ in order]
        for order in waves(whole, 2)
    ]
    assert deadlock(mixed, 2)


def test_a_rank_holds_one_sequence_of_a_block():
    generator = random.Random(12)
    for _ in range(PLANS):
        ranks = generator.randint(1, 6)
        plan = sliced_plan(generator, ranks, generator.randint(1, 8))
        made = make_waves(plan.micro_batches, plan.slices)
        for block in blocks_of(made, plan.slices):
            inside = [plan.slices.get(batch.index) for wave in block for batch in wave]
            if all(each is None or len(each.rows) == 1 for each in inside):
                assert len(block) == 1
                continue
            for number, wave in enumerate(block):
                assert {plan.slices[batch.index].number for batch in wave} == {number}
            for rank in range(ranks):
                own = [batch for wave in block for batch in wave if rank in batch.ranks]
                assert len({plan.slices[batch.index].sequence for batch in own}) <= 1
        for rank in range(ranks):
            own = [batch for wave in made for batch in wave if rank in batch.ranks]
            assert own == list(plan.for_rank(rank))


def test_pipelines_run_random_waves_to_their_end():
    generator = random.Random(9)
    for _ in range(PLANS // 2):
        expert, groups, stages, chunks = generator.choice([(2, 1, 2, 1), (2, 2, 3, 1), (3, 1, 2, 2), (1, 3, 2, 1)])
        ranks = expert * groups
        batches = [generator.sample(range(ranks), generator.randint(1, ranks)) for _ in range(generator.randint(1, 9))]
        plan = plan_of(ranks, batches)
        waves = plan_waves(plan, expert)
        cluster = ClusterSpec(ranks, 8, pipeline=stages, chunks=chunks)
        schedule = Planner(None, cluster, cost_model=CostModel(attention=1e-6, linear=1e-5)).schedule(waves.plan)
        check_programs(pipeline_programs(schedule, waves.plan), waves.plan, stages=stages * chunks)
        for rank in range(ranks):
            own = waves.of_rank(rank)
            assert [batch for _, batch in sorted(own.items()) if batch] == list(plan.for_rank(rank))
            assert own.keys() == waves.of_rank(rank // expert * expert).keys()


@pytest.mark.parametrize("split", [False, True])
def test_pipelines_run_random_slices_to_their_end(split):
    generator = random.Random(13)
    for _ in range(PLANS // 2):
        expert, groups, devices = generator.choice([(2, 1, 2), (2, 2, 3), (3, 1, 2), (1, 3, 2), (2, 2, 4)])
        plan = sliced_plan(generator, expert * groups, generator.randint(1, 7))
        planned = plan_waves(plan, expert)
        chunks = generator.choice([1, 1, 2, 3])
        cluster = ClusterSpec(expert * groups, 16, pipeline=devices, chunks=chunks, split_backward=split)
        schedule = Planner(None, cluster, cost_model=CostModel(attention=1e-6, linear=1e-5)).schedule(planned.plan)
        programs = pipeline_programs(schedule, planned.plan)
        check_programs(programs, planned.plan, stages=schedule.stages, split=split)
        for rank in range(expert * groups):
            own = planned.of_rank(rank)
            assert [batch for _, batch in sorted(own.items()) if batch] == list(plan.for_rank(rank))
            assert own.keys() == planned.of_rank(rank // expert * expert).keys()
            check_order(programs, plan, own, rank)


def check_order(programs, plan, own, rank):
    """Forward passes of the slices that a rank itself has rise, backward passes fall."""
    wave = {batch.index: number for number, batch in own.items() if batch is not None}
    for (other, _), program in programs.items():
        if other != rank:
            continue
        place = {
            (action.done.micro_batch, action.done.stage, action.done.backward): number
            for number, action in enumerate(program)
            if action.kind == "run" and not action.done.weights
        }
        for stage in {stage for _, stage, _ in place}:
            for batch, following in pairs_of_slices(plan, plan.for_rank(rank)):
                first, second = wave[batch.index], wave[following.index]
                assert place[first, stage, False] < place[second, stage, False]
                assert place[second, stage, True] < place[first, stage, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_without_micro_batches(rank):
    assert turns_of(plan_of(2, []), rank, 2) == []


def whole_programs(plan):
    return {(rank, 0): list(plan_program(plan, rank).actions) for rank in range(plan.num_ranks)}


def test_programs_without_pipelines_run_to_their_end():
    generator = random.Random(14)
    for _ in range(PLANS):
        ranks = generator.randint(1, 6)
        plan = sliced_plan(generator, ranks, generator.randint(1, 8))
        check_programs(whole_programs(plan), plan, stages=1)


@pytest.mark.parametrize(
    ("slices", "message"),
    [(0, "would wait for ever; 2 devices wait in a circle"), (2, "comes before that of the slice in micro-batch")],
)
def test_programs_in_another_order_are_refused(slices, message):
    """Two micro-batches on two ranks, or the two slices of a sequence on one."""
    fragments = tuple(SequenceFragment(0, 8 * number, 8 * number + 8) for number in range(slices))
    ranks = (0,) if slices else (0, 1)
    batches = tuple(MicroBatch(i, ranks, (SequenceInfo(i + (1 if slices else 0), 8),), 0.0, 1.0) for i in range(2))
    plan = StepPlan("by hand", len(ranks), batches, 1.0, 1.0, 0.0, 0.0, fragments=fragments)
    programs = whole_programs(plan)
    check_programs(programs, plan, stages=1)
    programs[0, 0][-2:] = reversed(programs[0, 0][-2:])
    with pytest.raises(InvalidUsage, match=message):
        check_programs(programs, plan, stages=1)

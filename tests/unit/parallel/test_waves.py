"""Waves of ranks that share experts: who runs when, and that nobody waits for ever."""

from __future__ import annotations

import os
import random

import pytest

from hdpcomm.parallel import check_programs, make_programs
from hdpcomm.parallel.waves import plan_waves, waves_of
from hdpcomm.plan import ClusterSpec, CostModel, MicroBatch, Planner, SequenceInfo, StepPlan

PLANS = int(os.environ.get("HDPCOMM_TEST_WAVE_PLANS", "60"))


def plan_of(ranks, batches):
    """Each rank's share of a micro-batch is 8 tokens."""
    made = tuple(MicroBatch(i, tuple(own), (SequenceInfo(i, 8 * len(own)),), 0.0, 1.0) for i, own in enumerate(batches))
    return StepPlan("by hand", ranks, made, 1.0, 1.0, 0.0, 0.0)


def deadlock(orders, size):
    """Runs what each rank does in turn, by a model of blocking operations: the ranks that are left waiting.

    orders: of each rank its micro-batches, None for a pass without tokens. A pass has two layers of a ring over the
    ranks of the micro-batch and an exchange over the group, there and back.
    """
    programs = []
    for rank, order in enumerate(orders):
        first = rank // size * size
        programs.append([])
        for number, batch in enumerate(order):
            for part in range(4):
                ring = (rank,) if batch is None else batch.ranks
                programs[-1].append((("ring", batch and batch.index, part), ring))
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
    return [
        waves_of(plan, rank, range(rank // size * size, rank // size * size + size)) for rank in range(plan.num_ranks)
    ]


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
            assert [batch for batch in order if batch] == list(plan.for_rank(rank))
            assert len(order) == len(orders[rank // size * size])
        for first in range(0, ranks, size):
            group = orders[first : first + size]
            assert all(any(each) for each in zip(*group, strict=True)), "a wave of a group without a micro-batch"


def test_pairing_micro_batches_by_their_number_would_wait_for_ever():
    plan = plan_of(4, [(0,), (3,), (0, 2), (1, 3)])
    by_number = [list(plan.for_rank(rank)) for rank in range(4)]
    longest = max(map(len, by_number))
    by_number = [order + [None] * (longest - len(order)) for order in by_number]
    assert deadlock(by_number, 2) == [0, 1, 2, 3]
    assert deadlock(waves(plan, 2), 2) == []


def test_without_passes_for_others_they_would_wait():
    plan = plan_of(2, [(0,), (0,), (0, 1)])
    assert deadlock([list(plan.for_rank(rank)) for rank in range(2)], 2) == [0, 1]
    assert [batch and batch.index for batch in waves_of(plan, 1, range(2))] == [None, None, 2]


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
        check_programs(make_programs(schedule, waves.plan), waves.plan, stages=stages * chunks)
        for rank in range(ranks):
            own = waves.of_rank(rank)
            assert [batch for _, batch in sorted(own.items()) if batch] == list(plan.for_rank(rank))
            assert own.keys() == waves.of_rank(rank // expert * expert).keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_without_micro_batches(rank):
    assert waves_of(plan_of(2, []), rank, range(2)) == []

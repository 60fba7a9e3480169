"""Searches leave out what cannot change their result, and say how much they have looked at."""

from __future__ import annotations

import bisect
import heapq
import random
from typing import Any

import pytest

from hdpcomm.plan import MODELS, ClusterSpec, CostModel, MemoryModel, Planner
from hdpcomm.plan.cost import core_cost
from tests.harness.native import _testing

COSTS = CostModel(attention=1e-8, linear=1e-5, fixed=1e-3)


def cost_of(ranks: int, **options: Any) -> Any:
    cluster = ClusterSpec(ranks=ranks, capacity=1000, **options)
    return core_cost(COSTS, MemoryModel(1000), cluster)


def batches_of(rng: random.Random, ranks: int, count: int) -> list[tuple[list[int], list[int]]]:
    return [([rng.randrange(ranks)], [sequence]) for sequence in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_entries_that_are_passed_over_come_again(seed: int) -> None:
    """Packs that have no room for a sequence are put back: compared with a heap."""
    rng = random.Random(seed)
    times = sorted((rng.choice([rng.random(), 0.5, float(rng.randrange(4))]) for _ in range(60)), reverse=seed % 2 == 0)
    turns = [(rng.choice([0, 0, 1, 7]), rng.choice([0.01, 0.3, 2.0, -1.0])) for _ in range(90)]
    heap = [(time, number) for number, time in enumerate(times)]
    heapq.heapify(heap)
    expected = []
    for passed, later in turns:
        taken = [heapq.heappop(heap) for _ in range(min(passed, len(heap)))]
        if heap:
            time, number = heapq.heappop(heap)
            expected.append(number)
            if later >= 0:
                heapq.heappush(heap, (time + later, number))
        for entry in taken:
            heapq.heappush(heap, entry)
    assert _testing.entries_in_turn(times, turns) == expected


@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"split_backward": True}])
@pytest.mark.parametrize("seed", range(6))
def test_pipelines_that_cannot_beat_a_limit_are_not_simulated(options: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    ranks, lengths = 5, [rng.randint(1, 1000) for _ in range(40)]
    cost = cost_of(ranks, pipeline=4, **options)
    batches = batches_of(rng, ranks, len(lengths))
    exact = _testing.makespan_of(cost, lengths, batches)
    for share in (0.3, 0.9, 0.999, 1.0):
        found = _testing.makespan_of(cost, lengths, batches, limit=share * exact)
        assert share * exact <= found <= exact
    assert _testing.makespan_of(cost, lengths, batches, limit=0.3 * exact) < exact  # given up long before the end
    assert _testing.makespan_of(cost, lengths, batches, limit=1.001 * exact) == exact


@pytest.mark.parametrize("seed", range(4))
def test_flat_plans_are_given_up_where_they_pass_a_limit(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 1000) for _ in range(3000)]
    batches = [(sorted(rng.sample(range(12), rng.choice([1, 1, 3]))), [sequence]) for sequence in range(3000)]
    cost = cost_of(12)
    exact = _testing.makespan_of(cost, lengths, batches)
    for share in (0.1, 0.5, 0.99, 1.0):
        found = _testing.makespan_of(cost, lengths, batches, limit=share * exact)
        assert share * exact <= found <= exact
    assert _testing.makespan_of(cost, lengths, batches, limit=0.3 * exact) < 0.31 * exact
    assert _testing.makespan_of(cost, lengths, batches, limit=1.001 * exact) == exact


@pytest.mark.parametrize("capacity", [63, 64, 4096, 70_001, 1 << 25])
def test_each_sequence_goes_to_the_fullest_pack_with_room(capacity: int) -> None:
    """If several are as full, it goes to the one that became so first. Many packs are in lists by room."""
    rng = random.Random(capacity)
    lengths = [max(1, int(capacity * rng.choice([rng.random(), 0.5, 0.1 * rng.random()]))) for _ in range(5000)]
    packs: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # room, when it came to have it, pack
    for turn, sequence in enumerate(sorted(range(len(lengths)), key=lambda each: -lengths[each])):
        at = bisect.bisect_left(rooms, (lengths[sequence], -1, -1))
        if at < len(rooms):
            room, _, pack = rooms.pop(at)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(sequence)
        if room > lengths[sequence]:
            bisect.insort(rooms, (room - lengths[sequence], turn, pack))
    cluster = ClusterSpec(ranks=3, ranks_per_node=3, capacity=capacity)
    planner = Planner(None, cluster, "static", COSTS, memory=MemoryModel(capacity))
    found = planner.plan(lengths).micro_batches
    assert [[each.id for each in batch.sequences] for batch in found] == packs


def test_blocks_of_slow_ranks_are_not_looked_at_for_fast_groups() -> None:
    """Every rank has a speed of its own, so each is a block, and groups of fast ones were looked for among all."""
    rng = random.Random(0)
    ranks = 2000
    cluster = ClusterSpec(ranks=ranks, capacity=1000, speeds=tuple(rng.uniform(0.5, 1) for _ in range(ranks)))
    cost = core_cost(CostModel(attention=1e-8, linear=1e-5, ring_step=4e-3), MemoryModel(1000), cluster)
    lengths = [rng.randint(1001, 4000) for _ in range(4000)]
    for target in (0.05, 0.1, 0.15):
        found = _testing.pack_blocks(cost, lengths, target)
        assert found["looked"] < 60 * len(lengths)


def test_shapes_without_a_plan_leave_work_for_others() -> None:
    """The search ends after so much work. Shapes of waves that were known already took half of it, and this plan was
    6.8% above the bound."""
    rng = random.Random("long 0")
    lengths: list[int] = []
    while sum(lengths) < 4 * 8192 * 16384:
        lengths.append(int(100_000 * rng.uniform(0.95, 1.05)))
    cluster = ClusterSpec(ranks=16384, capacity=8192, ranks_per_node=8, pipeline=4)
    plan = Planner(MODELS["llama-7b"], cluster).plan(lengths)
    assert plan.makespan_s < 1.06 * plan.lower_bound_s


def test_shapes_of_one_arrangement_have_one_plan() -> None:
    """Where no sequence takes several ranks, spread has no effect: such shapes are planned once."""
    rng = random.Random(3)
    cost = cost_of(6, pipeline=4)
    short = [rng.randint(1, 60) for _ in range(900)]
    (plain, first), (spread, second), (other, third) = _testing.arrange_waves(
        cost, short, [(8, 1.0, False), (8, 1.0, True), (11, 1.0, False)]
    )
    assert plain == spread
    assert first == second
    assert plain != other
    assert first != third
    wide = [*short, 4500, 3000]
    (plain, first), (spread, second) = _testing.arrange_waves(cost, wide, [(8, 1.0, False), (8, 1.0, True)])
    assert plain != spread or first == second

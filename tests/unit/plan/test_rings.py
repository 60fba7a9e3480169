"""Rings on hosts whose ranks share network interfaces."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, POLICIES, ClusterSpec, CostModel, Planner, StepPlan
from hdpcomm.sim import reduction_seconds, simulate_step
from tests.harness.native import _testing

COST = CostModel(1e-9, 1e-6, 1e-4, piece=1e-7, ring_step=1e-5, kv_intra=1e-6, kv_inter=8e-6, latency_inter=1e-5)


def edges(ring: list[int]) -> list[tuple[int, int]]:
    return list(zip(ring, ring[1:] + ring[:1], strict=True))


def messages(ring: list[int], node: int, nics: int) -> int:
    """Messages of the busiest interface, one way."""
    count: Counter[tuple[int, int, str]] = Counter()
    for a, b in edges(ring):
        if a // node != b // node:
            count[a // node, a % node * nics // node, "out"] += 1
            count[b // node, b % node * nics // node, "in"] += 1
    return max(count.values(), default=1)


def test_a_ring_leaves_each_host_once() -> None:
    node = 4
    peers = defaultdict(set)
    for first in range(8):
        for count in range(1, 41):
            ranks = list(range(first, first + count))
            ring = _testing.ring_order(ranks, node, 1)
            assert sorted(ring) == ranks
            hosts = len({rank // node for rank in ranks})
            assert sum(a // node != b // node for a, b in edges(ring)) == (hosts if hosts > 1 else 0)
            assert messages(ring, node, 1) == 1
            for a, b in edges(ring):
                peers[a].add(b)
                peers[b].add(a)
            if hosts < 3:
                assert ring == _testing.ring_order(ranks)
    assert max(len(each - {rank}) for rank, each in peers.items()) <= 14


@pytest.mark.parametrize(("node", "nics"), [(8, 8), (8, 9), (8, 4), (8, 2), (4, 2), (1, 1)])
def test_rings_of_neighbours_need_two_interfaces_to_stay_as_they_are(node: int, nics: int) -> None:
    for first in range(node):
        for count in range(1, 5 * node):
            ranks = list(range(first, first + count))
            ring = _testing.ring_order(ranks)
            assert messages(ring, node, min(nics, node)) == 1
            assert _testing.ring_order(ranks, node, nics) == ring


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_group_leaves_each_host_once(seed: int) -> None:
    rng = random.Random(seed)
    node, nics = rng.randint(1, 8), rng.randint(1, 3)
    ranks = sorted(rng.sample(range(64), rng.randint(1, 40)))
    ring = _testing.ring_order(ranks, node, nics)
    assert sorted(ring) == ranks
    if nics < node:
        assert messages(ring, node, nics) == 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_for_shared_interfaces_have_the_same_groups_and_times(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 24)
    plain = ClusterSpec(ranks=ranks, capacity=100, ranks_per_node=rng.randint(1, 6), pipeline=rng.choice([1, 1, 2]))
    shared = replace(plain, nics=1)
    policy = rng.choice([each for each in POLICIES if each != "static"])
    lengths = [rng.randint(1, rng.choice([40, 100 * ranks // 2])) for _ in range(rng.randint(1, 20))]
    plans = [Planner(None, cluster, policy, COST).plan(lengths) for cluster in (plain, shared)]
    assert plans[0].lower_bound_s == plans[1].lower_bound_s
    if policy not in ("balanced", "pipeline"):  # which chooses among plans by what rings take from each other
        assert plans[0].makespan_s <= plans[1].makespan_s * (1 + 1e-9)
        for one, other in zip(plans[0].micro_batches, plans[1].micro_batches, strict=True):
            assert sorted(one.ranks) == sorted(other.ranks)
            assert replace(one, ranks=()) == replace(other, ranks=())
    planner = Planner(None, shared, policy, COST)
    planner.validate(plans[1], lengths)
    assert simulate_step(planner, plans[1]).compute_s == pytest.approx(plans[1].makespan_s)
    assert planner.lower_bound(lengths) <= plans[1].makespan_s * (1 + 1e-9)
    # A plan that does not know of it takes at least as long as its busiest interfaces.
    blind = simulate_step(planner, plans[0])
    if plain.pipeline == 1:
        starts = [0.0] * ranks
        for batch in plans[0].micro_batches:
            slow = replace(COST, kv_inter=COST.kv_inter * messages(list(batch.ranks), shared.node_ranks, 1))
            inside = len({rank // shared.node_ranks for rank in batch.ranks}) == 1
            cost = slow if shared.node_ranks > 1 else COST
            seconds = cost.seconds([s.length for s in batch.sequences], len(batch.ranks), one_node=inside)
            end = max(starts[rank] for rank in batch.ranks) + seconds
            for rank in batch.ranks:
                starts[rank] = end
        assert blind.compute_s >= max(starts) * (1 - 1e-9)


def test_a_long_ring_takes_half_as_long() -> None:
    slow = CostModel(1e-12, 1e-9, kv_intra=1e-9, kv_inter=1e-6)
    plain = ClusterSpec(ranks=24, capacity=1000, ranks_per_node=8)
    planner = Planner(None, replace(plain, nics=1), cost_model=slow)
    aware, blind = planner.plan([24_000]), Planner(None, plain, cost_model=slow).plan([24_000])
    assert len(aware.micro_batches[0].ranks) == 24
    ratio = simulate_step(planner, blind).compute_s / simulate_step(planner, aware).compute_s
    assert ratio == pytest.approx(2, rel=0.01)
    assert isinstance(aware, StepPlan)


def test_interfaces_that_no_host_has() -> None:
    for nics in (0, -1, 1.5, True, "1"):
        with pytest.raises(InvalidUsage, match="nics"):
            ClusterSpec(ranks=4, nics=nics)  # type: ignore[arg-type]


def test_the_reduction_shares_them_too() -> None:
    cluster = ClusterSpec(ranks=32, ranks_per_node=8, capacity=8192)
    model = MODELS["llama-7b"]
    own = reduction_seconds(model, cluster)
    assert reduction_seconds(model, replace(cluster, nics=8)) == own
    assert reduction_seconds(model, replace(cluster, nics=16)) == own
    one, two = (reduction_seconds(model, replace(cluster, nics=nics)) for nics in (1, 2))
    between = 3 / 4 * model.params * 6 / cluster.hardware.inter_bandwidth
    assert one - two == pytest.approx(between / 2)
    assert one - own == pytest.approx(between * 7 / 8)

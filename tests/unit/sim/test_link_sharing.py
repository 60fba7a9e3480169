"""Rings that use the same network interface of a host at the same time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel, MicroBatch, Planner, SequenceInfo, StepPlan
from hdpcomm.sim import simulate_step

COST = CostModel(
    1e-8,
    1e-6,
    1e-4,
    piece=1e-7,
    ring_step=1e-5,
    kv_intra=1e-7,
    kv_domain=3e-6,
    kv_inter=6e-6,
    latency_domain=1e-5,
    latency_inter=2e-5,
)
Batch = tuple[tuple[int, ...], list[int]]


class Oracle:
    """A step in time slices: between two events every ring goes at a pace of its own, found by bisection."""

    def __init__(self, cost: CostModel, cluster: ClusterSpec, batches: list[Batch]) -> None:
        self.cost, self.cluster, self.batches = cost, cluster, batches
        self.uses = [self.links(ranks) for ranks, _ in batches]

    def links(self, ring: tuple[int, ...]) -> Counter[tuple[object, ...]]:
        """Messages of a ring on each interface, out and in."""
        node, nics, found = self.cluster.node_ranks, self.cluster.nics, Counter()
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            for rank, way in ((a, "out"), (b, "in")):
                if nics is not None and nics < node and a // node != b // node:
                    found[rank // node, rank % node * nics // node, way] += 1
        return found

    def parts(self, batch: int, backward: bool) -> tuple[float, float, float, float, int]:
        """Seconds of a pass but for waiting; of a ring step: compute, a message's bytes and latency; ring steps."""
        ranks, lengths = self.batches[batch]
        d, tokens, cost = len(ranks), sum(lengths), self.cost
        share = 1 - cost.forward if backward else cost.forward
        sent = 1 - cost.forward_transfer if backward else cost.forward_transfer
        step = cost.attention * sum(s * s for s in lengths) / d**2 + cost.piece * tokens / d
        rest = cost.linear * tokens / d + cost.fixed + (d - 1) * cost.ring_step
        nodes = {rank // self.cluster.node_ranks for rank in ranks}
        domains = {rank // (self.cluster.ranks_per_domain or self.cluster.node_ranks) for rank in ranks}
        kv, latency = cost.links(one_node=len(nodes) == 1, one_domain=len(domains) == 1)
        return share * (d * step + rest), share * step, sent * kv * tokens / d, sent * latency, d - 1

    def duration(self, batch: int, backward: bool, slowdown: float) -> float:
        work, compute, sent, latency, steps = self.parts(batch, backward)
        return work + steps * max(0.0, sent * slowdown + latency - compute)

    def flow(self, batch: int, backward: bool) -> tuple[float, float]:
        """How busy a message keeps a link of its own, and for which share of the pass there are messages."""
        _, compute, sent, latency, steps = self.parts(batch, backward)
        step = max(compute, sent + latency)
        alone = self.duration(batch, backward, max([1, *self.uses[batch].values()]))
        return (sent / step if step else 0.0), min(1.0, steps * step / alone)

    def slowdown(self, batch: int, running: dict[int, bool]) -> float:
        worst = 1.0
        for link, own in self.uses[batch].items():
            asked = [(self.flow(batch, running[batch])[0], float(own))]
            for other, backward in running.items():
                if other != batch and self.uses[other][link]:
                    demand, present = self.flow(other, backward)
                    asked.append((demand, present * self.uses[other][link]))
            low, high = 0.0, 1.0
            for _ in range(80):
                middle = 0.5 * (low + high)
                fits = sum(n * min(demand, middle) for demand, n in asked) <= 1
                low, high = (middle, high) if fits else (low, middle)
            worst = max(worst, own, 1 / high)
        return worst

    def run(self) -> float:
        order = {r: [k for k, (ranks, _) in enumerate(self.batches) if r in ranks] for r in range(self.cluster.ranks)}
        left: dict[int, float] = {}
        running: dict[int, bool] = {}
        now = 0.0
        while any(order.values()):
            for k, (ranks, _) in enumerate(self.batches):
                if k not in running and all(order[rank][:1] == [k] for rank in ranks):
                    running[k], left[k] = False, 1.0
            pace = {k: 1 / self.duration(k, way, self.slowdown(k, running)) for k, way in running.items()}
            span = min(left[k] / pace[k] for k in running)
            now += span
            for k in list(running):
                left[k] -= span * pace[k]
                if left[k] > 1e-9:
                    continue
                if running[k]:
                    del running[k]
                    for rank in self.batches[k][0]:
                        order[rank].pop(0)
                else:
                    running[k], left[k] = True, 1.0
        return now


def made(cluster: ClusterSpec, batches: list[Batch]) -> StepPlan:
    """A plan made by hand."""
    found, number = [], 0
    for k, (ranks, lengths) in enumerate(batches):
        infos = tuple(SequenceInfo(number + i, length) for i, length in enumerate(lengths))
        found.append(MicroBatch(k, ranks, infos, 0.0, 1.0))
        number += len(lengths)
    return StepPlan("by hand", cluster.ranks, tuple(found), 1.0, 0.0, 0.0, 0.0)


def random_case(rng: random.Random) -> tuple[ClusterSpec, list[Batch]]:
    node = rng.randint(1, 3)
    domain = node * rng.randint(2, 3) if rng.random() < 0.5 else None
    ranks = rng.randint(3, 12)
    cluster = ClusterSpec(
        ranks=ranks,
        capacity=4000,
        ranks_per_node=node,
        ranks_per_domain=domain,
        nics=rng.choice([None, 1, 2]),
    )
    batches = []
    for _ in range(rng.randint(2, 7)):
        group = tuple(rng.sample(range(ranks), rng.randint(1, min(ranks, 6))))
        batches.append((group, [rng.randint(1, 3000) for _ in range(rng.randint(1, 2))]))
    return cluster, batches


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_step_takes_as_long_as_in_time_slices(seed: int) -> None:
    rng = random.Random(seed)
    cluster, batches = random_case(rng)
    planner = Planner(None, cluster, cost_model=COST, memory=MemoryModel(100_000))
    report = simulate_step(planner, made(cluster, batches))
    assert report.compute_s == pytest.approx(Oracle(COST, cluster, batches).run(), rel=1e-6)
    total = report.rank_busy.sum() / (cluster.ranks * report.step_s) + report.exposed_share + report.idle_share
    assert total == pytest.approx(1)
    alone = Planner(None, replace(cluster, nics=None), cost_model=COST, memory=MemoryModel(100_000))
    assert simulate_step(alone, made(cluster, batches)).compute_s <= report.compute_s * (1 + 1e-9)


SLOW = replace(COST, attention=1e-12, linear=1e-9, fixed=0.0, ring_step=0.0, latency_domain=0.0, latency_inter=0.0)


def two_rings(cluster: ClusterSpec, cost: CostModel, groups: list[tuple[int, ...]]) -> float:
    batches: list[Batch] = [(group, [1000]) for group in groups]
    planner = Planner(None, cluster, cost_model=cost, memory=MemoryModel(100_000))
    return simulate_step(planner, made(cluster, batches)).compute_s


def test_two_rings_over_one_interface_take_about_twice_as_long() -> None:
    shared = ClusterSpec(ranks=4, capacity=4000, ranks_per_node=2, nics=1)
    groups = [(0, 2), (1, 3)]  # both between the same two hosts
    own = two_rings(replace(shared, nics=2), SLOW, groups)
    assert two_rings(shared, SLOW, groups) == pytest.approx(2 * own, rel=0.02)
    assert two_rings(shared, SLOW, groups[:1]) == own
    hidden = replace(SLOW, attention=1e-5)  # compute hides twice the message
    assert two_rings(shared, hidden, groups) == two_rings(replace(shared, nics=2), hidden, groups)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_count_it(seed: int) -> None:
    """The makespan of a plan is that of the simulated step, never below the bound; no policy beats balanced by it."""
    rng = random.Random(seed)
    cluster, _ = random_case(rng)
    cluster = replace(cluster, capacity=500)
    lengths = [rng.randint(1, 250 * cluster.ranks) for _ in range(rng.randint(1, 12))]
    plans = {}
    for policy in ("balanced", "naive", "pow2", "static"):
        planner = Planner(None, cluster, policy, COST)
        plans[policy] = planner.plan(lengths)
        assert simulate_step(planner, plans[policy]).compute_s == pytest.approx(plans[policy].makespan_s)
        assert plans[policy].lower_bound_s <= plans[policy].makespan_s * (1 + 1e-9)
    assert plans["balanced"].makespan_s <= min(plan.makespan_s for plan in plans.values()) * (1 + 1e-9)

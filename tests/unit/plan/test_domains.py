"""Three levels of links: nodes, domains of nodes that are near each other, and beyond."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import (
    DEVICES,
    MODELS,
    POLICIES,
    Calibration,
    ClusterSpec,
    CostLearner,
    CostModel,
    CostSample,
    MemoryModel,
    Planner,
    StepPlan,
)
from hdpcomm.plan.cost import core_cost
from hdpcomm.plan.learn import RankTimes
from hdpcomm.sim import reduction_seconds, simulate_step
from tests.harness.native import _testing

COST = CostModel(
    1e-9,
    1e-6,
    1e-4,
    piece=1e-7,
    ring_step=1e-5,
    kv_intra=1e-6,
    kv_domain=3e-6,
    kv_inter=9e-6,
    latency_domain=1e-5,
    latency_inter=3e-5,
)
ALIKE = replace(COST, kv_domain=None, latency_domain=None)
RACKS = ClusterSpec(ranks=24, capacity=100, ranks_per_node=4, ranks_per_domain=8)


def edges(ring: list[int]) -> list[tuple[int, int]]:
    return list(zip(ring, ring[1:] + ring[:1], strict=True))


def leaves(ring: list[int], block: int) -> Counter[int]:
    """How often a ring leaves each block of so many ranks."""
    return Counter(a // block for a, b in edges(ring) if a // block != b // block)


@pytest.mark.parametrize(("node", "domain", "most"), [(1, 4, 13), (2, 4, 16), (4, 8, 21), (4, 12, 22)])
@pytest.mark.parametrize("nics", [0, 1])
def test_a_ring_leaves_each_domain_once(node: int, domain: int, most: int, nics: int) -> None:
    peers: dict[int, set[int]] = {rank: set() for rank in range(5 * domain)}
    for first in range(domain):
        for count in range(1, 4 * domain):
            ranks = list(range(first, first + count))
            ring = _testing.ring_order(ranks, node, nics, domain)
            assert sorted(ring) == ranks
            assert max(leaves(ring, domain).values(), default=1) == 1  # no ring over several domains has less
            if nics and node > 1:
                assert max(leaves(ring, node).values(), default=1) == 1
            for a, b in edges(ring):
                peers[a] |= {b} - {a}
                peers[b] |= {a} - {b}
    assert max(map(len, peers.values())) <= most


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_group_leaves_each_domain_once(seed: int) -> None:
    rng = random.Random(seed)
    node, nics = rng.randint(1, 4), rng.randint(0, 2)
    domain = node * rng.randint(2, 4)
    ranks = sorted(rng.sample(range(64), rng.randint(1, 40)))
    ring = _testing.ring_order(ranks, node, nics, domain)
    assert sorted(ring) == ranks
    assert max(leaves(ring, domain).values(), default=1) == 1


def batch_seconds(cost: CostModel, cluster: ClusterSpec, ranks: tuple[int, ...], lengths: list[int]) -> float:
    """By the formula of the CostModel, with the slowest of the ring's links."""
    links = []
    for a, b in edges(list(ranks)):
        if a // cluster.node_ranks == b // cluster.node_ranks:
            links.append((cost.kv_intra, cost.latency_intra))
        elif cluster.ranks_per_domain and a // cluster.ranks_per_domain == b // cluster.ranks_per_domain:
            links.append(cost.links(one_node=False, one_domain=True))
        else:
            links.append((cost.kv_inter, cost.latency_inter))
    kv, latency = max(links)
    one = replace(cost, kv_intra=kv, latency_intra=latency, kv_inter=kv, latency_inter=latency)
    return one.seconds(lengths, len(ranks))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_are_priced_by_their_slowest_links(seed: int) -> None:
    rng = random.Random(seed)
    node = rng.randint(1, 4)
    ranks = rng.randint(2, 30)
    cluster = ClusterSpec(
        ranks=ranks,
        capacity=100,
        ranks_per_node=node,
        ranks_per_domain=node * rng.randint(1, 4),
        pipeline=rng.choice([1, 1, 1, 2]),
    )
    policy = rng.choice(POLICIES)
    longest = rng.choice([60, 50 * ranks])
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 30))]
    planner = Planner(None, cluster, policy, COST)
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    assert simulate_step(planner, plan).compute_s == pytest.approx(plan.makespan_s)
    for batch in plan.micro_batches:
        own = [sequence.length for sequence in batch.sequences]
        assert batch.predicted_s == pytest.approx(batch_seconds(COST, cluster, batch.ranks, own))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_domains_that_change_nothing(seed: int) -> None:
    """Those of one node each, and one that has all ranks: its links are then those between nodes."""
    rng = random.Random(seed)
    node, ranks = rng.randint(1, 4), rng.randint(2, 24)
    plain = ClusterSpec(ranks=ranks, capacity=100, ranks_per_node=node, nics=rng.choice([None, 1]))
    policy = rng.choice(POLICIES)
    lengths = [rng.randint(1, 40 * ranks) for _ in range(rng.randint(1, 20))]

    def made(cluster: ClusterSpec, cost: CostModel) -> tuple[object, ...]:
        plan = Planner(None, cluster, policy, cost).plan(lengths)
        return plan.makespan_s, plan.lower_bound_s, [sorted(batch.ranks) for batch in plan.micro_batches]

    assert made(replace(plain, ranks_per_domain=node), COST) == made(plain, COST)
    everyone = replace(plain, ranks_per_domain=-(-ranks // node) * node)
    near = replace(COST, kv_inter=3e-6, latency_inter=1e-5)
    assert made(everyone, COST) == made(plain, near)


def test_groups_lie_in_domains() -> None:
    """Sequences for 5 to 8 ranks, of which a domain has eight: all of them cross nodes, and none a domain."""
    lengths = [780, 700, 640, *[60] * 12]
    aware = Planner(None, RACKS, cost_model=COST).plan(lengths)
    wide = [batch.ranks for batch in aware.micro_batches if len(batch.ranks) > 4]
    assert len(wide) == 3
    assert all(len({rank // 8 for rank in ranks}) == 1 for ranks in wide)
    judge = Planner(None, RACKS, cost_model=COST)
    blind = Planner(None, replace(RACKS, ranks_per_domain=None), cost_model=ALIKE).plan(lengths)
    assert simulate_step(judge, aware).compute_s <= simulate_step(judge, blind).compute_s


@pytest.mark.parametrize(("first", "expected"), [(3, (4, 9)), (6, (6, 11))])
def test_a_group_starts_on_the_border_of_a_domain(first: int, expected: tuple[int, int]) -> None:
    """Ranks before it are slower than the others, so that the group's block begins in the middle of a domain."""
    cluster = replace(
        RACKS,
        ranks=12,
        ranks_per_node=2,
        ranks_per_domain=4 if first == 3 else 6,
        speeds=tuple(0.5 if rank < first else 1.0 for rank in range(12)),
    )
    cost = replace(COST, kv_inter=1e-3)
    plan = Planner(None, cluster, cost_model=cost).plan([350 if first == 3 else 550])
    (batch,) = plan.micro_batches
    assert len({rank // cluster.domain_ranks for rank in batch.ranks}) == 1
    assert expected[0] <= min(batch.ranks)
    assert max(batch.ranks) <= expected[1]


def test_fit_finds_the_links_of_domains() -> None:
    samples = []
    for ranks, node, domain in ((1, True, True), (2, True, True), (4, False, True), (8, False, False)):
        for length in (200, 800, 3200):
            seconds = COST.seconds([length], ranks, one_node=node, one_domain=domain)
            samples.append(CostSample(ranks, (length,), seconds, one_node=node, one_domain=domain))
    found = CostModel.fit(samples)
    assert found.kv_domain == pytest.approx(COST.kv_domain, rel=0.2)
    assert found.kv_inter == pytest.approx(COST.kv_inter, rel=0.1)
    assert CostModel.from_json(found.to_json()) == found
    near = CostModel.fit([sample for sample in samples if sample.ranks < 8])
    assert near.kv_inter == near.kv_domain == found.kv_domain
    calibration = Calibration(found, RACKS, MemoryModel(100), samples=tuple(samples))
    assert max(map(abs, calibration.errors())) < 0.2
    assert calibration.with_ranks(48).cluster.ranks_per_domain == 8
    assert calibration.with_ranks(48, 3).cluster.ranks_per_domain is None
    assert calibration.with_ranks(48, 3, 12).cluster.ranks_per_domain == 12


def test_the_learner_finds_the_links_of_domains() -> None:
    """Rings inside a domain wait as long as there, and those beyond as their links tell."""
    true = replace(COST, kv_intra=1e-5, kv_domain=3e-5, kv_inter=9e-5, latency_domain=1e-5, latency_inter=1e-5)
    believed = replace(true, kv_domain=1e-5, kv_inter=1e-5)
    free = replace(true, kv_intra=0, kv_inter=0, latency_intra=0, latency_inter=0)
    learner = CostLearner(believed, RACKS)
    for step in range(4):
        rng = random.Random(step)
        lengths = [*(rng.randint(500, 790) for _ in range(4)), *(rng.randint(900, 2300) for _ in range(3)), *[90] * 9]
        plan = Planner(None, RACKS, "pow2", learner.cost_model).plan(lengths)
        times = []
        for rank in range(RACKS.ranks):
            compute, waits = [], []
            for batch in plan.for_rank(rank):
                own = [sequence.length for sequence in batch.sequences]
                compute.append(free.seconds(own, len(batch.ranks)))
                waits.append(batch_seconds(true, RACKS, batch.ranks, own) - compute[-1])
            times.append(RankTimes(tuple(compute), tuple(waits)))
        learner.add(plan, times)
    assert learner.cost_model.kv_domain == pytest.approx(true.kv_domain, rel=0.1)
    assert learner.cost_model.kv_inter == pytest.approx(true.kv_inter, rel=0.1)


def test_the_analytic_model_and_the_reduction() -> None:
    device = replace(DEVICES["h100"], domain_bandwidth=200e9, domain_latency_s=DEVICES["h100"].intra_latency_s)
    model = MODELS["llama-7b"]
    plain = ClusterSpec(ranks=64, ranks_per_node=8, capacity=8192, device=device)
    racks = replace(plain, ranks_per_domain=32)
    near, far = (CostModel.analytic(model, cluster) for cluster in (racks, plain))
    assert near.kv_domain is not None
    assert near.kv_inter == pytest.approx(near.kv_domain * 200e9 / device.inter_bandwidth)
    assert replace(near, kv_domain=None, latency_domain=None) == far
    assert far == CostModel.analytic(model, replace(plain, device="h100"))
    volume = model.params * 6
    assert reduction_seconds(model, racks) == pytest.approx(
        7 / 8 * volume / device.intra_bandwidth
        + 3 / 4 * volume / 8 / 200e9
        + 1 / 2 * volume / 32 / device.inter_bandwidth
        + 2 * (7 * device.intra_latency_s + 3 * device.intra_latency_s + device.inter_latency_s)
    )
    assert reduction_seconds(model, plain) == reduction_seconds(model, replace(plain, device="h100"))
    slower = replace(device, domain_bandwidth=1e9, domain_latency_s=1.0)  # goes by the links to other domains then
    found = CostModel.analytic(model, replace(racks, device=slower))
    assert (found.kv_domain, found.latency_domain) == (found.kv_inter, found.latency_inter)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("12000\n12000\n")
    step = ["plan", "--ranks", "16", "--ranks-per-node", "2", "--capacity", "4K", "--lengths", str(lengths)]
    times = []
    for more in ([], ["--ranks-per-domain", "4", "--domain-bandwidth", "200"]):
        plan = tmp_path / "plan.json"
        assert main([*step, *more, "--policy", "naive", "--out", str(plan)]) == 0
        times.append(StepPlan.load(plan).micro_batches[0].predicted_s)  # on three ranks of one domain
    assert times[0] > times[1]
    capsys.readouterr()
    for more, message in (
        (["--domain-bandwidth", "200"], "give --ranks-per-domain, too"),
        (["--ranks-per-domain", "4"], "give --domain-bandwidth"),
        (["--ranks-per-domain", "5", "--domain-bandwidth", "200"], "a multiple of ranks_per_node"),
    ):
        assert main([*step, *more]) == 6
        assert message in capsys.readouterr().err


def test_domains_that_no_cluster_has() -> None:
    for domain in (0, -4, 6, 2.5, "8"):
        with pytest.raises(InvalidUsage, match="ranks_per_domain"):
            ClusterSpec(ranks=24, ranks_per_node=4, ranks_per_domain=domain)  # type: ignore[arg-type]
    memory = MemoryModel(100)
    for bad in (replace(COST, kv_domain=1e-7), replace(COST, kv_domain=1e-5), replace(COST, latency_domain=1e-4)):
        with pytest.raises(InvalidUsage, match="the links between nodes of a domain are faster"):
            core_cost(bad, memory, RACKS)
        core_cost(bad, memory, replace(RACKS, ranks_per_domain=None))
    for name in ("kv_domain", "latency_domain"):
        with pytest.raises(InvalidUsage, match=name):
            CostModel(1e-9, 1e-6, **{name: -1.0})
    with pytest.raises(InvalidUsage, match="domain_bandwidth"):
        replace(DEVICES["h100"], domain_bandwidth=0.0)

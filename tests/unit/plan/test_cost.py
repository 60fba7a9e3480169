"""The cost model, its fit, and the specs it is derived from."""

from __future__ import annotations

import random

import pytest

from hdpcomm._core import planner as core
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import (
    DEVICES,
    MODELS,
    ClusterSpec,
    CostModel,
    CostSample,
    DeviceSpec,
    MemoryModel,
    ModelSpec,
    Planner,
)
from hdpcomm.plan.cost import core_cost
from hdpcomm.plan.specs import device_in
from tests.harness.native import _testing


@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_core_and_python_price_alike(size: int, one_node: bool) -> None:
    cluster = ClusterSpec(ranks=64, capacity=8192, ranks_per_node=8)
    cost = CostModel.analytic(MODELS["llama-7b"], cluster)
    priced = core_cost(cost, MemoryModel(8192), cluster).seconds([9000, 17, 4096], size, one_node)
    assert priced == pytest.approx(cost.seconds([9000, 17, 4096], size, one_node=one_node), rel=1e-12)


def test_fit_finds_the_coefficients_back() -> None:
    true = CostModel(2e-9, 3e-6, 4e-3, piece=1e-6, ring_step=5e-4)
    rng = random.Random(3)
    samples = []
    for _ in range(40):
        ranks = rng.choice([1, 2, 3, 4])
        lengths = [rng.randrange(50, 5000) for _ in range(rng.randrange(1, 6))]
        samples.append((ranks, lengths, true.seconds(lengths, ranks) * rng.uniform(0.99, 1.01)))
    found = CostModel.fit(samples)
    for ranks, lengths, _ in samples:
        assert found.seconds(lengths, ranks) == pytest.approx(true.seconds(lengths, ranks), rel=0.02)


@pytest.mark.parametrize(("kv", "latency"), [(3e-7, 2e-3), (5e-6, 0.0), (1e-8, 2e-2)])
def test_fit_learns_the_links_between_nodes(kv: float, latency: float) -> None:
    truth = CostModel(2e-9, 1e-6, 1e-4, 1e-7, 2e-5, kv_inter=kv, latency_inter=latency)
    inside = [(d, [length] * n) for d in (1, 2, 4) for length, n in ((4096, 1), (1024, 1), (256, 8))]
    across = [(d, [length] * n) for d in (8, 16) for length, n in ((40960, 1), (4096, 1), (1024, 1), (256, 8))]
    samples = [CostSample(d, tuple(lengths), truth.seconds(lengths, d)) for d, lengths in inside]
    samples += [
        CostSample(d, tuple(lengths), truth.seconds(lengths, d, one_node=False), False) for d, lengths in across
    ]
    found = CostModel.fit(samples)
    assert found.attention == pytest.approx(truth.attention, rel=1e-6)
    for d, lengths in [*across, (32, [100_000]), (8, [20_000] * 3)]:
        want = truth.seconds(lengths, d, one_node=False)
        assert found.seconds(lengths, d, one_node=False) == pytest.approx(want, rel=0.02)
    hidden = [CostSample(d, tuple(lengths), truth.seconds(lengths, d), False) for d, lengths in across]
    unseen = CostModel.fit(samples[: len(inside)] + hidden)  # compute hid all messages
    for sample in hidden:
        assert unseen.seconds(sample.lengths, sample.ranks, one_node=False) == pytest.approx(sample.seconds, rel=1e-6)


def test_fit_needs_ranks_on_one_node() -> None:
    across = [CostSample(2, (length,), 1.0 + length, one_node=False) for length in (10, 20, 30)]
    with pytest.raises(InvalidUsage, match="0 samples of ranks on one node given, expected at least 3"):
        CostModel.fit(across)
    inside = [CostSample(1, (length,), 1.0 + length) for length in (10, 20, 30)]
    with pytest.raises(InvalidUsage, match="on 1 rank is said to be between nodes"):
        CostModel.fit([*inside, CostSample(1, (10,), 1.0, one_node=False)])


def test_fit_never_gives_a_negative_coefficient() -> None:
    found = CostModel.fit([(1, (100,), 2.0), (1, (200,), 1.0), (1, (300,), 0.5)])
    assert min(found.attention, found.linear, found.fixed) >= 0


def test_fit_and_json_refuse_bad_input() -> None:
    with pytest.raises(InvalidUsage, match="2 samples given, expected at least 3"):
        CostModel.fit([(1, (5,), 1.0), (1, (9,), 2.0)])
    with pytest.raises(InvalidUsage, match="is no measurement"):
        CostModel.fit([(1, (5,), 1.0), (1, (9,), 2.0), (1, (9,), 0.0)])
    with pytest.raises(InvalidUsage, match="attention is -1"):
        CostModel(-1.0, 0.0)
    with pytest.raises(InvalidUsage, match="no cost model"):
        CostModel.from_json('{"speed": 3}')
    cost = CostModel(1e-9, 2e-6)
    assert CostModel.from_json(cost.to_json()) == cost
    assert CostModel.from_json(cost.to_json()[:-1] + ', "noise": 0.0}') == cost  # of an earlier release


def test_specs_check_their_values() -> None:
    with pytest.raises(InvalidUsage, match="kv_heads to divide heads"):
        ModelSpec(2, 64, 4, 3, 128, 100)
    with pytest.raises(InvalidUsage, match="top_k is 3"):
        ModelSpec(2, 64, 4, 4, 128, 100, experts=2, top_k=3)
    with pytest.raises(InvalidUsage, match="ranks is 0"):
        ClusterSpec(ranks=0)
    with pytest.raises(InvalidUsage, match="unknown device 'abacus'"):
        _ = ClusterSpec(ranks=1, device="abacus").hardware
    with pytest.raises(InvalidUsage, match="raise tensor or pipeline"):
        MemoryModel.of(MODELS["llama-70b"], ClusterSpec(ranks=4))


def test_parameter_counts() -> None:
    billions = {name: round(spec.params / 1e9) for name, spec in MODELS.items()}
    assert billions["llama-70b"] in (68, 69, 70)
    assert billions["mistral-8x7b"] in (46, 47)
    assert billions["mistral-8x22b"] in (140, 141)


def test_offload_ratio_of_equation_3() -> None:
    """D(s) = ceil((2 Act(s) + (1 - r)(l - 2) Act(s)) / (l Act(C))) with the ratio that the copies allow."""
    cluster = ClusterSpec(ranks=4096, capacity=8192)
    cost, layers, capacity = CostModel(1e-9, 1e-6), 32, 8192
    offloadable = (layers - 2) / layers
    copy = 1e-5
    priced = core_cost(cost, MemoryModel(capacity, offloadable, copy, host_tokens=1e6), cluster)
    for length in (8193, 10000, 20000, 65536, 262144, 2_000_000):
        ratio = min(1.0, (1e-9 * length**2 + 1e-6 * length) / 3 / (copy * length))
        assert _testing.max_offload(priced, [length]) == pytest.approx(ratio)
        expected = (2 + (1 - ratio) * (layers - 2)) * length / (layers * capacity)
        assert _testing.min_ranks(priced, length) == pytest.approx(expected, rel=1e-3, abs=1)
        assert _testing.min_ranks(priced, length) >= expected - 1e-3
    assert priced.token_limit(1.0) == 8192 * 16


def test_host_memory_limits_offload() -> None:
    cluster = ClusterSpec(ranks=4096, capacity=8192)
    memory = MemoryModel(8192, 0.9, 1e-9, host_tokens=10_000)
    priced = core_cost(CostModel(1e-9, 1e-6), memory, cluster)
    assert priced.token_limit(1.0) == memory.token_limit(1.0) == 18_192
    assert _testing.min_ranks(priced, 1_000_000) == 55
    assert memory.token_limit(0.1) == int(8192 / 0.91)


def test_ring_order_keeps_peers_few() -> None:
    peers: dict[int, set[int]] = {}
    for first in range(20):
        for count in range(2, 21):
            ring = _testing.ring_order(list(range(first, first + count)))
            assert sorted(ring) == list(range(first, first + count))
            for place, rank in enumerate(ring):
                peers.setdefault(rank, set()).update((ring[place - 1], ring[(place + 1) % count]))
    assert max(len(found) for found in peers.values()) == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_presets_price_and_fit(model: str, device: str) -> None:
    cluster = ClusterSpec(ranks=1024, ranks_per_node=8, tensor=8, pipeline=4, device=device, offload=True)
    memory = MemoryModel.of(MODELS[model], cluster)
    cost = CostModel.analytic(MODELS[model], cluster)
    assert memory.capacity > 1000
    assert 0 < memory.offloadable < 1
    assert cost.seconds([8192]) < cost.seconds([65536], 8) < cost.seconds([65536])


def test_recomputed_layers_run_forward_again() -> None:
    """Three passes of matrix products become four, and the messages of the forward pass go again."""
    cost = CostModel(3.5e-9, 3e-6, fixed=3e-3, kv_inter=4e-9, forward_transfer=1 / 4, weights=1 / 3)
    full, half = cost.with_recompute(1.0), cost.with_recompute(0.5)
    assert (full.attention, full.linear, full.fixed) == pytest.approx((4.5e-9, 4e-6, 4e-3), rel=1e-9, abs=0)
    assert half.linear == pytest.approx(3.5e-6)
    assert full.kv_inter == pytest.approx(5e-9, abs=0)
    assert (full.forward, full.weights) == pytest.approx((1 / 4, 1 / 4))
    assert cost.with_recompute(1.0, outside=0.5).linear == pytest.approx(3.5e-6)
    assert cost.with_recompute(0.0) == cost


def test_matrix_products_in_float32_take_longer() -> None:
    narrow, wide = (device_in("h100", size) for size in (2, 4))
    assert narrow == DEVICES["h100"]
    assert isinstance(narrow, DeviceSpec)
    assert isinstance(wide, DeviceSpec)
    assert narrow.linear_flops / wide.linear_flops == pytest.approx(989 / 66.9)
    assert device_in("tpu", 4) == "tpu"


def test_the_core_names_values_that_it_does_not_have() -> None:
    with pytest.raises(InvalidUsage, match=r"given \['speed', 'tokens'\], expected values of CostParams"):
        core.CostModel({"capacity": 8, "speed": 1.0, "tokens": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"speed": 1}', "it has no coefficient 'speed'"),
        ('{"attention": 1e308, "linear": 1}', "its coefficients are no measured ones"),
        ('{"attention": NaN, "linear": 1}', "attention is nan"),
        ('{"attention": true, "linear": 1}', "attention is True"),
        ('{"attention": "1e-9", "linear": 1}', "attention is '1e-9'"),
        ('{"linear": 1}', "'attention' is missing"),
    ],
)
def test_coefficients_that_are_none(text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Planner(None, ClusterSpec(ranks=2, capacity=2000), cost_model=CostModel.from_json(text)).plan([1000])


@pytest.mark.parametrize(("seconds", "message"), [(1e308, r"a sample took 1e\+308 s"), (1e-320, "expected 1e-12 to")])
def test_seconds_that_no_micro_batch_takes(seconds: float, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        CostModel.fit([(1, [100], seconds), (1, [200], 2.0), (1, [50], 2.0)])

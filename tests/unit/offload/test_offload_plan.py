"""Predicted memory, offload ratios of plans, and a trainer that uses them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure import profile_activations
from hdpcomm.measure.costs import forward_backward
from hdpcomm.models import Llama, LlamaConfig
from hdpcomm.offload import ActivationOffload, MemoryMeter, PinnedPool, measure_copies
from hdpcomm.plan import DEVICES, MODELS, ClusterSpec, CostModel, Planner
from hdpcomm.train import Trainer
from tests.harness.native import _testing

SMALL = LlamaConfig(layers=8, hidden=64, heads=4, kv_heads=2, ffn=128)


def test_device_memory_is_as_predicted() -> None:
    comm = hdp.init()
    model = Llama(SMALL)
    pool = PinnedPool(32 << 20, device="cpu")
    offload = ActivationOffload(pool, model, min_bytes=1)
    memory = profile_activations(model, offload, comm, tokens=64, capacity=100)

    def predicted(tokens: int, ratio: float) -> float:
        peak = memory.bytes_held(tokens * (1 - ratio * memory.offloadable))
        assert peak is not None
        return peak

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for tokens in (192, 500):
        for ratio in (0.0, 0.25, 0.5, 0.8, 1.0):
            with MemoryMeter("cpu") as meter:
                context = offload.micro_batch(ratio, tokens=tokens)
                forward_backward(model, comm, [tokens], context=context)
            assert meter.peak == pytest.approx(predicted(tokens, ratio), rel=0.05)
    held = memory.token_limit(1.0)
    assert predicted(held, 1.0) <= predicted(100, 0.0) * 1.0001


def test_ranks_of_a_long_sequence_follow_equation_3() -> None:
    """LLaMA-7B, 8K tokens a rank, 512K tokens: ceil(s / C) ranks without offload, and with it those of the formula."""
    model, length, capacity = MODELS["llama-7b"], 512 * 1024, 8192
    plenty = replace(DEVICES["h100"], host_bytes=1e15)

    def fewest(offload: bool) -> int:
        planner = Planner(model, ClusterSpec(ranks=128, capacity=capacity, offload=offload, device=plenty))
        return int(_testing.min_ranks(planner._core, length))

    assert fewest(False) == 64
    layers = model.layers
    linear = model.linear_flops_per_token / plenty.linear_flops
    attention = length * model.attention_flops_per_token_squared / plenty.attention_flops
    forward = linear + attention  # of one token
    copied = (layers - 2) * model.activation_bytes / plenty.d2h_bandwidth
    ratio = min(1.0, forward / copied)
    assert ratio == 1.0  # at 512K the forward pass hides it all
    # Beside the layers a token has room to work in one of them, its number, label, position and angles.
    work = 2 * (2 * model.ffn + model.hidden) + 3 * 8 + 2 * model.hidden // model.heads
    every = layers * model.activation_bytes + work  # of one token
    kept = every - ratio * (layers - 2) * model.activation_bytes
    assert fewest(True) == math.ceil(length * kept / (capacity * every)) == 5
    # Without that it is the paper's own figure, about 2 s / (l C).
    assert math.ceil(2 * length / (layers * capacity)) == 4


def test_offload_never_costs_time() -> None:
    faster = 0
    for seed in range(40):
        rng = random.Random(seed)
        ranks = rng.choice([4, 8, 16, 64])
        limit = 8192 * ranks
        lengths = [min(int(math.exp(rng.gauss(8, 1.8))) + 1, limit) for _ in range(ranks * rng.choice([2, 5]))]
        times = [
            Planner(
                MODELS["llama-7b"],
                ClusterSpec(ranks=ranks, capacity=8192, ranks_per_node=8, offload=offload),
                rng.choice(["balanced", "balanced", "naive"]) if not offload else "balanced",
            )
            .plan(lengths)
            .makespan_s
            for offload in (False, True)
        ]
        assert times[1] <= times[0] * (1 + 1e-12)
        faster += times[1] < times[0] * 0.999
    assert faster > 0


def test_the_trainer_carries_the_ratios_out() -> None:
    """One rank holds 64 tokens. With offload it takes a sequence of 150, with the gradients of a large rank."""
    comm = hdp.init()
    pool = PinnedPool(64 << 20, device="cpu")
    cost = CostModel(1e-6, 1e-3)
    data = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(0))

    def trained(*, offloaded: bool) -> tuple[hdp.train.StepMetrics, list[torch.Tensor]]:
        model = Llama(SMALL)
        offload = ActivationOffload(pool, model, min_bytes=1) if offloaded else None
        memory = None
        if offload is not None:
            memory = replace(profile_activations(model, offload, comm, tokens=64, capacity=64), copy_s=1e-6)
        cluster = ClusterSpec(ranks=1, capacity=64 if offloaded else 256, offload=offloaded)
        planner = Planner(None, cluster, cost_model=cost, memory=memory)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), planner, comm, offload=offload)
        metrics = trainer.step([150, 20], lambda place: data[: 150 if place == 0 else 20])
        return metrics, [parameter.detach() for parameter in model.parameters()]

    with_offload, weights = trained(offloaded=True)
    without, expected = trained(offloaded=False)
    assert 0 < with_offload.offload_ratio <= 1
    assert with_offload.offloaded_bytes > 0
    assert with_offload.memory_bytes == pytest.approx(with_offload.predicted_memory_bytes, rel=0.05)
    assert without.offload_ratio == without.offloaded_bytes == without.memory_bytes == 0
    assert with_offload.loss == pytest.approx(without.loss, rel=1e-6)
    for got, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert pool.stats().in_use == 0


def test_a_trainer_without_a_way_to_host_memory_refuses_such_plans() -> None:
    comm = hdp.init()
    model = Llama(SMALL)
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks=1, capacity=64, offload=True))
    with pytest.raises(InvalidUsage, match="offload=ActivationOffload"):
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), planner, comm)
    offload = ActivationOffload(PinnedPool(1 << 20, device="cpu"), model)
    with pytest.raises(InvalidUsage, match="at least 2"):
        profile_activations(model, offload, comm, tokens=1, capacity=64)


def test_rates_of_copies() -> None:
    pool = PinnedPool(1 << 20, device="cpu")
    assert measure_copies(pool, 65536, iterations=2) > 0
    assert pool.stats().in_use == 0
    with pytest.raises(InvalidUsage, match="three blocks"):
        measure_copies(pool, 1 << 19)
    with pytest.raises(InvalidUsage, match="size is 0"):
        measure_copies(pool, 0)

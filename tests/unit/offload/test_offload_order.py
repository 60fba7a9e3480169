"""The waits of the copy engine under the check of simulated devices: clean as they are, and each of them is needed."""

from __future__ import annotations

import torch
from torch import nn

from hdpcomm._core.device import open_sim
from hdpcomm._core.offload import CopyEngine
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.testing.sim_check import check, current_rank, planted_sites

COUNT = 256  # uint32 of a layer's activations
LAYERS = 4


def training() -> None:
    """Two steps of forward and backward over four layers whose device memory is used again as soon as it is free.

    A compute stream makes each layer's activations; the pool has room for three, so that blocks are used again.
    """
    device = open_sim(current_rank())
    size = 4 * COUNT
    pool = PinnedPool(3 * size, device=device)
    engine = CopyEngine(pool.core, timeout=20.0)
    compute = device.create_stream()
    weights, total = device.allocate(size), device.allocate(size)
    memory = [device.allocate(size) for _ in range(2)]  # two layers' worth
    device.fill(weights, 1, bytes=size, stream=compute)
    device.fill(total, 0, bytes=size, stream=compute)
    for step in range(2):
        tickets: list[int] = []
        for layer in range(LAYERS - 1):
            place = memory[layer % 2]
            if layer >= 2:
                engine.settle(tickets[layer - 2], compute=compute)  # its memory is this layer's now
            device.fill(place, step + layer, bytes=size, stream=compute)
            device.accumulate(place, weights, count=COUNT, stream=compute)
            tickets.append(engine.store(place, size, compute=compute))
            assert tickets[-1]
        for ticket in tickets:
            engine.settle(ticket, compute=compute)
        engine.load(tickets[-1], memory[(LAYERS - 2) % 2], compute=compute)
        for layer in reversed(range(LAYERS - 1)):
            if layer:
                engine.load(tickets[layer - 1], memory[(layer - 1) % 2], compute=compute)
            engine.arrive(tickets[layer], compute=compute)
            device.accumulate(total, memory[layer % 2], count=COUNT, stream=compute)
            engine.drop(tickets[layer])
    # Given up on the way, as after an exception: the blocks are used again, and then all is taken down.
    abandoned = engine.store(weights, size, compute=compute)
    engine.settle(abandoned, compute=compute)
    engine.load(abandoned, memory[0], compute=compute)
    engine.drop(abandoned)
    for ticket in [engine.store(weights, size, compute=compute) for _ in range(3)]:
        assert ticket
        engine.drop(ticket)
    device.synchronize_stream(compute)
    del engine, pool


def module_training() -> None:
    """The same with torch: the host computes, and says so to the device."""
    torch.set_num_threads(1)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
    pool = PinnedPool(4096, device=open_sim(current_rank()))
    offload = ActivationOffload(pool, layers, min_bytes=1)
    for ratio in (1.0, 0.5):
        hidden = torch.ones(16, 8)
        with offload.micro_batch(ratio, tokens=16):
            for layer in layers:
                hidden = layer(hidden).sin()
        hidden.sum().backward()
    offload.lane.sweep()


def test_the_copies_are_ordered_for_200_seeds() -> None:
    check(training, 1, seeds=range(200))


def test_offloaded_modules_are_ordered() -> None:
    check(module_training, 1, seeds=range(40))


def test_each_wait_that_is_left_out_is_found() -> None:
    sites = planted_sites(training, 1, seeds=range(8), path="csrc/offload")
    calls = sorted((site.call, site.file.rsplit("/", 1)[-1]) for site in sites)
    assert calls.count(("wait", "copy_engine.cpp")) == 4
    assert calls.count(("wait", "pinned_pool.cpp")) == 1
    missed = [(site.call, site.file, site.line) for site in sites if not site.found]
    assert not missed


def test_each_wait_of_the_computing_host_is_found() -> None:
    sites = planted_sites(module_training, 1, seeds=range(4), path="csrc/offload")
    waits = [site for site in sites if site.call == "synchronize"]
    assert len(waits) == 3  # of settle and arrive (one line), and two at the end, for copies that were given up
    assert max(waits, key=lambda site: site.uses).found

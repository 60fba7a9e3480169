"""The waits of the copy engine under the check of simulated devices: correct, and each of them is needed."""

from __future__ import annotations

import torch
from torch import nn

from hdpcomm._core.device import open_sim
from hdpcomm._core.offload import CopyEngine, PooledCopy
from hdpcomm.attention import SlicedSequence, ring_attention
from hdpcomm.offload import ActivationOffload, PinnedPool
from hdpcomm.testing.device_check import check, current_rank, planted_sites
from tests.harness.native import _testing

COUNT = 1024  # uint32 of a layer's activations: a page, so that a pool has no more blocks than it was asked for
LAYERS = 4


def training() -> None:
    """Two steps of forward and backward over four layers whose device memory is reused as soon as it is free.

    A compute stream writes each layer's activations; the pool has room for three, so that blocks are reused.
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
        copies: list[PooledCopy] = []
        for layer in range(LAYERS - 1):
            place = memory[layer % 2]
            if layer >= 2:
                copies[layer - 2].finish_store(compute=compute)  # its memory is this layer's now
            device.fill(place, step + layer, bytes=size, stream=compute)
            _testing.accumulate(device, place, weights, count=COUNT, stream=compute)
            copies.append(engine.store(place, size, compute=compute, owner=None))
            assert copies[-1]
        for copy in copies:
            copy.finish_store(compute=compute)
        copies[-1].load(memory[(LAYERS - 2) % 2], compute=compute, owner=None)
        for layer in reversed(range(LAYERS - 1)):
            if layer:
                copies[layer - 1].load(memory[(layer - 1) % 2], compute=compute, owner=None)
            copies[layer].finish_load(compute=compute)
            _testing.accumulate(device, total, memory[layer % 2], count=COUNT, stream=compute)
            copies[layer].drop()
    device.synchronize_stream(compute)
    del engine, pool


def given_up(again: bool) -> None:
    """A load that nobody waits for, as after an exception; with ``again``, its block is used for a store at once."""
    device = open_sim(current_rank())
    size = 4 * COUNT
    pool = PinnedPool(size, device=device)
    engine = CopyEngine(pool.core, timeout=20.0)
    compute = device.create_stream()
    source, target = device.allocate(size), device.allocate(size)
    device.fill(source, 1, bytes=size, stream=compute)
    copy = engine.store(source, size, compute=compute, owner=None)
    copy.finish_store(compute=compute)
    copy.load(target, compute=compute, owner=None)
    copy.drop()
    if again:
        engine.store(source, size, compute=compute, owner=None).drop()
    del engine, pool


def module_training() -> None:
    """The same with torch: the host computes, and tells the device which memory it uses."""
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


def sliced_training() -> None:
    """Two layers of attention over a sequence in slices, whose keys and sums of gradients are in the pool."""
    torch.set_num_threads(1)
    pool = PinnedPool(1 << 20, device=open_sim(current_rank()))
    offload = ActivationOffload(pool, [nn.Identity()], min_bytes=1)
    for ratio in (1.0, 0.5):
        sliced = SlicedSequence([0, 5, 8, 16], offload=offload, ratio=ratio)
        outs = []
        for number in range(3):
            part = sliced.slice(number)
            hidden = torch.ones(part.length, 1, 4, requires_grad=True)
            for _ in range(2):
                hidden = hidden + ring_attention(hidden, hidden.sin(), hidden.cos(), comm=None, cu_seqlens=part)
            outs.append(hidden)
        for out in reversed(outs):
            out.sum().backward()
    assert offload.stats().held == 0


def test_the_copies_are_ordered_for_200_seeds() -> None:
    check(training, 1, seeds=range(200))
    check(given_up, 1, True, seeds=range(200))


def test_offloaded_modules_are_ordered() -> None:
    check(module_training, 1, seeds=range(40))
    check(sliced_training, 1, seeds=range(40))


def test_each_wait_that_is_left_out_is_found() -> None:
    needed: dict[tuple[str, str, int], bool] = {}
    for program, *args in ((training,), (given_up, True), (given_up, False), (module_training,), (sliced_training,)):
        for site in planted_sites(program, 1, *args, seeds=range(12), path="csrc/offload"):
            key = (site.call, site.file.rsplit("/", 1)[-1], site.line)
            needed[key] = needed.get(key, False) or bool(site.found)
    waits = [(call, file) for call, file, _ in needed if call != "record"]
    assert sorted(waits) == [
        ("synchronize", "copy_engine.cpp"),  # finish_store and finish_load, where the host computes
        ("synchronize", "copy_engine.cpp"),
        ("synchronize", "copy_engine.cpp"),  # the last wait, for each direction
        ("synchronize", "copy_engine.cpp"),
        ("wait", "copy_engine.cpp"),  # store for compute
        ("wait", "copy_engine.cpp"),  # finish_store
        ("wait", "copy_engine.cpp"),  # load for compute
        ("wait", "copy_engine.cpp"),  # finish_load
        ("wait", "pinned_pool.cpp"),  # a block's last reader
    ]
    assert not [site for site, found in needed.items() if not found]

"""How often layers with experts wait for numbers of the device, and where recomputation sends tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hdpcomm as hdp
from hdpcomm.attention.slices import Recomputation
from hdpcomm.comm import Mesh
from hdpcomm.kernels.transfers import HostNumbers
from hdpcomm.models import Llama, LlamaConfig, moe, set_recompute
from hdpcomm.models.expert_group import Routing, chosen_before, kept_routing, routing_before
from hdpcomm.parallel import expert_parallel
from hdpcomm.testing import run_threads

CONFIG = LlamaConfig(vocabulary=30, layers=2, hidden=16, heads=2, kv_heads=1, ffn=12, experts=4, top_k=2)


class Waits(TorchDispatchMode):
    """Operations inside the block for whose results the host waits on a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount") or (
            name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Experts(nn.Module):
    """The layers with experts of a model, one after the other."""

    def __init__(self, comm, recompute="none", dtype=torch.float64, **options):
        super().__init__()
        model = expert_parallel(Llama(CONFIG, dtype=dtype), Mesh(comm, expert=comm.size), **options)
        self.layers = nn.ModuleList(block.ffn for block in model.blocks)
        set_recompute(self, recompute)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def inputs(comm, tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(comm.rank)
    return torch.randn(tokens, CONFIG.hidden, dtype=dtype, generator=generator, requires_grad=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full", 1])
def test_counts_are_read_once_a_layer_in_forward_passes_only(ranks, recompute, monkeypatch):
    read, get = [], HostNumbers.get

    def rank():
        with hdp.init() as comm:
            model, x = Experts(comm, recompute), inputs(comm, 5 + comm.rank)
            with Waits() as waits:
                y = model(x)
                comm.barrier()
                forward = len({id(each) for each in read})
                comm.barrier()
                y.square().sum().backward()
            comm.barrier()
            return forward, len({id(each) for each in read}), waits.found, x.grad

    monkeypatch.setattr(HostNumbers, "get", lambda self: read.append(self) or get(self))
    for forward, all_read, waits, gradient in run_threads(rank, ranks):
        assert forward == all_read == CONFIG.layers * ranks
        assert waits == []
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_grouped_products_give_the_gradients_of_the_loop(tokens, recompute, ranks, monkeypatch):
    """torch's, on the CPU; the host waits for the sizes of messages only."""
    read, get = [], HostNumbers.get
    monkeypatch.setattr(HostNumbers, "get", lambda self: read.append(self) or get(self))

    def rank():
        with hdp.init() as comm:
            model, x = Experts(comm, recompute, torch.float32), inputs(comm, tokens * (comm.rank + 1), torch.float32)
            model(x).square().sum().backward()
            return [x.grad, *(p.grad for p in model.parameters())]

    looped = run_threads(rank, ranks)
    monkeypatch.setattr(moe, "_has_grouped_product", lambda *_: True)
    read.clear()
    for found, wanted in zip(run_threads(rank, ranks), looped, strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if tokens:
        assert len({id(each) for each in read}) == (0 if ranks == 1 else CONFIG.layers * ranks)


def test_where_products_are_grouped(monkeypatch):
    def has(dtype, hidden=64, device="meta"):
        rows, weights = torch.empty(3, hidden, dtype=dtype, device=device), torch.empty(2, 32, hidden, dtype=dtype)
        return moe._has_grouped_product(rows, weights)

    assert not has(torch.bfloat16)
    monkeypatch.setattr(moe, "_multiplies_groups", lambda device: device.type == "meta")
    assert has(torch.bfloat16)
    assert not has(torch.bfloat16, device="cpu")
    assert not has(torch.float32)
    assert not has(torch.bfloat16, hidden=60)
    monkeypatch.delattr(nn.functional, "grouped_mm")
    assert not has(torch.bfloat16)


def test_recomputation_sends_no_counts():
    """In its backward pass a recomputed layer sends rows, results, and gradients of both."""

    def rank():
        with hdp.init() as comm:
            model = Experts(comm, "full")
            start = comm.stats()["bytes_sent"]
            y = model(inputs(comm, 6))
            forward = comm.stats()["bytes_sent"] - start
            y.sum().backward()
            counts = CONFIG.layers * (comm.size - 1) * CONFIG.experts // comm.size * 8
            return comm.stats()["bytes_sent"] - start - forward == 2 * (forward - counts), forward - counts

    for right, rows in run_threads(rank, 2):
        assert right
        assert rows > 0


def test_recomputation_sends_tokens_where_they_were():
    """Though routers would send all of them elsewhere by then, on one rank of two."""

    def rank(change):
        with hdp.init() as comm:
            model = Experts(comm, "full")
            y = model(inputs(comm, 20))
            loads = [layer.load.computed.clone() for layer in model.layers]
            if change and comm.rank:
                for layer in model.layers:
                    layer.router.weight.data.neg_()
            y.square().sum().backward()
            gradients = [layer.out.grad.flatten(1).norm(dim=1) for layer in model.layers]
            return loads, gradients, [layer.load.computed for layer in model.layers]

    plain, changed = run_threads(rank, 2, False), run_threads(rank, 2, True)
    for (loads, before, _), (same, after, counted) in zip(plain, changed, strict=True):
        for load, first, again, second, in_all in zip(loads, before, same, after, counted, strict=True):
            assert torch.equal(load, again)
            assert torch.equal(load, in_all)
            own = load[load > 0]
            assert int(own.sum()) > 0
            assert torch.equal(first > 0, second > 0)  # the same experts get gradients


def routing_of(numbers, experts):
    return Routing(torch.tensor([numbers]), experts, HostNumbers(torch.tensor(numbers)))


@pytest.mark.parametrize(("experts", "kept"), [(256, torch.uint8), (257, torch.int16), (40_000, torch.int64)])
def test_a_block_gives_its_routings_again_in_their_order(experts, kept):
    block, other = Recomputation(), Recomputation()
    with block:
        first = kept_routing(routing_of([experts - 1, 0], experts))
        with other:
            kept_routing(routing_of([7], experts))
        second = kept_routing(routing_of([1], experts))
    assert first.chosen.dtype == torch.int64
    assert routing_before() is chosen_before() is None
    for _ in range(2):  # a graph that is kept may be gone through twice
        with block.again:
            assert chosen_before().tolist() == [[experts - 1, 0]]
            found = routing_before()
            assert found.chosen.dtype == kept
            assert found.sizes is first.sizes
            with other.again:
                assert routing_before().chosen.tolist() == [[7]]
            assert kept_routing(second) is second  # and does not keep it again
            assert routing_before().chosen.tolist() == [[1]]
            assert routing_before() is chosen_before() is None
    assert list(first.sizes.get()) == list(first.sizes.get()) == [experts - 1, 0]

"""Attention inside a model: ``with packing()``, the replacement of torch's function, and torch.compile."""

import importlib
from collections import OrderedDict

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import (
    AttentionOptions,
    packed_attention,
    packing,
    ring_attention,
    scaled_dot_product_attention,
    shard,
    unshard,
)
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options

CU = [0, 50, 51, 80]


class Layer(torch.nn.Module):
    """A layer with attention in its middle."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(32, 64).double()
        self.out = torch.nn.Linear(32, 32).double()
        self.sinks = torch.nn.Parameter(torch.linspace(-1, 1, 4).double())
        self.options = options

    def forward(self, x):
        q, k, v = self.qkv(x).split((32, 16, 16), dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 8)) for t in (q, k, v))
        return self.out(torch.relu(packed_attention(q, k, v, sinks=self.sinks, **self.options).flatten(-2)))


def _x():
    return torch.randn(CU[-1], 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _run(layer, call, comm, x, **pack):
    layer.zero_grad()
    mine = shard(x, CU, rank=comm.rank, size=comm.size).requires_grad_()
    with packing(comm, CU, **with_options(**pack)):
        out = call(mine)
    out.square().sum().backward()
    return [out.detach(), mine.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses"])
def test_compiled_layers_give_the_same(variant):
    """One operator, no graph break, forward and backward; the pack may change without compiling again."""
    layers = [Layer(window=20) for _ in range(2)]
    torch._dynamo.reset()
    compiled = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in layers]
    with packing(None, CU):  # compile in one thread
        for call in compiled:
            call(_x()).sum().backward()

    def main():
        comm = hdp.init()
        layer = layers[comm.rank]
        eager = _run(layer, layer, comm, _x(), variant=variant)
        return eager, _run(layer, compiled[comm.rank], comm, _x(), variant=variant)

    for eager, fused in run_threads(main, 2):
        for a, b in zip(eager, fused, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_compiled_batches_give_the_same():
    layer = Layer()
    torch._dynamo.reset()
    x = _x()[:60].view(3, 20, 32).requires_grad_()
    with packing(None, [0, 20]):
        want = layer(x)
        got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (got, want)))


def test_the_operator_passes_torchs_own_checks():
    q = torch.randn(20, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(20, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with packing(None, [0, 20]):
        torch.library.opcheck(
            torch.ops.hdpcomm.packed_attention.default, (q, k, v, None, [1.0, -1.0, -1.0, 0.3, 0.0, 0.0]),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )  # fmt: skip


def test_like_torchs_function():
    def main():
        comm = hdp.init()
        place = {"rank": comm.rank, "size": comm.size}
        q, k, v = (shard(t, [0, 30], **place, dim=2) for t in whole)
        with packing(comm, [0, 30]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    whole = [torch.randn(2, heads, 30, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    want = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(unshard(run_threads(main, 3), [0, 30], dim=2), want, atol=1e-12, rtol=1e-12)


def test_dense_is_a_batch_of_packs():
    """[batch, tokens, heads, dim]: every row gives the same result as alone, with the layout of one pack."""
    cu, batch = [0, 21, 33], 3
    whole = [torch.randn(batch, 33, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64)

    def main(tensors, dim):
        comm = hdp.init()
        q, k, v = (shard(t, cu, rank=comm.rank, size=comm.size, dim=dim).contiguous() for t in tensors)
        return ring_attention(q, k, v, comm=comm, cu_seqlens=cu, options=AttentionOptions(sinks=sinks), return_lse=True)

    dense = run_threads(lambda: main(whole, 1), 2)
    for row in range(batch):
        alone = run_threads(lambda row=row: main([t[row] for t in whole], 0), 2)
        for (out, lse), (one, one_lse) in zip(dense, alone, strict=True):
            torch.testing.assert_close(out[row], one, atol=1e-13, rtol=1e-13)
            torch.testing.assert_close(lse[row], one_lse, atol=1e-13, rtol=1e-13)


def test_packs_of_eager_layers_are_not_kept(remembered):
    """Eager calls save no pack, since autograd keeps what their backward needs; only compiled ones need a ticket."""
    with packing(None, CU):
        Layer()(_x()).sum().backward()
    assert not remembered


@pytest.mark.parametrize("end", [hdp.Communicator.close, lambda comm: comm.abort("enough")])
def test_worlds_that_are_over_are_let_go_of(remembered, end):
    """Packs of ended worlds are dropped when the next pack begins; those of open worlds are kept."""
    layer = Layer()
    torch._dynamo.reset()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def main():
        comm = hdp.init()
        with packing(comm, CU) as pack:
            first = call(_x()).square().sum()
        with packing(comm, CU):
            second = call(_x()).square().sum()
        assert pack.ticket in remembered
        first.backward()
        second.backward()
        with packing(comm, CU):
            late = call(_x()).sum()
        end(comm)
        assert len(remembered) == 3
        with packing(None, CU):
            assert not remembered
            call(_x()).sum().backward()
            assert len(remembered) == 1
        with pytest.raises(InvalidUsage, match="its world was closed or aborted, or more than 1024"):
            late.backward()

    run_threads(main, 1)


@pytest.fixture
def remembered(monkeypatch):
    """The packs that are kept for compiled backwards."""
    kept = OrderedDict()
    monkeypatch.setattr(importlib.import_module("hdpcomm.attention.pack_context"), "_saved", kept)
    return kept


def test_packs_nest_and_end():
    q = torch.zeros(4, 1, 8)
    with pytest.raises(InvalidUsage, match="outside a pack"):
        packed_attention(q, q, q)
    with packing(None, [0, 4]):
        with packing(None, [0, 1, 4]):
            packed_attention(q, q, q)
        with pytest.raises(ZeroDivisionError), packing(None, [0, 9]):
            raise ZeroDivisionError
        packed_attention(q, q, q)


def test_what_cannot_be_done_is_refused():
    q = torch.zeros(1, 2, 4, 8)
    with packing(None, [0, 4]):
        with pytest.raises(InvalidUsage, match="attn_mask was given"):
            scaled_dot_product_attention(q, q, q, attn_mask=q)
        with pytest.raises(InvalidUsage, match="dropout is not supported"):
            scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        with pytest.raises(InvalidUsage, match="enable_gqa"):
            scaled_dot_product_attention(q, q[:, :1], q[:, :1])
        with pytest.raises(InvalidUsage, match="window, the keys that a query sees, itself included, is 0"):
            packed_attention(q, q, q, window=0)

"""What has no second derivative says so, also where the incoming gradient has no graph of its own."""

import importlib
import pkgutil

import pytest
import torch

import hdpcomm
from hdpcomm.attention import (
    delta_rule,
    mla_attention,
    packed_attention,
    packing,
    ring_attention,
    selected_attention,
    shard,
    short_conv,
    ssd,
)
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import cross_entropy, linear_cross_entropy
from hdpcomm.models.lean import gate_clamped, gated, rms_norm, rotate

CU = torch.tensor([0, 5, 8])
PACK = {"comm": None, "cu_seqlens": CU}


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def sharded():
    x = rand(8, 2)
    return x, shard(x, CU, rank=0, size=2)


def attention(x):
    return ring_attention(x, rand(8, 2, 4), rand(8, 2, 4), **PACK)


def packed(x):
    with packing(None, CU):
        return packed_attention(x, rand(8, 2, 4), rand(8, 2, 4))


def selected(x):
    chosen = torch.zeros(8, 1, dtype=torch.int64)  # the first token of the sequence
    chosen[5:] = 5
    return selected_attention(x, rand(8, 2, 4), rand(8, 2, 4), chosen, **PACK)


CALLS = {
    "selected_attention": (selected, (8, 2, 4)),
    "ring_attention": (attention, (8, 2, 4)),
    "packed_attention": (packed, (8, 2, 4)),
    "mla_attention": (lambda x: mla_attention(x, rand(8, 6), rand(8, 2), rand(2 * (2 + 4), 6), **PACK), (8, 2, 4)),
    "delta_rule": (
        lambda x: delta_rule(x, rand(8, 2, 4), rand(8, 2, 4), -rand(8, 2).abs(), rand(8, 2).sigmoid(), **PACK),
        (8, 2, 4),
    ),
    "ssd": (lambda x: ssd(x, rand(8, 2).abs(), -rand(2).abs(), rand(8, 1, 4), rand(8, 1, 4), **PACK), (8, 2, 4)),
    "short_conv": (lambda x: short_conv(x, rand(6, 3), **PACK), (8, 6)),
    "shard": (lambda x: shard(x, CU, rank=0, size=2), (8, 2)),
    "cross_entropy": (lambda x: cross_entropy(x.float(), torch.arange(8)), (8, 9)),
    "linear_cross_entropy": (lambda x: linear_cross_entropy(x, rand(9, 4), torch.arange(8)), (8, 4)),
    "rms_norm": (lambda x: rms_norm(x, rand(4), 1e-6), (8, 4)),
    "gated": (lambda x: gated(x, rand(8, 4), "silu"), (8, 4)),
    "gate_clamped": (lambda x: gate_clamped(x, 1.7, 7.0), (8, 4)),
    "rotate": (lambda x: rotate(x, rand(8, 1, 2), rand(8, 1, 2)), (8, 2, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_create_graph_is_refused(name):
    call, shape = CALLS[name]
    x = rand(*shape)
    with pytest.raises(InvalidUsage, match="first derivatives only: call backward"):
        torch.autograd.grad(call(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(call(x).sum(), x)[0].shape == x.shape


def test_every_backward_pass_is_guarded():
    """Also those of ranks, of stages and of models, which the calls above do not reach."""
    for module in pkgutil.walk_packages(hdpcomm.__path__, "hdpcomm."):
        if module.name.split(".")[1] in ("attention", "kernels", "models", "parallel", "train"):
            importlib.import_module(module.name)
    functions = [each for each in torch.autograd.Function.__subclasses__() if each.__module__.startswith("hdpcomm.")]
    assert len(functions) >= 20
    guard = functions[0].backward.__code__
    assert guard.co_name == "refusing"
    assert [f"{each.__module__}.{each.__name__}" for each in functions if each.backward.__code__ is not guard] == []


def test_a_compiled_call_is_refused_too():
    @torch.compile(backend="aot_eager")
    def compiled(x, k, v):
        return packed_attention(x, k, v).sum()

    x = rand(8, 2, 4)
    with (
        packing(None, CU),
        pytest.raises((InvalidUsage, RuntimeError), match=r"first derivatives|double backward"),
    ):
        torch.autograd.grad(compiled(x, rand(8, 2, 4), rand(8, 2, 4)), x, create_graph=True)[0].sum().backward()

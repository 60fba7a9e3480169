"""RMSNorm, gates and rotations: values and gradients of torch's own operations, and what they keep."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from hdpcomm.models import lean as lean_module
from hdpcomm.models.lean import ACTIVATIONS, gate_clamped, gate_halves, gated, rms_norm, rotate


def composed_norm(x, weight, eps, offset=0.0):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.rms_norm(x.to(wide), (x.shape[-1],), eps=eps) * (weight.to(wide) + offset)).to(x.dtype)


def composed_gate(gate, up, activation):
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=GELUS[activation])) * up


def composed_clamped(pairs, alpha, limit):
    gate, up = pairs[..., ::2].clamp(max=limit), pairs[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


GELUS = {"gelu": "none", "gelu_tanh": "tanh"}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (7, 6), (2, 3, 16)])
def test_values_and_gradients(dtype, limit, shape):
    torch.manual_seed(0)
    x, gate, upstream = (torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(3))
    weight = torch.randn(shape[-1], dtype=torch.float64).to(dtype)
    for lean, composed, inputs in (
        (lambda a, w: rms_norm(a, w, 1e-5), lambda a, w: composed_norm(a, w, 1e-5), (x, weight)),
        (
            lambda a, w: rms_norm(a, w, 1e-5, offset=1.0), lambda a, w: composed_norm(a, w, 1e-5, 1.0), (x, weight),
        ),
        *(
            (partial(gated, activation=name), partial(composed_gate, activation=name), (x, gate))
            for name in ACTIVATIONS
        ),
    ):  # fmt: skip
        found, wanted = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
        results = lean(*found), composed(*wanted)
        for result in results:
            result.backward(upstream)
        torch.testing.assert_close(results[0], results[1], rtol=limit, atol=limit)
        for one, other in zip(found, wanted, strict=True):
            assert one.grad.dtype == dtype
            torch.testing.assert_close(one.grad, other.grad, rtol=limit, atol=limit * max(1, x.numel()) ** 0.5)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (2, 3, 16)])
def test_gates_of_one_tensor(dtype, limit, shape):
    pairs = (torch.randn(shape, dtype=torch.float64) * 4).to(dtype)
    pairs[:1, ..., :4] = torch.tensor([7.0, 7.0, 7.5, -7.0])  # the limits themselves have a gradient
    upstream = torch.randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64).to(dtype)
    for lean, composed in (
        (partial(gate_clamped, alpha=1.5, limit=7.0), partial(composed_clamped, alpha=1.5, limit=7.0)),
        *(
            (partial(gate_halves, activation=name), lambda x, name=name: composed_gate(*x.chunk(2, dim=-1), name))
            for name in ACTIVATIONS
        ),
    ):
        found, wanted = (pairs.clone().requires_grad_() for _ in range(2))
        results = lean(found), composed(wanted)
        for result in results:
            result.backward(upstream)
        torch.testing.assert_close(results[0], results[1], rtol=limit, atol=limit * 10)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=limit, atol=limit * 10)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no fused operator")
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 16)])
def test_torchs_fused_norm(shape, monkeypatch):
    """Its values; and its calls by tensors without storage, since torch has its backward for CUDA only
    (tests/gpu/test_kernels_gpu.py)."""
    monkeypatch.setattr(lean_module, "_has_fused_norm", lambda _: True)
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), composed_norm(x, weight, 1e-5))
    with torch.device("meta"):
        x, weight = torch.empty(shape, requires_grad=True), torch.empty(shape[-1], requires_grad=True)
        rms_norm(x, weight, 1e-5).sum().backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_exact_gradients():
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: rms_norm(a, w, 1e-5), (x, weight))
    other = x.detach().flip(0).requires_grad_()
    for name in ACTIVATIONS:
        assert torch.autograd.gradcheck(partial(gated, activation=name), (x, other))
        assert torch.autograd.gradcheck(partial(gate_halves, activation=name), (x,))
    assert torch.autograd.gradcheck(partial(gate_clamped, alpha=1.5, limit=1.0), (x,))
    heads, angles = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True), torch.randn(5, 1, 4).double()
    assert torch.autograd.gradcheck(lambda a: rotate(a, angles.cos(), angles.sin()), (heads,))
    for width in (4, 8):  # each place has a factor of its own, and with 4 some dimensions are not turned
        tables = torch.randn(2, 5, 1, width).double()
        assert torch.autograd.gradcheck(lambda a, tables=tables: rotate(a, *tables, halves=False), (heads,))


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_rotation(tokens):
    x, angles = torch.randn(tokens, 3, 8).double(), torch.randn(tokens, 1, 4).double()
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    turned = rotate(x.transpose(0, 1).contiguous().transpose(0, 1), angles.cos(), angles.sin())
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1))


def test_a_frozen_weight_and_an_input_without_gradient():
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is not None
    x.requires_grad_()
    rms_norm(x, weight.detach(), 1e-5).sum().backward()
    assert x.grad is not None
    assert rms_norm(x, weight.detach().double(), 1e-5).dtype == torch.float64
    assert rms_norm(x, weight.detach().double(), 1e-5, dtype=x.dtype).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept(dtype):
    x, up = torch.randn(100, 64).to(dtype).requires_grad_(), torch.randn(100, 64).to(dtype).requires_grad_()
    weight = torch.ones(64, dtype=dtype, requires_grad=True)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
        assert sum(kept) == x.numel() + 64 + 100
        kept.clear()
        gated(x, up, "silu")
        assert sum(kept) == 2 * x.numel()
        kept.clear()
        angles = torch.randn(100, 1, 4).to(dtype)
        rotate(x.view(100, 8, 8), angles, angles)
        assert sum(kept) == 2 * angles.numel()

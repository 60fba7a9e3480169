"""The flat gradient buffer against plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.train import Gradients
from hdpcomm.train.state.layout import layout_of


@pytest.fixture
def mesh():
    with hdp.init() as comm:
        yield Mesh(comm)


def gradients_of(parameters, mesh):
    parameters = list(parameters)
    return Gradients.whole(parameters, layout_of(nn.ParameterList(parameters), mesh), mesh)


def model_of(dtype, *, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_gradients_as_autograd_and_no_copy(dtype, mesh):
    model, plain = model_of(dtype), model_of(dtype)
    buffer = gradients_of(model.parameters(), mesh)
    x = torch.randn(7, 3, dtype=dtype)
    for _ in range(2):  # the second step starts from zero again
        buffer.zero()
        plain.zero_grad()
        with buffer.passes(list):
            for part in x.split(3):
                model(part).square().sum().backward()
                plain(part).square().sum().backward()
    buffer.reduce(1.0)
    buffer.finish()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert mine.grad.untyped_storage().data_ptr() == buffer.sums.flat.untyped_storage().data_ptr()
    wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    assert buffer.clip_(0.5) == pytest.approx(wanted, rel=1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert float(buffer.sums.flat.norm()) == pytest.approx(0.5, rel=1e-5)


def test_narrow_gradients_are_summed_in_fp32(mesh):
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    buffer = gradients_of([weight], mesh)
    buffer.zero()
    with buffer.passes(list):
        for _ in range(1000):  # a sum in bf16 would stand still at 256
            weight.sum().backward()
    assert buffer.sums.flat.dtype == torch.float32
    assert buffer.sums.flat[0].item() == 1000
    buffer.reduce(1.0)
    buffer.finish()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.item() == 1000


def test_no_clipping_below_the_limit_or_without_one(mesh):
    weight = nn.Parameter(torch.ones(4))
    buffer = gradients_of([weight], mesh)
    buffer.zero()
    with buffer.passes(list):
        (weight * 3).sum().backward()
    assert buffer.clip_(None) == buffer.clip_(100.0) == 6.0
    assert weight.grad.tolist() == [3.0] * 4


def test_shared_and_frozen_and_unused_parameters(mesh):
    tied, frozen, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    buffer = gradients_of([tied, tied, frozen, unused], mesh)
    assert [p is tied or p is unused for p in buffer.parameters] == [True, True]
    buffer.zero()
    with buffer.passes(list):
        tied.sum().backward()
    buffer.reduce(1.0)
    buffer.finish()
    assert unused.grad is None
    assert frozen.grad is None
    assert tied.grad.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_that_another_buffer_has_taken_over(dtype, mesh):
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    first, second = gradients_of([weight], mesh), gradients_of([weight], mesh)
    for buffer in (first, second, first):
        buffer.zero()
        with buffer.passes(list):
            (weight * 3).sum().backward()
            weight.sum().backward()
        buffer.reduce(1.0)
        buffer.finish()
        assert weight.grad.tolist() == [4, 4]
        assert buffer.sums.flat[:2].tolist() == [4, 4]


def test_what_cannot_be_trained(mesh):
    with pytest.raises(InvalidUsage, match="nothing to train"):
        gradients_of([], mesh)
    with pytest.raises(InvalidUsage, match="must be on one device"):
        gradients_of([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))], mesh)
    with pytest.raises(InvalidUsage, match="real floating-point parameters"):
        gradients_of([nn.Parameter(torch.ones(1, dtype=torch.complex64))], mesh)

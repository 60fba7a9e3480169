"""Weight gradients that are computed later: those of a whole backward pass, when they are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdpcomm as hdp
from hdpcomm.measure.costs import profile_samples, weights_share
from hdpcomm.models import Llama, LlamaConfig, set_recompute
from hdpcomm.models.recompute import WeightGradients
from hdpcomm.plan import CostModel, CostSample
from hdpcomm.run import RunConfig
from hdpcomm.run.costs import weights_put_off

WIDTH = 6


def small_net(**options):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "bias": True} | options
    return nn.Sequential(nn.Linear(WIDTH, 8, **options), nn.SiLU(), nn.Linear(8, WIDTH, **options))


def inputs(*shape, dtype=torch.float64):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype, requires_grad=True)


def gradients_of(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_those_of_a_whole_backward_pass(shape, dtype):
    net, x = small_net(dtype=dtype), inputs(*shape, dtype=dtype)
    net(x).square().sum().backward()
    wanted, of_input = gradients_of(net), x.grad.clone()
    net.zero_grad()
    later = WeightGradients()
    assert later.watch([net]) == 2
    x.grad = None
    loss = net(x).square().sum()
    with later.put_off("key"):
        loss.backward()
    limit = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(x.grad, of_input, rtol=limit, atol=limit)
    assert [p.grad is None for p in net.parameters()] == [True, False, True, False]  # biases come at once
    later.compute("key")
    for found, want in zip(gradients_of(net), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=limit, atol=limit)
    assert later.held_bytes == 0
    with pytest.raises(KeyError):
        later.compute("key")


def test_several_passes_in_any_order_and_one_layer_used_twice():
    net = small_net()
    batches = [inputs(5), inputs(3).detach() * 2, inputs(1).detach() - 1]
    for x in batches:
        net(net(x)).square().sum().backward()
    wanted = gradients_of(net)
    net.zero_grad()
    later = WeightGradients()
    later.watch([net])
    losses = [net(net(x)).square().sum() for x in batches]
    for key, loss in enumerate(losses):
        with later.put_off(key):
            loss.backward()
    for key in (2, 0, 1):
        later.compute(key)
    for found, want in zip(gradients_of(net), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_without_being_asked_nothing_is_put_off():
    net, x = small_net(), inputs(4)
    net(x).sum().backward()
    wanted = gradients_of(net)
    net.zero_grad()
    WeightGradients().watch([net])
    net(x).sum().backward()
    for found, want in zip(gradients_of(net), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not net(x).requires_grad


def test_hooks_run_when_the_gradient_is_there():
    """Autograd also calls them for a weight that has none in the backward pass."""
    net, later, told = small_net(), WeightGradients(), []
    later.watch([net])
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: told.append((name, p.grad is not None)))
    loss = net(inputs(4)).sum()
    with later.put_off(0):
        loss.backward()
    assert sorted(name for name, there in told if there) == ["0.bias", "2.bias"]
    later.compute(0)
    assert sorted(name for name, there in told if there) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_frozen_weights_keep_nothing_and_what_is_kept_is_counted():
    net, later = small_net(bias=False), WeightGradients()
    net[0].weight.requires_grad_(False)
    later.watch([net])
    loss = net(inputs(10)).sum()
    with later.put_off(0):
        loss.backward()
    assert later.held_bytes in (10 * 8 * 8 + 8, 10 * 8 * 8 + 10 * WIDTH * 8)  # sum()'s gradient is one number
    later.compute(0)
    assert net[0].weight.grad is None
    assert net[2].weight.grad is not None


def test_a_step_that_failed_leaves_nothing():
    net, later = small_net(), WeightGradients()
    later.watch([net])
    loss = net(inputs(4)).sum()
    with later.put_off(0):
        loss.backward()
    later.forget()
    assert later.held_bytes == 0
    with pytest.raises(KeyError):
        later.compute(0)


def test_recomputed_layers_keep_their_gradients():
    """Their linear layers are not watched: seven in each of the others."""
    model = Llama(LlamaConfig(layers=3, hidden=8, heads=2, kv_heads=1, ffn=8))
    set_recompute(model, 2)
    assert WeightGradients().watch(model.blocks) == 7
    later = WeightGradients()
    model = Llama(LlamaConfig(layers=2, hidden=8, heads=2, kv_heads=1, ffn=8))
    assert later.watch(model.blocks) == 14
    set_recompute(model, 1)
    assert later.watch(model.blocks) == 7  # and the first layer is as it was
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    assert sum("forward" in vars(module) for module in linear) == 7
    WeightGradients().leave(model.blocks)  # of another one
    assert sum("forward" in vars(module) for module in linear) == 7
    later.leave(model.blocks)
    assert not any("forward" in vars(module) for module in linear)
    sparse = Llama(LlamaConfig(layers=1, hidden=8, heads=2, kv_heads=1, ffn=8, experts=2, top_k=1))
    assert WeightGradients().watch(sparse.blocks) == 5  # attention and the router


def test_a_profile_of_split_passes_tells_what_is_put_off():
    """The layers are as they were, and gradients are dropped."""
    model = Llama(LlamaConfig(layers=2, hidden=32, heads=2, kv_heads=1, ffn=64))
    with hdp.init() as comm:
        samples = profile_samples(model, comm, longest=64, split_backward=True)
        plain = profile_samples(model, comm, longest=64)
    assert all(0 < sample.weights_s < sample.seconds for sample in samples)
    assert all(sample.weights_s == 0 for sample in plain)
    assert 0 <= weights_share(samples, CostModel.fit(samples)) <= 1
    assert not any("forward" in vars(module) for module in model.modules() if type(module) is nn.Linear)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_share_of_weight_gradients_is_that_of_dense_layers_with_most_tokens():
    samples = [CostSample(1, (60, 40), 5.0, weights_s=1.0), CostSample(1, (100,), 6.0, weights_s=2.0)]
    samples += [CostSample(1, (10,), 6.0, weights_s=9.0), CostSample(2, (400,), 6.0, weights_s=9.0)]
    samples += [CostSample(1, (400,), 6.0, weights_s=9.0, expert=2)]
    assert weights_share(samples, CostModel(0.0, linear=0.08, experts=0.02)) == pytest.approx(1.5 / 6)
    assert weights_share(samples, CostModel(0.0, linear=0.001)) == 1.0
    assert weights_share(samples, CostModel(1.0, linear=0.0)) == weights_share([], CostModel(1.0, 1.0)) == 0.0


@pytest.mark.parametrize(
    ("recompute", "share"),
    [("none", 0.3), (0, 0.3), (3, 0.3 * 2.5), ((1, 0), 0.3 * 3.5 / 3), (4, 1 / 6)],
)
def test_the_share_of_a_run_is_the_mean_of_its_devices(recompute, share):
    """0.3 was measured with as many layers recomputed as on the device that recomputes most, of two with four each."""
    config = RunConfig(model=LlamaConfig(layers=8), pipeline=2, split_backward=True, recompute=recompute)
    assert weights_put_off(config, 0.3) == pytest.approx(share)


@pytest.mark.parametrize(("heads", "kv_heads", "ffn"), [(4, 2, 96), (2, 2, 32), (4, 1, 128)])
def test_what_is_kept_is_no_more_than_the_activations(heads, kv_heads, ffn):
    """As the simulator counts it: a micro-batch holds its tokens until its weight gradients are there."""
    model = Llama(LlamaConfig(layers=2, hidden=32, heads=heads, kv_heads=kv_heads, ffn=ffn))
    later, tokens = WeightGradients(), 64
    later.watch(model.blocks)
    of_model = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = []

    def keep(tensor):
        saved.append(tensor.untyped_storage())
        return tensor

    with hdp.init() as comm, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x = torch.randn(tokens, 32, requires_grad=True)
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
        y, _ = model.run_layers(x, positions=torch.arange(tokens), cu_seqlens=cu_seqlens, comm=comm)
        sizes = {each.data_ptr(): each.nbytes() for each in saved}
        activations = sum(size for place, size in sizes.items() if place not in of_model)
        with later.put_off(0):
            y.backward(torch.ones_like(y))
    assert 0.9 * activations <= later.held_bytes <= activations

"""Recurrences and short convolutions in slices: output and gradients are those of the whole sequence, by its definition
in float64."""

import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import SlicedSequence, Tree, delta_rule, short_conv, ssd
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import error
from tests.harness.tree_oracle import random_tree
from tests.ranks.attention import test_linear as linear
from tests.ranks.attention import test_short_conv as convolution
from tests.ranks.attention.test_slices import cuts, on_slices, whole
from tests.ranks.attention.test_tree_linear import wanted as on_trajectories

DELTA, SSD = (
    {"heads": 4, "key_heads": 2, "dk": 8, "dv": 6},
    {"heads": 4, "groups": 2, "dk": 8, "dv": 6},
)


def check(run, inputs, shared, want, bounds, size, way, tree=None):
    """``run(comm, part, leaves, shared)``; ``want``: output, gradients of ``inputs``, then of ``shared``."""
    parameters = []

    def main():
        comm = hdp.init()
        mine = [x.clone().requires_grad_() for x in shared]
        parameters.append(mine)
        return on_slices(lambda part, leaves: run(comm, part, leaves, mine), bounds, inputs, comm, way, tree)

    found = whole(run_threads(main, size), bounds, tree)
    found += [sum(x.grad for x in each) for each in zip(*parameters, strict=True)]
    for place, (got, expected) in enumerate(zip(found, want, strict=True)):
        assert error(got, expected) <= 1e-10, (place, error(got, expected), bounds)


def check_delta(bounds, size, way, tree=None, *, channels=False, exchange="auto"):
    lengths = [bounds[-1]]
    inputs = linear.delta_inputs(lengths, **DELTA, channels=channels)
    options = with_options(exchange=exchange)
    run = lambda comm, part, leaves, _: delta_rule(*leaves, comm=comm, cu_seqlens=part, **options)
    want = linear.wanted(linear.by_token_delta, lengths, inputs, linear.DELTA) if tree is None else None
    check(run, inputs, [], want or on_trajectories(tree, inputs), bounds, size, way, tree)


def check_ssd(bounds, size, way, tree=None, *, exchange="auto"):
    lengths = [bounds[-1]]
    inputs = linear.ssd_inputs(lengths, **SSD)
    want = linear.wanted(linear.by_token_ssd, lengths, inputs, linear.SSD) if tree is None else None
    want = want or on_trajectories(tree, inputs)
    out, x, dt, a, b, c, d = want
    shared = [inputs.pop("a"), inputs.pop("d")]
    options = with_options(exchange=exchange)

    def run(comm, part, leaves, shared):
        x, dt, b, c = leaves
        a, d = shared
        return ssd(x, dt, a, b, c, d=d, comm=comm, cu_seqlens=part, **options)

    check(run, inputs, shared, [out, x, dt, b, c, a, d], bounds, size, way, tree)


def check_conv(bounds, size, way, width, tree=None):
    lengths = [bounds[-1]]
    inputs = convolution.tensors(lengths, 5, width, torch.float64)
    want = convolution.wanted(lengths, inputs) if tree is None else on_trajectories(tree, inputs)
    shared = [inputs.pop("weight"), inputs.pop("bias")]
    run = lambda comm, part, leaves, own: short_conv(leaves[0], own[0], bias=own[1], comm=comm, cu_seqlens=part)
    check(run, inputs, shared, want, bounds, size, way, tree)


def random_tree_slices(seed):
    """(tree, bounds, ranks, way): cuts anywhere, or where segments begin."""
    rng = random.Random(2000 + seed)
    tree = Tree(*random_tree(rng, segments=rng.choice([2, 5, 14]), longest=rng.choice([5, 60])))
    bounds = cuts(rng, tree.num_tokens, rng.randint(1, min(9, tree.num_tokens)))
    if rng.random() < 0.3:
        bounds = [*tree.rows.tolist(), tree.num_tokens]
    return tree, bounds, 1 + seed % 3, rng.choice(["kept", "again", "checkpoint"])


@pytest.mark.parametrize("seed", range(24))
def test_random_slices_of_trees(seed):
    tree, bounds, size, way = random_tree_slices(seed)
    rng = random.Random(seed)
    exchange = rng.choice(["auto", "gather", "scan", "pipeline"])
    check_delta(bounds, size, way, tree, channels=rng.random() < 0.5, exchange=exchange)
    check_ssd(bounds, size, way, tree, exchange=exchange)
    check_conv(bounds, size, way, rng.choice([1, 2, 4, 7]), tree)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_of_a_tree_is_a_slice(size):
    tree, bounds = Tree([-1, 0, 0, 2, 2, -1], [2, 3, 1, 1, 1, 1]), list(range(10))
    check_delta(bounds, size, "kept", tree)
    check_ssd(bounds, size, "kept", tree)
    check_conv(bounds, size, "kept", 4, tree)


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_exchange_on_a_tree(size, exchange):
    tree = Tree([-1, 0, 0, 2, 2, 0, -1, -1, 7], [40, 17, 9, 1, 23, 30, 5, 3, 11])
    for bounds in ([0, 41, 57, 66, 139], [0, 40, 57, 66, 67, 90, 120, 125, 128, 139]):
        check_delta(bounds, size, "again", tree, exchange=exchange)


@pytest.mark.parametrize("seed", range(24))
def test_random_slices(seed):
    rng = random.Random(seed)
    length, size = rng.choice([9, 40, 150]), 1 + seed % 3
    bounds, way = cuts(rng, length, rng.randint(1, 9)), rng.choice(["kept", "again", "checkpoint"])
    check_delta(bounds, size, way, channels=rng.random() < 0.5)
    check_ssd(bounds, size, way)
    check_conv(bounds, size, way, rng.choice([1, 2, 4, 7]))


@pytest.mark.parametrize("exchange", ["gather", "scan", "pipeline"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_exchange(size, exchange):
    check_delta([0, 31, 32, 90], size, "kept", exchange=exchange)
    check_ssd([0, 31, 32, 90], size, "kept", exchange=exchange)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bounds", [range(8), [0, 1, 50], [0, 49, 50], [0, 50]])
def test_slices_of_one_token(bounds, size):
    bounds = list(bounds)
    check_delta(bounds, size, "kept")
    check_ssd(bounds, size, "kept")
    check_conv(bounds, size, "kept", 4)


def test_a_slice_without_the_one_before_it_is_refused():
    inputs = linear.delta_inputs([4], **DELTA)
    leaves = [inputs[name] for name in linear.DELTA]
    with pytest.raises(InvalidUsage, match="from slice 0 on"):
        delta_rule(*leaves, comm=None, cu_seqlens=SlicedSequence([0, 4, 8]).slice(1))


def test_backward_passes_in_another_order_are_refused():
    inputs = linear.delta_inputs([4], **DELTA)
    leaves = [inputs[name].clone().requires_grad_() for name in linear.DELTA]
    sliced = SlicedSequence([0, 4, 8])
    first, second = (delta_rule(*leaves, comm=None, cu_seqlens=sliced.slice(n)) for n in range(2))
    with pytest.raises(InvalidUsage, match="backward pass of slice 0"):
        first.sum().backward()
    second.sum().backward()
    first.sum().backward()


def test_tensors_that_need_no_gradient():
    """A frozen layer before the convolution, and a delta rule where only the decay is trained."""
    bounds, inputs = [0, 5, 6, 20], linear.delta_inputs([20], **DELTA)
    frozen = convolution.tensors([20], 5, 4, torch.float64)
    g, weight = inputs["g"].clone().requires_grad_(), frozen["weight"].clone().requires_grad_()
    sliced, outs = SlicedSequence(bounds), []
    for n in range(3):
        part = sliced.slice(n)
        here = slice(part.start, part.stop)
        conv = short_conv(frozen["x"][here], weight, comm=None, cu_seqlens=part)
        q, k, v, _, beta = (inputs[name][here] for name in linear.DELTA)
        out = delta_rule(q, k, v, g[here], beta, comm=None, cu_seqlens=part)
        outs.append((conv * frozen["dout"][here]).sum() + (out * inputs["dout"][here]).sum())
    for out in reversed(outs):
        out.backward()
    wanted = linear.wanted(linear.by_token_delta, [20], inputs, linear.DELTA)[4]
    assert error(g.grad, wanted) <= 1e-10
    assert error(weight.grad, convolution.wanted([20], frozen)[2]) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_wide(dtype):
    """States go from slice to slice in float32: slices change no more than the rounding of the output."""
    inputs = linear.delta_inputs([60], **DELTA, dtype=dtype)
    leaves = [inputs[name] for name in linear.DELTA]
    whole_out = delta_rule(*leaves, comm=None, cu_seqlens=[0, 60])
    sliced = SlicedSequence([0, 16, 32, 33, 60])
    parts = [sliced.slice(n) for n in range(4)]
    found = [delta_rule(*(x[p.start : p.stop] for x in leaves), comm=None, cu_seqlens=p) for p in parts]
    assert found[0].dtype == dtype
    assert error(torch.cat(found), whole_out) <= 2 * torch.finfo(dtype).eps

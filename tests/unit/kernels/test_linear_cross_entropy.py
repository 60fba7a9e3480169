"""The last layer and its loss in chunks, against a float64 oracle in numpy, one token at a time."""

import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import LossOptions, linear_cross_entropy
from hdpcomm.offload import MemoryMeter
from hdpcomm.testing import run_threads

IGNORED = -100


def oracle(problem, scale=1.0, softcap=0.0):
    """(loss, gradients of hidden, weight and bias, and the magnitudes of their terms summed) in float64, by token."""
    hidden, weight, bias, labels, factors = (None if x is None else x.double().numpy() for x in problem)
    grads = [np.zeros_like(hidden), np.zeros_like(weight), np.zeros(len(weight))]
    sizes = [np.zeros_like(grad) for grad in grads]
    losses = []
    for t, label in enumerate(labels.astype(int)):
        if label == IGNORED:
            continue
        factor = 1.0 if factors is None else factors[t]
        raw = scale * (weight @ hidden[t] + (0.0 if bias is None else bias))
        logits = softcap * np.tanh(raw / softcap) if softcap else raw
        lse = np.logaddexp.reduce(logits)
        losses.append(factor * (lse - logits[label]))
        slope = np.exp(logits - lse)
        slope[label] -= 1.0
        if softcap:
            slope *= 1.0 - np.tanh(raw / softcap) ** 2
        slope *= factor * scale
        grads[0][t] += slope @ weight
        grads[1] += np.outer(slope, hidden[t])
        grads[2] += slope
        sizes[0][t] += abs(slope) @ abs(weight)
        sizes[1] += abs(np.outer(slope, hidden[t]))
        sizes[2] += abs(slope)
    return math.fsum(losses), *([torch.from_numpy(g) for g in each] for each in (grads, sizes))


def problem_of(seed, tokens, columns, width, dtype, *, bias=True, factors=True):
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(generator.normal(0, generator.choice([0.1, 1.0]), shape)).to(dtype)

    labels = torch.from_numpy(generator.integers(0, columns, tokens))
    labels[torch.from_numpy(generator.random(tokens) < generator.choice([0.0, 0.3, 1.0]))] = IGNORED
    weights = torch.from_numpy(generator.normal(0, 1, tokens)).float()
    return (
        normal(tokens, width), normal(columns, width), normal(columns) if bias else None, labels,
        weights if factors else None,
    )  # fmt: skip


def run(problem, upstream=1.0, **arguments):
    hidden, weight, bias, labels, factors = problem
    leaves = [None if x is None else x.clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2], weights=factors, **arguments)
    (loss * upstream).backward()
    return loss.detach(), [None if x is None else x.grad for x in leaves]


def close(found, wanted, dtype):
    limit = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    loss, grads, sizes = wanted
    assert abs(float(found[0]) - loss) <= limit * (1.0 + abs(loss))
    for mine, theirs, size in zip(found[1], grads, sizes, strict=True):
        if mine is not None:
            assert mine.dtype == dtype
            assert float((mine.double() - theirs).norm()) <= limit * float(size.norm()) + 1e-7


@given(
    st.integers(0, 2**32), st.integers(0, 11), st.integers(1, 40), st.integers(1, 9),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 12), st.booleans(), st.booleans(),
    st.sampled_from([1.0, 0.25]), st.sampled_from([0.0, 3.0]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_loss_and_gradients_are_the_oracles(seed, tokens, columns, width, dtype, chunk, bias, factors, scale, softcap):
    problem = problem_of(seed, tokens, columns, width, dtype, bias=bias, factors=factors)
    maths = {"scale": scale, "softcap": softcap}
    found = run(problem, chunk_tokens=chunk, options=LossOptions(**maths))
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(found, oracle(problem, **maths), dtype)


def test_the_upstream_gradient_is_a_factor():
    problem = problem_of(3, 9, 20, 5, torch.float64)
    once, thrice = run(problem), run(problem, upstream=3.0)
    for one, three in zip(once[1], thrice[1], strict=True):
        torch.testing.assert_close(three, 3.0 * one)


@given(
    st.integers(0, 2**32), st.integers(0, 6), st.integers(1, 30), st.integers(1, 4),
    st.sampled_from([torch.float64, torch.float32]), st.sampled_from([0.0, 3.0]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_shards_of_the_vocabulary_give_the_whole(seed, tokens, columns, size, dtype, softcap):
    bounds = [(rank * columns, (rank + 1) * columns) for rank in range(size)]
    problem = problem_of(seed, tokens, size * columns, 5, dtype)
    maths = {"softcap": softcap, "scale": 0.5}

    def main():
        comm = hdp.init()
        first, stop = bounds[comm.rank]
        hidden, weight, bias, labels, factors = problem
        mine = hidden, weight[first:stop], bias[first:stop], labels, factors
        return run(mine, comm=comm, chunk_tokens=4, options=LossOptions(**maths))

    results = run_threads(main, size)
    loss, *sums = oracle(problem, **maths)
    for (first, stop), found in zip(bounds, results, strict=True):
        assert torch.equal(found[0], results[0][0])
        assert torch.equal(found[1][0], results[0][1][0])
        close(found, (loss, *([each[0], each[1][first:stop], each[2][first:stop]] for each in sums)), dtype)


def test_peak_memory_does_not_grow_with_tokens_times_vocabulary():
    columns, width = 4096, 64

    def peak(tokens):
        hidden, weight, _, labels, _ = problem_of(0, tokens, columns, width, torch.float32)
        hidden.requires_grad_()
        weight.requires_grad_()
        with MemoryMeter("cpu") as meter:
            linear_cross_entropy(hidden, weight, labels, chunk_tokens=64).backward()
        return meter.peak

    small, large = peak(512), peak(4096)
    # a token costs its gradient, which is also copied to .grad's place, and some numbers of four bytes; a logit nothing
    assert large - small <= (4096 - 512) * 4 * (2 * width + 16)
    assert large < 4096 * columns * 4 / 8


@pytest.mark.parametrize(("chunk", "bytes_an_element"), [(64, 2), (32, 6)])  # 6: the sum in float32, and its rounding
def test_peak_memory_of_a_narrow_weights_gradient(monkeypatch, chunk, bytes_an_element):
    monkeypatch.setattr(importlib.import_module(linear_cross_entropy.__module__), "_PRODUCT_ELEMENTS", 1 << 12)
    hidden, weight, _, labels, _ = problem_of(0, 64, 4096, 512, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    with MemoryMeter("cpu") as meter:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    assert meter.peak <= 1.02 * bytes_an_element * weight.numel() + 3 * 2 * chunk * 4096


@given(st.integers(0, 2**32), st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_products_of_some_rows_at_a_time_give_the_whole(seed, elements):
    module = importlib.import_module(linear_cross_entropy.__module__)
    problem = problem_of(seed, 9, 11, 3, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PRODUCT_ELEMENTS", elements)
        found = run(problem, chunk_tokens=4)
    close(found, oracle(problem), torch.bfloat16)


def test_frozen_weights_cost_nothing():
    hidden, weight, _, labels, _ = problem_of(0, 8, 6, 4, torch.float32, bias=False, factors=False)
    hidden.requires_grad_()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


def test_autocast_computes_in_its_type():
    hidden, weight, bias, labels, _ = problem_of(1, 8, 6, 4, torch.float32, factors=False)
    for leaf in (hidden, weight, bias):
        leaf.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    loss.backward()
    close((loss.detach(), [x.grad.bfloat16() for x in (hidden, weight, bias)]),
          oracle((hidden.detach(), weight.detach(), bias.detach(), labels, None)), torch.bfloat16)  # fmt: skip
    assert hidden.grad.dtype == torch.float32


def test_a_second_backward_is_refused():
    hidden, weight, _, labels, _ = problem_of(2, 4, 6, 4, torch.float32)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidUsage, match="a second time"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softcap": -1.0}, "softcap -1.0; expected finite numbers"),
        ({"scale": math.inf}, "scale is inf"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(InvalidUsage, match=message):
        LossOptions(**change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"hidden \(3, 5\) and weight \(6, 4\)"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.float16)}, "one floating-point type was expected"),
        ({"bias": torch.zeros(5)}, r"bias \(5,\); expected one for each row"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, r"labels \(2,\) of torch.int64; expected int64"),
        ({"labels": torch.tensor([0, 1, 6])}, "label"),
        ({"weights": torch.ones(2)}, r"weights \(2,\) of torch.float32"),
        ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, "another argument on meta"),
        ({"options": 2.0}, "options is 2.0, expected LossOptions"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"weight": torch.zeros(0, 4)}, "has no row"),
    ],
)
def test_bad_arguments(change, message, dtype):
    given_types = {
        name: value.to(dtype)
        if name in ("hidden", "weight", "bias") and isinstance(value, torch.Tensor) and value.dtype == torch.float32
        else value
        for name, value in change.items()
    }
    arguments = {
        "hidden": torch.zeros(3, 4, dtype=dtype),
        "weight": torch.zeros(6, 4, dtype=dtype),
        "labels": torch.zeros(3, dtype=torch.int64),
        **given_types,
    }
    with pytest.raises(InvalidUsage, match=message):
        linear_cross_entropy(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("labels"), **arguments)

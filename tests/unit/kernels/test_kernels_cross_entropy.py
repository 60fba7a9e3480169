"""Softmax cross-entropy compared with a float64 oracle that uses Python's and numpy's logarithms."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm._core import kernels as core
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels import cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
IGNORED = -100


def oracle(logits, labels, factors):
    """(losses, gradients) in float64, with numpy's pairwise logaddexp; ``factors`` multiply the losses."""
    x = logits.detach().double().numpy()
    losses, grads = np.zeros(len(x)), np.zeros(x.shape)
    for i, label in enumerate(labels.tolist()):
        if label == IGNORED:
            continue
        lse = np.logaddexp.reduce(x[i])
        losses[i] = factors[i] * (lse - x[i, label])
        grads[i] = factors[i] * np.exp(x[i] - lse)
        grads[i, label] -= factors[i]
    return torch.from_numpy(losses), torch.from_numpy(grads)


def problem(seed, tokens, columns, dtype):
    """(logits, labels, weights, upstream gradients); logits have -inf, and any values in rows without a label."""
    generator = np.random.default_rng(seed)
    logits = torch.empty(tokens, columns, dtype=dtype)
    logits.copy_(torch.from_numpy(generator.normal(0, generator.choice([0.1, 3.0, 30.0]), (tokens, columns))))
    logits[torch.from_numpy(generator.random((tokens, columns)) < generator.choice([0.0, 0.5]))] = -torch.inf
    labels = torch.from_numpy(generator.integers(0, columns, tokens))
    logits[torch.arange(tokens), labels] = logits[torch.arange(tokens), labels].nan_to_num(neginf=0.5)
    labels[torch.from_numpy(generator.random(tokens) < generator.choice([0.0, 0.3, 1.0]))] = IGNORED
    logits[labels == IGNORED] = generator.choice([0.0, math.nan, math.inf, -math.inf])
    weights, upstream = (torch.from_numpy(generator.normal(0, 1, tokens)).float() for _ in range(2))
    return logits, labels, weights, upstream


def check(got_loss, got_grad, want_loss, want_grad, dtype):
    torch.testing.assert_close(got_loss.double(), want_loss, atol=1e-5, rtol=3e-6)
    torch.testing.assert_close(got_grad.double(), want_grad, atol=3e-6 if dtype != torch.float16 else 1e-5,
                               rtol=2 * ROUNDING[dtype])  # fmt: skip


@given(
    st.integers(0, 2**32), st.integers(0, 9), st.one_of(st.integers(1, 80), st.sampled_from([1023, 1025, 5003])),
    st.sampled_from(DTYPES), st.integers(0, 9), st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_loss_and_gradient_are_the_oracles(seed, tokens, columns, dtype, offset, gap):
    logits, labels, weights, upstream = problem(seed, tokens, columns, dtype)
    want = oracle(logits, labels, (weights.double() * 1.0).numpy())
    want_grad = oracle(logits, labels, (weights * upstream).double().numpy())[1]
    # A result in the graph: rows that begin anywhere in its memory and lie apart.
    memory = torch.zeros(offset + tokens * (columns + gap), dtype=dtype, requires_grad=True) * 1
    inner = memory[offset:].view(tokens, columns + gap)[:, :columns]
    inner.detach().copy_(logits)
    loss = cross_entropy(inner, labels, weights=weights)
    assert loss.dtype == torch.float32
    (grad,) = torch.autograd.grad(loss, inner, upstream)
    check(loss, grad, want[0], want_grad, dtype)
    if tokens:
        assert grad.data_ptr() == inner.data_ptr()
        outside = memory.detach().clone()
        outside[offset:].view(tokens, columns + gap)[:, :columns] = 0
        assert not outside.any()


@given(
    st.integers(0, 2**32), st.integers(0, 6), st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_shards_give_the_whole(seed, tokens, widths, dtype):
    columns = sum(widths)
    if columns == 0:
        return
    logits, labels, weights, upstream = problem(seed, tokens, columns, dtype)
    want_loss = oracle(logits, labels, weights.double().numpy())[0]
    want_grad = oracle(logits, labels, (weights * upstream).double().numpy())[1]
    starts = np.cumsum([0, *widths])
    parts = [logits[:, a:b].contiguous() for a, b in pairwise(starts)]
    stats = torch.empty(len(parts), 3, tokens)
    shapes = [(tokens, x.shape[1], x.shape[1], int(a), columns, IGNORED) for x, a in zip(parts, starts, strict=False)]
    code = {torch.float32: 7, torch.bfloat16: 6, torch.float16: 5}[dtype]
    for x, shape, out in zip(parts, shapes, stats, strict=True):
        core.cross_entropy_stats(*shape, code, x.data_ptr(), labels.data_ptr(), out.data_ptr(), 1, False, 0)
    sums, loss = torch.empty(2, tokens), torch.empty(tokens)
    core.cross_entropy_loss(
        stats.data_ptr(), labels.data_ptr(), weights.data_ptr(), sums.data_ptr(), loss.data_ptr(), len(parts), tokens,
        IGNORED, False, 0,
    )  # fmt: skip
    for x, shape in zip(parts, shapes, strict=True):
        core.cross_entropy_grad(
            *shape, code, x.data_ptr(), labels.data_ptr(), sums.data_ptr(), weights.data_ptr(), upstream.data_ptr(), 1,
            x.data_ptr(), 1, False, 0,
        )  # fmt: skip
    check(loss, torch.cat(parts, 1), want_loss, want_grad, dtype)


@given(st.floats(-87, 0, width=32))
@settings(max_examples=300, deadline=None)
def test_exponential_to_two_units_in_the_last_place(x):
    """Two columns, the largest 0 and the sum 1: the gradient of the one that is not the label is e^x."""
    logits = torch.tensor([[0.0, x]])
    out = torch.empty(1, 2)
    sums, one, label = torch.tensor([0.0, 1.0]), torch.ones(1), torch.zeros(1, dtype=torch.int64)
    core.cross_entropy_grad(
        1, 2, 2, 0, 2, -100, 7, logits.data_ptr(), label.data_ptr(), sums.data_ptr(), 0, one.data_ptr(), 1,
        out.data_ptr(), 1, False, 0,
    )  # fmt: skip
    want = math.exp(float(np.float32(x)))
    assert abs(out[0, 1].item() - want) <= 2 * np.spacing(np.float32(want))


def test_rows_without_anything_finite_are_as_in_torch():
    logits = torch.tensor([[-torch.inf] * 3, [torch.inf, 0, 0], [0, torch.nan, 1], [0, -torch.inf, 1]])
    labels = torch.tensor([0, 1, 0, 1])
    got = cross_entropy(logits, labels)
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(got, want, equal_nan=True)


def test_threads_do_not_change_a_bit():
    logits, labels, _, _ = problem(1, 64, 20000, torch.float32)
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaf = logits.clone().requires_grad_()
            loss = cross_entropy(leaf, labels)
            loss.sum().backward()
        finally:
            torch.set_num_threads(before)
        results.append((loss.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_only_temporaries_are_overwritten():
    labels = torch.tensor([1, 0])
    leaf = torch.randn(3, 4, requires_grad=True)
    before = leaf.detach().clone()
    for logits in (leaf[:2], leaf.view(2, 6)[:, :4], leaf.detach()[:2].requires_grad_(), leaf[:1].expand(2, 4)):
        cross_entropy(logits, labels).sum().backward()
    assert torch.equal(leaf.detach(), before)
    with torch.no_grad():
        cross_entropy(leaf[:2] * 1, labels)


def test_leading_dimensions_are_tokens():
    logits, labels = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    got = cross_entropy(logits, labels, weights=torch.full((2, 3), 2.0))
    want = 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(got, want.view(2, 3))


def test_who_still_needs_the_logits_is_told():
    leaf, labels = torch.randn(2, 4, requires_grad=True), torch.tensor([1, 0])
    loss = cross_entropy(leaf * 1, labels).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidUsage, match="has overwritten the logits"):
        loss.backward()
    logits = torch.tanh(leaf)  # saves its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(logits, labels).sum().backward()
    cross_entropy(torch.tanh(leaf).clone(), labels).sum().backward()


def test_bad_arguments_say_what_is_wrong():
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 3])
    with pytest.raises(InvalidUsage, match="one row of logits for each label"):
        cross_entropy(logits, labels[:1])
    with pytest.raises(InvalidUsage, match="float64 was given; expected float32, bfloat16, float16"):
        cross_entropy(logits.double(), labels)
    with pytest.raises(InvalidUsage, match="expected int64"):
        cross_entropy(logits, labels.int())
    with pytest.raises(InvalidUsage, match="weights"):
        cross_entropy(logits, labels, weights=torch.zeros(3))
    with pytest.raises(InvalidUsage, match="at least one"):
        cross_entropy(logits[:, :0], labels)
    with pytest.raises(InvalidUsage, match="label 4 of token 1 is outside the vocabulary; expected 0 to 3"):
        cross_entropy(logits, torch.tensor([0, 4]))
    with pytest.raises(InvalidUsage, match="label -1 of token 0"):
        cross_entropy(logits, torch.tensor([-1, 0]))
    with pytest.raises(InvalidUsage, match="labels or weights on meta"):
        cross_entropy(logits, labels.to("meta"))
    with pytest.raises(InvalidUsage, match="must not be negative"):
        core.cross_entropy_stats(-1, 1, 1, 0, 1, 0, 7, 0, 0, 0, 1, False, 0)
    with pytest.raises(InvalidUsage, match="the rows overlap"):
        core.cross_entropy_stats(2, 4, 2, 0, 4, 0, 7, 0, 0, 0, 1, False, 0)
    with pytest.raises(InvalidUsage, match="must not be negative"):
        core.cross_entropy_loss(0, 0, 0, 0, 0, 0, 1, 0, False, 0)
    cross_entropy(logits, labels)  # and the next one works


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_small_losses_of_large_logits_are_not_rounded_away(size):
    logits = torch.tensor([[size, size - 9, 0.0], [size, size - 2, -size]], requires_grad=True)
    labels = torch.tensor([0, 0])
    loss = cross_entropy(logits, labels)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    want_loss, want_grad = oracle(logits, labels, np.ones(2))
    torch.testing.assert_close(loss.detach().double(), want_loss, atol=0, rtol=1e-3)
    torch.testing.assert_close(grad.double(), want_grad, atol=1e-7, rtol=1e-5)

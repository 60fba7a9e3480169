"""Segmented row copies and the zigzag boundaries, against numpy indexing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm._core import kernels as core
from hdpcomm.attention import positions, shard
from hdpcomm.attention.rows import Rows, add_rows, copy_rows, take_rows
from hdpcomm.errors import InvalidUsage


@st.composite
def segments(draw):
    """Disjoint destinations and sources inside 40 rows."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=6))
    gaps = draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    order = draw(st.permutations(range(len(lengths))))
    starts, at = [0] * len(lengths), 0
    for i in order:
        starts[i], at = at + gaps[i], at + gaps[i] + lengths[i]
    places = np.cumsum([0, *lengths])[:-1]
    return [(int(d), s, n) for d, s, n in zip(places, starts, lengths, strict=True)]


@given(segments(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_copy_is_indexing(parts, dtype, width):
    source = torch.randint(0, 255, (40, 2, width)).to(dtype)
    rows = Rows(parts)
    index = [s + i for _, s, n in parts for i in range(n)]
    assert rows.total == len(index)
    for src in (source, torch.cat((source, source), 1)[:, :2]):  # the second has a stride between rows
        dst = torch.zeros(rows.total, 2, width, dtype=dtype)
        copy_rows(dst, src, rows)
        assert torch.equal(dst, source[index])
    back = torch.zeros_like(source)
    copy_rows(back, source[index], rows.inverse())
    want = torch.zeros_like(source)
    want[index] = source[index]
    assert torch.equal(back, want)


@given(segments(), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_add_is_indexed_addition(parts, dtype):
    rows = Rows(parts).inverse()
    index = [s + i for _, s, n in parts for i in range(n)]
    dst, src = torch.randn(40, 3, dtype=dtype), torch.randn(rows.total, 3, dtype=dtype)
    want = dst.clone()
    want[index] += src
    add_rows(dst, src, rows)
    assert torch.equal(dst, want)


def test_contiguous_source_is_recognised():
    assert Rows([]).contiguous_source() == (0, 0)
    assert Rows([(0, 3, 2), (2, 5, 4)]).contiguous_source() == (3, 9)
    assert Rows([(0, 3, 2), (2, 6, 4)]).contiguous_source() is None
    assert Rows([(1, 3, 2)]).contiguous_source() is None


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4), st.sampled_from([0, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_positions_and_rows(lengths, size, width):
    cu = np.cumsum([0, *lengths])
    own = np.concatenate([np.empty(0, dtype=np.int64), *map(np.arange, lengths)])  # of every token of the pack
    x = torch.randn(len(own), width, requires_grad=True)
    for rank in range(size):
        want = shard(torch.from_numpy(own), cu, rank=rank, size=size)
        got = shard(x, cu, rank=rank, size=size)
        assert torch.equal(positions(cu, rank=rank, size=size), want)
        (grad,) = torch.autograd.grad(got.sum(), x)
        assert grad.sum() == got.numel()


def test_take_rows_is_differentiable():
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    rows = Rows([(0, 6, 2), (2, 1, 3)])
    assert torch.autograd.gradcheck(lambda t: take_rows(t, rows), (x,))
    assert torch.equal(take_rows(x.t(), rows, dim=1), x.t()[:, [6, 7, 1, 2, 3]])


def test_bad_copies_say_what_is_wrong():
    x = torch.zeros(4, 6)
    with pytest.raises(InvalidUsage, match="not contiguous"):
        copy_rows(x[:, ::2], x[:, ::2], Rows([(0, 0, 1)]))
    with pytest.raises(InvalidUsage, match="expected float32 or float64"):
        add_rows(x.half(), x.half(), Rows([(0, 0, 1)]))
    with pytest.raises(InvalidUsage, match="must not be negative"):
        core.copy_rows(0, 0, 0, 0, -1, 0, 0, 0, 0, False, 0)
    with pytest.raises(InvalidUsage, match="whole elements"):
        core.add_rows(0, 0, 4, 4, 6, 0, 0, 0, 7, False, 0)


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_zigzag_pieces_and_totals_are_balanced(lengths, size):
    cu = np.cumsum([0, *lengths])
    bounds = core.zigzag_bounds(cu, size)
    assert bounds.shape == (len(lengths), 2 * size + 1)
    assert (bounds[:, 0] == 0).all()
    assert (bounds[:, -1] == lengths).all()
    pieces = np.diff(bounds, axis=1)
    assert (pieces >= 0).all()
    if lengths:
        assert (pieces.max(axis=1) - pieces.min(axis=1) <= 1).all()
    held = pieces.sum(axis=0)
    by_rank = held[:size] + held[size:][::-1]
    assert by_rank.max() - by_rank.min() <= 1


@given(
    st.lists(st.integers(0, 3000), max_size=6),
    st.integers(1, 9),
    st.integers(1, 2000),
    st.sampled_from([0.1, 0.7, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_even_bounds_have_equal_tokens_and_work(lengths, size, limit, limited):
    """The work counted token by token; of each sequence it is within that of two tokens of the mean."""
    cu = np.cumsum([0, *lengths])
    bounds = core.zigzag_bounds(cu, size, limit, limited)
    assert (bounds[:, 0] == 0).all()
    assert (bounds[:, -1] == lengths).all()
    pieces = np.diff(bounds, axis=1)
    plain = np.diff(core.zigzag_bounds(cu, size), axis=1)
    assert (pieces >= 0).all()
    assert (pieces + pieces[:, ::-1] == plain + plain[:, ::-1]).all()
    for row, length in zip(bounds, lengths, strict=True):
        seen = np.arange(1, length + 1)
        sums = np.concatenate([[0], np.cumsum((1 - limited) * seen + limited * np.minimum(seen, limit))])
        parts = np.diff(sums[row])
        if length >= 2 * size:
            work = parts[:size] + parts[size:][::-1]
            assert abs(work - work.mean()).max() <= 2 * (1 - limited) * length + 2 * limited * min(limit, length)


def test_zigzag_refuses_bad_input():
    for limit, limited in ((0.5, 1.0), (4, -0.1), (4, 1.1), (math.nan, 0.5), (4, math.nan)):
        with pytest.raises(InvalidUsage, match="expected at least 1 key, and a share"):
            core.zigzag_bounds(np.array([0, 4]), 2, limit, limited)
    with pytest.raises(InvalidUsage, match="at least 1 rank"):
        core.zigzag_bounds(np.array([0, 4]), 0)
    with pytest.raises(InvalidUsage, match="begin with 0"):
        core.zigzag_bounds(np.array([1, 4]), 2)
    with pytest.raises(InvalidUsage, match="falls from 4 to 2 at sequence 1"):
        core.zigzag_bounds(np.array([0, 4, 2]), 2)
    with pytest.raises(InvalidUsage, match="one dimension"):
        core.zigzag_bounds(np.zeros((2, 2), dtype=np.int64), 2)

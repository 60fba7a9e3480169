"""Zigzag shards: every token once, restored by unshard, balanced, with the right positions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.attention import local_cu_seqlens, positions, shard, unshard
from hdpcomm.errors import InvalidUsage

PACKS = st.lists(st.integers(0, 200), max_size=8)


def _cu(lengths):
    return torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], dtype=torch.int32)


@given(PACKS, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_unshard_undoes_shard(lengths, size):
    cu = _cu(lengths)
    x = torch.arange(int(cu[-1]) * 3).reshape(-1, 3)
    parts = [shard(x, cu, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(unshard(parts, cu), x)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    for rank, part in enumerate(parts):
        assert int(local_cu_seqlens(cu, rank=rank, size=size)[-1]) == len(part)


@given(PACKS, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_rank_holds_head_and_tail_of_each_sequence(lengths, size):
    cu = _cu(lengths)
    place = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.empty(0, dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    for rank in range(size):
        mine = positions(cu, rank=rank, size=size)
        local = local_cu_seqlens(cu, rank=rank, size=size)
        assert local.dtype == torch.int32
        assert torch.equal(mine, shard(place, cu, rank=rank, size=size))
        for s, length in enumerate(lengths):
            held = mine[local[s] : local[s + 1]]
            assert torch.equal(held, held.sort().values)
            assert bool((shard(sequence, cu, rank=rank, size=size)[local[s] : local[s + 1]] == s).all())
            if length % (2 * size) == 0:
                piece = length // (2 * size)
                head, tail = rank * piece, (2 * size - 1 - rank) * piece
                assert held.tolist() == [*range(head, head + piece), *range(tail, tail + piece)]


def test_shard_takes_any_dimension_and_is_differentiable():
    cu = [0, 7, 12]
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    parts = [shard(x, cu, rank=rank, size=3, dim=1) for rank in range(3)]
    assert torch.equal(unshard(parts, cu, dim=1), x)
    assert torch.autograd.gradcheck(lambda t: shard(t, cu, rank=1, size=3, dim=1), (x,))
    assert torch.autograd.gradcheck(lambda *t: unshard(t, cu, dim=1), tuple(p.detach().requires_grad_() for p in parts))


@pytest.mark.parametrize(("cu", "message"), [
    ([1, 4], "running sum"),
    ([0, 4, 2], "running sum"),
    ([], "running sum"),
    ([[0, 4]], "running sum"),
    ([0.0, 4.0], "expected integers"),
    (torch.tensor([0.0, 4.0]), "expected int32 or int64"),
])  # fmt: skip
def test_bad_cu_seqlens(cu, message):
    with pytest.raises(InvalidUsage, match=message):
        shard(torch.zeros(4), cu, rank=0, size=2)


def test_bad_shards():
    with pytest.raises(InvalidUsage, match="rank 2 is not in a group of 2"):
        shard(torch.zeros(4), [0, 4], rank=2, size=2)
    with pytest.raises(InvalidUsage, match=r"size is 0, expected .* at least 1"):
        shard(torch.zeros(4), [0, 4], rank=0, size=0)
    with pytest.raises(InvalidUsage, match=r"shape \(5,\), but cu_seqlens ends with 4"):
        shard(torch.zeros(5), [0, 4], rank=0, size=2)
    with pytest.raises(InvalidUsage, match=r"part of rank 1 has shape \(3,\); expected 2 tokens"):
        unshard([torch.zeros(2), torch.zeros(3)], [0, 4])

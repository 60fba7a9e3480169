"""The LSE merge against a softmax over the concatenated scores, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.attention import rows as _kernels
from hdpcomm.errors import InvalidUsage

SIZES = [(0, 2, 8), (1, 1, 1), (3, 2, 5), (7, 3, 16), (65, 2, 129)]


def _block(tokens, heads, dim, keys, seed):
    """(out, lse) of a random block of ``keys`` keys, in float64; no keys: 0 and -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(tokens, heads, keys, dtype=torch.float64, generator=generator)
    values = torch.randn(keys, heads, dim, dtype=torch.float64, generator=generator)
    return scores, values, _attend(scores, values)


def _attend(scores, values):
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) if scores.shape[-1] else scores
    total = weights.sum(-1)
    out = (torch.einsum("thk,khd->thd", weights, values) / torch.where(total == 0, 1.0, total)[..., None]).contiguous()
    return out, torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full_like(total, -torch.inf)


@pytest.mark.parametrize(("tokens", "heads", "dim"), SIZES)
@pytest.mark.parametrize(("acc", "block", "tolerance"), [
    (torch.float64, torch.float64, 1e-14),
    (torch.float32, torch.float32, 1e-6),
    (torch.float32, torch.bfloat16, 4e-3),
    (torch.float32, torch.float16, 5e-4),
])  # fmt: skip
def test_merging_blocks_is_one_softmax(tokens, heads, dim, acc, block, tolerance):
    parts = [_block(tokens, heads, dim, keys, seed) for seed, keys in enumerate((4, 0, 1, 9))]
    out = torch.zeros(tokens, heads, dim, dtype=acc)
    lse = torch.full((tokens, heads), -torch.inf, dtype=acc)
    for _, _, (part_out, part_lse) in parts:
        by_head = part_lse.to(acc).t().contiguous().t()  # strides of [heads, tokens]
        _kernels.merge(out, lse, part_out.to(block), by_head)
    want_out, want_lse = _attend(torch.cat([p[0] for p in parts], -1), torch.cat([p[1] for p in parts]))
    torch.testing.assert_close(out.double(), want_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=max(tolerance / 10, 1e-14), rtol=1e-6)


@given(st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_order_of_blocks_gives_the_same_row(scores):
    def merged(order):
        out, lse = torch.zeros(1, 1, 1, dtype=torch.float64), torch.full((1, 1), -torch.inf, dtype=torch.float64)
        for score in order:
            one = torch.full((1, 1), score, dtype=torch.float64)
            _kernels.merge(out, lse, one[..., None] / 1e4, one)
        return out, lse

    for a, b in zip(merged(scores), merged(scores[::-1]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_block_that_nobody_sees_changes_nothing():
    _, _, (out, lse) = _block(5, 2, 3, 4, 0)
    before = out.clone(), lse.clone()
    _kernels.merge(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


def test_an_empty_result_may_hold_anything():
    _, _, (part_out, part_lse) = _block(5, 2, 3, 4, 0)
    out, lse = torch.full_like(part_out, torch.nan), torch.full_like(part_lse, -torch.inf)
    _kernels.merge(out, lse, part_out, part_lse)
    assert torch.equal(out, part_out)
    assert torch.equal(lse, part_lse)


@pytest.mark.parametrize("offset", range(4))
def test_any_alignment(offset):
    parts = [_block(5, 2, 3, keys, keys)[2] for keys in (2, 3)]
    want_out, want_lse = parts[0][0].float(), parts[0][1].float()
    _kernels.merge(want_out, want_lse, parts[1][0].bfloat16(), parts[1][1].float())
    moved = [torch.empty(x.numel() + offset)[offset:].view(x.shape).copy_(x) for x in parts[0]]
    block = torch.empty(30 + offset, dtype=torch.bfloat16)[offset:].view(5, 2, 3).copy_(parts[1][0])
    _kernels.merge(*moved, block, parts[1][1].float())
    assert torch.equal(moved[0], want_out)
    assert torch.equal(moved[1], want_lse)


def test_nan_is_not_hidden():
    _, _, (out, lse) = _block(2, 1, 3, 4, 0)
    _kernels.merge(out, lse, torch.zeros_like(out), torch.full_like(lse, torch.nan))
    assert lse.isnan().all()


def test_rows_name_the_places():
    _, _, (out, lse) = _block(4, 2, 3, 4, 0)
    _, _, (part_out, part_lse) = _block(2, 2, 3, 5, 1)
    whole_out, whole_lse = out.clone(), lse.clone()
    _kernels.merge(out, lse, part_out, part_lse, torch.tensor([3, 1]))
    for place, row in ((3, 0), (1, 1)):
        _kernels.merge(
            whole_out[place : place + 1], whole_lse[place : place + 1], part_out[row : row + 1], part_lse[row : row + 1]
        )
    assert torch.equal(out, whole_out)
    assert torch.equal(lse, whole_lse)


def test_threads_do_not_change_a_bit():
    parts = [_block(4096, 4, 64, keys, seed)[2] for seed, keys in enumerate((2, 3))]
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out, lse = parts[0][0].float(), parts[0][1].float()
            _kernels.merge(out, lse, parts[1][0].float(), parts[1][1].float())
        finally:
            torch.set_num_threads(before)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_bad_merges_say_what_is_wrong():
    out, lse = torch.zeros(4, 2, 3), torch.zeros(4, 2)
    with pytest.raises(InvalidUsage, match="must be contiguous"):
        _kernels.merge(out.transpose(0, 1), lse.t(), out.transpose(0, 1), lse.t())
    with pytest.raises(InvalidUsage, match="do not fit"):
        _kernels.merge(out, lse, torch.zeros(4, 2, 5), lse)
    with pytest.raises(InvalidUsage, match="block of 3 rows"):
        _kernels.merge(out, lse, out[:3], lse[:3])
    with pytest.raises(InvalidUsage, match="type of out"):
        _kernels.merge(out, lse.double(), out, lse)
    with pytest.raises(InvalidUsage, match="cannot merge a block of float64 into float32"):
        _kernels.merge(out, lse, out.double(), lse)
    with pytest.raises(InvalidUsage, match="expected float16, bfloat16"):
        _kernels.merge(out, lse, out.int(), lse)


def test_half_precision_is_widened_exactly():
    """Every float16 and bfloat16 value, merged into an empty row, is widened as by torch."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        finite = values[values.float().isfinite()]
        out, lse = torch.zeros(1, 1, len(finite)), torch.full((1, 1), -torch.inf)
        _kernels.merge(out, lse, finite.reshape(1, 1, -1).clone(), torch.zeros(1, 1))
        assert torch.equal(out.flatten(), finite.float())

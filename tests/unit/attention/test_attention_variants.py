"""The choice of a variant: by name, by cost, and what heads allow."""

import numpy as np
import pytest
import torch

from hdpcomm.attention import AttentionCosts, Problem, as_pack
from hdpcomm.attention.engine import Variant, choose_variant, estimate, grouped_layout, head_shares, token_shares
from hdpcomm.attention.tiles import Band
from hdpcomm.errors import InvalidUsage

CAUSAL = Band(None, 0)
SLOW_LINK = AttentionCosts(flops_per_s=1e12, bytes_per_s=1e7, message_s=0.0, call_s=0.0)
SLOW_START = AttentionCosts(flops_per_s=1e15, bytes_per_s=1e12, message_s=1e-2, call_s=0.0)


def _problem(heads=8, kv_heads=8):
    return Problem(device="cuda", dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=128)


def _layouts(lengths, size):
    layout = as_pack(np.cumsum([0, *lengths])).layout(size)
    return layout, layout


def _choose(name, size, problem=None, lengths=(4096,), band=CAUSAL, costs=None):
    return choose_variant(name, problem or _problem(), _layouts(lengths, size), band, costs)


def test_names():
    assert _choose("ring", 4) == Variant("ring")
    assert _choose("gather", 4) == Variant("gather", gather=True)
    assert _choose("ulysses", 4) == Variant("ulysses", head_group=4)
    assert _choose("hybrid", 16) == Variant("hybrid", head_group=8)
    assert _choose("hybrid", 8, costs=AttentionCosts(1e12, 1e9, 0, 0, ranks_per_node=4)) == Variant(
        "hybrid", head_group=4
    )
    assert _choose("auto", 1) == Variant("ring")


def test_heads_must_fit():
    with pytest.raises(InvalidUsage, match="ulysses cannot share 8 heads with 8 kv_heads among 3 ranks"):
        _choose("ulysses", 3)
    with pytest.raises(InvalidUsage, match="hybrid finds no head group"):
        _choose("hybrid", 5)
    with pytest.raises(InvalidUsage, match="no variant 'best'"):
        _choose("best", 2)


def test_costs_decide():
    """A slow link favours the variant that moves least; a high latency favours few messages."""
    few_kv = _problem(heads=32, kv_heads=1)
    assert _choose("auto", 4, few_kv, costs=SLOW_LINK).head_group == 1  # KV of one head is little, q and out are much
    assert _choose("auto", 4, costs=SLOW_START).name in ("gather", "ulysses")
    long = _choose("auto", 4, lengths=(1 << 20,), costs=AttentionCosts.default("cuda"))
    assert long.name in ("ring", "ulysses", "hybrid")


def test_every_rank_chooses_alike():
    choices = {_choose("auto", 8, lengths=(5000, 17, 300)) for _ in range(3)}
    assert len(choices) == 1


def test_estimates_follow_the_work():
    variant, problem, costs = Variant("ring"), _problem(), AttentionCosts.default("cuda")
    short, long = (estimate(variant, problem, _layouts([n], 4), CAUSAL, costs) for n in (1024, 65536))
    assert 0 < short < long
    windowed = estimate(variant, problem, _layouts([65536], 4), Band(-128, 0), costs)
    assert windowed < long
    assert estimate(variant, problem, _layouts([], 4), CAUSAL, costs) >= 0


def test_costs_are_checked():
    with pytest.raises(InvalidUsage, match=r"AttentionCosts: .* is"):
        AttentionCosts(flops_per_s=0, bytes_per_s=1, message_s=0, call_s=0)


def test_shares_of_heads():
    assert head_shares(8, 4, 2) == ([slice(0, 4), slice(4, 8)], [slice(0, 2), slice(2, 4)])
    assert head_shares(8, 2, 4)[1] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_group_holds_what_its_members_hold(size):
    layout = as_pack([0, 37, 37, 42, 143]).layout(6)
    whole = grouped_layout(layout, size)
    pack = np.arange(143)
    for group in range(6 // size):
        want = np.concatenate([pack[s : s + n] for _, s, n in whole.segments(group).tolist()])
        shares = token_shares(layout, size, group)
        got = np.full(shares.rows, -1)
        for member, share in enumerate(shares.members):
            mine = np.concatenate([pack[s : s + n] for _, s, n in layout.segments(group * size + member).tolist()])
            for d, s, n in share.triples.tolist():
                assert (got[d : d + n] == -1).all()
                got[d : d + n] = mine[s : s + n]
        assert got.tolist() == want.tolist()

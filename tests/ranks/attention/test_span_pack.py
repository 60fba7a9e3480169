"""Spans of a pack see all of themselves: equal to dense attention under that mask, in fp64."""

import random

import numpy as np
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import BalancedPack, SpanPack, positions, ring_attention, shard, unshard
from hdpcomm.attention.ring import find_atoms
from hdpcomm.attention.tiles import Band
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import error

LENGTHS = [7, 70, 1, 33, 64]
SPANS = [[2, 5], [9, 30], [30, 41], [76, 77], [80, 111], [120, 125], [130, 131], [140, 172]]


def tensors(tokens, heads=4, kv_heads=2):
    draw = torch.Generator().manual_seed(0)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "dout": heads}
    return {name: torch.randn(tokens, count, 8, dtype=torch.float64, generator=draw) for name, count in shapes.items()}


def dense(x, lengths, spans, window=None):
    """The mask pair by pair, and plain attention under it."""
    tokens = sum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for q in range(tokens):
        for k in range(tokens):
            inside = any(first <= q < last and first <= k < last for first, last in spans)
            near = window is None or k > q - window
            seen[q, k] = bool(sequence[q] == sequence[k]) and near and (k <= q or inside)
    leaves = [x[name].clone().requires_grad_() for name in "qkv"]
    q, k, v = (each.transpose(0, 1).repeat_interleave(x["q"].shape[1] // each.shape[1], 0) for each in leaves)
    scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1)
    grads = torch.autograd.grad(out, leaves, x["dout"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def distributed(x, pack, size, **options):
    def main():
        comm = hdp.init()
        mine = {name: shard(each, pack, rank=comm.rank, size=comm.size) for name, each in x.items()}
        leaves = [mine[name].requires_grad_() for name in "qkv"]
        out = ring_attention(*leaves, comm=comm, cu_seqlens=pack, **with_options(**options))
        out.backward(mine["dout"])
        return {"out": out.detach(), **{"d" + name: each.grad for name, each in zip("qkv", leaves, strict=True)}}

    parts = run_threads(main, size)
    return {name: unshard([part[name] for part in parts], pack) for name in parts[0]}


def cu(lengths):
    return [0, *np.cumsum(lengths).tolist()]


CASES = [(size, {}) for size in (1, 2, 3, 4)] + [
    (2, {"variant": "ulysses"}),
    (3, {"variant": "gather"}),
    (3, {"backend": "reference"}),
    (4, {"variant": "gather"}),
    (4, {"variant": "hybrid"}),
]


@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize(("size", "options"), CASES, ids=str)
def test_equal_to_dense_attention(size, options, window):
    x = tensors(sum(LENGTHS))
    found = distributed(x, SpanPack(cu(LENGTHS), SPANS), size, window=window, **options)
    for name, expected in dense(x, LENGTHS, SPANS, window).items():
        assert error(found[name], expected) < 1e-12, name


@pytest.mark.parametrize("seed", range(12))
def test_random_packs(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 6))]
    spans, first = [], 0
    for length in lengths:
        edges = sorted(draw.sample(range(length + 1), min(length + 1, 2 * draw.randint(0, 3))))
        spans += [[first + a, first + b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        first += length
    x = tensors(sum(lengths))
    pack = BalancedPack(cu(lengths), key_limit=8) if draw.random() < 0.5 else cu(lengths)
    window = draw.choice([None, draw.randint(1, 20)])
    found = distributed(x, SpanPack(pack, spans), draw.randint(1, 4), window=window)
    for name, expected in dense(x, lengths, spans, window).items():
        assert error(found[name], expected) < 1e-12, name


def test_shards_are_those_of_the_sequences():
    places = torch.arange(sum(LENGTHS))
    for rank in range(3):
        given = {"rank": rank, "size": 3}
        assert torch.equal(shard(places, SpanPack(cu(LENGTHS), SPANS), **given), shard(places, cu(LENGTHS), **given))
        assert torch.equal(positions(SpanPack(cu(LENGTHS), SPANS), **given), positions(cu(LENGTHS), **given))


def test_a_rank_gets_no_more_keys_than_its_spans_need():
    """A span inside of one piece costs no message; one over a cut costs its keys after the cut."""
    band = Band(-3, 0)

    def received(spans):
        layout = SpanPack([0, 64], spans).layout(2)
        atoms = find_atoms(layout, layout, band)
        return int((atoms.rows * atoms.needed.sum(axis=1)).sum())

    assert received([[2, 10]]) == received([])
    assert received([[2, 17]]) == received([]) + 1


@pytest.mark.parametrize(
    "spans", [[[3, 3]], [[5, 2]], [[0, 4], [2, 6]], [[-1, 2]], [[5, 9]], [[8, 13]], [1, 2], [[0.5, 2.0]]], ids=str
)
def test_spans_that_cannot_be(spans):
    with pytest.raises(InvalidUsage, match="spans"):
        SpanPack([0, 7, 12], spans)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "causal=False"),
        ({"cu_seqlens_k": [0, 7, 12]}, "cu_seqlens_k"),
        ({"chunk": 4}, "SpanPack|Span"),
    ],
)
def test_refused_together(options, match):
    x = tensors(12)
    with pytest.raises(InvalidUsage, match=match):
        ring_attention(
            x["q"], x["k"], x["v"], comm=None, cu_seqlens=SpanPack([0, 7, 12], [[1, 3]]), **with_options(**options)
        )


def test_ranks_with_other_spans_are_told():
    x = tensors(12)

    def main():
        comm = hdp.init()
        pack = SpanPack([0, 12], [[1, 3 + comm.rank]])
        mine = [shard(x[name], pack, rank=comm.rank, size=2) for name in "qkv"]
        with pytest.raises(Mismatch, match="spans"):
            ring_attention(*mine, comm=comm, cu_seqlens=pack, **with_options(check=True))

    run_threads(main, 2)

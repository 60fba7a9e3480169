"""Attention that chooses its keys, beside a definition in one process: choices, results, gradients, bytes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hdpcomm as hdp
from hdpcomm.attention import (
    SlicedSequence,
    Tree,
    index_top_k,
    indexed_attention,
    selected_attention,
    shard,
    unshard,
)
from hdpcomm.testing import run_threads
from tests.ranks.attention.test_slices import on_slices, whole

PACKS = {"mixed": (1, 7, 201, 399, 88), "short": (1, 2, 1), "one": (64,), "single": (1,)}
HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 6, 5
INDEX_HEADS, INDEX_DIM = 3, 4


def cu_of(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def inputs(lengths, seed=0, *, ties=False):
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k, v = normal(tokens, HEADS, DIM), normal(tokens, KV_HEADS, DIM), normal(tokens, KV_HEADS, V_DIM)
    index = [normal(tokens, INDEX_HEADS, INDEX_DIM), normal(tokens, INDEX_DIM), normal(tokens, INDEX_HEADS)]
    if ties:  # few values, which every order of sums gives exactly; many scores are 0
        index = [x.round().clamp(-1, 1) for x in index]
    return q, k, v, index


def choose(index, lengths, top_k):
    """For each token, the set that the definition chooses: one score at a time, sorted in plain Python."""
    q, k, weights = index
    found, start = [], 0
    for length in lengths:
        for t in range(start, start + length):
            scores = [
                (-sum(float(weights[t, h]) * max(0.0, float(q[t, h] @ k[s])) for h in range(INDEX_HEADS)), s)
                for s in range(start, t + 1)
            ]
            found.append(sorted(s for _, s in sorted(scores)[:top_k]))
        start += length
    return found


def attend(q, k, v, sets, scale):
    """By a mask over all pairs of tokens."""
    mask = torch.zeros(len(sets), len(sets), dtype=torch.bool)
    for t, own in enumerate(sets):
        mask[t, own] = True
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * scale
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, v.repeat_interleave(HEADS // KV_HEADS, 1))


def on_ranks(size, body):
    """``body(comm, part)``, where ``part`` cuts a tensor of the pack; results of all ranks."""

    def rank():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            return body(comm)

    return run_threads(rank, size)


def local(x, cu, comm):
    return shard(x, cu, rank=comm.rank, size=comm.size).contiguous()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("pack", "top_k"), [("mixed", 16), ("short", 2), ("one", 1), ("one", 100), ("single", 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_choices_results_and_gradients(size, pack, top_k, ties):
    lengths = PACKS[pack]
    if pack == "mixed" and ties:
        lengths = (1, 7, 60, 33)  # the definition is slow
    cu = cu_of(lengths)
    q, k, v, index = inputs(lengths, ties=ties)
    sets = choose(index, lengths, top_k) if sum(lengths) < 200 else choose_fast(index, lengths, top_k)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attend(*leaves, sets, 0.3)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (wanted * weight).sum().backward()

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in (q, k, v)]
        given = [local(x, cu, comm) for x in index]
        chosen = index_top_k(*given, top_k=top_k, comm=comm, cu_seqlens=cu)
        out = selected_attention(*own, chosen, comm=comm, cu_seqlens=cu, scale=0.3)
        (out * local(weight, cu, comm)).sum().backward()
        return chosen, out.detach(), [x.grad for x in own]

    told = on_ranks(size, body)
    chosen = unshard([each[0] for each in told], cu)
    assert [[s for s in row if s >= 0] for row in chosen.tolist()] == sets
    assert torch.allclose(unshard([each[1] for each in told], cu), wanted, rtol=0, atol=1e-10)
    for i, leaf in enumerate(leaves):
        assert torch.allclose(unshard([each[2][i] for each in told], cu), leaf.grad, rtol=0, atol=1e-10)


def choose_fast(index, lengths, top_k):
    """As :func:`choose`, by whole rows of scores."""
    q, k, weights = index
    found, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        scores = torch.einsum("ths,th->ts", torch.relu(torch.einsum("thd,sd->ths", q[rows], k[rows])), weights[rows])
        for t in range(length):
            ranked = sorted((-score, s) for s, score in enumerate(scores[t, : t + 1].tolist()))
            found.append(sorted(start + s for _, s in ranked[:top_k]))
        start += length
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("top_k", [1, 5, 100])
def test_ties_and_signs_in_float32(size, top_k):
    """Whole numbers, which are exact there: scores of both signs, many equal, many 0."""
    lengths = (90, 7, 1)
    cu = cu_of(lengths)
    *_, index = inputs(lengths, ties=True)
    sets = choose_fast(index, lengths, top_k)
    told = on_ranks(
        size,
        lambda comm: index_top_k(*[local(x.float(), cu, comm) for x in index], top_k=top_k, comm=comm, cu_seqlens=cu),
    )
    assert [[s for s in row if s >= 0] for row in unshard(told, cu).tolist()] == sets


def test_the_two_definitions_agree():
    *_, index = inputs((5, 30))
    assert choose(index, (5, 30), 4) == choose_fast(index, (5, 30), 4)


@pytest.mark.parametrize("size", [1, 3])
def test_recomputed_twice_in_a_graph_and_several_micro_batches(size):
    """Two layers share k and v; the first is recomputed; gradients of two packs add up."""
    packs = [(40, 3, 21), (1, 17)]
    wanted = torch.zeros(HEADS, V_DIM, dtype=torch.float64)
    scale_of = torch.ones(HEADS, V_DIM, dtype=torch.float64, requires_grad=True)
    for seed, lengths in enumerate(packs):
        q, k, v, index = inputs(lengths, seed)
        sets = choose_fast(index, lengths, 7)
        first = attend(q * scale_of.mean(), k, v, sets, 1.0)
        second = attend(q, k * scale_of.sum(), v, sets, 1.0)
        ((first * second) * scale_of).sum().backward()
    wanted = scale_of.grad

    def body(comm):
        own = torch.ones(HEADS, V_DIM, dtype=torch.float64, requires_grad=True)
        for seed, lengths in enumerate(packs):
            cu = cu_of(lengths)
            q, k, v, index = inputs(lengths, seed)
            q, k, v, *index = [local(x, cu, comm) for x in (q, k, v, *index)]

            def layer(q, k, v, index=index, cu=cu):
                return indexed_attention(q, k, v, *index, top_k=7, comm=comm, cu_seqlens=cu, scale=1.0)

            first = checkpoint(layer, q * own.mean(), k, v, use_reentrant=False)
            second = layer(q, k * own.sum(), v)
            ((first * second) * own).sum().backward()
        comm.all_reduce(own.grad)
        return own.grad

    for found in on_ranks(size, body):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
def test_each_row_that_is_needed_comes_once(size):
    """Bytes by an independent count of the sets: numbers and rows go, gradients come back."""
    lengths, top_k = (300, 41, 9), 8
    cu = cu_of(lengths)
    q, k, v, index = inputs(lengths)
    sets = choose_fast(index, lengths, top_k)
    owner = unshard([torch.full((int(len_of(cu, r, size)),), r) for r in range(size)], cu).tolist()
    need = {(owner[t], s) for t, own in enumerate(sets) for s in own if owner[s] != owner[t]}
    row = KV_HEADS * (DIM + V_DIM) * 8

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in (q, k, v)]
        chosen = index_top_k(*[local(x, cu, comm) for x in index], top_k=top_k, comm=comm, cu_seqlens=cu)
        comm.barrier()
        before = comm.stats()["bytes_sent"]
        out = selected_attention(*own, chosen, comm=comm, cu_seqlens=cu)
        forward = comm.stats()["bytes_sent"] - before
        out.sum().backward()
        return forward, comm.stats()["bytes_sent"] - before - forward

    told = on_ranks(size, body)
    agreement = size * (size - 1) * 547 + size * (size - 1) * 8  # what ranks compare first, and their counts
    assert sum(forward for forward, _ in told) == len(need) * (row + 8) + agreement
    assert sum(backward for _, backward in told) == len(need) * row


def len_of(cu, rank, size):
    return hdp.attention.local_cu_seqlens(cu, rank=rank, size=size)[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    lengths = (90, 5)
    cu = cu_of(lengths)
    q, k, v, index = inputs(lengths)
    sets = choose_fast([x.to(dtype).double() for x in index], lengths, 100)  # all keys, so rounding chooses nothing
    wanted = attend(*(x.to(dtype).double() for x in (q, k, v)), sets, DIM**-0.5)

    def body(comm):
        own = [local(x, cu, comm).to(dtype) for x in (q, k, v)]
        given = [local(x, cu, comm).to(dtype) for x in index]
        return indexed_attention(*own, *given, top_k=100, comm=comm, cu_seqlens=cu)

    found = unshard(on_ranks(2, body), cu)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("size", [1, 3])
def test_values_that_are_a_part_of_the_keys(size):
    """As latents: the same as with the values beside them, and fewer bytes."""
    lengths, top_k = (60, 7, 21), 5
    cu = cu_of(lengths)
    q, k, _, index = inputs(lengths)

    def body(comm):
        given = [local(x, cu, comm) for x in index]
        chosen = index_top_k(*given, top_k=top_k, comm=comm, cu_seqlens=cu)
        told = []
        for inside in (True, False):
            own = [local(x, cu, comm).requires_grad_() for x in (q, k)]
            before = comm.stats()["bytes_sent"]
            place = {"comm": comm, "cu_seqlens": cu, "v_dim": 4 if inside else None}
            out = selected_attention(*own, None if inside else own[1][..., :4], chosen, **place)
            out.square().sum().backward()
            told.append((out.detach(), *(x.grad for x in own), comm.stats()["bytes_sent"] - before))
        return told

    for (*found, less), (*want, more) in on_ranks(size, body):
        for one, other in zip(found, want, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
        assert less < more or size == 1


@pytest.mark.parametrize(("given", "told"), [({}, "v_dim"), ({"v_dim": 99}, "v_dim is 99"), ({"v_dim": 2.0}, "v_dim")])
def test_a_bad_part_of_the_keys(given, told):
    q, k, v, _ = inputs((9,))
    chosen = torch.zeros(9, 1, dtype=torch.int64)
    with pytest.raises(hdp.InvalidUsage, match=told):
        selected_attention(q, k, None, chosen, comm=None, cu_seqlens=[0, 9], **given)
    with pytest.raises(hdp.InvalidUsage, match="was given with v"):
        selected_attention(q, k, v, chosen, comm=None, cu_seqlens=[0, 9], v_dim=2)


TREES = {
    "answers": Tree([-1, 0, 0, 2, 2, 0], [60, 9, 1, 30, 17, 40]),
    "trees and sequences": Tree([-1, 0, 0, -1, 3, 4, -1], [40, 1, 22, 9, 5, 31, 50]),
    "short": Tree([-1, 0, 0], [1, 1, 1]),
}


def seen_in(tree):
    """For each token the tokens before it on its way from the root, itself the last one."""
    starts = [0, *torch.tensor(tree.lengths).cumsum(0).tolist()]
    seen = []
    for segment, length in enumerate(tree.lengths.tolist()):
        ways, above = [], segment
        while (above := int(tree.parents[above])) >= 0:
            ways = [*range(starts[above], starts[above + 1]), *ways]
        seen += [[*ways, *range(starts[segment], starts[segment] + at + 1)] for at in range(length)]
    return seen


def choose_in(tree, index, top_k):
    q, k, weights = index
    found = []
    for t, keys in enumerate(seen_in(tree)):
        scores = (torch.relu(k[keys] @ q[t].T) @ weights[t]).tolist()
        found.append(sorted(keys[i] for i in sorted(range(len(keys)), key=lambda i: (-scores[i], i))[:top_k]))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("top_k", "ties"), [(6, False), (6, True), (1, False), (500, False)])
def test_trees(size, tree, top_k, ties):
    tree = TREES[tree]
    q, k, v, index = inputs((tree.num_tokens,), ties=ties)
    sets = choose_in(tree, index, top_k)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attend(*leaves, sets, 0.3)
    wanted.square().sum().backward()

    def body(comm):
        own = [local(x, tree, comm).requires_grad_() for x in (q, k, v)]
        chosen = index_top_k(*[local(x, tree, comm) for x in index], top_k=top_k, comm=comm, cu_seqlens=tree)
        out = selected_attention(*own, chosen, comm=comm, cu_seqlens=tree, scale=0.3)
        out.square().sum().backward()
        return chosen, out.detach(), *(x.grad for x in own)

    chosen, *found = (unshard(list(each), tree) for each in zip(*on_ranks(size, body), strict=True))
    assert [[s for s in row if s >= 0] for row in chosen.tolist()] == sets
    for got, want in zip(found, [wanted, *(x.grad for x in leaves)], strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["graphs", "again", "checkpoint"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bounds", [(0, 1, 60, 61, 150), (0, 75, 150), (0, 150), (0, *range(30, 151, 15))])
@pytest.mark.parametrize("latents", [False, True])
def test_slices(size, bounds, way, latents):
    """A sequence in slices; with ``latents`` values are a part of the keys."""
    q, k, v, index = inputs((150,))
    dout = torch.randn(q.shape[0], HEADS, 4 if latents else V_DIM, generator=torch.Generator().manual_seed(5)).double()
    sets = choose_fast(index, (150,), 16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attend(*leaves[:2], leaves[1][..., :4] if latents else leaves[2], sets, 0.3)
    wanted.backward(dout)
    given = dict(zip("qkvabc", (q, k, v, *index), strict=True)) | {"dout": dout}

    def body(comm):
        def run(part, own):
            chosen = index_top_k(*own[3:], top_k=16, comm=comm, cu_seqlens=part)
            values = {"v_dim": 4} if latents else {}
            v = None if latents else own[2]
            return selected_attention(*own[:2], v, chosen, comm=comm, cu_seqlens=part, scale=0.3, **values)

        return on_slices(run, bounds, given, comm, way)

    out, *grads = whole([[[x[0], *x[1 : 3 if latents else 4]] for x in rank] for rank in on_ranks(size, body)], bounds)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-10)
    for got, leaf in zip(grads, leaves, strict=False):
        assert torch.allclose(got, leaf.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bounds", [(0, 1, 60, 61, 157), (0, 50, 110, 157), (0, *range(30, 151, 15), 157)])
def test_slices_of_a_tree(size, bounds):
    tree = TREES["answers"]
    q, k, v, index = inputs((tree.num_tokens,))
    dout = torch.randn(*q.shape[:2], V_DIM, generator=torch.Generator().manual_seed(5)).double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attend(*leaves, choose_in(tree, index, 16), 0.3)
    wanted.backward(dout)
    given = dict(zip("qkvabc", (q, k, v, *index), strict=True)) | {"dout": dout}

    def body(comm):
        def run(part, own):
            chosen = index_top_k(*own[3:], top_k=16, comm=comm, cu_seqlens=part)
            return selected_attention(*own[:3], chosen, comm=comm, cu_seqlens=part, scale=0.3)

        return on_slices(run, bounds, given, comm, "again", tree)

    found = whole([[x[:4] for x in rank] for rank in on_ranks(size, body)], bounds, tree)
    for got, want in zip(found, [wanted, *(x.grad for x in leaves)], strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-10)


def test_tokens_of_other_branches_are_refused():
    """Token 5 is of the first answer, and the slice begins with the second one."""
    sliced = SlicedSequence([0, 6, 8], Tree([-1, 0, 0], [4, 2, 2]))
    x = torch.randn(8, 1, 4)
    rows = torch.arange(6)[:, None]
    selected_attention(x[:6], x[:6], x[:6], rows.clamp(max=3), comm=None, cu_seqlens=sliced.slice(0))
    for wrong, told in ((5, "tokens of other branches"), (8, "numbers from 8 to 8; the pack has 8")):
        chosen = torch.full((2, 1), wrong)
        with pytest.raises(hdp.InvalidUsage, match=told):
            selected_attention(x[6:], x[6:], x[6:], chosen, comm=None, cu_seqlens=sliced.slice(1))


def test_without_a_communicator():
    q, k, v, index = inputs((20,))
    found = indexed_attention(q, k, v, *index, top_k=3, comm=None, cu_seqlens=[0, 20])
    assert torch.allclose(found, attend(q, k, v, choose_fast(index, (20,), 3), DIM**-0.5), rtol=0, atol=1e-12)


def test_a_second_derivative_is_refused():
    q, k, v, index = inputs((9,))
    q.requires_grad_()
    out = indexed_attention(q, k, v, *index, top_k=3, comm=None, cu_seqlens=[0, 9])
    with pytest.raises(hdp.InvalidUsage, match="create_graph"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


BAD = {
    "no top_k": (lambda a: a.update(top_k=0), "top_k is 0"),
    "index_q": (lambda a: a.update(index_q=a["index_q"][0]), r"expected index_q \[tokens, heads, dim\]"),
    "index_k": (lambda a: a.update(index_k=a["index_k"][:, :-1]), "do not belong together"),
    "weights": (lambda a: a.update(weights=a["weights"][:-1]), "do not belong together, or to"),
    "types": (lambda a: a.update(index_k=a["index_k"].float()), "must have one type"),
    "q": (lambda a: a.update(q=a["q"][:, :3].contiguous()), "do not belong together"),
    "v": (lambda a: a.update(v=a["v"].float()), "must have one type"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("wrong", [0, 1])
def test_bad_arguments_are_an_error_on_all_ranks(case, wrong):
    change, told = BAD[case]
    cu = [0, 21]

    def body(comm):
        q, k, v, (index_q, index_k, weights) = inputs((21,))
        given = {"q": q, "k": k, "v": v, "index_q": index_q, "index_k": index_k, "weights": weights}
        given = {name: local(x, cu, comm) for name, x in given.items()} | {"top_k": 3, "cu_seqlens": cu}
        if comm.rank == wrong:
            change(given)
        with pytest.raises(hdp.InvalidUsage, match=told):
            indexed_attention(comm=comm, **given)
        comm.barrier()

    on_ranks(2, body)


def test_random_packs_and_choices():
    """Choices of one's own, some empty: softmax over nothing is 0."""
    for seed in range(12):
        draw = random.Random(seed)
        lengths = [draw.choice([0, 1, 2, 5, 30]) for _ in range(draw.randint(1, 5))]
        cu = cu_of(lengths)
        q, k, v, _ = inputs(lengths, seed)
        sets = [sorted(draw.sample(range(sum(lengths)), min(sum(lengths), draw.randint(0, 4)))) for _ in range(len(q))]
        chosen = torch.tensor([own + [-1] * (4 - len(own)) for own in sets], dtype=torch.int64).reshape(-1, 4)
        wanted = attend(q, k, v, sets, DIM**-0.5).nan_to_num(0.0) if len(q) else q.new_zeros(0, HEADS, V_DIM)

        def body(comm, cu=cu, q=q, k=k, v=v, chosen=chosen):
            own = [local(x, cu, comm).requires_grad_() for x in (q, k, v)]
            out = selected_attention(*own, local(chosen, cu, comm), comm=comm, cu_seqlens=cu)
            out.square().sum().backward()
            assert all(bool(x.grad.isfinite().all()) for x in own)
            return out.detach()

        found = unshard(on_ranks(draw.randint(1, 4), body), cu)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
        assert not math.isnan(float(found.sum()))

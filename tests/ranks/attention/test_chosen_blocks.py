"""MoBA, NSA and attention over blocks of one's own choice, beside definitions in one process: choices, values,
gradients, bytes."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hdpcomm as hdp
from hdpcomm.attention import NSABlocks, as_pack, block_attention, moba_attention, nsa_attention, unshard
from hdpcomm.attention.chosen_blocks import _by_means
from hdpcomm.errors import InvalidUsage
from tests.ranks.attention.test_chosen import DIM, HEADS, KV_HEADS, PACKS, V_DIM, cu_of, len_of, local, on_ranks

EACH = HEADS // KV_HEADS
PACKS = PACKS | {"mixed": (1, 7, 201, 88), "blocks": (16, 48, 15, 33)}


def drawn(lengths, seed=0, *, whole=False):
    """q, k and v; ``whole``: of whole numbers, so that products have ties and every order of sums is exact."""
    draw, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    sizes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM)
    found = [torch.randn(tokens, *size, generator=draw, dtype=torch.float64) for size in sizes]
    return [x.round().clamp(-1, 1) for x in found] if whole else found


def attend(q, k, v, mask, scale):
    """``mask``: [heads, tokens, tokens]; a query that sees nothing gives 0."""
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(EACH, 1)) * scale
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    return torch.einsum("hts,shd->thd", p, v.repeat_interleave(EACH, 1))


def sequences(lengths):
    start = 0
    for length in lengths:
        yield start, length
        start += length


def mask_of(lengths, block, sets):
    """``sets(t, h)``: the blocks of token t of the pack and head h."""
    tokens = sum(lengths)
    mask = torch.zeros(HEADS, tokens, tokens, dtype=torch.bool)
    for start, length in sequences(lengths):
        for t in range(length):
            for h in range(HEADS):
                for b in sets(start + t, h):
                    mask[h, start + t, start + b * block : min(start + (b + 1) * block, start + t + 1)] = True
    return mask


def moba_sets(q, k, lengths, block, top_k):
    """One product at a time, sorted in plain Python: by [token][head]."""
    found = []
    for start, length in sequences(lengths):
        means = [k[start + b : min(start + b + block, start + length)].mean(0) for b in range(0, length, block)]
        for t in range(length):
            own = t // block
            rows = []
            for h in range(HEADS):
                ranked = sorted((-float(q[start + t, h] @ means[b][h // EACH]), b) for b in range(own))
                rows.append(sorted([own, *(b for _, b in ranked[: top_k - 1])]))
            found.append(rows)
    return found


def run(size, cu, tensors, call, weight):
    """(result, gradients of the tensors) of all ranks."""

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in tensors]
        out = call(*own, comm=comm, cu_seqlens=cu)
        (out * local(weight, cu, comm)).sum().backward()
        return out.detach(), [x.grad for x in own]

    told = on_ranks(size, body)
    return unshard([out for out, _ in told], cu), [
        unshard([grads[i] for _, grads in told], cu) for i in range(len(tensors))
    ]


def weight_of(tokens):
    return torch.randn(tokens, HEADS, V_DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def same(size, lengths, tensors, call, wanted_of):
    cu, weight = cu_of(lengths), weight_of(sum(lengths))
    leaves = [x.clone().requires_grad_() for x in tensors]
    wanted = wanted_of(*leaves)
    (wanted * weight).sum().backward()
    out, grads = run(size, cu, tensors, call, weight)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-10)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.allclose(grad, leaf.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("pack", "block", "top_k"),
    [("mixed", 16, 3), ("blocks", 16, 2), ("short", 2, 2), ("one", 5, 1), ("one", 7, 100), ("single", 3, 1)],
)
@pytest.mark.parametrize("whole", [False, True])
def test_moba(size, pack, block, top_k, whole):
    lengths = PACKS[pack]
    tensors = drawn(lengths, whole=whole)
    sets = moba_sets(*tensors[:2], lengths, block, top_k)
    mask = mask_of(lengths, block, lambda t, h: sets[t][h])

    def call(*own, **pack):
        return moba_attention(*own, block=block, top_k=top_k, **pack)

    same(size, lengths, tensors, call, lambda q, k, v: attend(q, k, v, mask, DIM**-0.5))
    cu = cu_of(lengths)
    chosen = on_ranks(
        size,
        lambda comm: _by_means(
            *(local(x, cu, comm) for x in tensors[:2]), as_pack(cu).layout(size), comm, block, top_k
        ),
    )
    assert [[sorted(b for b in row if b >= 0) for row in rows] for rows in unshard(chosen, cu).tolist()] == sets


@pytest.mark.parametrize("seed", range(16))
def test_blocks_of_ones_own(seed):
    """By heads or by groups of them, some of nothing, packs with empty sequences."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 5, 30, draw.randint(1, 70)]) for _ in range(draw.randint(1, 5))]
    block, heads = draw.randint(1, 20), draw.choice([HEADS, KV_HEADS])
    sets = [
        [sorted(draw.sample(range(t // block + 1), draw.randint(0, min(3, t // block + 1)))) for _ in range(heads)]
        for _, length in sequences(lengths)
        for t in range(length)
    ]
    chosen = torch.tensor([[own + [-1] * (3 - len(own)) for own in rows] for rows in sets], dtype=torch.int64)
    chosen = chosen.reshape(-1, heads, 3)[..., torch.randperm(3, generator=torch.Generator().manual_seed(seed))]
    mask = mask_of(lengths, block, lambda t, h: sets[t][h * heads // HEADS])
    cu = cu_of(lengths)

    def call(*own, comm, **pack):
        return block_attention(*own, local(chosen, cu, comm), block=block, comm=comm, scale=0.4, **pack)

    size = draw.randint(1, 4)
    same(size, lengths, drawn(lengths, seed), call, lambda q, k, v: attend(q, k, v, mask, 0.4))


SIZES = NSABlocks(length=8, stride=4, selected=12, top_k=4, first=1, local=2, window=10)


class Compress(torch.nn.Module):
    """A learned sum over a block's tokens, each with a bias by its place."""

    def __init__(self, sizes, seed):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(sizes.length, generator=draw, dtype=torch.float64))
        self.place = torch.nn.Parameter(torch.randn(sizes.length, 1, 1, generator=draw, dtype=torch.float64))

    def forward(self, block):
        return torch.einsum("nlhd,l->nhd", block + self.place, self.weight)


def nsa(q, keys, values, gates, lengths, sizes, compress):
    """By the definition: every compressed block, probability and selected block by itself."""
    far, sets = [], []
    for start, length in sequences(lengths):
        begins = range(0, length - sizes.length + 1, sizes.stride)
        blocks = [[x[start + b : start + b + sizes.length] for b in begins] for x in (keys[0], values[0])]
        made = [make(torch.stack(each)) if each else None for make, each in zip(compress, blocks, strict=True)]
        for t in range(length):
            seen = sum(b + sizes.length <= t + 1 for b in begins)
            own = t // sizes.selected
            rows, result = [], []
            for g in range(KV_HEADS):
                score = [0.0] * (own + 1)
                for h in range(g * EACH, (g + 1) * EACH):
                    if not seen:
                        result.append(values[0].new_zeros(V_DIM))
                        continue
                    p = (made[0][:seen, g] @ q[start + t, h] * DIM**-0.5).softmax(0)
                    result.append(p @ made[1][:seen, g])
                    for i, share in enumerate(p.tolist()):
                        for place in range(i * sizes.stride, i * sizes.stride + sizes.length, sizes.stride):
                            if place // sizes.selected <= own:
                                score[place // sizes.selected] += share
                fixed = {b for b in range(own + 1) if b < sizes.first or b > own - sizes.local}
                ranked = sorted((-s, b) for b, s in enumerate(score) if b not in fixed)
                rows.append(
                    sorted([*fixed, *(b for _, b in ranked)][: sizes.top_k])
                    if len(fixed) < sizes.top_k
                    else sorted(fixed)
                )
            far.append(torch.stack(result))
            sets.append(rows)
    branches = [torch.stack(far)]
    branches.append(
        attend(q, keys[1], values[1], mask_of(lengths, sizes.selected, lambda t, h: sets[t][h // EACH]), DIM**-0.5)
    )
    near = torch.zeros(HEADS, sum(lengths), sum(lengths), dtype=torch.bool)
    for start, length in sequences(lengths):
        places = torch.arange(length)
        apart = places[:, None] - places
        near[:, start : start + length, start : start + length] = (apart >= 0) & (apart < sizes.window)
    branches.append(attend(q, keys[2], values[2], near, DIM**-0.5))
    return sum(gates[..., i : i + 1] * branch for i, branch in enumerate(branches))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("pack", "sizes"), [
    ("mixed", SIZES),
    ("one", NSABlocks(length=6, stride=6, selected=6, top_k=2, first=0, local=1, window=3)),
    ("short", SIZES),
    ("blocks", NSABlocks(length=4, stride=2, selected=16, top_k=100, window=1000)),
])  # fmt: skip
def test_nsa(size, pack, sizes):
    lengths = PACKS[pack]
    cu, weight = cu_of(lengths), weight_of(sum(lengths))
    q, *first = drawn(lengths)
    keys, values = ([x, *(drawn(lengths, seed)[i] for seed in (1, 2))] for i, x in zip((1, 2), first, strict=True))
    gates = torch.rand(sum(lengths), HEADS, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    tensors = [q, *keys, *values, gates]
    leaves = [x.clone().requires_grad_() for x in tensors]
    compress = Compress(sizes, 3), Compress(sizes, 4)
    wanted = nsa(leaves[0], leaves[1:4], leaves[4:7], leaves[7], lengths, sizes, compress)
    (wanted * weight).sum().backward()

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in tensors]
        made = Compress(sizes, 3), Compress(sizes, 4)
        pack = {"comm": comm, "cu_seqlens": cu, "blocks": sizes, "compress": made}
        out = nsa_attention(own[0], tuple(own[1:4]), tuple(own[4:7]), own[7], **pack)
        (out * local(weight, cu, comm)).sum().backward()
        grads = [p.grad for each in made for p in each.parameters()]
        for grad in grads:
            comm.all_reduce(grad)
        return out.detach(), [x.grad for x in own], grads

    told = on_ranks(size, body)
    assert torch.allclose(unshard([out for out, *_ in told], cu), wanted, rtol=0, atol=1e-10)
    for i, leaf in enumerate(leaves):
        grad = unshard([grads[i] for _, grads, _ in told], cu)
        want = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # no sequence is as long as a block
        assert torch.allclose(grad, want, rtol=0, atol=1e-10), i
    for *_, grads in told:
        for found, p in zip(grads, [p for each in compress for p in each.parameters()], strict=True):
            want = torch.zeros_like(p) if p.grad is None else p.grad
            assert torch.allclose(found, want, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3])
def test_recomputed_and_twice_in_a_graph(size):
    lengths = (40, 3, 21)
    cu = cu_of(lengths)
    q, k, v = drawn(lengths)
    gates = torch.rand(sum(lengths), HEADS, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def body(comm):
        given = [local(x, cu, comm) for x in (q, k, v)]
        weights = local(gates, cu, comm)

        def layer(q, k, v):
            far = moba_attention(q, k, v, block=8, top_k=3, comm=comm, cu_seqlens=cu)
            return far * nsa_attention(q, k, v, weights, comm=comm, cu_seqlens=cu, blocks=SIZES)

        found = []
        for again in (False, True):
            own = [x.clone().requires_grad_() for x in given]
            first = checkpoint(layer, *own, use_reentrant=False) if again else layer(*own)
            (first * layer(own[0], own[1] * 2, own[2])).sum().backward()
            found.append([x.grad for x in own])
        return found

    for plain, recomputed in on_ranks(size, body):
        for one, other in zip(plain, recomputed, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("size", [2, 4])
def test_each_token_that_is_seen_comes_once(size):
    """Bytes by an independent count: numbers and rows go, gradients come back."""
    lengths, block, top_k = (300, 41, 9), 16, 3
    cu = cu_of(lengths)
    tensors = drawn(lengths)
    sets = moba_sets(*tensors[:2], lengths, block, top_k)
    mask = mask_of(lengths, block, lambda t, h: sets[t][h])
    owner = unshard([torch.full((int(len_of(cu, r, size)),), r) for r in range(size)], cu).tolist()
    seen = mask.any(0).nonzero().tolist()
    # Heads of a group may look at a block from other queries; keys come up to the last query that sees the block.
    need = {(owner[t], s) for t, s in seen if owner[s] != owner[t]}
    row = KV_HEADS * (DIM + V_DIM) * 8
    chosen = torch.full((sum(lengths), HEADS, top_k), -1, dtype=torch.int64)
    for t, rows in enumerate(sets):
        for h, own in enumerate(rows):
            chosen[t, h, : len(own)] = torch.tensor(own)

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in tensors]
        given = local(chosen, cu, comm)
        comm.barrier()
        before = comm.stats()["bytes_sent"]
        out = block_attention(*own, given, block=block, comm=comm, cu_seqlens=cu)
        forward = comm.stats()["bytes_sent"] - before
        out.sum().backward()
        return forward, comm.stats()["bytes_sent"] - before - forward

    told = on_ranks(size, body)
    agreement = sum(forward for forward, _ in told) - len(need) * (row + 8)
    assert 0 < agreement < size * (size - 1) * 700  # what ranks compare first, and their counts
    assert sum(backward for _, backward in told) == len(need) * row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    lengths = (90, 5)
    cu = cu_of(lengths)
    tensors = [x.to(dtype) for x in drawn(lengths)]
    mask = mask_of(lengths, 16, lambda t, _: range((t - 90 * (t >= 90)) // 16 + 1))
    wanted = attend(*(x.double() for x in tensors), mask, DIM**-0.5)
    told = on_ranks(
        2,
        lambda comm: moba_attention(
            *(local(x, cu, comm) for x in tensors), block=16, top_k=9, comm=comm, cu_seqlens=cu
        ),
    )
    found = unshard(told, cu)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


BAD = {
    "block": ({"block": 0}, "block is 0"),
    "later": ({"chosen": torch.full((21, HEADS, 1), 9)}, "up to the token's own"),
    "twice": ({"chosen": torch.zeros(21, HEADS, 2, dtype=torch.int64)}, "a block twice"),
    "heads": ({"chosen": torch.zeros(21, 3, 1, dtype=torch.int64)}, "expected chosen"),
    "type": ({"chosen": torch.zeros(21, HEADS, 1)}, "must be int64"),
    "q": ({"q": torch.zeros(21, 3, DIM, dtype=torch.float64)}, "do not belong together"),
    "tree": ({"cu_seqlens": hdp.attention.Tree([-1, 0], [3, 18])}, "only packs of plain sequences"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("wrong", [0, 1])
def test_bad_arguments_are_an_error_on_all_ranks(case, wrong):
    change, told = BAD[case]
    cu = [0, 21]

    def body(comm):
        q, k, v = drawn((21,))
        given = {"q": q, "k": k, "v": v, "chosen": torch.zeros(21, HEADS, 1, dtype=torch.int64)}
        given |= {"block": 8, "cu_seqlens": cu}
        if comm.rank == wrong:
            given |= change
        given = {name: local(x, cu, comm) if torch.is_tensor(x) else x for name, x in given.items()}
        with pytest.raises(InvalidUsage, match=told):
            block_attention(comm=comm, **given)
        comm.barrier()

    on_ranks(2, body)


def test_sizes_and_gates():
    with pytest.raises(InvalidUsage, match="stride must divide"):
        NSABlocks(length=10, stride=4)
    with pytest.raises(InvalidUsage, match="top_k be at least first"):
        NSABlocks(top_k=2)
    with pytest.raises(InvalidUsage, match="top_k is 0"):
        moba_attention(*drawn((9,)), block=4, top_k=0, comm=None, cu_seqlens=[0, 9])
    q, k, v = drawn((9,))
    with pytest.raises(InvalidUsage, match="expected gates"):
        nsa_attention(q, k, v, torch.rand(9, HEADS), comm=None, cu_seqlens=[0, 9])
    with pytest.raises(InvalidUsage, match="2 keys and 3 values"):
        nsa_attention(q, [k, k], v, torch.rand(9, HEADS, 3), comm=None, cu_seqlens=[0, 9])
    same = (lambda block: block,) * 2
    with pytest.raises(InvalidUsage, match=r"compress made \(0, 32, 2, 6\) of blocks"):
        nsa_attention(q, k, v, torch.rand(9, HEADS, 3), comm=None, cu_seqlens=[0, 9], compress=same)
    q.requires_grad_()
    out = moba_attention(q, k, v, block=4, top_k=2, comm=None, cu_seqlens=[0, 9])
    with pytest.raises(InvalidUsage, match="create_graph"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)

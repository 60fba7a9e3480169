"""The loss of an indexer, beside its definition in one process: values, gradients, what has none."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hdpcomm as hdp
from hdpcomm.attention import index_top_k, indexer_loss, unshard
from tests.ranks.attention.test_chosen import (
    DIM,
    HEADS,
    INDEX_DIM,
    KV_HEADS,
    PACKS,
    TREES,
    choose_fast,
    choose_in,
    cu_of,
    inputs,
    local,
    on_ranks,
)


def loss_by_definition(q, k, index, sets, scale):
    """KL of each token, by masks over all pairs; q and k are constants."""
    index_q, index_k, weights = index
    mask = torch.zeros(len(sets), len(sets), dtype=torch.bool)
    for t, own in enumerate(sets):
        mask[t, own] = True
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * scale
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0).sum(0)
    p = (p / p.sum(-1, keepdim=True).clamp(min=1e-300)).detach()
    found = torch.einsum("ths,th->ts", torch.relu(torch.einsum("thd,sd->ths", index_q, index_k)), weights)
    share = found.masked_fill(~mask, -1e300).log_softmax(-1)
    return (torch.xlogy(p, p) - p * share.masked_fill(~mask, 0.0)).sum(-1)


def sets_of(index, lengths, top_k):
    """The chosen keys, or all up to the token."""
    return choose_fast(index, lengths, sum(lengths) if top_k is None else top_k)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("pack", "top_k"),
    [("mixed", 16), ("mixed", None), ("short", 2), ("one", 1), ("one", 100), ("one", None), ("single", None)],
)
def test_values_and_gradients(size, pack, top_k):
    lengths = PACKS[pack]
    cu = cu_of(lengths)
    q, k, _, index = inputs(lengths)
    leaves = [x.clone().requires_grad_() for x in index]
    wanted = loss_by_definition(q, k, leaves, sets_of(index, lengths, top_k), 0.3)
    weight = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (wanted * weight).sum().backward()

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in (*index, q, k)]
        pack = {"comm": comm, "cu_seqlens": cu}
        chosen = None if top_k is None else index_top_k(*own[:3], top_k=top_k, **pack)
        loss = indexer_loss(*own, chosen, scale=0.3, **pack)
        (loss * local(weight, cu, comm)).sum().backward()
        assert own[3].grad is None and own[4].grad is None, "attention learns from its own loss alone"  # noqa: PT018
        return loss.detach(), [x.grad for x in own[:3]]

    told = on_ranks(size, body)
    assert torch.allclose(unshard([each[0] for each in told], cu), wanted, rtol=0, atol=1e-10)
    for i, leaf in enumerate(leaves):
        assert torch.allclose(unshard([each[1][i] for each in told], cu), leaf.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dense", [False, True])
def test_trees(size, tree, dense):
    tree = TREES[tree]
    q, k, _, index = inputs((tree.num_tokens,))
    leaves = [x.clone().requires_grad_() for x in index]
    wanted = loss_by_definition(q, k, leaves, choose_in(tree, index, tree.num_tokens if dense else 6), 0.3)
    wanted.square().sum().backward()

    def body(comm):
        own = [local(x, tree, comm).requires_grad_() for x in (*index, q, k)]
        pack = {"comm": comm, "cu_seqlens": tree}
        chosen = None if dense else index_top_k(*own[:3], top_k=6, **pack)
        loss = indexer_loss(*own, chosen, scale=0.3, **pack)
        loss.square().sum().backward()
        return loss.detach(), *(x.grad for x in own[:3])

    found = (unshard(list(each), tree) for each in zip(*on_ranks(size, body), strict=True))
    for got, want in zip(found, [wanted, *(x.grad for x in leaves)], strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-10)


def test_slices_are_refused():
    index = torch.randn(9, 3, 4), torch.randn(9, 4), torch.randn(9, 3)
    part = hdp.attention.SlicedSequence([0, 9, 20]).slice(0)
    with pytest.raises(hdp.InvalidUsage, match="indexers do not learn in slices"):
        indexer_loss(*index, torch.randn(9, 4, 6), torch.randn(9, 2, 6), None, comm=None, cu_seqlens=part)


def test_small_blocks_are_the_same(monkeypatch):
    from hdpcomm.attention import chosen

    monkeypatch.setattr(chosen, "_GATHERED", 64)
    test_values_and_gradients(2, "mixed", None)
    test_values_and_gradients(2, "mixed", 16)


def test_the_loss_is_least_where_the_indexer_is_the_attention():
    """Steps along the gradient bring the indexer's choice to the attention's, in the warm-up and after it."""
    lengths = (24,)
    q, k, _, index = inputs(lengths)
    leaves = [x.clone().requires_grad_() for x in index]
    pack = {"comm": None, "cu_seqlens": [0, 24]}
    optimizer = torch.optim.Adam(leaves, lr=0.05)
    first = last = 0.0
    for step in range(300):
        chosen = None if step < 200 else index_top_k(*[x.detach() for x in leaves], top_k=8, **pack)
        loss = indexer_loss(*leaves, q, k, chosen, **pack).mean()
        last = float(loss.detach())
        first = first or last
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0 <= last < 0.1 * first


@pytest.mark.parametrize("dense", [False, True])
def test_recomputed_and_twice_in_a_graph(dense):
    lengths = (40, 3, 21)
    cu = cu_of(lengths)
    q, k, _, index = inputs(lengths)
    sets = sets_of(index, lengths, None if dense else 5)
    leaves = [x.clone().requires_grad_() for x in index]
    one = loss_by_definition(q, k, leaves, sets, DIM**-0.5)
    (one * loss_by_definition(2 * q, k, leaves, sets, DIM**-0.5)).sum().backward()

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in index]
        mine, keys = local(q, cu, comm), local(k, cu, comm)
        pack = {"comm": comm, "cu_seqlens": cu}
        chosen = None if dense else index_top_k(*own, top_k=5, **pack)

        def layer(factor, *given):
            return indexer_loss(*given, factor * mine, keys, chosen, **pack)

        first = checkpoint(layer, 1.0, *own, use_reentrant=False)
        (first * layer(2.0, *own)).sum().backward()
        return [x.grad for x in own]

    told = on_ranks(3, body)
    for i, leaf in enumerate(leaves):
        assert torch.allclose(unshard([each[i] for each in told], cu), leaf.grad, rtol=1e-10, atol=1e-10)


def test_random_packs_and_choices():
    """Choices of one's own, some empty, sequences of no token: nothing is 0, and finite."""
    for seed in range(12):
        draw = random.Random(seed)
        lengths = [draw.choice([0, 1, 2, 5, 30]) for _ in range(draw.randint(1, 5))]
        cu = cu_of(lengths)
        q, k, _, index = inputs(lengths, seed)
        dense = draw.random() < 0.3
        sets = [sorted(draw.sample(range(sum(lengths)), min(sum(lengths), draw.randint(0, 4)))) for _ in range(len(q))]
        chosen = torch.tensor([own + [-1] * (4 - len(own)) for own in sets], dtype=torch.int64).reshape(-1, 4)
        leaves = [x.clone().requires_grad_() for x in index]
        wanted = loss_by_definition(q, k, leaves, sets_of(index, lengths, None) if dense else sets, DIM**-0.5)
        wanted.square().sum().backward()

        def body(comm, cu=cu, given=(*index, q, k), chosen=None if dense else chosen):
            own = [local(x, cu, comm).requires_grad_() for x in given]
            mine = None if chosen is None else local(chosen, cu, comm)
            loss = indexer_loss(*own, mine, comm=comm, cu_seqlens=cu)
            loss.square().sum().backward()
            return loss.detach(), [x.grad for x in own[:3]]

        told = on_ranks(draw.randint(1, 4), body)
        assert torch.allclose(unshard([each[0] for each in told], cu), wanted, rtol=0, atol=1e-12)
        for i, leaf in enumerate(leaves):
            assert torch.allclose(unshard([each[1][i] for each in told], cu), leaf.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    """The indexer's tensors in fp32, as models keep them."""
    lengths = (90, 5)
    cu = cu_of(lengths)
    q, k, _, index = inputs(lengths)
    sets = sets_of(index, lengths, None)
    wanted = loss_by_definition(q.to(dtype).double(), k.to(dtype).double(), index, sets, DIM**-0.5)

    def body(comm):
        given = [local(x, cu, comm).float() for x in index]
        return indexer_loss(
            *given, local(q, cu, comm).to(dtype), local(k, cu, comm).to(dtype), None, comm=comm, cu_seqlens=cu
        )

    found = unshard(on_ranks(2, body), cu)
    assert found.dtype == torch.float32
    assert (found.double() - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("size", [2, 4])
def test_index_keys_and_keys_come_once(size):
    """Bytes of the sparse stage by an independent count: rows of keys and of index keys, gradients of the latter."""
    lengths, top_k = (300, 41, 9), 8
    cu = cu_of(lengths)
    q, k, _, index = inputs(lengths)
    sets = choose_fast(index, lengths, top_k)
    counts = [int(hdp.attention.local_cu_seqlens(cu, rank=rank, size=size)[-1]) for rank in range(size)]
    owner = unshard([torch.full((count,), rank) for rank, count in enumerate(counts)], cu).tolist()
    need = {(owner[t], s) for t, own in enumerate(sets) for s in own if owner[s] != owner[t]}

    def body(comm):
        own = [local(x, cu, comm).requires_grad_() for x in index]
        chosen = index_top_k(*own, top_k=top_k, comm=comm, cu_seqlens=cu)
        comm.barrier()
        before = comm.stats()["bytes_sent"]
        loss = indexer_loss(*own, local(q, cu, comm), local(k, cu, comm), chosen, comm=comm, cu_seqlens=cu)
        forward = comm.stats()["bytes_sent"] - before
        loss.sum().backward()
        return forward, comm.stats()["bytes_sent"] - before - forward

    told = on_ranks(size, body)
    rows = len(need) * (KV_HEADS * DIM + INDEX_DIM + 1) * 8
    assert rows < sum(forward for forward, _ in told) < rows + size * (size - 1) * 1000  # what ranks compare first
    assert sum(backward for _, backward in told) == len(need) * INDEX_DIM * 8


@pytest.mark.parametrize("wrong", [0, 1])
def test_bad_arguments_are_an_error_on_all_ranks(wrong):
    q, k, _, index = inputs((21,))

    def body(comm):
        given = [local(x, [0, 21], comm) for x in (*index, q, k)]
        if comm.rank == wrong:
            given[1] = given[1][:, :-1]
        with pytest.raises(hdp.InvalidUsage, match="do not belong together"):
            indexer_loss(*given, None, comm=comm, cu_seqlens=[0, 21])
        comm.barrier()

    on_ranks(2, body)

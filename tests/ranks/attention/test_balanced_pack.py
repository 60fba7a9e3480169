"""Packs whose heads and tails differ in length: all that attends over sequences, on several ranks and on one."""

from __future__ import annotations

import pytest
import torch

import hdpcomm as hdp
from hdpcomm import attention
from hdpcomm.attention import BalancedPack, local_cu_seqlens, positions, shard, unshard
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options

LENGTHS = (1, 7, 201, 399, 88)
CU = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]


def normal(*shape, seed=0):
    return torch.randn(CU[-1], *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen(q, k, v, *, comm, cu_seqlens):
    index = [x.detach() for x in (q, k[:, 0], q[:, :, 0])]
    return attention.indexed_attention(q, k, v, *index, top_k=20, comm=comm, cu_seqlens=cu_seqlens)


def ring(q, k, v, **pack):
    return attention.ring_attention(q, k, v, causal=True, **pack)


def windows(q, k, v, **pack):
    return attention.ring_attention(q, k, v, **with_options(window=(19, 0)), **pack)


def chunks(q, k, v, **pack):
    return attention.ring_attention(q, k, v, **with_options(chunk=64), **pack)


def delta(q, k, v, **pack):
    q, k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) / 4 for x in (q, k, v))
    write = torch.full(q.shape[:2], 0.3, dtype=q.dtype)
    return attention.delta_rule(q, k, v, -write, write, **pack)


CALLS = (chosen, ring, windows, chunks, delta)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_results_and_gradients(call, size):
    leaves = [normal(4, 6).requires_grad_(), *(normal(2, 6, seed=s).requires_grad_() for s in (1, 2))]
    weight = normal(1, 1, seed=3)
    wanted = call(*leaves, comm=None, cu_seqlens=CU)
    (wanted * weight).sum().backward()
    pack = BalancedPack(CU, key_limit=20, limited=0.8)

    def body():
        torch.set_num_threads(1)
        with hdp.init() as comm:
            place = {"rank": comm.rank, "size": comm.size}
            own = [shard(x.detach(), pack, **place).contiguous().requires_grad_() for x in leaves]
            out = call(*own, comm=comm, cu_seqlens=pack)
            (out * shard(weight, pack, **place)).sum().backward()
            return out.detach(), *(x.grad for x in own)

    found = [unshard(list(each), pack) for each in zip(*run_threads(body, size), strict=True)]
    for got, want in zip(found, [wanted, *(x.grad for x in leaves)], strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-10)


def test_shards():
    """Tokens and work by rank; positions and local lengths belong to the shards."""
    lengths = [4096] * 8
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    pack, seen = BalancedPack(cu, key_limit=2048), torch.cat([torch.arange(n) for n in lengths])
    own = [shard(seen, pack, rank=rank, size=8) for rank in range(8)]
    assert {len(each) for each in own} == {4096}
    for rank, each in enumerate(own):
        assert torch.equal(each, positions(pack, rank=rank, size=8))
        assert local_cu_seqlens(pack, rank=rank, size=8).tolist() == list(range(0, 4097, 512))
    work = torch.stack([(each + 1).clamp(max=2048).sum() for each in own]).double()
    assert work.max() < 1.002 * work.min()
    plain = torch.stack([(shard(seen, cu, rank=r, size=8) + 1).clamp(max=2048).sum() for r in range(8)]).double()
    assert plain.max() > 1.28 * plain.mean()
    assert torch.equal(unshard(own, pack), seen)


def test_ranks_must_mean_the_same():
    def body():
        with hdp.init() as comm:
            pack = BalancedPack([0, 40], key_limit=8) if comm.rank else [0, 40]
            own = shard(torch.randn(40, 2, 4), [0, 40], rank=comm.rank, size=2)
            with pytest.raises(Mismatch, match="1 over 8 keys at most"):
                ring(own, own, own, comm=comm, cu_seqlens=pack)

    run_threads(body, 2)


def test_bad_arguments():
    with pytest.raises(InvalidUsage, match="key_limit"):
        BalancedPack([0, 4], key_limit=0)
    with pytest.raises(InvalidUsage, match="limited"):
        BalancedPack([0, 4], key_limit=2, limited=1.5)
    with pytest.raises(InvalidUsage, match="beginning with 0"):
        BalancedPack([1, 4], key_limit=2)

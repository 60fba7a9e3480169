"""Trees that are wrong, or differ between ranks: a clear error on every rank, and the next call works."""

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import Tree, packed_attention, packing, ring_attention, shard
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options

TREE = Tree([-1, 0, 0], [20, 12, 8])


def errors(change, **settings):
    """The error of each rank when the arguments of rank 1 are ``change``d; a good call follows."""

    def main():
        comm = hdp.init()
        x = shard(torch.ones(40, 2, 8), TREE, rank=comm.rank, size=comm.size)
        arguments = {"q": x, "k": x, "v": x, "cu_seqlens": TREE, **settings}
        if comm.rank == 1:
            arguments |= change
        error = None
        try:
            ring_attention(comm=comm, **with_options(**arguments))
        except hdp.Error as raised:
            error = raised
        assert ring_attention(x, x, x, comm=comm, cu_seqlens=TREE).shape == x.shape
        return error

    return run_threads(main, 3, timeout=30)


BAD = {
    "tokens": ({"cu_seqlens": Tree([-1, 0], [20, 30])}, r"q has 1\d tokens; under cu_seqlens, rank 1 of 3 holds 17"),
    "not causal": ({"causal": False}, "causal=False was given with a tree"),
    "keys": ({"cu_seqlens_k": [0, 40]}, "cu_seqlens_k was given with a tree, a mask or a slice"),
    "keys as a tree": ({"cu_seqlens": [0, 40], "cu_seqlens_k": TREE}, "cu_seqlens_k was given with a tree"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank_are_an_error_on_all(name):
    change, message = BAD[name]
    for error in errors(change):
        with pytest.raises(InvalidUsage, match=message):
            raise error


OTHERS = {
    "another tree": {"cu_seqlens": Tree([-1, 0, 1], [20, 12, 8])},
    "flat": {"cu_seqlens": Tree([-1, -1, -1], [20, 12, 8])},
    "a window": {"window": 3},
}


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_disagree_all_hear_of_it(name):
    change = dict(OTHERS[name])
    if "cu_seqlens" in change:
        x = shard(torch.ones(40, 2, 8), change["cu_seqlens"], rank=1, size=3)
        change |= {"q": x, "k": x, "v": x}
    for error in errors(change, variant="ring"):
        with pytest.raises(Mismatch, match="called with different arguments, so no rank began"):
            raise error


def test_sequences_on_one_rank_and_a_tree_on_another():
    x = shard(torch.ones(40, 2, 8), [0, 20, 40], rank=1, size=3)
    for error in errors({"cu_seqlens": [0, 20, 40], "q": x, "k": x, "v": x}, variant="ring"):
        with pytest.raises(Mismatch, match="a tree of 3 segments with 40 tokens") as info:
            raise error
        assert "2 sequences with 40 tokens" in str(info.value)


def test_inside_a_model_with_checkpoints():
    """packing() takes a tree; gradients through a checkpoint and through two calls in one graph add up."""
    x = torch.randn(40, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def main():
        comm = hdp.init()
        mine = shard(x, TREE, rank=comm.rank, size=comm.size)
        plain, checked = mine.clone().requires_grad_(), mine.clone().requires_grad_()

        def layers(y):
            return packed_attention(packed_attention(y, y, y), y, y, window=5)

        with packing(comm, TREE):
            layers(plain).sum().backward()
            out = torch.utils.checkpoint.checkpoint(
                layers, checked, use_reentrant=False, context_fn=hdp.attention.carry_pack
            )
        out.sum().backward()
        return torch.equal(plain.grad, checked.grad)

    assert all(run_threads(main, 2))

"""Multi-head latent attention on prefix trees: dense attention in float64 on every trajectory by itself.

HDPCOMM_TEST_TREES: how many random trees (default 12).
"""

import os
import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import Tree, mla_attention, shard
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_oracle import error
from tests.harness.tree_oracle import TreeCase, random_tree, trajectories
from tests.ranks.attention.test_mla import NAMES, TOLERANCE, on_ranks, sent_on, tensors
from tests.ranks.attention.test_tree_traffic import minimum_rows

TREES = int(os.environ.get("HDPCOMM_TEST_TREES", "12"))
BRANCHED = Tree([-1, 0, 0, 2, 2, 0, -1, -1, 7], [40, 17, 9, 1, 23, 30, 5, 3, 11])


def wanted(tree, dims, inputs):
    """Output, and gradients of q, c_kv, k_rope and w_kv; a shared token's output is that of any trajectory."""
    heads, nope, rope, v, _ = dims
    leaves = {name: inputs[name].double().clone().requires_grad_() for name in NAMES}
    weight = leaves["w_kv"].view(heads, nope + v, -1)
    out = [None] * tree.num_tokens
    for places in trajectories(tree.parents.tolist(), tree.lengths.tolist()):
        q, c_kv, k_rope = (leaves[name][places] for name in ("q", "c_kv", "k_rope"))
        both = torch.einsum("tr,hdr->htd", c_kv, weight)
        keys = torch.cat((both[..., :nope], k_rope.expand(heads, -1, -1)), -1)
        scores = torch.einsum("thd,hsd->hts", q, keys) * (nope + rope) ** -0.5
        seen = torch.ones(len(places), len(places), dtype=torch.bool).tril()
        rows = torch.einsum("hts,hsv->thv", scores.where(seen, -torch.inf).softmax(-1), both[..., nope:])
        for place, row in zip(places, rows, strict=True):
            out[place] = row
    whole = torch.stack(out)
    return [whole.detach(), *torch.autograd.grad(whole, list(leaves.values()), inputs["dout"].double())]


def check(size, tree, dims, dtype=torch.float64, seed=0, **options):
    inputs = tensors([tree.num_tokens], dims, dtype, seed)
    found = on_ranks(size, None, inputs, tree, **options)
    for name, got, want in zip(("out", *NAMES), found, wanted(tree, dims, inputs), strict=True):
        assert error(got, want) <= TOLERANCE[dtype], (name, error(got, want), size, tree, dims, options)


@pytest.mark.parametrize("seed", range(TREES))
def test_random_trees(seed):
    rng = random.Random(seed)
    segments, longest = rng.choice([(rng.randint(1, 12), 40), (rng.randint(1, 4), 300)])
    tree = Tree(*random_tree(rng, segments=segments, longest=longest))
    size, heads = 1 + seed % 4, rng.choice([1, 2, 4])
    shares = [n for n in range(2, size + 1) if size % n == 0 and heads % n == 0]
    variants = ["auto", "ring", "gather", *(["ulysses"] if size in shares else [])]
    variants += ["hybrid"] if any(n < size for n in shares) else []
    dims = (heads, *(rng.choice(x) for x in ([0, 3, 8], [2, 4], [1, 6, 16], [5])))
    options = {"send": ("latent", "kv", "auto")[seed % 3], "variant": rng.choice(variants)}
    check(size, tree, dims, rng.choice([torch.float64, torch.float32]), seed, **options)


@pytest.mark.parametrize("variant", ["ring", "gather", "hybrid", "ulysses"])
@pytest.mark.parametrize("send", ["latent", "kv"])
def test_every_variant(variant, send):
    check(4, BRANCHED, (4, 8, 4, 6, 10), variant=variant, send=send)


@pytest.mark.parametrize("tree", [Tree([-1], [1]), Tree([-1, 0, 0], [1, 1, 1])], ids=["a token", "two answers"])
def test_ranks_without_a_token(tree):
    for send in ("latent", "kv", "auto"):
        check(4, tree, (2, 4, 2, 6, 5), send=send)


@pytest.mark.parametrize("variant", ["ring", "gather"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_latents_go_only_where_they_are_seen(size, variant):
    dims = (4, 8, 4, 8, 12)
    for parents, lengths in (
        ([-1, 0, 0, 0], [60, 40, 40, 10]),
        random_tree(random.Random(size), segments=8, longest=60),
    ):
        tree = Tree(parents, lengths)
        inputs, rows = tensors([tree.num_tokens], dims, torch.bfloat16), minimum_rows(TreeCase(size, parents, lengths))
        for send, row in (("latent", 12 + 4), ("kv", 4 * (12 + 8))):
            forward, backward = sent_on(tree, size, inputs, send=send, variant=variant)
            assert forward == rows * row * 2
            assert backward == rows * row * (2 + 4)


def test_ranks_that_disagree_all_hear_of_it():
    tree, other = Tree([-1, 0, 0], [20, 12, 8]), Tree([-1, 0, 1], [20, 12, 8])
    inputs = tensors([40], (2, 4, 2, 4, 6), torch.float64)

    def main(on_one):
        comm = hdp.init()

        def call(pack):
            mine = {n: x if n == "w_kv" else shard(x, pack, rank=comm.rank, size=3) for n, x in inputs.items()}
            return mla_attention(*(mine[name] for name in NAMES), comm=comm, cu_seqlens=pack)

        found = None
        try:
            call(on_one if comm.rank == 1 else tree)
        except hdp.Error as raised:
            found = raised
        assert call(tree).shape[1:] == (2, 4)
        return found

    for found in run_threads(main, 3, other, timeout=30):
        with pytest.raises(Mismatch, match="a tree of 3 segments with 40 tokens"):
            raise found
    with pytest.raises(InvalidUsage, match="a child before its parent"):
        Tree([1, -1], [20, 20])

"""Masks of one's own equal dense attention under them; blocks that nobody sees are neither sent nor computed.

HDPCOMM_TEST_TREES: how many random packs and trees are given as masks (default 8).
"""

import os
import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import BlockMask, as_pack, positions, ring_attention, shard, unshard
from hdpcomm.attention.ring import find_atoms, ring_plan
from hdpcomm.attention.tiles import Band
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import error
from tests.harness.tree_oracle import TreeCase, expected, random_tree, trajectories

TREES = int(os.environ.get("HDPCOMM_TEST_TREES", "8"))
DOCUMENT = torch.arange(1000) // 37
NOISE = torch.randint(0, 2, (400, 400), generator=torch.Generator().manual_seed(1)).bool()


def causal(b, h, q, kv):  # noqa: ARG001
    return kv <= q


def prefix(b, h, q, kv):  # noqa: ARG001
    return (kv <= q) | (kv < 30)


def documents(b, h, q, kv):  # noqa: ARG001
    return (DOCUMENT[q] == DOCUMENT[kv]) & (kv <= q)


def noise(b, h, q, kv):  # noqa: ARG001
    return NOISE[q, kv]


def some_blind(b, h, q, kv):  # noqa: ARG001
    return (kv <= q) & (q % 5 != 0)


def nothing(b, h, q, kv):  # noqa: ARG001
    return (kv < 0) & (q < 0)


MASKS = {mask.__name__: mask for mask in (causal, prefix, documents, noise, some_blind, nothing)}


def tensors(tokens, heads, kv_heads, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "dout": heads}
    return {n: torch.randn(tokens, h, 8, dtype=torch.float64, generator=generator).to(dtype) for n, h in shapes.items()}


def dense(x, mask, tokens):
    leaves = [x[name].double().clone().requires_grad_() for name in ("q", "k", "v")]
    q, k, v = (t.transpose(0, 1).repeat_interleave(x["q"].shape[1] // t.shape[1], 0) for t in leaves)
    place = torch.arange(tokens)
    seen = mask(None, None, place[:, None], place[None, :])
    weights = torch.exp(q @ k.transpose(1, 2) / 8**0.5) * seen
    out = (weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ v).transpose(0, 1)
    grads = torch.autograd.grad(out, leaves, x["dout"].double())
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def results(size, mask, tokens, x, **options):
    pack = BlockMask(mask, tokens, block=options.pop("block", 32))

    def main():
        comm = hdp.init()
        mine = {name: shard(t, pack, rank=comm.rank, size=comm.size) for name, t in x.items()}
        leaves = [mine[name].requires_grad_() for name in ("q", "k", "v")]
        out = ring_attention(
            *leaves, comm=comm, cu_seqlens=BlockMask(mask, tokens, block=pack.block), **with_options(**options)
        )
        out.backward(mine["dout"])
        return {"out": out.detach(), **{"d" + n: t.grad for n, t in zip("qkv", leaves, strict=True)}}

    parts = run_threads(main, size)
    return {name: unshard([part[name] for part in parts], pack) for name in parts[0]}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_any_mask_is_exact(name, size):
    for tokens, dtype, limit in ((300, torch.float64, 1e-10), (129, torch.float32, 2e-5), (1, torch.float64, 1e-10)):
        x = tensors(tokens, 4, 2, dtype)
        got, want = results(size, MASKS[name], tokens, x), dense(x, MASKS[name], tokens)
        for key in want:
            assert error(got[key], want[key]) <= limit, (key, tokens)


def tree_mask(case, blind):
    """The mask of a tree, token by token: those before a token on its way from the root, and itself; or nothing."""
    seen = torch.zeros(sum(case.lengths), sum(case.lengths), dtype=torch.bool)
    for places in trajectories(case.parents, case.lengths):
        for i, place in enumerate(places):
            first = 0 if case.window is None else max(0, i + 1 - case.window)
            seen[place, places[first : i + 1]] = True
    seen[blind] = False
    return lambda b, h, q, kv: seen[q, kv]  # noqa: ARG005


@pytest.mark.parametrize("seed", range(TREES))
def test_random_packs_and_trees_as_masks(seed):
    """Trees, packs of sequences (trees of roots), windows, queries that see nothing, blocks of any size."""
    rng = random.Random(seed)
    parents, lengths = random_tree(rng, segments=rng.randint(1, 10), longest=rng.choice([30, 200]))
    if rng.random() < 0.3:
        parents = [-1] * len(lengths)
    case = TreeCase(1 + seed % 4, parents, lengths, heads=4, kv_heads=rng.choice([1, 2, 4]), seed=seed,
                    window=rng.choice([None, 1, 9, 60]))  # fmt: skip
    tokens = sum(lengths)
    blind = sorted(rng.sample(range(tokens), rng.choice([0, 0, tokens // 3])))
    mask, x = tree_mask(case, blind), {n: t for n, t in case.tensors().items() if n != "sinks"}
    options = {"variant": rng.choice(["auto", "ring", "gather"]), "block": rng.choice([1, 5, 32, 128])}
    got, want = results(case.size, mask, tokens, x, **options), dense(x, mask, tokens)
    for key in want:
        assert error(got[key], want[key]) <= 1e-10, (key, case, options, blind)
    if not blind:
        for key, exact in expected(case).items():
            assert exact is None or error(got[key], exact) <= 1e-10, (key, case, options)


@pytest.mark.parametrize("options", [{"variant": "gather"}, {"variant": "ulysses"}, {"variant": "hybrid"},
                                     {"backend": "reference"}, {"block": 7}], ids=str)  # fmt: skip
def test_every_variant(options):
    x = tensors(150, 4, 2, torch.float64)
    for mask in (prefix, some_blind):
        got, want = results(4, mask, 150, x, **options), dense(x, mask, 150)
        for key in want:
            assert error(got[key], want[key]) <= 1e-10, key


def test_unseen_blocks_are_neither_sent_nor_computed():
    pack = BlockMask(documents, 37 * 16, block=37)
    layout = as_pack(pack).layout(4)
    assert not find_atoms(layout, layout, Band(None, None)).needed.any()  # a block is a document
    pairs = 0
    for rank in range(4):
        tiles = [tile for step in ring_plan(layout, layout, Band(None, None), rank=rank).steps for tile in step.tiles]
        assert sum(tile.num_q * tile.num_k for tile in tiles) == 4 * 37 * 37
        pairs += sum(tile.pairs for tile in tiles)
    assert pairs == 16 * 37 * 38 // 2
    far = as_pack(BlockMask(lambda b, h, q, kv: (q >= 224) & (kv < 32), 256, block=32)).layout(4)  # noqa: ARG005
    atoms = find_atoms(far, far, Band(None, None))
    assert (atoms.rows * atoms.needed.sum(axis=1)).tolist() == [32, *[0] * 7]


def test_work_and_tokens_are_balanced():
    layout = as_pack(BlockMask(causal, 4096, block=64)).layout(4)
    work = [int(layout.seen[layout.owner == rank].sum()) for rank in range(4)]
    assert max(work) <= 1.01 * sum(work) / 4
    assert {layout.rows(rank) for rank in range(4)} == {1024}


def test_positions():
    pack = BlockMask(documents, 300, positions=torch.arange(300) % 37)
    for rank in range(3):
        place = {"rank": rank, "size": 3}
        want = shard(torch.arange(300) % 37, pack, **place)
        assert torch.equal(positions(pack, **place), want)
    plain = BlockMask(documents, 300)
    assert torch.equal(positions(plain, rank=1, size=2), shard(torch.arange(300), plain, rank=1, size=2))


def fails(b, h, q, kv):  # noqa: ARG001
    raise ZeroDivisionError("oh")


BAD = {
    "raises": (fails, r"mask_mod failed on queries \(0, \d+\).*ZeroDivisionError: oh"),
    "float": (lambda b, h, q, kv: (kv - q).float(), "mask_mod gave torch.float32 on cpu; expected a bool"),  # noqa: ARG005
    "not a tensor": (lambda b, h, q, kv: True, "mask_mod gave bool; expected a bool tensor"),  # noqa: ARG005
    "shape": (lambda b, h, q, kv: torch.ones(3, 7, dtype=torch.bool), r"gave the shape \(3, 7\)"),  # noqa: ARG005
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mask_of_one_rank_is_an_error_on_all(name):
    mask, message = BAD[name]
    x = tensors(40, 2, 2, torch.float64)
    good = BlockMask(causal, 40)

    def main():
        comm = hdp.init()
        q, k, v = (shard(x[n], good, rank=comm.rank, size=comm.size) for n in ("q", "k", "v"))
        with pytest.raises(InvalidUsage, match=message):
            ring_attention(q, k, v, comm=comm, cu_seqlens=BlockMask(mask, 40) if comm.rank == 1 else good)
        return ring_attention(q, k, v, comm=comm, cu_seqlens=good)

    assert sum(len(part) for part in run_threads(main, 3, timeout=30)) == 40


def test_bad_arguments():
    x = tensors(40, 2, 2, torch.float64)
    q, k, v = x["q"], x["k"], x["v"]
    mask = BlockMask(causal, 40)
    with pytest.raises(InvalidUsage, match="window=3 was given with a mask"):
        ring_attention(q, k, v, comm=None, cu_seqlens=mask, window=3)
    with pytest.raises(InvalidUsage, match="cu_seqlens_k was given with a tree, a mask or a slice"):
        ring_attention(q, k, v, comm=None, cu_seqlens=mask, **with_options(cu_seqlens_k=[0, 40]))
    with pytest.raises(InvalidUsage, match="it has no masks of one's own; use cpu or reference"):
        ring_attention(q, k, v, comm=None, cu_seqlens=mask, backend="flash")
    with pytest.raises(InvalidUsage, match="num_tokens is 0 and block 128; expected at least 1"):
        BlockMask(causal, 0)
    with pytest.raises(InvalidUsage, match=r"positions have shape \(3,\)"):
        BlockMask(causal, 4, positions=torch.arange(3))

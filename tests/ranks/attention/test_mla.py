"""Multi-head latent attention: whatever travels, output and gradients are those of dense attention in float64."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.attention import AttentionCosts, Tree, as_pack, mla_attention, shard, unshard
from hdpcomm.attention.api import choose_send
from hdpcomm.attention.backends import Problem
from hdpcomm.attention.tiles import band_of
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import Case, error
from tests.ranks.attention.test_attention_traffic import minimum_rows

EXAMPLES = int(os.environ.get("HDPCOMM_TEST_PACKS", "25"))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
NAMES = ("q", "c_kv", "k_rope", "w_kv")


def tensors(lengths, dims, dtype, seed=0):
    """Inputs of a whole pack; ``dims``: heads, nope_dim, rope_dim, v_dim, rank."""
    heads, nope, rope, v, rank = dims
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = [(total, heads, nope + rope), (total, rank), (total, rope), (heads * (nope + v), rank), (total, heads, v)]
    made = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    made[3] /= rank**0.5
    return dict(zip((*NAMES, "dout"), (x.to(dtype) for x in made), strict=True))


def dense(lengths, dims, inputs, scale=None):
    """Each sequence by the definition, in float64: K and V of all heads, one softmax over a dense mask."""
    heads, nope, rope, v, _ = dims
    leaves = [inputs[name].double().clone().requires_grad_() for name in NAMES]
    q, c_kv, k_rope, w_kv = leaves
    weight = w_kv.view(heads, nope + v, -1)
    outs = []
    for a, b in zip(np.cumsum([0, *lengths])[:-1], np.cumsum(lengths), strict=True):
        k = torch.einsum("tr,hnr->htn", c_kv[a:b], weight[:, :nope])
        scores = torch.einsum("thn,hsn->hts", q[a:b, :, :nope], k)
        scores = scores + torch.einsum("thr,sr->hts", q[a:b, :, nope:], k_rope[a:b])
        scores = scores * ((nope + rope) ** -0.5 if scale is None else scale)
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hts,sr,hvr->thv", weights, c_kv[a:b], weight[:, nope:]))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, leaves, inputs["dout"].double())
    return [out.detach(), *grads]


def on_ranks(size, lengths, inputs, pack=None, **options):
    """Output, and gradients of q, c_kv, k_rope and w_kv, in the order of the pack."""
    cu = np.cumsum([0, *lengths]) if pack is None else pack

    def main():
        comm = hdp.init()
        mine = {n: x if n == "w_kv" else shard(x, cu, rank=comm.rank, size=size) for n, x in inputs.items()}
        leaves = [mine[name].clone().requires_grad_() for name in NAMES]
        out = mla_attention(*leaves, comm=comm, cu_seqlens=cu, **with_options(**options))
        out.backward(mine["dout"])
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    parts = list(zip(*run_threads(main, size), strict=True))
    return [*(unshard(part, cu) for part in parts[:4]), sum(part.double() for part in parts[4])]


def check(size, lengths, dims, dtype, seed=0, scale=None, **options):
    inputs = tensors(lengths, dims, dtype, seed)
    wanted = dense(lengths, dims, inputs, scale)
    found = on_ranks(size, lengths, inputs, scale=scale, **options)
    for name, got, want in zip(("out", *NAMES), found, wanted, strict=True):
        assert error(got, want) <= TOLERANCE[dtype], (name, error(got, want), size, lengths, dims, options)


@st.composite
def packs(draw):
    size = draw(st.integers(1, 4))
    heads = draw(st.sampled_from([1, 2, 4]))
    shares = [n for n in range(2, size + 1) if size % n == 0 and heads % n == 0]
    variants = ["auto", "ring", "gather", *(["ulysses"] if size in shares else [])]
    variants += ["hybrid"] if any(n < size for n in shares) else []
    return {
        "size": size,
        "lengths": draw(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=4)),
        "dims": (heads, *(draw(st.sampled_from(x)) for x in ([0, 3, 8], [2, 4], [1, 6, 16], [5]))),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "seed": draw(st.integers(0, 1000)),
        "scale": draw(st.sampled_from([None, 0.3])),
        "send": draw(st.sampled_from(["latent", "latent", "kv", "auto"])),
        "variant": draw(st.sampled_from(variants)),
        "backend": draw(st.sampled_from(["auto", "reference"])),
    }  # fmt: skip


@given(packs())
@settings(max_examples=EXAMPLES, derandomize=True)
def test_any_pack_is_exact(pack):
    check(**pack)


@pytest.mark.parametrize("variant", ["ring", "gather", "hybrid", "ulysses"])
@pytest.mark.parametrize("send", ["latent", "kv"])
def test_every_variant(variant, send):
    check(4, [90, 13, 1, 41], (4, 8, 4, 6, 10), torch.float64, variant=variant, send=send)


@pytest.mark.parametrize("send", ["latent", "kv"])
def test_bfloat16_is_as_exact_as_one_process(send):
    lengths, dims = [300, 130, 31], (4, 16, 8, 16, 24)
    inputs = tensors(lengths, dims, torch.bfloat16)
    wanted = dense(lengths, dims, inputs)
    alone = on_ranks(1, lengths, inputs, send="kv")
    for size in (2, 4):
        found = on_ranks(size, lengths, inputs, send=send)
        for got, one, want in zip(found, alone, wanted, strict=True):
            assert error(got, want) <= 1.1 * error(one, want)


@pytest.mark.parametrize("variant", ["ring", "gather"])
@pytest.mark.parametrize("send", ["latent", "kv"])
def test_on_a_tree_each_branch_is_its_own_sequence(send, variant):
    """Two answers to one prompt: each with the prompt before it is a sequence of its own; shared gradients add up."""
    prompt, answers, dims = 40, (17, 30), (2, 4, 2, 6, 5)
    inputs = tensors([prompt + sum(answers)], dims, torch.float64)
    first = np.r_[: prompt + answers[0]]
    second = np.r_[:prompt, prompt + answers[0] : prompt + sum(answers)]
    inputs["dout"][:prompt] = 0.0  # only answers have a loss
    found = on_ranks(3, None, inputs, Tree([-1, 0, 0], [prompt, *answers]), send=send, variant=variant)
    total = [torch.zeros_like(x) for x in found]
    for rows in (first, second):
        part = {n: x if n == "w_kv" else x[rows] for n, x in inputs.items()}
        for i, (x, whole) in enumerate(zip(dense([len(rows)], dims, part), total, strict=True)):
            if i == 0:
                whole[rows] = x
            elif i == 4:
                whole += x
            else:
                whole[rows] += x
    assert all(error(got, want) <= 1e-10 for got, want in zip(found, total, strict=True))


def test_several_uses_in_one_graph_and_checkpoints():
    lengths, dims = [40, 9], (2, 4, 2, 4, 6)
    inputs = tensors(lengths, dims, torch.float64)
    cu = np.cumsum([0, *lengths])

    def main(again):
        comm = hdp.init()
        mine = {n: x if n == "w_kv" else shard(x, cu, rank=comm.rank, size=2) for n, x in inputs.items()}
        leaves = [mine[name].clone().requires_grad_() for name in NAMES]

        def layer(*x):
            return mla_attention(*x, comm=comm, cu_seqlens=cu, **with_options(send="latent"))

        def once(*x):
            return torch.utils.checkpoint.checkpoint(layer, *x, use_reentrant=False) if again else layer(*x)

        (once(*leaves) * once(*leaves)).sum().backward()
        return [leaf.grad for leaf in leaves]

    for plain, repeated in zip(run_threads(main, 2, False), run_threads(main, 2, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))


def test_autocast_changes_nothing():
    inputs, cu = tensors([40, 9], (2, 4, 2, 4, 6), torch.float32), [0, 40, 49]

    def main(cast):
        comm = hdp.init()
        mine = {n: x if n == "w_kv" else shard(x, cu, rank=comm.rank, size=2) for n, x in inputs.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            return mla_attention(
                *(mine[name] for name in NAMES), comm=comm, cu_seqlens=cu, **with_options(send="latent")
            )

    for plain, cast in zip(run_threads(main, 2, False), run_threads(main, 2, True), strict=True):
        assert torch.equal(plain, cast)


def sent(size, lengths, dims, dtype, **options):
    return sent_on(np.cumsum([0, *lengths]), size, tensors(lengths, dims, dtype), **options)


def sent_on(cu, size, inputs, **options):
    """(forward, backward) bytes that all ranks send."""

    def main():
        comm = hdp.init()
        mine = {n: x if n == "w_kv" else shard(x, cu, rank=comm.rank, size=size) for n, x in inputs.items()}
        leaves = [mine[name].clone().requires_grad_() for name in NAMES]
        counts = [comm.stats()["bytes_sent"]]
        out = mla_attention(*leaves, comm=comm, cu_seqlens=cu, **with_options(check=False, **options))
        counts.append(comm.stats()["bytes_sent"])
        out.sum().backward()
        counts.append(comm.stats()["bytes_sent"])
        return counts[1] - counts[0], counts[2] - counts[1]

    return [sum(part) for part in zip(*run_threads(main, size), strict=True)]


@pytest.mark.parametrize("variant", ["ring", "gather"])
@pytest.mark.parametrize(("size", "lengths"), [(4, [301, 64, 3, 1, 17]), (3, [128])])
def test_the_bytes_are_those_of_the_tokens_that_others_need(size, lengths, variant):
    dims = (4, 8, 4, 8, 12)
    rows = minimum_rows(Case(size, lengths))
    for send, row in (("latent", 12 + 4), ("kv", 4 * (12 + 8))):
        forward, backward = sent(size, lengths, dims, torch.bfloat16, send=send, variant=variant)
        assert forward == rows * row * 2
        assert backward == rows * row * (2 + 4)


def test_the_latent_is_sent_where_the_link_is_slow():
    shape = Problem("cpu", torch.bfloat16, heads=128, kv_heads=128, head_dim=192, v_head_dim=128, latent_dim=576)
    layouts = (as_pack([0, 4096]).layout(4),) * 2
    fast = AttentionCosts(flops_per_s=1e9, bytes_per_s=1e15, message_s=0.0, call_s=0.0)
    slow = AttentionCosts(flops_per_s=1e15, bytes_per_s=1e9, message_s=0.0, call_s=0.0)
    for variant in ("ring", "gather", "auto"):
        assert choose_send(variant, shape, layouts, band_of(True, None), fast) == "kv"
        assert choose_send(variant, shape, layouts, band_of(True, None), slow) == "latent"
    assert choose_send("ring", shape, (as_pack([0, 9]).layout(1),) * 2, band_of(True, None), slow) == "kv"


BAD = {
    "send": ({"send": "both"}, "send='both'; expected one of auto, latent, kv"),
    "dimensions": ({"k_rope": torch.zeros(9, dtype=torch.float64)}, r"expected q \[tokens, heads, nope_dim"),
    "weight": ({"w_kv": torch.zeros(15, 6, dtype=torch.float64)}, "these shapes do not belong together"),
    "rank": ({"w_kv": torch.zeros(16, 5, dtype=torch.float64)}, "these shapes do not belong together"),
    "types": ({"w_kv": torch.zeros(16, 6)}, "must have one type"),
    "scale": ({"scale": float("inf")}, "expected a finite number"),
    "empty": ({"cu_seqlens": [0, 40, 40, 49]}, "sequence 1 of cu_seqlens is empty"),
    "tokens": ({"cu_seqlens": [0, 30]}, r"q has \d+ tokens; under cu_seqlens"),
    "variant": ({"variant": "ulysses"}, "cannot share 2 heads"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank_are_an_error_on_all(name):
    changes, message = BAD[name]
    for found in _errors(changes):
        with pytest.raises(InvalidUsage, match=message):
            raise found


def test_ranks_that_disagree_all_hear_of_it():
    for found in _errors({"send": "kv"}, send="latent"):
        with pytest.raises(Mismatch, match="called with different arguments"):
            raise found


def test_nan_is_found_on_all_ranks():
    def spoil(x):
        x["c_kv"][3, 1] = torch.nan

    for found in _errors(spoil):
        with pytest.raises(InvalidUsage, match="c_kv holds NaN or infinity"):
            raise found


def _errors(changes, **common):
    """The error of each of three ranks when rank 1 has other arguments; a good call follows."""
    lengths, dims = [40, 9], (2, 4, 2, 4, 6)
    inputs, cu = tensors(lengths, dims, torch.float64), np.cumsum([0, *lengths])

    def main():
        comm = hdp.init()
        mine = {n: x if n == "w_kv" else shard(x, cu, rank=comm.rank, size=3) for n, x in inputs.items()}
        good = [mine[name].clone() for name in NAMES]
        call = {**dict(zip(NAMES, (x.clone() for x in good), strict=True)), "cu_seqlens": cu, **common}
        if comm.rank == 1:
            if callable(changes):
                changes(call)
            else:
                call.update(changes)
        found, arguments = None, [call.pop(name) for name in NAMES]
        try:
            mla_attention(*arguments, comm=comm, **with_options(**call))
        except hdp.Error as raised:
            found = raised
        assert mla_attention(*good, comm=comm, cu_seqlens=cu).shape == mine["dout"].shape
        return found

    return run_threads(main, 3, timeout=30)

"""Distributed attention equals plain attention: all group sizes, masks, variants, types; forward and gradients."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.attention import ring_attention, shard, unshard
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import GRADS, Case, check, error, expected, on_rank, on_ranks, plain

EXAMPLES = int(os.environ.get("HDPCOMM_TEST_PACKS", "60"))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
LENGTH = st.one_of(st.integers(1, 30), st.integers(1, 300), st.integers(1, 2000))


@st.composite
def cases(draw):
    size = draw(st.integers(1, 8))
    lengths = draw(st.lists(LENGTH, min_size=1, max_size=4).filter(lambda x: sum(x) <= 2500))
    keys = draw(st.one_of(st.none(), st.lists(st.integers(0, 400), min_size=len(lengths), max_size=len(lengths))))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4), (1, 4), (4, 1)]))
    limit = st.one_of(st.just(-1), st.integers(0, 100))
    return Case(
        size=size,
        lengths=lengths,
        keys=keys,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 4, 8, 16])),
        v_dim=draw(st.sampled_from([None, None, 1, 6, 12])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.integers(1, 500), st.tuples(limit, limit))),
        scale=draw(st.sampled_from([None, None, None, 0.3, 0.0, -0.4])),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.0, 3.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        options={"variant": draw(st.sampled_from(["auto", "ring", "gather", "ulysses", "hybrid"]))},
    )


def _possible(case):
    """The case, or the same with the ring if its heads cannot be shared as its variant needs."""

    def shares(n):
        return case.size % n == 0 and case.heads % n == 0 and (case.kv_heads % n == 0 or n % case.kv_heads == 0)

    name = case.options["variant"]
    fits = {"ulysses": shares(case.size), "hybrid": any(shares(n) for n in range(2, case.size))}
    if case.size > 1 and not fits.get(name, True):
        case.options["variant"] = "ring"
    return case


@given(cases())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def test_any_case_is_exact(case):
    check(_possible(case), TOLERANCE[case.dtype])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_group_size(size, dtype):
    check(
        Case(size, [257, 1, 2, 64, 33], heads=4, kv_heads=2, dtype=dtype, options={"variant": "ring"}), TOLERANCE[dtype]
    )


MASKS = {
    "causal": {},
    "full": {"causal": False},
    "sliding": {"window": 20},
    "two-sided": {"causal": False, "window": (9, 4)},
    "lookahead": {"causal": False, "window": (-1, 5)},
    "narrow": {"window": 1},
    "longer keys": {"keys": [300, 20, 5, 61]},
    "shorter keys": {"keys": [100, 3, 0, 2]},
    "longer keys, sliding": {"keys": [300, 20, 5, 61], "window": 31},
    "softcap": {"softcap": 2.0},
    "narrow values": {"v_dim": 5},
    "wide values": {"v_dim": 12, "window": 20},
    "sinks": {"sinks": True},
    "sliding with sinks": {"sinks": True, "window": 20},
}


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "hybrid"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_variant(variant, mask):
    check(Case(4, [150, 7, 1, 61], heads=4, kv_heads=2, **MASKS[mask], options={"variant": variant}), 1e-12)


def test_shared_kv_heads_in_head_groups():
    """Fewer kv heads than ranks: several ranks hold the same kv head, and their gradients are added."""
    check(Case(4, [90, 13], heads=4, kv_heads=1, options={"variant": "ulysses"}), 1e-12)
    check(Case(6, [90, 13], heads=6, kv_heads=2, options={"variant": "hybrid"}), 1e-12)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_cpu_backend(backend):
    check(Case(3, [120, 9], heads=4, kv_heads=2, window=17, options={"backend": backend}), 1e-12)


@pytest.mark.parametrize("changes", [{}, {"keys": [140, 40]}, {"causal": False}])
def test_backward_in_blocks(changes, monkeypatch):
    monkeypatch.setattr("hdpcomm.attention.backends.dense._BACKWARD_BLOCK", 16)
    check(Case(3, [120, 50], heads=4, kv_heads=2, **changes, options={"backend": "cpu"}), 1e-12)


def _single_device(case):
    """torch's own operator in the case's type, on whole sequences: output and gradients."""
    x = case.tensors()
    leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v")]
    outs = []
    for a, b in zip(case.cu, case.cu[1:], strict=False):
        q, k, v = (leaf[a:b].transpose(0, 1)[None] for leaf in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs)
    out.backward(x["dout"])
    return dict(zip(GRADS, (out.detach(), *(leaf.grad for leaf in leaves)), strict=True))


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "hybrid"])
def test_bfloat16_is_as_exact_as_one_device_for_any_group(variant):
    lengths = [384, 130, 31]
    errors = {}
    for size in (1, 2, 4, 8):
        options = {"variant": variant}
        case = _possible(Case(size, lengths, heads=8, kv_heads=2, dim=16, dtype=torch.bfloat16, options=options))
        want, alone, got = expected(case), _single_device(case), on_ranks(case)
        for name in GRADS:
            errors[name, size] = error(got[name], want[name])
            assert errors[name, size] <= 1.5 * error(alone[name], want[name]), (name, size)
    for name in GRADS:  # it does not grow with the group
        assert errors[name, 8] <= 1.1 * errors[name, 1]


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "hybrid"])
def test_runs_are_bitwise_the_same(variant):
    case = Case(4, [222, 31], heads=4, kv_heads=2, dtype=torch.float32, options={"variant": variant})
    first, second = on_ranks(case), on_ranks(case)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_lse_is_the_log_of_the_sum():
    case = Case(3, [40, 5], keys=[44, 2], sinks=True)
    got, x = on_ranks(case), case.tensors()
    ones = torch.ones_like(x["v"])
    without = Case(3, [40, 5], keys=[44, 2])
    weight = plain(case, x["q"], x["k"], ones, x["sinks"])[..., 0]  # what the keys keep of the weight: 1 - the sink's
    seen = plain(without, x["q"], x["k"], ones, x["sinks"])[..., 0]
    torch.testing.assert_close(torch.exp(x["sinks"] - got["lse"]), 1 - weight, atol=1e-12, rtol=1e-12)
    assert on_ranks(without)["lse"][seen == 0].eq(-torch.inf).all()
    assert (seen == 0).any()


def process_main(case):
    with hdp.init() as comm:
        return os.getpid(), on_rank(case, comm)


def test_ranks_may_be_processes(ranks):
    case = Case(2, [100, 3], heads=4, kv_heads=2)
    results = ranks(2, process_main, case)
    assert len({pid for pid, _ in results}) == 2
    want = on_ranks(case)
    for name in GRADS:
        assert torch.equal(unshard([result[name] for _, result in results], case.cu), want[name])


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses"])
def test_a_dense_batch_on_ranks_without_tokens(variant):
    """One token on three ranks: two of them hold none, and take part."""
    q, k, v = (torch.randn(2, 1, 3, 4, dtype=torch.float64) for _ in range(3))

    def main():
        comm = hdp.init()
        mine = [
            torch.stack([shard(row, [0, 1], rank=comm.rank, size=3) for row in x]).requires_grad_() for x in (q, k, v)
        ]
        out, lse = ring_attention(*mine, comm=comm, cu_seqlens=[0, 1], return_lse=True, **with_options(variant=variant))
        out.sum().backward()
        assert lse.shape == out.shape[:3]
        return out.detach(), mine[2].grad

    results = run_threads(main, 3)
    assert sorted(out.shape[1] for out, _ in results) == [0, 0, 1]
    assert torch.equal(torch.cat([out for out, _ in results], 1), v)  # a token that sees itself only
    assert torch.equal(torch.cat([grad for _, grad in results], 1), torch.ones_like(v))

"""Short convolutions over ranks: torch's Conv1d on each sequence, output, gradients and bytes."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdpcomm as hdp
from hdpcomm.attention import shard, short_conv, unshard
from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import Case
from tests.ranks.attention.test_attention_traffic import minimum_rows

EXAMPLES = int(os.environ.get("HDPCOMM_TEST_PACKS", "25"))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2}


def tensors(lengths, channels, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), channels), (channels, width), (channels,), (sum(lengths), channels)]
    made = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return dict(zip(("x", "weight", "bias", "dout"), made, strict=True))


def wanted(lengths, inputs):
    x, weight, bias = (inputs[n].double().clone().requires_grad_() for n in ("x", "weight", "bias"))
    channels, width = weight.shape
    outs = [
        torch.nn.functional.conv1d(part.T[None], weight[:, None], bias, padding=width - 1, groups=channels)[0].T
        for part in x.split(lengths)
    ]
    out = torch.cat([y[:n] for y, n in zip(outs, lengths, strict=True)])
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), inputs["dout"].double())]


def run(size, lengths, inputs, *, check=None):
    """(out and gradients in the order of the pack, bytes sent forward and backward)."""
    cu = np.cumsum([0, *lengths])

    def main():
        comm = hdp.init()
        x, dout = (shard(inputs[n], cu, rank=comm.rank, size=size) for n in ("x", "dout"))
        leaves = [x.clone().requires_grad_(), *(inputs[n].clone().requires_grad_() for n in ("weight", "bias"))]
        counts = [comm.stats()["bytes_sent"]]
        out = short_conv(leaves[0], leaves[1], bias=leaves[2], comm=comm, cu_seqlens=cu, **with_options(check=check))
        counts.append(comm.stats()["bytes_sent"])
        out.backward(dout)
        counts.append(comm.stats()["bytes_sent"])
        return out.detach(), *(leaf.grad for leaf in leaves), counts[1] - counts[0], counts[2] - counts[1]

    out, dx, dweight, dbias, forward, backward = zip(*run_threads(main, size), strict=True)
    whole = [unshard(out, cu), unshard(dx, cu), sum(x.double() for x in dweight), sum(x.double() for x in dbias)]
    return whole, (sum(forward), sum(backward))


def check(size, lengths, channels, width, dtype, seed=0):
    inputs = tensors(lengths, channels, width, dtype, seed)
    found, _ = run(size, lengths, inputs)
    for name, got, want in zip(("out", "x", "weight", "bias"), found, wanted(lengths, inputs), strict=True):
        # gradients of parameters are sums over tokens, which may cancel: compared with the norm of what is added
        norm = max(float(want.norm()), sum(lengths) ** 0.5) if name in ("weight", "bias") else float(want.norm())
        wrong = float((got.double() - want).norm()) / norm
        assert wrong <= TOLERANCE[dtype], (name, wrong, size, lengths, channels, width)


@given(
    st.integers(1, 4),
    st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(list(TOLERANCE)),
    st.integers(0, 100),
)
@settings(max_examples=EXAMPLES, derandomize=True)
def test_any_pack_is_that_of_conv1d(size, lengths, channels, width, dtype, seed):
    check(size, lengths, channels, width, dtype, seed)


def test_pieces_shorter_than_the_kernel():
    check(4, [9, 1, 2, 3, 30], 2, 6, torch.float64)


@pytest.mark.parametrize("length", [64, 4096])
def test_the_bytes_are_those_of_the_past_of_each_piece(length):
    inputs = tensors([length, 17], 3, 4, torch.bfloat16)
    _, (forward, backward) = run(4, [length, 17], inputs, check=False)
    rows = minimum_rows(Case(4, [length, 17], window=4))
    assert forward == rows * 3 * 2
    assert backward == rows * 3 * 4  # gradients in float32


BAD = {
    "weight": ({"weight": torch.zeros(4, 3, dtype=torch.float64)}, r"expected x \[tokens, channels\] and weight"),
    "width": ({"weight": torch.zeros(3, 0, dtype=torch.float64)}, r"expected x \[tokens, channels\] and weight"),
    "bias": ({"bias": torch.zeros(1)}, r"bias must be \[channels\] = \(3,\)"),
    "tokens": ({"cu_seqlens": [0, 12]}, r"x has \d tokens; under cu_seqlens, rank 1 of 2"),
    "type": ({"x": torch.zeros(3, 3, dtype=torch.int64)}, "x has type torch.int64"),
    "nan": ({"x": torch.full((3, 3), torch.nan, dtype=torch.float64)}, "x holds NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank_are_an_error_on_all(name):
    changes, message = BAD[name]
    for found in errors(changes):
        with pytest.raises(InvalidUsage, match=message):
            raise found


def test_ranks_that_disagree_all_hear_of_it():
    for found in errors({"weight": torch.ones(3, 2, dtype=torch.float64)}):
        with pytest.raises(Mismatch, match="called with different arguments"):
            raise found


def errors(changes):
    """The error of each of two ranks when rank 1 has other arguments; a good call follows."""
    inputs, cu = tensors([6], 3, 4, torch.float64), [0, 6]

    def main():
        comm = hdp.init()
        good = {"x": shard(inputs["x"], cu, rank=comm.rank, size=2), "weight": inputs["weight"], "cu_seqlens": cu}
        call, found = {**good, **(changes if comm.rank == 1 else {})}, None
        x, weight = call.pop("x"), call.pop("weight")
        try:
            short_conv(x, weight, comm=comm, **with_options(**call))
        except hdp.Error as raised:
            found = raised
        assert short_conv(good["x"], good["weight"], comm=comm, cu_seqlens=cu).shape == good["x"].shape
        return found

    return run_threads(main, 2, timeout=30)

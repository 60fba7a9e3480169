"""The bytes that ranks send compared with the minimum: the KV that other ranks need, and its gradients."""

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import positions, ring_attention, shard
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import Case, visible

PACKS = {
    "one": Case(4, [512]),
    "five ranks": Case(5, [511, 40]),
    "mixed": Case(4, [301, 64, 3, 1, 17]),
    "eight ranks": Case(8, [640, 130]),
    "window": Case(4, [512, 90], window=24),
    "narrow window": Case(8, [512], window=2),
    "full": Case(3, [100, 31], causal=False),
    "two-sided": Case(4, [200], causal=False, window=(10, 3)),
    "longer keys": Case(4, [60, 9], keys=[200, 70]),
    "narrow values": Case(3, [100, 31], v_dim=5),
}


def minimum_rows(case):
    """Keys that some other rank's queries see, counted once for each such rank; by the dense mask."""
    total = 0
    q_cu, k_cu = torch.tensor(case.cu), torch.tensor(case.cu_k)
    for rank in range(case.size):
        q_at, k_at = (positions(cu, rank=rank, size=case.size) for cu in (q_cu, k_cu))
        q_seq, k_seq = (
            shard(torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff()), cu, rank=rank, size=case.size)
            for cu in (q_cu, k_cu)
        )
        for s, (n, m) in enumerate(zip(q_cu.diff().tolist(), k_cu.diff().tolist(), strict=True)):
            seen = visible(n, m, case.causal, case.window)[q_at[q_seq == s]].any(dim=0)
            seen[k_at[k_seq == s]] = False
            total += int(seen.sum())
    return total


def sent(case):
    """(forward, backward) bytes that all ranks send."""

    def main():
        comm = hdp.init()
        x = case.tensors()
        place = {"rank": comm.rank, "size": comm.size}
        q, k, v = (
            shard(x[name], cu, **place).requires_grad_()
            for name, cu in (("q", case.cu), ("k", case.cu_k), ("v", case.cu_k))
        )
        counts = [comm.stats()["bytes_sent"]]
        out = ring_attention(
            q, k, v, comm=comm, cu_seqlens=case.cu, causal=case.causal, window=case.window,
            **with_options(cu_seqlens_k=case.cu_k, check=False, **case.options),
        )  # fmt: skip
        counts.append(comm.stats()["bytes_sent"])
        out.sum().backward()
        counts.append(comm.stats()["bytes_sent"])
        return counts[1] - counts[0], counts[2] - counts[1]

    return [sum(part) for part in zip(*run_threads(main, case.size), strict=True)]


@pytest.mark.parametrize("variant", ["ring", "gather"])
@pytest.mark.parametrize("name", PACKS)
def test_nothing_is_sent_that_nobody_needs(name, variant):
    case = PACKS[name]
    case.options = {"variant": variant}
    rows, row = minimum_rows(case), case.kv_heads * (case.dim + (case.v_dim or case.dim))
    forward, backward = sent(case)
    assert forward == rows * row * case.dtype.itemsize
    assert backward == rows * row * (case.dtype.itemsize + 8)  # KV again, and its gradients in float64


def test_gradients_travel_in_float32_and_kv_in_its_own_type():
    case = Case(4, [512], dtype=torch.bfloat16, options={"variant": "ring"})
    rows, row = minimum_rows(case), 2 * case.kv_heads * case.dim
    forward, backward = sent(case)
    assert forward == rows * row * 2
    assert backward == rows * row * (2 + 4)


def test_a_causal_ring_sends_a_quarter_less_than_a_plain_one():
    case = PACKS["one"]
    case.options = {"variant": "ring"}
    plain_ring = case.size * (case.size - 1) * 512 // case.size * 2 * case.kv_heads * case.dim * 8
    assert sent(case)[0] == 0.75 * plain_ring


def test_one_rank_sends_nothing():
    assert sent(Case(1, [64])) == [0, 0]

"""Sequences of one batch on groups of different sizes: overlapping subsets, one order on all ranks."""

import torch

import hdpcomm as hdp
from hdpcomm.attention import ring_attention, shard, unshard
from hdpcomm.testing import run_threads
from tests.harness.attention_oracle import Case, error, expected

GROUPS = [([0, 1, 2], [200]), ([3], [31, 7]), ([2, 3], [64, 64]), ([3, 1, 0, 2], [301, 5]), ([1], [12]), ([2, 0], [90])]


def test_groups_of_any_size_and_order_in_one_batch():
    cases = [Case(len(ranks), lengths, heads=4, kv_heads=2, seed=i) for i, (ranks, lengths) in enumerate(GROUPS)]

    def main():
        world = hdp.init()
        outs, leaves, douts, results = [], [], [], {}
        for i, ((ranks, _), case) in enumerate(
            zip(GROUPS, cases, strict=True)
        ):  # forwards of all, then backwards of all
            group = world.subset(ranks)
            if group is None:
                continue
            x = {
                name: shard(t, case.cu, rank=group.rank, size=group.size)
                for name, t in case.tensors().items() if name != "sinks"
            }  # fmt: skip
            mine = [x[name].requires_grad_() for name in ("q", "k", "v")]
            outs.append((i, group.rank, ring_attention(*mine, comm=group, cu_seqlens=case.cu)))
            leaves.append(mine)
            douts.append(x["dout"])
        for (i, rank, out), mine, dout in list(zip(outs, leaves, douts, strict=True))[::-1]:
            results[i, rank] = (out.detach(), *torch.autograd.grad(out, mine, dout))
        return results

    results = {key: value for part in run_threads(main, 4) for key, value in part.items()}
    for i, case in enumerate(cases):
        want = expected(case)
        for j, name in enumerate(("out", "dq", "dk", "dv")):
            got = unshard([results[i, rank][j] for rank in range(case.size)], case.cu)
            assert error(got, want[name]) <= 1e-12, (i, name)

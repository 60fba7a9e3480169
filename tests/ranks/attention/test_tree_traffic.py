"""Trees send the keys that other ranks' queries see, each once, and less than flattened trajectories."""

import random

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import as_pack, ring_attention, shard
from hdpcomm.testing import run_threads
from tests.harness.attention_options import with_options
from tests.harness.attention_oracle import Case
from tests.harness.tree_oracle import TreeCase, random_tree, trajectories
from tests.ranks.attention.test_attention_traffic import sent as sent_flat


def owners(case):
    layout = as_pack(case.tree).layout(case.size)
    found = torch.empty(sum(case.lengths), dtype=torch.int64)
    for rank in range(case.size):
        found[shard(torch.arange(len(found)), case.tree, rank=rank, size=case.size)] = rank
    assert layout.tokens == len(found)
    return found.tolist()


def minimum_rows(case):
    """Keys that a query of another rank sees, once for each such rank; by the trajectories."""
    holder = owners(case)
    needed = {
        (places[j], holder[places[i]])
        for places in trajectories(case.parents, case.lengths)
        for i in range(len(places))
        for j in range(max(0, i + 1 - (case.window or len(places))), i + 1)
        if holder[places[j]] != holder[places[i]]
    }
    return len(needed)


def sent(case):
    """(forward, backward) bytes that all ranks send."""

    def main():
        comm = hdp.init()
        x = case.tensors()
        q, k, v = (shard(x[n], case.tree, rank=comm.rank, size=comm.size).requires_grad_() for n in "qkv")
        counts = [comm.stats()["bytes_sent"]]
        options = with_options(check=False, **case.options)
        out = ring_attention(q, k, v, comm=comm, cu_seqlens=case.tree, window=case.window, **options)
        counts.append(comm.stats()["bytes_sent"])
        out.sum().backward()
        counts.append(comm.stats()["bytes_sent"])
        return counts[1] - counts[0], counts[2] - counts[1]

    return [sum(part) for part in zip(*run_threads(main, case.size), strict=True)]


@pytest.mark.parametrize("variant", ["ring", "gather"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_nothing_is_sent_that_nobody_needs(size, window, variant):
    tree = random_tree(random.Random(size), segments=8, longest=60)
    for parents, lengths in (tree, ([-1, 0, 0, 0], [60, 40, 40, 10])):
        case = TreeCase(size, parents, lengths, window=window, options={"variant": variant})
        rows, row = minimum_rows(case), 2 * case.kv_heads * case.dim
        forward, backward = sent(case)
        assert forward == rows * row * 8
        assert backward == rows * row * (8 + 8)


def test_trees_send_less_than_flattened_trajectories():
    tree = TreeCase(2, [-1, 0, 0, 0, 0], [64, 32, 32, 32, 32], options={"variant": "ring"})
    flat = Case(2, [96] * 4, options={"variant": "ring"})
    row = 2 * tree.kv_heads * tree.dim * 8
    assert sent(tree)[0] == 64 * row  # each half of the prompt to the other rank
    assert sent_flat(flat)[0] == 4 * 72 * row  # of each trajectory a quarter one way and a half the other

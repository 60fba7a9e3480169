"""Chunked attention on any ranks: values and gradients by the definition, and no more traffic than chunks need."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hdpcomm as hdp
from hdpcomm.attention import AttentionOptions, as_pack, ring_attention
from hdpcomm.attention.tree_layout import chunked
from hdpcomm.errors import InvalidUsage
from hdpcomm.testing import run_threads
from tests.harness.attention_oracle import Case, check, on_rank

LENGTHS = [1, 7, 201, 399, 88]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 13, 64, 200, 1000])
def test_values_and_gradients(size: int, chunk: int) -> None:
    check(Case(size, LENGTHS, heads=4, kv_heads=2, options={"chunk": chunk}), 1e-10)


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "hybrid"])
def test_variants(variant: str) -> None:
    check(Case(4, LENGTHS, heads=4, kv_heads=4, sinks=True, options={"chunk": 50, "variant": variant}), 1e-10)


def test_a_window_inside_of_chunks() -> None:
    check(Case(3, LENGTHS, window=9, softcap=2.0, options={"chunk": 30}), 1e-10)


@pytest.mark.parametrize("seed", range(20))
def test_random_packs(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 5, rng.randint(1, 300)]) for _ in range(rng.randint(1, 6))]
    check(Case(rng.randint(1, 5), lengths, seed=seed, options={"chunk": rng.randint(1, 150)}), 1e-10)


@pytest.mark.parametrize("size", [2, 5])
def test_rows_are_where_plain_attention_has_them(size: int) -> None:
    layout = as_pack([0, 1, 8, 209, 608, 696]).layout(size)
    chunks = chunked(layout, 64)
    for rank in range(size):
        rows = [(source, row, count) for row, source, count in chunks.segments(rank).tolist()]
        mine = [source + i for source, _, count in rows for i in range(count)]
        wanted = [source + i for _, source, count in layout.segments(rank).tolist() for i in range(count)]
        assert mine == wanted
        assert [row for _, row, _ in rows] == [sum(n for *_, n in rows[:i]) for i in range(len(rows))]


def traffic(case: Case) -> int:
    with hdp.init() as comm:
        on_rank(case, comm)
        return comm.stats()["bytes_sent"]


def test_only_chunks_that_ranks_share_travel() -> None:
    """Four ranks cut 4,096 tokens at 512, 1,024, ...: chunks that end there move nothing, others their ends."""
    options: dict[str, Any] = {"variant": "ring", "check": False}
    sent = {
        chunk: sum(run_threads(traffic, 4, Case(4, [4096], options=options | {"chunk": chunk})))
        for chunk in (0, 512, 1024, 700)
    }
    assert sent[512] < 10_000  # the agreement on what is sent
    assert 0 < sent[1024] - sent[512] < sent[0] / 3
    assert sent[700] < sent[0] / 2


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"causal": False}, "chunk=4 was given with causal=False"),
        ({"cu_seqlens": hdp.plan.Tree([-1], [9])}, "chunk=4 was given with a tree"),
        ({"chunk": -1}, "chunk"),
        ({"chunk": 2.5}, "chunk"),
    ],
)
def test_refusals(changed: dict[str, Any], reason: str) -> None:
    q = torch.zeros(9, 1, 4)
    given: dict[str, Any] = {"cu_seqlens": [0, 9], "chunk": 4} | changed
    options = AttentionOptions(chunk=given.pop("chunk"))
    with pytest.raises(InvalidUsage, match=reason):
        ring_attention(q, q, q, comm=None, options=options, **given)

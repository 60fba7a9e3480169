"""What a rank fetches of a micro-batch: its shards, and no other token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdpcomm.plan import MicroBatch, SequenceInfo
from hdpcomm.train import next_token_labels, pack_shard

LENGTHS = (101, 1, 2, 64, 7)
TEXT = {i: torch.arange(length) + 1000 * i for i, length in enumerate(LENGTHS)}


class Parts:
    """Gives parts of sequences and counts what it gave."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.part(place, 0, LENGTHS[place])

    def part(self, place: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.given += stop - start
        return TEXT[place][start:stop], next_token_labels(TEXT[place])[start:stop]


def packed(size: int, rank: int, fetch: Any) -> Any:
    sequences = tuple(SequenceInfo(i, length) for i, length in enumerate(LENGTHS))
    batch = MicroBatch(0, tuple(range(size)), sequences, 0.0, 1.0)
    comm: Any = SimpleNamespace(rank=rank, size=size)
    return pack_shard(batch, fetch, comm=comm, device=torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_make_the_shard_of_the_whole(size: int) -> None:
    given = 0
    for rank in range(size):
        parts = Parts()
        own, whole = packed(size, rank, parts), packed(size, rank, lambda i: TEXT[i])
        for name in ("tokens", "labels", "positions", "cu_seqlens"):
            assert torch.equal(getattr(own, name), getattr(whole, name)), name
        assert parts.given == own.tokens.numel()
        given += parts.given
    assert given == sum(LENGTHS)

"""The scheduler for Megatron-Core: its rules, and its load beside Megatron's own scheduler where that is installed."""

from __future__ import annotations

import random

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations import MegatronScheduler


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def random_samples(rng: random.Random, ranks: int, limit: int) -> list[tuple[int, int]]:
    count = rng.choice([1, 2, 5, 30, 100])
    lengths = [max(1, int((ranks * limit) ** rng.random())) for _ in range(count)]
    return [(100 + i, length) for i, length in enumerate(lengths)]


def check_rules(samples: list[tuple[int, int]], ids: list[list[int]], ranks: int, limit: int) -> None:
    """Aligned groups of 2^k ranks that hold their sample, no rank without one, one global order."""
    assert len(ids) == ranks
    assert all(ids)
    members = {sample: [rank for rank in range(ranks) if sample in ids[rank]] for sample, _ in samples}
    for sample, length in samples:
        group = members[sample]
        assert group == list(range(group[0], group[0] + len(group)))
        assert len(group) & (len(group) - 1) == 0
        assert group[0] % len(group) == 0
        assert -(-length // len(group)) <= limit
    assert all(len(set(own)) == len(own) for own in ids)
    queues = [list(own) for own in ids]
    while any(queues):
        ready = [q[0] for q in queues if q and all(queues[r][:1] == [q[0]] for r in members[q[0]])]
        assert ready, "the ranks wait for each other in a circle"
        for rank in members[ready[0]]:
            queues[rank].pop(0)


def heaviest(ids: list[list[int]], samples: list[tuple[int, int]]) -> float:
    """The most work of a rank by Megatron's own estimate."""
    sizes = {sample: sum(sample in own for own in ids) for sample, _ in samples}
    work = {sample: length**2 / sizes[sample] for sample, length in samples}
    return max(sum(work[sample] for sample in own) for own in ids)


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_rules(ranks: int) -> None:
    rng = random.Random(ranks)
    for _ in range(30):
        samples = random_samples(rng, ranks, 1000)
        lengths, ids = MegatronScheduler(1000, Group(ranks)).get_groups_and_subsamples(samples, None)
        check_rules(samples, ids[0], ranks, 1000)
        by_id = dict(samples)
        assert lengths == [[[by_id[sample] for sample in own] for own in ids[0]]]


def test_bad_samples() -> None:
    scheduler = MegatronScheduler(1000, Group(4))
    assert scheduler.get_groups_and_subsamples([]) == ([], [])
    with pytest.raises(InvalidUsage, match="sample 3 has 4001 tokens, expected 1 to 4 ranks x 1000"):
        scheduler.get_groups_and_subsamples([(3, 4001), (4, 5)])
    with pytest.raises(InvalidUsage, match="sample 4 has 0 tokens"):
        scheduler.get_groups_and_subsamples([(3, 4000), (4, 0)])
    with pytest.raises(InvalidUsage, match="has 6 ranks"):
        MegatronScheduler(1000, Group(6))
    with pytest.raises(InvalidUsage, match="max_seq_len_per_rank is 0"):
        MegatronScheduler(0, Group(4))


def test_beside_megatrons_own_scheduler() -> None:
    """The same call, the same form of result, and less work on the heaviest rank on average."""
    found = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    rng = random.Random(5)
    ratios = []
    for _ in range(20):
        samples = random_samples(rng, 8, 1000)
        theirs = found.BalancedCPScheduler(1000, Group(8))
        _, groups = theirs.get_groups_and_subsamples(samples, None)
        ours = MegatronScheduler(1000, Group(8))
        for name in ("get_groups_and_subsamples", "gpus_needed", "total_hdp_gpus"):  # what Megatron-Core uses
            assert hasattr(ours, name)
            assert hasattr(theirs, name)
        _, own = ours.get_groups_and_subsamples(samples, None)
        assert isinstance(own[0][0], type(groups[0][0]))
        ratios.append(heaviest(own[0], samples) / sum(heaviest_of_group(group, samples) for group in groups))
    assert sum(ratios) / len(ratios) <= 1.0


def heaviest_of_group(ids: list[list[int]], samples: list[tuple[int, int]]) -> float:
    inside = {sample for own in ids for sample in own}
    return heaviest(ids, [sample for sample in samples if sample[0] in inside])

"""Micro-batches for Megatron-Core's packing scheduler: its rules, and what is said where its class has moved."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import CostModel

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

from megatron_packing import megatron_packing_scheduler, pack_micro_batches


def check_rules(
    samples: list[tuple[int, int]], groups: list[list[list[int]]], ranks: int, limit: int, least: int = 1
) -> None:
    """Each sample once, on one of the groups that Megatron-Core makes; equal samples on its ranks, within the limit."""
    lengths = dict(samples)
    made = {tuple(range(ranks))}
    for size in (1, 2, 4, 8, 16):
        if least <= size < ranks and 2 * size <= ranks:
            made |= {tuple(range(first, first + size)) for first in range(0, ranks - size + 1, size)}
    held = []
    for micro_batch in groups:
        assert len(micro_batch) == ranks
        members: dict[int, list[int]] = {}
        for rank, own in enumerate(micro_batch):
            assert own, "a rank without samples"
            for sample in own:
                members.setdefault(sample, []).append(rank)
        for own in micro_batch:
            group = members[own[0]]
            assert all(members[sample] == group for sample in own)
            assert tuple(group) in made
            assert sum(lengths[sample] for sample in own) <= limit * len(group)
        held += list(members)
    assert sorted(held) == sorted(lengths)


def random_samples(rng: random.Random, ranks: int, limit: int) -> list[tuple[int, int]]:
    count = rng.choice([1, 2, 5, 30, 80])
    return [(100 + i, max(1, int((ranks * limit) ** rng.random()))) for i in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 32])
def test_rules(ranks: int) -> None:
    rng = random.Random(ranks)
    for _ in range(20):
        limit = rng.choice([1, 7, 1000])
        least = rng.choice([1, 2, ranks]) if ranks > 1 else 1
        samples = random_samples(rng, ranks, limit)
        check_rules(samples, pack_micro_batches(samples, limit, ranks, min_ranks=least), ranks, limit, least)


@pytest.mark.parametrize("divisible_by", [2, 3])
@pytest.mark.parametrize("most", [2, 3])
def test_multiples_and_most_samples(divisible_by: int, most: int) -> None:
    rng = random.Random(most)
    for _ in range(10):
        samples = [(i, rng.choice([5, 90, 700, 3900])) for i in range(40)]
        groups = pack_micro_batches(samples, 1000, 4, divisible_by=divisible_by, max_samples=most)
        check_rules(samples, groups, 4, 1000)
        assert len(groups) % divisible_by == 0
        assert max(len(own) for micro_batch in groups for own in micro_batch) <= most


def test_order_of_samples_does_not_matter() -> None:
    samples = random_samples(random.Random(3), 8, 1000)
    assert pack_micro_batches(samples[::-1], 1000, 8) == pack_micro_batches(samples, 1000, 8)


def test_equal_samples_make_equal_ranks() -> None:
    """As few micro-batches as hold them, and as many samples on each rank."""
    groups = pack_micro_batches([(i, 500) for i in range(32)], 1000, 8)
    assert len(groups) == 2
    assert {len(own) for micro_batch in groups for own in micro_batch} == {2}


def test_costs_decide_how_wide_samples_run() -> None:
    """Where ring steps cost much, samples stay on the fewest ranks that hold them."""
    samples = [(i, 1000) for i in range(8)] + [(8, 4000)]
    dear = CostModel(attention=1e-9, linear=1e-6, ring_step=10.0)
    wide = {
        i: sum(i in own for own in group)
        for group in pack_micro_batches(samples, 1000, 8, cost_model=dear)
        for i in range(9)
    }
    assert max(wide.values()) <= 8
    groups = pack_micro_batches(samples[:8], 1000, 8, cost_model=dear)
    assert groups == [[[i] for i in range(8)]]


def test_bad_samples() -> None:
    assert pack_micro_batches([], 1000, 4) == []
    with pytest.raises(InvalidUsage, match="sample 3 has 4001 tokens, expected 1 to 4 ranks x 1000"):
        pack_micro_batches([(3, 4001), (4, 5)], 1000, 4)
    with pytest.raises(InvalidUsage, match="sample 4 has 0 tokens"):
        pack_micro_batches([(3, 4000), (4, 0)], 1000, 4)
    with pytest.raises(InvalidUsage, match="min_ranks 5 of 4"):
        pack_micro_batches([(3, 1)], 1000, 4, min_ranks=5)
    with pytest.raises(InvalidUsage, match=r"3 samples make no micro-batches .* multiple of 4"):
        pack_micro_batches([(i, 5) for i in range(3)], 1000, 4, divisible_by=4)


class Known:
    """Megatron-Core's class, as far as it is used."""

    def __init__(
        self, limit: int, cp: int, dp: int, stages: int | None, max_num_seqs: Any = None, min_cp_size: int = 1
    ):
        self.max_seqlen_per_dp_cp_rank, self.cp_size, self.dp_size, self.min_cp_size = limit, cp, dp, min_cp_size
        self.microbatch_group_size_per_vp_stage, self.max_num_seqs = stages, max_num_seqs

    def get_groups_and_subsamples(self, sample_id_seqlens: list[tuple[int, int]]) -> list[list[list[int]]]:
        return [[[sample] for _ in range(self.cp_size * self.dp_size)] for sample, _ in sample_id_seqlens]

    def run(self) -> str:
        return "Megatron's own"


class Renamed(Known):
    def get_groups_and_subsamples(self, sequences: Any) -> Any:  # type: ignore[override]
        return super().get_groups_and_subsamples(sequences)


class WithLengths(Known):
    def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Any:
        return [], super().get_groups_and_subsamples(sample_id_seqlens)


class WithoutLimit(Known):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.max_seqlen_per_dp_cp_rank


class OtherArguments(Known):
    def __init__(self, config: Any) -> None:
        super().__init__(config, 1, 1, None)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    modules = {name: ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.datasets")}
    schedule: Any = ModuleType("megatron.core.datasets.data_schedule")
    schedule.scheduler_map = {"dp_balanced": None, "default_dynamic_cp": None}
    modules["megatron"].core = modules["megatron.core"]  # type: ignore[attr-defined]
    modules["megatron.core"].__version__ = "9.8"  # type: ignore[attr-defined]
    modules["megatron.core.datasets"].data_schedule = schedule  # type: ignore[attr-defined]
    for name, module in {**modules, schedule.__name__: schedule}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return schedule


def test_takes_the_place_of_the_known_class(megatron: Any) -> None:
    megatron.DefaultDynamicCPScheduler = Known
    scheduler = megatron_packing_scheduler()(1000, 2, 2, None, max_num_seqs=None, min_cp_size=1)
    assert scheduler.run() == "Megatron's own"
    samples = [(0, 2000), (1, 900), (2, 800)]
    assert scheduler.get_groups_and_subsamples(samples) == pack_micro_batches(samples, 1000, 4)
    stages = megatron_packing_scheduler()(1000, 2, 2, 2, max_num_seqs=3, min_cp_size=2)
    expected = pack_micro_batches(samples, 1000, 4, min_ranks=2, divisible_by=2, max_samples=2)
    assert stages.get_groups_and_subsamples(samples) == expected


@pytest.mark.parametrize("moved", [Renamed, WithLengths, WithoutLimit, OtherArguments])
def test_says_that_the_class_has_moved(megatron: Any, moved: type) -> None:
    megatron.DefaultDynamicCPScheduler = moved
    with pytest.raises(InvalidUsage, match=r"megatron-core 9\.8: .*DefaultDynamicCPScheduler has another interface"):
        megatron_packing_scheduler()


def test_says_that_the_map_has_moved(megatron: Any) -> None:
    megatron.DefaultDynamicCPScheduler = Known
    megatron.scheduler_map = {5: Known}
    with pytest.raises(InvalidUsage, match=r"scheduler_map has \[5\], expected 'default_dynamic_cp'"):
        megatron_packing_scheduler()


@pytest.mark.usefixtures("megatron")
def test_says_what_older_versions_have() -> None:
    with pytest.raises(InvalidUsage, match=r"9\.8: .* has no DefaultDynamicCPScheduler, which came after 0\.19"):
        megatron_packing_scheduler()


def test_says_that_megatron_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(InvalidUsage, match="pip install megatron-core"):
        megatron_packing_scheduler()

"""Costs and plans of models that choose their keys: squares up to the limit, and lines from there on."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import ClusterSpec, CostModel, CostSample, Planner, StepPlan, Tree
from hdpcomm.sim import simulate_step

LIMITED = CostModel(attention=2e-8, linear=1e-5, fixed=1e-3, key_limit=100, limited=0.75)


def pairs(stop: int, start: int = 0) -> float:
    """Queries and keys counted one by one, in squared tokens."""
    return sum(2 * (0.25 * (t + 1) + 0.75 * min(t + 1, 100)) for t in range(start, stop))


@pytest.mark.parametrize("length", [1, 99, 100, 101, 500, 3000])
def test_squares_count_queries_and_keys(length: int) -> None:
    assert LIMITED.squares(float(length)) == pytest.approx(pairs(length), rel=0.02, abs=2 * length)
    assert LIMITED.squares(float(length)) - LIMITED.squares(length - 1.0) <= 2 * length
    assert LIMITED.squares(3000.0, float(length)) == pytest.approx(LIMITED.squares(3000.0) - LIMITED.squares(length))


def test_trees_count_by_the_way_from_the_root() -> None:
    tree = Tree([-1, 0, 0], [80, 50, 300])
    wanted = sum(LIMITED.squares(80.0 + more) - LIMITED.squares(80.0) for more in (50, 300)) + LIMITED.squares(80.0)
    assert LIMITED.item_squares(tree) == pytest.approx(wanted)
    assert LIMITED.item_squares(tree) < tree.squares


def samples(lengths: list[list[int]], limited: float) -> list[CostSample]:
    return [
        CostSample(ranks, tuple(each), LIMITED.seconds(each, ranks), key_limit=100, limited=limited)
        for ranks in (1, 2)
        for each in lengths
    ]


def test_long_samples_tell_both_kinds_of_layers() -> None:
    found = CostModel.fit(samples([[50], [400], [1600], [100] * 16, [25] * 8], limited=0.1))
    assert found.limit == (100.0, pytest.approx(0.75))
    assert found.attention == pytest.approx(LIMITED.attention)
    assert found.seconds([9000, 20]) == pytest.approx(LIMITED.seconds([9000, 20]))


def test_short_samples_take_the_share_of_the_sizes() -> None:
    found = CostModel.fit(samples([[20], [90], [40, 40]], limited=0.75))
    assert found.limit == (100.0, 0.75)
    assert found.seconds([9000, 20]) == pytest.approx(LIMITED.seconds([9000, 20]), rel=1e-6)


@pytest.mark.parametrize("part", range(4))
def test_plans_are_above_their_bounds_and_no_other_policy_is_shorter(part: int) -> None:
    draw = random.Random(part)
    for _ in range(40):
        stages = draw.choice([1, 1, 2, 4])
        cluster = ClusterSpec(ranks=draw.choice([1, 2, 4, 8]), capacity=draw.choice([50, 200, 1000]), pipeline=stages)
        cost = CostModel(
            attention=10 ** draw.uniform(-8, -4), linear=10 ** draw.uniform(-6, -3), fixed=draw.choice([0.0, 1e-3]),
            kv_intra=1e-7, kv_inter=draw.choice([1e-7, 1e-6]), key_limit=draw.choice([8, 64, 300]),
            limited=draw.choice([0.3, 0.9, 1.0]),
        )  # fmt: skip
        most = cluster.ranks * (cluster.capacity or 0)
        lengths = [min(most, int(draw.lognormvariate(4, 1.2)) + 1) for _ in range(draw.randint(1, 40))]
        found = {}
        for policy in ("balanced", "naive", "pow2", "static"):
            planner = Planner(None, cluster, policy, cost)
            plan = planner.plan(lengths)
            planner.validate(plan, lengths)
            found[policy] = plan.makespan_s
            assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
            assert simulate_step(planner, plan).compute_s == pytest.approx(plan.makespan_s, rel=1e-9)
        assert found["balanced"] <= min(found.values()) * (1 + 1e-9)


def test_pipelines_choose_slices() -> None:
    """Slices of a long sequence take as long as each other, and the whole as long as they do together."""
    cluster = ClusterSpec(ranks=4, capacity=1000, pipeline=4)
    cost = replace(LIMITED, fixed=0.0)
    whole, cut = (Planner(None, cluster, cost_model=cost, slices=slices) for slices in (1, 8))
    lengths = [4000, *[2] * 150]  # too many for local search, which may cut elsewhere
    plan = cut.plan(lengths)
    assert plan.lower_bound_s <= plan.makespan_s < 0.8 * whole.plan(lengths).makespan_s
    slices = list(plan.slices.values())
    assert len(slices) > 1
    took = [cost.squares(float(each.stop), float(each.start)) * cost.attention / 4 for each in slices]
    took = [
        squares + (each.stop - each.start) * (cost.linear + cost.piece) / 4
        for squares, each in zip(took, slices, strict=True)
    ]
    assert max(took) <= 1.02 * min(took)
    assert simulate_step(cut, plan).compute_s == pytest.approx(plan.makespan_s, rel=1e-9)


@pytest.mark.parametrize("part", range(3))
def test_plans_with_slices_are_above_their_bounds_and_not_longer(part: int) -> None:
    draw, sliced = random.Random(part), 0
    for _ in range(40):
        cluster = ClusterSpec(
            ranks=draw.choice([1, 2, 4, 8]), capacity=draw.choice([50, 200, 1000]), pipeline=draw.choice([2, 4, 8])
        )
        cost = CostModel(
            attention=10 ** draw.uniform(-8, -4), linear=10 ** draw.uniform(-6, -3), fixed=draw.choice([0.0, 1e-3]),
            kv_inter=draw.choice([0.0, 1e-6]), key_limit=draw.choice([8, 64, 300]),
            limited=draw.choice([0.3, 0.9, 1.0]),
        )  # fmt: skip
        most = cluster.ranks * (cluster.capacity or 0)
        lengths = [min(most, int(draw.lognormvariate(4, 1.2)) + 1) for _ in range(draw.randint(1, 30))]
        lengths += [most] * draw.randint(0, 2)
        whole = Planner(None, cluster, cost_model=cost).plan(lengths)
        planner = Planner(None, cluster, cost_model=cost, slices=draw.choice([2, 4, 16]))
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        sliced += bool(plan.slices)
        assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
        assert plan.makespan_s <= whole.makespan_s * (1 + 1e-9)
    assert sliced > 5


def test_no_policy_is_shorter_for_trees() -> None:
    """The static mesh was not tried where squares were given."""
    draw = random.Random(0)
    for _ in range(100):
        cluster = ClusterSpec(ranks=draw.choice([2, 4]), capacity=400)
        cost = CostModel(attention=1e-5, linear=1e-6)
        sizes = [[draw.randint(100, 250), *(draw.randint(1, 60) for _ in range(8))] for _ in range(draw.randint(4, 12))]
        trees = [Tree([-1, *[0] * 8], each) for each in sizes]
        balanced, static = (Planner(None, cluster, policy, cost).plan(trees) for policy in ("balanced", "static"))
        assert balanced.makespan_s <= static.makespan_s * (1 + 1e-9)


def test_plans_carry_the_limit(tmp_path: Path) -> None:
    plan = Planner(None, ClusterSpec(2, 1000), cost_model=LIMITED).plan([1500, 30])
    other = Planner(None, ClusterSpec(2, 1000), cost_model=CostModel(attention=2e-8, linear=1e-5)).plan([1500, 30])
    assert plan.limit == (100.0, 0.75)
    assert other.limit == (0.0, 0.0)
    assert "limited" not in other.to_dict()
    plan.save(tmp_path / "plan.json")
    read = StepPlan.load(tmp_path / "plan.json")
    assert (read.limit, read.hash) == (plan.limit, plan.hash)
    assert plan.with_table(plan.table).hash == plan.hash
    text = plan.to_json()
    with pytest.raises(InvalidUsage, match="it was changed"):
        StepPlan.from_json(text.replace('"limited": 0.75', '"limited": 0.5'))
    for wrong in ('"limited": 1.5', '"limited": NaN', '"limited": 0.5, "key_limit": 0.0'):
        with pytest.raises(InvalidUsage, match="expected a share and at least one key"):
            StepPlan.from_json(text.replace('"limited": 0.75', wrong))


def test_bad_limits() -> None:
    for wrong in ({"limited": 0.5}, {"key_limit": 8, "limited": 1.5}, {"key_limit": -1}):
        with pytest.raises(InvalidUsage):
            CostModel(attention=1e-6, linear=1e-5, **wrong)
    assert CostModel.from_json(LIMITED.to_json()) == LIMITED

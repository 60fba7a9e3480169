"""Plans of steps with trees: their true cost, and trees that are cut where that is cheaper."""

import json
import os
import random

import pytest

from hdpcomm._core import planner as core
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import POLICIES, ClusterSpec, CostModel, PlanAhead, Planner, StepPlan, Tree
from hdpcomm.plan.fragments import cut_tree
from hdpcomm.sim import simulate_step
from tests.harness.tree_oracle import random_tree

COST = CostModel(attention=1e-8, linear=1e-6, fixed=1e-4, ring_step=1e-4)
TREES = int(os.environ.get("HDPCOMM_TEST_TREES", "24"))


def planner(ranks, capacity, policy="balanced", cost=COST):
    return Planner(None, ClusterSpec(ranks, capacity), policy, cost)


def many_trees(count, seed=0):
    """GRPO-like: a prompt and some answers; a few of them large."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        scale = 8 if rng.random() < 0.02 else 1
        answers = rng.randint(2, 8)
        lengths = [rng.randint(50, 1500) * scale, *(rng.randint(20, 400) * scale for _ in range(answers))]
        found.append(Tree([-1, *[0] * answers], lengths))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tree_costs_its_area(policy):
    tree = Tree([-1, *[0] * 7], [600, *[50] * 7])
    alone = planner(1, 1000, policy).plan([tree])
    assert alone.makespan_s == pytest.approx(COST.load_seconds(tree.squares, 950))
    assert alone.makespan_s < COST.seconds([950])
    chain = Tree([-1, 0, 1], [400, 300, 200])
    assert planner(1, 1000, policy).plan([chain]).makespan_s == pytest.approx(COST.seconds([900]))
    two = planner(2, 500, policy).plan([tree, 100])
    assert two.tokens == 1050
    planner(2, 500, policy).validate(two, [tree, 100])


def test_a_large_tree_gets_ranks_like_any_sequence():
    tree = Tree([-1, *[0] * 8], [4000, *[500] * 8])
    plan = planner(8, 1000).plan([tree])
    assert plan.fragments == ()
    assert [len(batch.ranks) for batch in plan.micro_batches] == [8]
    assert plan.micro_batches[0].predicted_s == pytest.approx(COST.load_seconds(tree.squares, 8000, 8))


def test_a_short_prompt_is_computed_again_where_rings_cost_more():
    tree = Tree([-1, *[0] * 8], [100, *[800] * 8])
    items = [500, tree]
    plan = planner(8, 1000).plan(items)
    assert [(f.tree, f.segments) for f in plan.fragments] == [(1, (0, i)) for i in range(1, 9)]
    assert [f.repeated for f in plan.fragments] == [(False, False), *[(True, False)] * 7]
    assert sorted(s.id for batch in plan.micro_batches for s in batch.sequences) == [0, *range(2, 10)]
    assert StepPlan.from_json(plan.to_json()).fragments == plan.fragments
    assert StepPlan.from_json(plan.to_json()).hash == plan.hash


def test_a_tree_that_no_cluster_holds_is_cut():
    tree = Tree([-1, *[0] * 30], [900, *[90] * 30])
    plan = planner(2, 1000).plan([tree])
    assert len(plan.fragments) >= 2
    planner(2, 1000).validate(plan, [tree])
    with pytest.raises(InvalidUsage, match="of 2500 tokens needs 3 ranks"):
        planner(2, 1000).plan([Tree([-1, 0], [1500, 1000])])


@pytest.mark.parametrize("seed", range(TREES))
def test_parts_hold_every_segment_once(seed):
    rng = random.Random(seed)
    tree = Tree(*random_tree(rng, segments=rng.randint(1, 15), longest=50))
    limit = rng.randint(1, 200)
    parts = cut_tree(tree, limit)
    new = [s for segments, repeated in parts for s, again in zip(segments, repeated, strict=True) if not again]
    assert sorted(new) == list(range(len(tree)))
    for segments, repeated in parts:
        part = tree.part(segments)  # refuses parts without all ancestors
        leaves = sum(tree.ends[s] == s + 1 for s in segments)
        assert part.num_tokens <= limit or leaves == 1
        assert not any(again for s, again in zip(segments, repeated, strict=True) if tree.ends[s] == s + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_of_many_trees(policy):
    items = [*many_trees(60), 300, 4000, *many_trees(5, seed=1)]
    made = planner(16, 2048, policy)
    plan = made.plan(items)
    made.validate(plan, items)
    assert plan.makespan_s >= made.lower_bound(items) * (1 - 1e-9)
    if policy == "balanced":
        assert plan.gap <= 0.02
    with PlanAhead(made, [items]) as steps:
        assert [step.plan.hash for step in steps] == [plan.hash]


def test_validation_of_fragments():
    tree = Tree([-1, *[0] * 8], [100, *[800] * 8])
    plan = planner(8, 1000).plan([tree])
    with pytest.raises(InvalidUsage, match="has a fragment of tree 0, which is not among the 1 given items"):
        plan.validate([6500])
    data = plan.to_dict()
    data.pop("sha256")
    data["fragments"][0]["repeated"] = [True, False]
    with pytest.raises(InvalidUsage, match="fragments of tree 0 do not train each of its segments once"):
        StepPlan.from_json(json.dumps(data)).validate([tree])
    with pytest.raises(InvalidUsage, match="2 squares were given for 1 lengths"):
        core.lower_bound(planner(2, 10)._core, [5], squares=[25.0, 1.0])


def test_the_simulator_knows_what_trees_cost():
    items = [Tree([-1, *[0] * 8], [100, *[800] * 8]), Tree([-1, 0, 0], [600, 100, 100]), 900]
    made = planner(8, 1000)
    plan = made.plan(items)
    assert plan.fragments
    report = simulate_step(made, items)
    assert report.compute_s == pytest.approx(plan.makespan_s)
    assert simulate_step(made, plan, items=items).compute_s == report.compute_s
    with pytest.raises(InvalidUsage, match="has fragments of trees; give items="):
        simulate_step(made, plan)
    with pytest.raises(InvalidUsage, match="which is not among the 1 given items"):
        simulate_step(made, plan, items=[900])

"""Plans whose long sequences and trees run in slices: they can run, none is longer, and the bound is below all of them.

HDPCOMM_TEST_SLICES_PLANS: how many random steps (default 30).
"""

from __future__ import annotations

import math
import os
import pickle
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from hdpcomm._core import planner as core
from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import (
    MODELS,
    ClusterSpec,
    CostModel,
    MemoryModel,
    MicroBatch,
    Planner,
    SequenceFragment,
    SequenceInfo,
    StepPlan,
    Tree,
)
from hdpcomm.plan.cost import core_cost
from hdpcomm.plan.token_mixing import delta_mixing, latent_mixing, softmax_mixing
from hdpcomm.plan.tree import tree_of
from hdpcomm.sim import simulate_step
from tests.harness.programs import check_programs, pipeline_programs
from tests.harness.tree_oracle import random_tree

STEPS = int(os.environ.get("HDPCOMM_TEST_SLICES_PLANS", "30"))
COST = CostModel(attention=1e-9, linear=1e-6, fixed=1e-4, ring_step=1e-5, kv_intra=1e-8, kv_inter=4e-8)


def random_step(seed, chunks=1):
    """(planner without slices, lengths): one or a few long sequences among many short ones.

    ``chunks``: stages of the model on each device.
    """
    rng = random.Random(seed)
    ranks, stages = rng.choice([(2, 2), (4, 2), (8, 2), (8, 4), (16, 4), (24, 8)])
    capacity = rng.choice([256, 1024, 4096])
    split = rng.random() < 0.2
    cluster = ClusterSpec(
        ranks,
        capacity,
        ranks_per_node=rng.choice([1, 4, None]),
        pipeline=stages,
        chunks=chunks,
        split_backward=split,
    )
    cost = replace(COST, attention=COST.attention * rng.choice([0, 1, 30]), fixed=rng.choice([0, 1e-4, 1e-2]))
    lengths = [rng.randint(1, max(1, capacity // 2)) for _ in range(rng.randint(1, 8 * ranks))]
    lengths += [rng.randint(capacity, capacity * ranks) for _ in range(rng.randint(1, 3))]
    return Planner(None, cluster, cost_model=cost), lengths


def most_held(cluster):
    """How many full micro-batches the first device holds."""
    return cluster.pipeline + (cluster.pipeline - 1) / cluster.chunks if cluster.chunks > 1 else cluster.pipeline


def with_slices(planner, slices=16, **options):
    return Planner(
        None, planner.cluster, cost_model=planner.cost_model, memory=planner.memory, slices=slices, **options
    )


# In the last three, local search or split passes make the plan without slices the better one.
@pytest.mark.parametrize(
    ("seed", "chunks"),
    [(seed, 1) for seed in sorted({*range(STEPS), 54, 55, 90})] + [(seed, 2 + seed % 2) for seed in range(STEPS)],
)
def test_a_step_is_no_longer_and_can_run(seed, chunks):
    planner, lengths = random_step(seed, chunks)
    sliced = with_slices(planner)
    before, after = planner.plan(lengths), sliced.plan(lengths)
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)
    assert after.lower_bound_s <= min(after.makespan_s, before.lower_bound_s) * (1 + 1e-9)
    after.validate(lengths, memory=planner.memory)
    assert StepPlan.from_json(after.to_json()).hash == after.hash
    schedule = sliced.schedule(after)
    split = planner.cluster.split_backward
    check_programs(
        pipeline_programs(schedule, after), after, stages=schedule.stages, split=split, memory=planner.memory
    )
    found = simulate_step(sliced, after)
    assert abs(found.compute_s - after.makespan_s) <= 1e-9 * after.makespan_s
    assert found.rank_peak_tokens.max() <= most_held(planner.cluster) * planner.memory.capacity * (1 + 1e-9)
    if not after.slices:  # or another search, with more work for it, has found another one
        assert after.hash == before.hash or after.makespan_s < before.makespan_s


def step_with_trees(seed):
    """(planner without slices, items): some trees are cut into fragments, and some are longer than all sequences."""
    rng = random.Random(seed)
    ranks, stages = rng.choice([(4, 2), (8, 4)])
    items = [rng.randint(1, 500) for _ in range(rng.choice([2, 20]))]
    items += [rng.randint(2000, 1000 * ranks) for _ in range(rng.randint(0, 2))]
    items += [Tree([-1, 0, 0, 0], [rng.randint(100, 600) for _ in range(4)]) for _ in range(4)]
    items.append(Tree(*random_tree(rng, segments=rng.randint(1, 12), longest=rng.choice([200, 600 * ranks // 4]))))
    rng.shuffle(items)
    limit = {"key_limit": 200.0, "limited": 0.5} if rng.random() < 0.3 else {}
    cost = replace(COST, attention=COST.attention * rng.choice([1, 30]), **limit)
    split = rng.random() < 0.2
    cluster = ClusterSpec(ranks, 1024, pipeline=stages, split_backward=split)
    return Planner(None, cluster, cost_model=cost), items


@pytest.mark.parametrize("seed", range(-(-STEPS // 3)))
def test_a_step_with_trees_is_no_longer_and_can_run(seed):
    planner, items = step_with_trees(seed)
    sliced = with_slices(planner)
    before, after = planner.plan(items), sliced.plan(items)
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)
    assert after.lower_bound_s <= after.makespan_s * (1 + 1e-9)
    after.validate(items, memory=planner.memory)
    for planned in after.slices.values():  # they cover it in order
        item = tree_of(planned.sequence, items, after.fragments) or items[planned.sequence]
        assert planned.bounds == tuple(sorted({0, *planned.bounds, _tokens(item)}))
    schedule = sliced.schedule(after)
    check_programs(
        pipeline_programs(schedule, after), after, stages=schedule.stages, split=planner.cluster.split_backward
    )
    found = simulate_step(sliced, after, items=items)
    assert found.compute_s == pytest.approx(after.makespan_s, rel=1e-9)
    for again in (pickle.loads(pickle.dumps(after)), StepPlan.from_json(after.to_json())):
        assert (again.hash, again.slices) == (after.hash, after.slices)


def _tokens(item):
    return item.num_tokens if isinstance(item, Tree) else item


def test_trees_and_their_fragments_run_in_slices():
    """A plan where they do, and about equal time in each, by the area under the tree."""
    tree = Tree([-1, 0, 0, 2], [4000, 1000, 500, 2500])
    planner = Planner(None, ClusterSpec(8, 1024, pipeline=4), cost_model=COST, slices=8)
    plan = planner.plan([tree, 300, 200])
    bounds = next(iter(plan.slices.values())).bounds
    areas = [planner.cost_model.item_squares(tree, a, b) for a, b in pairwise(bounds)]
    assert len(areas) > 2
    assert sum(areas) == pytest.approx(tree.squares)
    tokens = [b - a for a, b in pairwise(bounds)]
    work = [COST.attention * area + COST.linear * count for area, count in zip(areas, tokens, strict=True)]
    assert max(work) <= 1.02 * min(work)
    kinds = set()
    for seed in range(8):
        planner, items = step_with_trees(seed)
        plan = with_slices(planner).plan(items)
        for planned in plan.slices.values():
            kinds.add("fragment" if planned.sequence >= len(items) else type(items[planned.sequence]))
    assert kinds >= {Tree, int}


def test_a_tree_that_fits_no_other_way():
    """No rank has room for a way to a leaf, so that there are no fragments, either."""
    tree, memory = Tree([-1, 0, 0], [5000, 700, 300]), MemoryModel(1024, kept=0.1)
    planner = Planner(None, ClusterSpec(3, 1024), cost_model=COST, memory=memory, slices=16)
    items = [400, tree, Tree([-1, 0, 0], [100, 70, 30])]
    plan = planner.plan(items)
    plan.validate(items, memory=memory)
    assert [each.bounds for each in plan.slices.values()] == [(0, 2000, 4000, 6000)] * 3
    assert simulate_step(planner, plan, items=items).compute_s == pytest.approx(plan.makespan_s)
    with pytest.raises(InvalidUsage, match="tree 1 of 6000 tokens does not fit 3 ranks of 1024 tokens in 2 slices"):
        with_slices(planner, 2).plan(items)


@pytest.mark.parametrize(
    ("fragments", "told"),
    [
        ((SequenceFragment(0, 0, 4), SequenceFragment(0, 4, 9)), "slices of a sequence 0 of 9 tokens, which is not"),
        ((SequenceFragment(5, 0, 4), SequenceFragment(5, 4, 12)), "slices of a sequence 5 of 12 tokens, which is not"),
        ((SequenceFragment(1, 0, 4), SequenceFragment(1, 4, 12)), "slices of a sequence 1 of 12 tokens, which is not"),
    ],
)
def test_slices_of_no_tree_are_refused(fragments, told):
    """They are of another length, of no sequence, or of a slice."""
    batches = [MicroBatch(i, (0,), (SequenceInfo(1 + i, f.stop - f.start),), 0.0, 0.0) for i, f in enumerate(fragments)]
    plan = StepPlan("by hand", 1, tuple(batches), 0.0, 0.0, 0.0, 0.0, fragments=fragments)
    with pytest.raises(InvalidUsage, match=told):
        plan.validate([Tree([-1, 0, 0], [5, 4, 3])])


@pytest.mark.parametrize("seed", [1, 7])
def test_the_bound_is_no_less_than_that_of_the_longest_alone(seed):
    """Books beside short files: all sequences together prove 21% and 15% less than the longest 4 and 2 alone."""
    rng = random.Random(seed)
    lengths = [rng.lognormvariate(*rng.choice([(7.3, 1.4)] * 9 + [(11.6, 0.7)])) for _ in range(70)]
    longest = sorted((min(2**18, 1 + int(length)) for length in lengths), reverse=True)
    cluster = ClusterSpec(32, 8192, ranks_per_node=8, device="h100", pipeline=4)
    planner = Planner(MODELS["llama-7b"], cluster, slices=16)
    bound = planner.lower_bound(longest)
    for count in (1, 2, 4, 16):
        assert planner.lower_bound(longest[:count]) <= bound * (1 + 1e-3)  # the least that it is raised by


@pytest.mark.parametrize(("pipeline", "count", "length"), [(4, 1, 4000), (8, 1, 6000), (8, 2, 4000), (4, 8, 3000)])
def test_memory_asks_for_no_more_slices_than_are_allowed(pipeline, count, length):
    """Where links are slow, few ranks would end first with as many slices as hold the sequence, far below the bound."""
    cost = CostModel(attention=0, linear=1e-6, kv_intra=1e-5, kv_inter=1e-5)
    planner = Planner(None, ClusterSpec(8, 1000, pipeline=pipeline), cost_model=cost, slices=2)
    plan = planner.plan([length] * count)
    assert max(len(each.rows) for each in plan.slices.values()) == 2
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    planner.validate(plan, [length] * count)


@pytest.mark.parametrize("chunks", [1, 2])
def test_slices_are_taken(chunks):
    found = [with_slices(planner).plan(lengths) for planner, lengths in (random_step(i, chunks) for i in range(12))]
    assert sum(bool(plan.slices) for plan in found) >= 3


@pytest.mark.parametrize("seed", range(4))
def test_more_slices_are_no_worse(seed):
    planner, lengths = random_step(seed)
    few, many = (with_slices(planner, most).plan(lengths) for most in (16, 64))
    assert many.makespan_s <= 1.005 * few.makespan_s


def test_a_long_sequence_hides_its_way_through_the_stages():
    """One sequence on all ranks takes p times as long as its passes; in n slices (n + p - 1) / n times."""
    cluster = ClusterSpec(4, 1024, pipeline=4)
    cost = CostModel(attention=0, linear=1e-3)
    whole = Planner(None, cluster, cost_model=cost).plan([4096])
    sliced = Planner(None, cluster, cost_model=cost, slices=8).plan([4096])
    assert whole.makespan_s == pytest.approx(4 * 1.024)
    assert sliced.makespan_s == pytest.approx(1.024 * 11 / 8, rel=0.01)
    assert sliced.lower_bound_s == pytest.approx(1.024 * 11 / 8, rel=0.01)


def test_several_stages_on_a_device_hide_more_of_it():
    """With v stages on each of p devices, n slices take (n + (p - 1) / v) / n times its passes, n >= p."""
    cluster = ClusterSpec(4, 1024, pipeline=4, chunks=2)
    cost = CostModel(attention=0, linear=1e-3)
    plan = Planner(None, cluster, cost_model=cost, slices=8).plan([4096])
    assert plan.makespan_s <= 1.024 * (8 + 3 / 2) / 8 * (1 + 1e-9)
    assert 1.024 < plan.lower_bound_s <= plan.makespan_s


def any_sliced_plan(rng, planner, lengths):
    """A plan by hand: whatever groups, sequences in slices of any number; in the memory of its devices."""
    ranks, capacity = planner.cluster.ranks, planner.memory.capacity
    batches, fragments = [], []
    for sequence, item in rng.sample(list(enumerate(lengths)), len(lengths)):
        length = _tokens(item)
        size = rng.randint(-(-length // capacity), ranks)
        group = tuple(rng.sample(range(ranks), size))
        if rng.random() < 0.5 and length >= 8:
            bounds = [0, *sorted(rng.sample(range(1, length), rng.randint(1, 5))), length]
            for first, end in pairwise(bounds):
                held = (SequenceInfo(len(lengths) + len(fragments), end - first),)
                batches.append(MicroBatch(len(batches), group, held, 0.0, 0.0))
                fragments.append(SequenceFragment(sequence, first, end))
        else:
            batches.append(MicroBatch(len(batches), group, (SequenceInfo(sequence, length),), 0.0, 0.0))
    return StepPlan("by hand", ranks, tuple(batches), 0.0, 0.0, 0.0, 0.0, fragments=tuple(fragments))


def random_step_of_trees(seed):
    """Trees that are not cut into fragments."""
    planner, items = step_with_trees(seed)
    cut = {each.tree for each in planner.plan(items).fragments}
    return planner, [item for i, item in enumerate(items) if i not in cut]


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((chunks, seed) for chunks in ("1", "2 or 3") for seed in range(STEPS)),
        *(("trees", seed) for seed in range(-(-STEPS // 3))),
    ],
)
def test_the_bound_is_below_plans_by_hand(kind, seed):
    rng = random.Random(seed)
    chunks = 1 if kind == "1" else 2 + seed % 2
    planner, lengths = random_step_of_trees(seed) if kind == "trees" else random_step(seed, chunks)
    sliced = with_slices(planner, 8)
    least = sliced.lower_bound(lengths)
    for _ in range(20):
        plan = any_sliced_plan(rng, planner, lengths)
        plan.validate(lengths)
        found = simulate_step(sliced, plan, items=lengths)
        assert least <= found.compute_s * (1 + 1e-9)
        schedule = sliced.schedule(plan)
    split = planner.cluster.split_backward
    check_programs(pipeline_programs(schedule, plan), plan, stages=schedule.stages, split=split)


def equal_slices(cost, length, size, count):
    """Where slices of about equal compute begin on so many ranks, and the length at last."""
    square, linear = cost.attention / size, cost.piece + cost.linear / size
    whole = (square * length + linear) * length
    bounds = [0]
    for k in range(1, count):
        wanted = whole * k / count
        bounds.append(round(2 * wanted / (linear + math.sqrt(linear * linear + 4 * square * wanted))))
    return [*bounds, length]


@pytest.mark.parametrize("seed", range(2 * STEPS))
def test_the_bound_is_near_slices_of_equal_time(seed):
    """Sequences of about equal length one after the other on the same ranks, where links bind or not."""
    rng = random.Random(seed)
    ranks, stages = rng.choice([(8, 2), (24, 4), (96, 4), (300, 8)])
    cluster = ClusterSpec(ranks, 1024, ranks_per_node=8, pipeline=stages)
    kv = rng.choice([0, 1e-8, 1e-7, 1e-6])
    cost = replace(COST, attention=rng.choice([1e-9, 3e-8]), kv_intra=kv, kv_inter=4 * kv, fixed=rng.choice([0, 1e-3]))
    planner = Planner(None, cluster, cost_model=cost, slices=8)
    longest = rng.randint(1024, 1024 * rng.randint(1, ranks))
    lengths = [round(longest * rng.uniform(0.95, 1)) for _ in range(rng.choice([1, 1, 2, 4]))]
    most = math.inf
    for size in {rng.randint(1, ranks) for _ in range(12)} | {1, 2, 4, 8, ranks}:
        for count in range(1, 9):
            batches, fragments = [], []
            for sequence, length in enumerate(lengths):
                bounds = equal_slices(cost, length, size, count)
                for first, end in pairwise(bounds):
                    entry = SequenceInfo(sequence if count == 1 else len(lengths) + len(fragments), end - first)
                    batches.append(MicroBatch(len(batches), tuple(range(size)), (entry,), 0.0, 0.0))
                    if count > 1:
                        fragments.append(SequenceFragment(sequence, first, end))
            if size * 1024 * stages < longest or max(batch.tokens for batch in batches) > size * 1024:
                continue
            plan = StepPlan("by hand", ranks, tuple(batches), 0.0, 0.0, 0.0, 0.0, fragments=tuple(fragments))
            most = min(most, planner.simulate(plan)["makespan"])
    found = planner.plan(lengths)
    assert found.lower_bound_s <= most * (1 + 1e-9)
    assert len(lengths) > 1 or found.makespan_s <= 1.55 * found.lower_bound_s


@pytest.mark.parametrize("seed", range(10 * STEPS))
def test_no_device_waits_for_ever(seed):
    """Any groups and numbers of slices, more than there are stages or fewer, of sequences that all devices of a rank
    together just hold; none holds more than that."""
    rng = random.Random(seed)
    ranks, stages, capacity = rng.randint(1, 4), rng.choice([2, 3, 4]), 64
    split = rng.random() < 0.3
    cluster = ClusterSpec(ranks, capacity, pipeline=stages, chunks=rng.choice([1, 2, 3, 4]), split_backward=split)
    planner = Planner(None, cluster, cost_model=replace(COST, fixed=rng.choice([0, 1e-4])), slices=16)
    batches, fragments, lengths = [], [], []
    for _ in range(rng.randint(1, 10)):
        size, places = rng.randint(1, ranks), rng.choice([1, 1, 2, stages])
        count = max(places, rng.choice([1, 2, 3, stages, 2 * stages + 1, 16]))
        length = min(size * places, ranks) * capacity // (size * count) * size * count
        group, sequence = tuple(rng.sample(range(ranks), size)), len(lengths)
        lengths.append(length)
        if count == 1:
            batches.append((group, (sequence, length)))
            continue
        for k in range(count):
            fragments.append(SequenceFragment(sequence, length * k // count, length * (k + 1) // count))
            batches.append((group, (-len(fragments), fragments[-1].stop - fragments[-1].start)))
    made = tuple(
        MicroBatch(i, group, (SequenceInfo(held if held >= 0 else len(lengths) - 1 - held, tokens),), 0.0, 0.0)
        for i, (group, (held, tokens)) in enumerate(batches)
    )
    plan = StepPlan("by hand", ranks, made, 0.0, 0.0, 0.0, 0.0, fragments=tuple(fragments))
    schedule = planner.schedule(plan)
    check_programs(pipeline_programs(schedule, plan), plan, stages=schedule.stages, split=split, memory=planner.memory)
    found = planner.simulate(plan)
    assert found["peak_tokens"].max() <= most_held(cluster) * capacity * (1 + 1e-9)
    assert planner.lower_bound(lengths) <= found["makespan"] * (1 + 1e-9)


def test_a_sequence_that_fits_no_other_way():
    memory = MemoryModel(1024, kept=0.1)
    planner = Planner(None, ClusterSpec(4, 1024), cost_model=COST, memory=memory, slices=8)
    lengths = [200, 9000, 900, 6000]
    plan = planner.plan(lengths)
    plan.validate(lengths, memory=memory)
    assert [len(each.rows) for each in plan.slices.values() if each.number == 0] == [3, 2]
    assert plan.lower_bound_s <= plan.makespan_s
    assert plan.makespan_s == pytest.approx(planner.simulate(plan)["makespan"])
    # but for the last slices, forward passes run twice
    plain = Planner(None, ClusterSpec(4, 4096), cost_model=COST).plan(lengths)
    assert plain.makespan_s < plan.makespan_s < 1.4 * plain.makespan_s
    with pytest.raises(InvalidUsage, match="needs 9 ranks"):
        Planner(None, ClusterSpec(4, 1024), cost_model=COST, memory=memory).plan(lengths)
    with pytest.raises(InvalidUsage, match="in 2 slices, beside the keys and values of all of it: it needs 3"):
        with_slices(planner, 2).plan(lengths)
    with pytest.raises(InvalidUsage, match="and not in slices, either"):
        planner.plan([60_000])


@pytest.mark.parametrize(
    "tree", [(0, [1], [0]), (0, [0, 12], [0, 5]), (0, [0, 0], [0, 0]), (0, [0, 5], [0]), (2, [0], [0]), (-1, [0], [0])]
)
def test_what_is_no_tree_is_refused(tree):
    solver = core_cost(COST, MemoryModel(64), ClusterSpec(2, 64, pipeline=2), slices=4)
    with pytest.raises(InvalidUsage, match="give its item, and one of each for every segment, rows rising from 0"):
        core.solve(solver, [12, 3], "balanced", 0, 0, squares=[80.0, 9.0], trees=[tree])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "static"}, "policy 'static', which runs whole sequences only: give 1"),
        ({"slices": 0}, "slices is 0, expected a whole number from 1 to 64"),
    ],
)
def test_what_runs_whole_sequences_only_is_refused(options, told):
    known = {"cluster": ClusterSpec(4, 64), "slices": 4} | options
    with pytest.raises(InvalidUsage, match=told):
        Planner(None, cost_model=COST, **known)


def test_recurrent_layers_keep_no_keys():
    """Only layers with attention keep keys for later slices: one of four."""
    delta = delta_mixing(4096, key_heads=16, key_dim=128, heads=32, value_dim=128, gates=4096)
    hybrid = replace(MODELS["llama-7b"], mixing=(delta.over(24), softmax_mixing(4096, 32, 8, 128).over(8)))
    assert hybrid.kept_values() == 8 * 2 * 1024
    lengths = [30_000, *[2000] * 40]
    for model in (hybrid, replace(hybrid, mixing=(delta.over(32),))):
        planner = Planner(model, ClusterSpec(8, 4096, device="h100", pipeline=4), slices=8)
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        assert plan.slices


def test_a_models_kept_bytes():
    """LLaMA-7B in bf16 keeps K and V of 32 layers, 1024 wide, with sums in fp32, and makes a layer's gradients; in host
    memory all but three sets of a layer. MLA's latent is the same on all tensor ranks."""
    model = MODELS["llama-7b"]
    assert [model.kept_values(tensor) for tensor in (1, 4)] == [32 * 2 * 1024, 8 * 2 * 1024]
    latent = replace(
        model,
        mixing=(latent_mixing(4096, 32, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128).over(32),),
    )
    assert latent.kept_values(4) == latent.kept_values() == 32 * (512 + 64)
    resident, offloaded = (MemoryModel.of(model, ClusterSpec(8, 8192, offload=each)) for each in (False, True))
    layer = 2 * 1024 * (2 + 4) / resident.token_bytes
    assert resident.kept == resident.kept_offloaded == offloaded.kept == pytest.approx(33 * layer)
    assert offloaded.kept_offloaded == pytest.approx(3 * layer)
    device = ClusterSpec(8, 8192).hardware
    assert offloaded.kept_copy_s == pytest.approx(32 * 2 * 1024 * 2 / min(device.d2h_bandwidth, device.h2d_bandwidth))
    assert offloaded.kept_back_s == pytest.approx(3 * offloaded.kept_copy_s)
    # A token of fewer bytes, as with recomputation: a larger share of it is kept, and loads take as long.
    smaller = offloaded.with_kept(model, ClusterSpec(8, 8192), offloaded.token_bytes / 4)
    assert smaller.kept == pytest.approx(4 * offloaded.kept)
    assert smaller.kept_copy_s == pytest.approx(offloaded.kept_copy_s)


def offloaded(**more):
    known = {"offloadable": 0.5, "copy_s": 1e-9, "host_tokens": 5000, "kept": 0.3, "kept_offloaded": 0.05} | more
    return Planner(None, ClusterSpec(2, 1000), cost_model=COST, memory=MemoryModel(1000, **known), slices=8)


def test_keys_in_host_memory():
    """A sequence whose keys do not fit the devices: in as few slices as fit beside one layer's, all in host memory."""
    lengths = [12_000, 100, 300]
    plan = offloaded().plan(lengths)
    # 1000 tokens without what is kept of 6000, at half a token each; and as many as host memory has room for.
    assert len(plan.slices) == math.ceil(6000 / ((1000 - 0.05 * 6000) / 0.5))
    assert {plan.micro_batches[index].offload_ratio for index in plan.slices} == {1.0}
    fewer = offloaded(host_tokens=0.3 * 6000 + 500).plan(lengths)
    assert len(fewer.slices) == 6
    assert max(simulate_step(offloaded(), lengths).rank_peak_tokens) == pytest.approx(0.05 * 6000 + 0.5 * 1200)
    with pytest.raises(InvalidUsage, match=r"sequence 0 of 12000 tokens does not fit .* and not in slices, either"):
        offloaded(host_tokens=0.3 * 6000).plan(lengths)
    with pytest.raises(InvalidUsage, match=r"in 8 slices, beside the keys and values of all of it: it needs 12"):
        offloaded(host_tokens=0.3 * 6000 + 250).plan(lengths)


def test_passes_wait_for_keys_that_come_slowly():
    """Each pass takes at least as long as its loads: two forward passes, but for the last slice, and a backward one."""
    lengths = [12_000]
    plan = offloaded().plan(lengths)
    slow = offloaded(kept_copy_s=1.0, kept_back_s=3.0).plan(lengths)
    starts = [each.bounds[each.number] // 2 for each in slow.slices.values()]
    loads = [start * (3 + 2) for start in starts[:-1]] + [starts[-1] * (3 + 1)]
    predicted = [batch.predicted_s for batch in slow.micro_batches]
    assert predicted[1:] == pytest.approx(loads[1:], rel=1e-9)
    assert predicted[0] == pytest.approx(plan.micro_batches[0].predicted_s)
    assert slow.makespan_s == pytest.approx(sum(predicted))
    hidden = offloaded(kept_copy_s=1e-12, kept_back_s=1e-12).plan(lengths)
    assert hidden.makespan_s == plan.makespan_s


def test_offload_that_moves_nothing_changes_nothing():
    memory = MemoryModel(1000, copy_s=1e-9, host_tokens=500, token_bytes=1e6)
    known = memory.with_kept(MODELS["llama-7b"], ClusterSpec(2, 1000))
    assert (known.kept, known.kept_copy_s) == (known.kept_offloaded, 0.0)
    planner = Planner(None, ClusterSpec(2, 1000), cost_model=COST, memory=known, slices=64)
    assert {each.offload_ratio for each in planner.plan([2200]).micro_batches} == {0.0}
    with pytest.raises(InvalidUsage, match="and not in slices, either"):
        planner.plan([60_000])


def test_bytes_that_nobody_measured_are_those_of_the_model():
    model, cluster = MODELS["llama-7b"], ClusterSpec(2, 1000)
    known = MemoryModel.of(model, cluster)
    assert MemoryModel(1000).with_kept(model, cluster).kept == pytest.approx(known.kept)
    recomputed = MemoryModel(1000).with_kept(model, cluster, recompute=model.layers)
    assert recomputed.kept > 3 * known.kept  # as much beside fewer bytes of a token


def test_policies_that_cannot_hold_a_step_are_left_out(tmp_path, capsys):
    """Unless they were named: only plans of balanced have slices."""
    file = tmp_path / "lengths.txt"
    file.write_text("2000000\n3000\n")
    step = ["--ranks", "8", "--model", "llama-7b", "--offload", "--slices", "16", "--lengths", str(file)]
    assert main(["simulate", *step]) == 0
    out, told = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["policy", "balanced"]
    assert "naive is left out: sequence 0 of 2000000 tokens needs 35 ranks" in told
    assert "static is left out" in told
    assert main(["simulate", *step, "--policy", "balanced,naive"]) != 0
    assert "needs 35 ranks" in capsys.readouterr().err

"""Plans whose long sequences run in slices: they can run, none is longer, and the bound is below all of them.

HDPCOMM_TEST_SLICES_PLANS: how many random steps (default 30).
"""

from __future__ import annotations

import os
import pickle
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel.program import check_programs, make_programs
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
from hdpcomm.plan.token_mixing import delta_mixing, softmax_mixing
from hdpcomm.sim import simulate_step

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
    schedule.validate(after)
    split = planner.cluster.split_backward
    check_programs(make_programs(schedule, after), after, stages=schedule.stages, split=split)
    found = simulate_step(sliced, after)
    assert abs(found.compute_s - after.makespan_s) <= 1e-9 * after.makespan_s
    assert found.rank_peak_tokens.max() <= most_held(planner.cluster) * planner.memory.capacity * (1 + 1e-9)
    if not after.slices:  # or local search, which tries more with slices, has found another one
        assert after.hash == before.hash or after.makespan_s < before.makespan_s


@pytest.mark.parametrize("seed", range(12))
def test_trees_stay_whole(seed):
    rng = random.Random(seed)
    ranks, stages = rng.choice([(4, 2), (8, 4)])
    items = [rng.randint(1, 500) for _ in range(20)] + [rng.randint(2000, 1000 * ranks) for _ in range(2)]
    items += [Tree([-1, 0, 0, 0], [rng.randint(100, 600) for _ in range(4)]) for _ in range(4)]  # some are cut
    rng.shuffle(items)
    planner = Planner(None, ClusterSpec(ranks, 1024, pipeline=stages), cost_model=COST)
    sliced = with_slices(planner)
    before, after = planner.plan(items), sliced.plan(items)
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)
    after.validate(items, memory=planner.memory)
    assert not any(isinstance(items[each.sequence], Tree) for each in after.slices.values())
    schedule = sliced.schedule(after)
    check_programs(make_programs(schedule, after), after, stages=stages)
    again = pickle.loads(pickle.dumps(after))
    assert (again, again.slices) == (after, after.slices)
    alone = Planner(None, ClusterSpec(3, 1024), cost_model=COST, memory=MemoryModel(1024, kept=0.1), slices=16)
    plan = alone.plan([5000, *items[:3]] if max(map(_tokens, items[:3])) <= 3072 else [5000])
    assert len(plan.slices) == 2


def _tokens(item):
    return item.num_tokens if isinstance(item, Tree) else item


@pytest.mark.parametrize("chunks", [1, 2])
def test_slices_are_taken(chunks):
    found = [with_slices(planner).plan(lengths) for planner, lengths in (random_step(i, chunks) for i in range(12))]
    assert sum(bool(plan.slices) for plan in found) >= 3


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
    for sequence, length in rng.sample(list(enumerate(lengths)), len(lengths)):
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


@pytest.mark.parametrize(
    ("seed", "chunks"), [(seed, 1) for seed in range(STEPS)] + [(seed, 2 + seed % 2) for seed in range(STEPS)]
)
def test_the_bound_is_below_plans_by_hand(seed, chunks):
    rng = random.Random(seed)
    planner, lengths = random_step(seed, chunks)
    sliced = with_slices(planner, 8)
    least = sliced.lower_bound(lengths)
    for _ in range(20):
        plan = any_sliced_plan(rng, planner, lengths)
        plan.validate(lengths)
        found = simulate_step(sliced, plan)
        assert least <= found.compute_s * (1 + 1e-9)
        schedule = sliced.schedule(plan)
        schedule.validate(plan)
    split = planner.cluster.split_backward
    check_programs(make_programs(schedule, plan), plan, stages=schedule.stages, split=split)


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
    schedule.validate(plan)
    check_programs(make_programs(schedule, plan), plan, stages=schedule.stages, split=split)
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
    assert hybrid.kept_bytes == 8 * 2 * 1024 * (2 + 4) * (1 + 1 / 32)
    lengths = [30_000, *[2000] * 40]
    for model in (hybrid, replace(hybrid, mixing=(delta.over(32),))):
        planner = Planner(model, ClusterSpec(8, 4096, device="h100", pipeline=4), slices=8)
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        assert plan.slices


def test_a_models_kept_bytes():
    """LLaMA-7B in bf16 keeps K and V of 32 layers, 1024 wide, with sums in fp32, and makes a layer's gradients."""
    assert MODELS["llama-7b"].kept_bytes == 33 * 2 * 1024 * (2 + 4)
    assert MemoryModel.of(MODELS["llama-7b"], ClusterSpec(8, 8192)).kept == pytest.approx(0.1, rel=0.5)

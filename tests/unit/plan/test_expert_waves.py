"""Waves of ranks that share experts: when they run, which plan ends first, and below what no plan can be."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.plan import (
    MODELS,
    Calibration,
    ClusterSpec,
    CostModel,
    CostSample,
    MemoryModel,
    MicroBatch,
    Planner,
    SequenceFragment,
    SequenceInfo,
    StepPlan,
)
from hdpcomm.plan.waves import in_waves, make_waves, plan_waves, run_waves, sorted_for_waves
from hdpcomm.sim import simulate_step

COSTS = CostModel(attention=1e-8, linear=3e-5, fixed=1e-3, experts=2e-5)


def batches_of(*given: tuple[tuple[int, ...], int]) -> tuple[MicroBatch, ...]:
    """Micro-batches from pairs (ranks, tokens)."""
    return tuple(
        MicroBatch(i, ranks, (SequenceInfo(i, tokens),), 0.0, COSTS.seconds([tokens], len(ranks)))
        for i, (ranks, tokens) in enumerate(given)
    )


def ends_by_neighbours(batches: tuple[MicroBatch, ...], size: int, ranks: int) -> list[float]:
    """When each rank ends, by another way: rank after rank asks all with whom it shares a wave."""
    numbers: dict[int, int] = {}
    at = []
    for batch in batches:
        at.append(max(numbers.get(rank, 0) for rank in batch.ranks))
        numbers |= dict.fromkeys(batch.ranks, at[-1] + 1)
    ends = [0.0] * ranks
    for wave in range(max(at, default=-1) + 1):
        here = [batch for batch, place in zip(batches, at, strict=True) if place == wave]
        left = list(range(ranks))
        while left:
            together = {left[0]}
            while True:
                more = {r for one in together for r in range(one // size * size, one // size * size + size)}
                more |= {r for batch in here if together & set(batch.ranks) for r in batch.ranks}
                if more <= together:
                    break
                together |= more
            left = [rank for rank in left if rank not in together]
            own = [batch for batch in here if together & set(batch.ranks)]
            if not own:
                continue
            dense = max(COSTS.seconds([b.tokens], len(b.ranks)) - COSTS.experts * b.tokens / len(b.ranks) for b in own)
            work = [
                sum(b.tokens / len(b.ranks) for b in own for r in b.ranks if r // size == group) * COSTS.experts / size
                for group in {rank // size for rank in together}
            ]
            end = max(ends[rank] for rank in together) + dense + max(work)
            for rank in together:
                ends[rank] = end
    return ends


def test_times_are_those_of_ranks_that_wait_for_each_other() -> None:
    draw = random.Random(5)
    for _ in range(60):
        size = draw.choice((2, 3))
        ranks = size * draw.randint(1, 3)
        given = []
        for _ in range(draw.randint(0, 9)):
            first = draw.randrange(ranks)
            given.append((tuple(range(first, draw.randint(first + 1, ranks))), draw.randint(1, 3000)))
        made = batches_of(*given)
        cluster = ClusterSpec(ranks=ranks, capacity=4000, expert=size)
        found = run_waves(made, [each.predicted_s for each in made], COSTS, cluster)
        assert found.rank_end == pytest.approx(ends_by_neighbours(made, size, ranks))
        # Work is neither lost nor made: the experts' is only done elsewhere.
        work = sum(len(each.ranks) * each.predicted_s for each in made)
        assert sum(found.rank_busy) == pytest.approx(work)
        assert all(busy <= end + 1e-12 for busy, end in zip(found.rank_busy, found.rank_end, strict=True))


def test_a_rank_without_tokens_does_its_part_for_the_others() -> None:
    made = batches_of(((0,), 1000))
    cluster = ClusterSpec(ranks=2, capacity=1000, expert=2)
    found = run_waves(made, [made[0].predicted_s], COSTS, cluster)
    assert found.rank_end.max() == pytest.approx(1e-8 * 1e6 + 1e-5 * 1000 + 1e-3 + 2e-5 * 1000 / 2)
    assert found.rank_busy == pytest.approx([found.rank_end.max(), 2e-5 * 1000 / 2])
    plan = Planner(None, replace(cluster, capacity=1001), "static", COSTS).plan([1000])
    assert len(plan.micro_batches[0].ranks) == 1


def test_the_bound_of_waves_knows_what_short_pieces_cost() -> None:
    """Sequences that take all ranks run at the bound, but for the fixed costs; no plan is below it."""
    costs = replace(COSTS, piece=2e-5, fixed=1e-9)
    planner = Planner(None, ClusterSpec(ranks=4, capacity=1000, expert=2, expert_imbalance=1.2), cost_model=costs)
    plan = planner.plan([4000, 3900, 3950])
    assert plan.lower_bound_s == pytest.approx(plan.makespan_s, rel=1e-6)
    draw = random.Random(8)
    for _ in range(30):
        plan = planner.plan([draw.randint(1, draw.choice((900, 2100, 4000))) for _ in range(draw.randint(1, 12))])
        assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", ["balanced", "naive", "static"])
def test_plans_know_their_waves(policy: str) -> None:
    draw = random.Random(3)
    for ranks, expert in ((2, 2), (4, 2), (6, 3)):
        lengths = [min(2000, int(draw.lognormvariate(5.0, 1.2)) + 1) for _ in range(60)]
        cluster = ClusterSpec(ranks=ranks, capacity=1000, expert=expert)
        planner = Planner(None, cluster, policy, COSTS)
        plan = planner.plan(lengths)
        plan.validate(lengths)
        assert simulate_step(planner, plan).compute_s == pytest.approx(plan.makespan_s)
        assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
        assert plan.lower_bound_s == planner.lower_bound(lengths)
        assert 0 <= plan.idle_share < 1
        blind = Planner(None, replace(cluster, expert=1), policy, COSTS).plan(lengths).micro_batches
        waves = run_waves(blind, [each.predicted_s for each in blind], COSTS, cluster)
        assert plan.makespan_s <= waves.rank_end.max() * (1 + 1e-9)


def test_the_simulated_passes_follow_the_waves() -> None:
    cluster = ClusterSpec(ranks=4, capacity=1000, expert=2)
    planner = Planner(None, cluster, cost_model=COSTS)
    plan = planner.plan([900, 100, 800, 300, 250, 40, 1700])
    found = planner.simulate(plan)
    rows = list(zip(found["which"], found["times"], strict=True))
    forward = {int(which[0]): times for which, times in rows if not which[2]}
    backward = {int(which[0]): times for which, times in rows if which[2]}
    assert len(forward) == len(backward) == len(plan.micro_batches)
    waves = run_waves(plan.micro_batches, [each.predicted_s for each in plan.micro_batches], COSTS, cluster)
    for batch in plan.micro_batches:
        assert forward[batch.index][0] == pytest.approx(waves.start[batch.index])
        assert forward[batch.index][1] == backward[batch.index][0]
        assert backward[batch.index][1] == pytest.approx(waves.end[batch.index])
    assert found["makespan"] == pytest.approx(plan.makespan_s)
    nothing = in_waves(planner.simulate(planner.plan([])), (), COSTS, cluster)
    assert nothing["makespan"] == 0.0


def test_slices_of_sequences_that_fit_the_ranks_no_other_way() -> None:
    """They run forward for what they keep, then again from the last one to the first; a rank does one thing a time."""
    lengths = [9000, 100, 800, 7500, 250, 40, 1700]
    for experts in (0.0, COSTS.experts):
        costs = replace(COSTS, experts=experts)
        cluster, memory = ClusterSpec(ranks=4, capacity=1000, expert=2), MemoryModel(1000, kept=0.05)
        planner = Planner(None, cluster, cost_model=costs, memory=memory, slices=8)
        plan = planner.plan(lengths)
        plan.validate(lengths, memory=memory)
        assert len(plan.slices) == 3 + 3
        found = planner.simulate(plan)
        assert plan.makespan_s == pytest.approx(found["makespan"])
        assert plan.lower_bound_s <= plan.makespan_s
        times: dict[tuple[int, int], Any] = {
            (int(which[0]), int(which[2])): row for which, row in zip(found["which"], found["times"], strict=True)
        }
        for index, planned in plan.slices.items():
            if not planned.last:
                assert times[index, 0][1] <= times[index + 1, 0][0] + 1e-12
                assert times[index + 1, 1][1] <= times[index, 1][0] + 1e-12
        for rank in range(4):
            rows = sorted(tuple(times[batch.index, kind]) for batch in plan.for_rank(rank) for kind in (0, 1))
            assert all(one[1] <= following[0] + 1e-12 for one, following in pairwise(rows))
        alone = Planner(None, replace(cluster, expert=1), cost_model=costs, memory=memory, slices=8)
        seconds = np.array([alone.simulate(plan)["busy"].sum(), found["busy"].sum()])
        assert seconds[0] == pytest.approx(seconds[1])  # experts' work is only done elsewhere
        whole = alone.plan([9000]).makespan_s, planner.plan([9000]).makespan_s
        assert whole[0] == pytest.approx(whole[1])


def seconds_of_waves(planner: Planner, plan: StepPlan) -> float:
    found, index = planner.simulate(plan), plan.table.index.tolist()
    spans = zip(found["which"].tolist(), found["times"].tolist(), strict=True)
    took = {(index[row], kind): end - start for (row, _, kind), (start, end) in spans}
    waves = plan_waves(plan, planner.cluster.expert)
    return waves.seconds(planner.schedule(waves.plan), took, planner.cluster.expert)


@pytest.mark.parametrize("split", [False, True])
def test_waves_of_whole_groups_take_what_their_micro_batches_do(split: bool) -> None:
    """In pipelines, with and without slices: nobody waits for others' experts."""
    cluster = ClusterSpec(ranks=2, capacity=1000, pipeline=3, expert=2, split_backward=split)
    planner = Planner(None, cluster, cost_model=replace(COSTS, weights=0.3))
    everyone, cuts = (0, 1), (0, 1000, 1800, 2400)
    slices = tuple(SequenceFragment(1, a, b) for a, b in pairwise(cuts))
    given = [(0, 1200), *((4 + k, each.stop - each.start) for k, each in enumerate(slices)), (2, 600), (3, 1800)]
    made = tuple(
        MicroBatch(i, everyone, (SequenceInfo(number, tokens),), 0.0, 1.0) for i, (number, tokens) in enumerate(given)
    )
    plan = StepPlan("by hand", 2, made, 1.0, 1.0, 0.0, 0.0, fragments=slices)
    plan.validate([1200, 2400, 600, 1800])
    assert seconds_of_waves(planner, plan) == pytest.approx(planner.simulate(plan)["makespan"])


def test_pipelines_have_slices_where_their_waves_end_earlier() -> None:
    """Ranks that share experts wait for those with a sequence in slices, so the search takes slices less often."""
    draw, chosen, model = random.Random(4), [], MODELS["mistral-8x7b"]
    mixed = [30_000 if draw.random() < 0.03 else draw.randint(100, 2000) for _ in range(300)]
    for ranks, lengths in ((16, mixed), (8, [60_000, *mixed[:60]]), (8, [12_000] * 12)):
        cluster = ClusterSpec(ranks, 8192, pipeline=4, expert=2, device="h100", ranks_per_node=8)
        whole, sliced = (Planner(model, cluster, slices=slices) for slices in (1, 16))
        plans = whole.plan(lengths), sliced.plan(lengths)
        plans[1].validate(lengths)
        seconds = [seconds_of_waves(planner, plan) for planner, plan in zip((whole, sliced), plans, strict=True)]
        assert seconds[1] <= seconds[0] * (1 + 1e-9)
        blind = Planner(model, replace(cluster, expert=1), slices=16, cost_model=sliced.cost_model).plan(lengths)
        chosen.append((bool(blind.slices), bool(plans[1].slices)))
    assert {(True, True), (True, False)} <= set(chosen)


def test_longest_first_is_the_same_work() -> None:
    made = batches_of(((0,), 10), ((1,), 1000), ((0, 1), 500))
    in_order = sorted_for_waves(made)
    assert [batch.tokens for batch in in_order] == [1000, 500, 10]
    assert [batch.index for batch in in_order] == [0, 1, 2]
    assert [len(wave) for wave in make_waves(made)] == [2, 1]


def test_the_experts_work_is_fitted_to_a_rank_beside_others_without_tokens() -> None:
    plain = [CostSample(1, (length,), COSTS.seconds([length])) for length in (100, 300, 1000, 2000)]
    alone = COSTS.seconds([2000]) - COSTS.experts * 2000 * 3 / 4
    found = CostModel.fit([*plain, CostSample(1, (2000,), alone, expert=4)])
    assert found.experts == pytest.approx(COSTS.experts, rel=1e-5)
    assert found.linear == pytest.approx(COSTS.linear, rel=1e-5)
    # Ranks that share processors take 2 s of the clock for each of a processor, but for those that others leave.
    shared = [replace(each, seconds=2 * each.seconds, processor_s=each.seconds) for each in plain]
    beside = CostSample(1, (2000,), 1.1 * alone, processor_s=alone, expert=4)
    assert CostModel.fit([*shared, beside]).experts == pytest.approx(2 * COSTS.experts, rel=1e-5)
    assert CostModel.fit(plain).experts == 0.0


def test_analytic_costs_have_dispatch_and_imbalance() -> None:
    model = MODELS["mistral-8x7b"]
    plain = ClusterSpec(ranks=64, ranks_per_node=8)
    near, far = (CostModel.analytic(model, replace(plain, expert=size)) for size in (8, 16))
    whole = CostModel.analytic(model, plain)
    assert whole.experts == 0.0
    # By hand: 4 messages of 2 rows of 4096 x 2 bytes in 32 layers, of which 7 / 8 leave.
    sent = 4 * 32 * 2 * 4096 * 2 * 7 / 8
    assert model.dispatch_bytes_per_token(8) == sent
    assert MODELS["llama-7b"].dispatch_bytes_per_token(8) == 0.0
    assert near.linear - whole.linear == pytest.approx(sent / plain.hardware.intra_bandwidth)
    flops = 3 * 2 * 32 * 2 * 3 * 4096 * 14336  # forward and backward; layers, top_k, gate, up and down
    assert near.experts == pytest.approx(flops / plain.hardware.linear_flops + near.linear - whole.linear)
    assert far.linear > near.linear  # between nodes
    lengths, cluster = [4000] * 64, replace(plain, expert=8, capacity=4000)
    even = Planner(model, cluster).plan(lengths)
    skewed = Planner(model, replace(cluster, expert_imbalance=2.0)).plan(lengths)
    assert skewed.makespan_s - even.makespan_s == pytest.approx(near.experts * 4000, rel=1e-6)
    held = [MemoryModel.of(model, replace(plain, expert=size, capacity=100)).state_bytes for size in (1, 8)]
    assert held[0] is not None
    assert held[1] is not None
    assert held[0] - held[1] == pytest.approx(3 * 4096 * 32 * 14336 * 8 * 7 / 8 * 6)


def test_bad_groups_are_refused() -> None:
    with pytest.raises(hdp.InvalidUsage, match="expert is 4 and ranks 6"):
        ClusterSpec(ranks=6, capacity=10, expert=4)
    with pytest.raises(hdp.InvalidUsage, match="expert_imbalance"):
        ClusterSpec(ranks=6, capacity=10, expert=2, expert_imbalance=2.5)
    with pytest.raises(hdp.InvalidUsage, match="expert"):
        ClusterSpec(ranks=6, capacity=10, expert=0)


def test_the_command_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["--tokens", "64K", "--context", "8K", "--ranks", "16", "--model", "mistral-8x7b", "--capacity", "8K"]
    assert main(["plan", *step, "--expert", "8"]) == 0
    assert main(["simulate", *step, "--expert", "8", "--policy", "balanced"]) == 0
    assert main(["plan", *step, "--expert", "5"]) == 6
    assert "expert is 5 and ranks 16" in capsys.readouterr().err
    cluster = ClusterSpec(ranks=4, capacity=100, expert=2, expert_imbalance=1.5)
    kept = Calibration(COSTS, cluster, MemoryModel(100))
    kept.save(tmp_path / "c.json")
    found = Calibration.load(tmp_path / "c.json")
    assert found.cost_model == kept.cost_model
    assert (found.cluster.expert, found.cluster.expert_imbalance) == (2, 1.5)
    with pytest.raises(hdp.InvalidUsage, match="expert is 2 and ranks 3"):
        found.with_ranks(3)


def test_experts_that_hide_copies_count_in_the_bound() -> None:
    """Offload hides behind the experts' work, too, so the bound has to leave room for it."""
    cluster = ClusterSpec(ranks=4, capacity=7, expert=4)
    costs = CostModel(attention=1e-8, linear=1e-3, fixed=1e-3, kv_intra=1e-4, kv_inter=1e-4, experts=9.9e-4)
    memory = MemoryModel(7, offloadable=0.9, copy_s=3e-4, host_tokens=1e6)
    plan = Planner(None, cluster, cost_model=costs, memory=memory).plan([48])
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)

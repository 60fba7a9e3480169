"""Ranks of different speeds: what plans promise, how the work is shared out, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, Planner, StepPlan
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.sim import simulate_step

COST = CostModel(1e-9, 1e-5, fixed=1e-4, ring_step=1e-5, kv_intra=1e-7, kv_inter=1e-6)


def work(plan: StepPlan, speeds: tuple[float, ...]) -> list[float]:
    """Seconds of each rank in its micro-batches, at full speed."""
    busy = [0.0] * plan.num_ranks
    for batch in plan.micro_batches:
        for rank in batch.ranks:
            busy[rank] += batch.predicted_s
    return [seconds * speed for seconds, speed in zip(busy, speeds, strict=True)]


@pytest.mark.parametrize("pipeline", [1, 3])
def test_a_micro_batch_takes_the_time_of_its_slowest_rank(pipeline: int) -> None:
    rng = random.Random(3)
    for _ in range(20):
        ranks = rng.randrange(2, 12)
        speeds = tuple(rng.uniform(0.2, 1) for _ in range(ranks))
        cluster = ClusterSpec(ranks, 1000, ranks_per_node=4, speeds=speeds, pipeline=pipeline)
        lengths = [rng.randrange(1, 1000 * ranks) for _ in range(12)]
        for policy in ("balanced", "naive", "pow2"):
            planner = Planner(None, cluster, policy, COST)
            try:
                plan = planner.plan(lengths)
            except InvalidUsage:  # sizes that are rounded up
                assert policy == "pow2"
                continue
            planner.validate(plan, lengths)
            for batch in plan.micro_batches:
                inside = min(batch.ranks) // 4 == max(batch.ranks) // 4
                full = COST.seconds([s.length for s in batch.sequences], len(batch.ranks), one_node=inside)
                assert batch.predicted_s == pytest.approx(full / min(speeds[rank] for rank in batch.ranks))
            assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
            simulated = simulate_step(planner, plan)
            assert simulated.compute_s == pytest.approx(plan.makespan_s)
            if pipeline == 1:
                assert max(plan.timeline()[b.index] + b.predicted_s for b in plan.micro_batches) == pytest.approx(
                    plan.makespan_s
                )


@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_a_rank_at_half_speed_gets_half_of_the_work(ranks: int) -> None:
    speeds = (0.5, *(1.0,) * (ranks - 1))
    planner = Planner(MODELS["llama-7b"], ClusterSpec(ranks, 8192, ranks_per_node=8, speeds=speeds))
    lengths = sample_lengths("lognormal", count=12 * ranks, context=8192, seed=1)
    plan = planner.plan(lengths)
    planner.validate(plan, lengths)
    done = work(plan, speeds)
    assert done[0] == pytest.approx(0.5 * sum(done[1:]) / (ranks - 1), rel=0.15)
    assert plan.gap <= 0.03


@pytest.mark.parametrize("distribution", ["byted", "github"])
def test_large_steps_on_ranks_of_different_speeds_come_near_the_bound(distribution: str) -> None:
    rng = random.Random(5)
    gaps = []
    for seed in range(3):
        speeds = (1.0, *(rng.choice([1.0, 0.9, 0.7]) for _ in range(255)))
        planner = Planner(MODELS["llama-7b"], ClusterSpec(256, 8192, ranks_per_node=8, speeds=speeds))
        lengths = sample_lengths(distribution, tokens=2**25, context=2**18, seed=seed)
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        gaps.append(plan.gap)
    assert max(gaps) <= 0.1  # neighbours differ, so nearly every group is joined from single ranks


@pytest.mark.parametrize("pipeline", [1, 4])
def test_equal_speeds_change_nothing(pipeline: int) -> None:
    cluster = ClusterSpec(32, 8192, ranks_per_node=8, pipeline=pipeline)
    lengths = sample_lengths("byted", tokens=2**20, context=2**17, seed=0)
    plans = [
        Planner(MODELS["llama-7b"], each).plan(lengths) for each in (cluster, replace(cluster, speeds=(1.0,) * 32))
    ]
    assert plans[0].hash == plans[1].hash
    assert plans[0].lower_bound_s == plans[1].lower_bound_s
    assert plans[0].makespan_s == plans[1].makespan_s


def test_one_rank_of_any_speed_is_the_one_the_costs_are_of() -> None:
    planner = Planner(None, ClusterSpec(1, 100, speeds=(0.25,)), cost_model=COST)
    plan = planner.plan([100, 1, 1])
    alone = Planner(None, ClusterSpec(1, 100), cost_model=COST).plan([100, 1, 1])
    assert plan.makespan_s == pytest.approx(4 * alone.makespan_s)
    assert plan.lower_bound_s == pytest.approx(4 * alone.lower_bound_s, rel=1e-6)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, 1.5), (1.0, float("nan")), (1.0, 1e-4), ()])
def test_speeds_that_are_none_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidUsage, match="speed"):
        ClusterSpec(2, 100, speeds=speeds)


def test_ranks_that_share_cores_have_no_speeds() -> None:
    with pytest.raises(InvalidUsage, match="cores"):
        ClusterSpec(4, 100, cores=2, speeds=(1.0, 1.0, 1.0, 0.5))


def test_the_command_takes_slow_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "--ranks", "8", "--capacity", "8K", "--tokens", "256K"]
    assert main([*common, "--slow-ranks", "3:0.5,7:.8"]) == 0
    capsys.readouterr()
    for wrong in ("8:0.5", "3", "3:x", "-1:0.5", "3:0.5,", "3:2", "3:0", "3:1e999"):
        assert main([*common, f"--slow-ranks={wrong}"]) != 0, wrong
        assert "speed" in capsys.readouterr().err.lower(), wrong


def test_many_ranks_each_of_its_own_speed() -> None:
    """Speeds are not rounded: ranks of about one speed as a block took 4% more here, at that of the slowest."""
    rng, ranks = random.Random(0), 8192
    speeds = tuple(rng.uniform(0.5, 1) for _ in range(ranks))
    cluster = ClusterSpec(ranks, 8192, ranks_per_node=8, speeds=speeds)
    costs = CostModel.analytic(MODELS["llama-7b"], cluster)
    lengths = sample_lengths("lognormal:6.5:1.6", tokens=ranks * 32_768, context=1 << 21, seed=0)
    plan = Planner(MODELS["llama-7b"], cluster, "balanced", costs).plan(lengths)
    assert plan.makespan_s < 1.01 * plan.lower_bound_s

"""Noise of micro-batches: what it adds to a step, plans that count with it, and where it is shown."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, Calibration, ClusterSpec, CostModel, MemoryModel, Planner, StepPlan
from hdpcomm.plan.distributions import sample_lengths

CLUSTER = ClusterSpec(32, 8192, ranks_per_node=8)
COST = CostModel.analytic(MODELS["llama-7b"], CLUSTER)
QUIET = Planner(None, CLUSTER, cost_model=COST)


def noisy(noise: float = 0.05, policy: str = "balanced") -> Planner:
    return Planner(None, CLUSTER, policy, replace(COST, noise=noise))


def lengths_of(seed: int, context: int = 8192) -> list[int]:
    return sample_lengths("github", tokens=2**20, context=context, seed=seed)


def mean_step(plan: StepPlan, noise: float, *, steps: int = 400, seed: int = 0) -> float:
    """Seconds of a step in the mean, drawn one micro-batch after the other."""
    rng = random.Random(seed)
    compute = replace(COST, kv_intra=0, kv_inter=0, latency_intra=0, latency_inter=0)
    parts = []
    for batch in plan.micro_batches:
        lengths, size = [each.length for each in batch.sequences], len(batch.ranks)
        own = compute.seconds(lengths, size)
        parts.append((batch.ranks, own, batch.predicted_s - own))
    total = 0.0
    for _ in range(steps):
        ready = [0.0] * plan.num_ranks
        for ranks, own, waits in parts:
            end = max(ready[rank] for rank in ranks) + own * rng.gauss(1, noise) + waits
            for rank in ranks:
                ready[rank] = end
        total += max(ready)
    return total / steps


@pytest.mark.parametrize(("policy", "context"), [("balanced", 2**17), ("static", 2**15), ("naive", 8192)])
def test_the_mean_step_is_that_of_steps_drawn_by_chance(policy: str, context: int) -> None:
    plan = noisy(policy=policy).plan(lengths_of(0, context))
    assert plan.expected_s == pytest.approx(mean_step(plan, 0.05), rel=0.006)
    assert plan.expected_s > plan.makespan_s * 1.005


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_plans_that_know_of_noise_are_shorter(seed: int) -> None:
    lengths = lengths_of(seed)
    plan, quiet = noisy().plan(lengths), QUIET.plan(lengths)
    plan.validate(lengths, memory=MemoryModel(8192))
    assert len(plan.micro_batches) > len(quiet.micro_batches)
    assert plan.makespan_s < 1.03 * quiet.makespan_s
    assert mean_step(plan, 0.05, seed=seed) < 0.997 * mean_step(quiet, 0.05, seed=seed)
    assert plan.hash == noisy().plan(lengths).hash


@pytest.mark.parametrize("context", [8192, 2**17])
def test_a_plan_that_knows_of_noise_is_never_worse(context: int) -> None:
    """By the same steps that the planner looks at, but for those of the plan that it starts from."""
    for seed in range(6):
        lengths = lengths_of(seed, context)
        assert mean_step(noisy().plan(lengths), 0.05) <= 1.002 * mean_step(QUIET.plan(lengths), 0.05)


def test_without_noise_nothing_changes() -> None:
    for context in (8192, 2**17):
        lengths = lengths_of(1, context)
        plan = noisy(0.0).plan(lengths)
        assert plan.noise_s == 0
        assert plan.expected_s == plan.makespan_s
        assert plan.hash == QUIET.plan(lengths).hash
        assert "noise" not in plan.explain()


def test_the_bound_does_not_know_of_noise() -> None:
    lengths = lengths_of(2)
    assert noisy().lower_bound(lengths) == QUIET.lower_bound(lengths) == noisy().plan(lengths).lower_bound_s


@pytest.mark.parametrize(
    "change", [{"cores": 8}, {"pipeline": 2}, {"expert": 4}], ids=["shared cores", "pipeline", "experts"]
)
def test_noise_is_left_out_where_ranks_wait_otherwise(change: dict[str, int]) -> None:
    cluster = replace(CLUSTER, **change)
    lengths = lengths_of(3)
    plan = Planner(None, cluster, cost_model=replace(COST, noise=0.05)).plan(lengths)
    assert plan.noise_s == 0
    assert plan.hash == Planner(None, cluster, cost_model=COST).plan(lengths).hash


def test_slow_ranks_and_offload_keep_their_rules() -> None:
    speeds = (0.5, *(1.0,) * 31)
    memory = MemoryModel(8192, offloadable=0.9, copy_s=1e-6, host_tokens=1e5)
    cluster = replace(CLUSTER, speeds=speeds)
    lengths = lengths_of(4, 2**16)
    for cost in (COST, replace(COST, noise=0.1)):
        plan = Planner(None, cluster, cost_model=cost, memory=memory).plan(lengths)
        plan.validate(lengths, memory=memory)
        tokens = [sum(batch.tokens / len(batch.ranks) for batch in plan.for_rank(rank)) for rank in range(32)]
        assert tokens[0] < 0.75 * sum(tokens[1:]) / 31


def test_files_tell_what_noise_adds(tmp_path: Path) -> None:
    plan = noisy().plan(lengths_of(5))
    assert plan.noise_s > 0
    assert f"{plan.noise_s:.3g} s of noise" in plan.explain()
    for suffix in (".json", ".safetensors"):
        plan.save(tmp_path / f"plan{suffix}")
        assert StepPlan.load(tmp_path / f"plan{suffix}").noise_s == plan.noise_s
    assert StepPlan.from_json(plan.to_json().replace('"noise_s"', '"other"')).noise_s == 0  # of an earlier release
    with pytest.raises(InvalidUsage, match="noise_s is -1"):
        StepPlan.from_json(plan.to_json().replace(f'"noise_s": {plan.noise_s!r}', '"noise_s": -1'))


@pytest.mark.parametrize("noise", [-0.1, 1.5, float("nan")])
def test_noise_is_a_share(noise: float) -> None:
    with pytest.raises(InvalidUsage, match="noise"):
        CostModel(1e-9, 1e-6, noise=noise)


def test_the_commands_take_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["--ranks", "32", "--capacity", "8K", "--tokens", "512K", "--context", "8K"]
    assert main(["plan", *step, "--noise", "0.05", "--json", str(tmp_path / "plan.json")]) == 0
    assert "s of noise, lower bound" in capsys.readouterr().out
    assert StepPlan.from_json((tmp_path / "plan.json").read_text()).noise_s > 0
    assert main(["simulate", *step, "--noise", "0.05", "--policy", "balanced,static"]) == 0
    assert re.search(r"in the mean it adds balanced \S+ s, static \S+ s to each", capsys.readouterr().out)
    assert main(["simulate", *step, "--noise", "0", "--policy", "balanced"]) == 0
    assert "in the mean" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", *step, "--noise", "1.5"])
    assert "1.5 is not a number from 0 to 1" in capsys.readouterr().err
    calibration = tmp_path / "costs.json"
    Calibration(replace(COST, noise=0.03), CLUSTER, MemoryModel(8192), facts={}).save(calibration)
    for options, told in (([], True), (["--noise", "0"], False)):
        command = ["plan", "--calibration", str(calibration), "--tokens", "512K", "--context", "8K", *options]
        assert main(command) == 0
        assert ("s of noise" in capsys.readouterr().out) == told

"""Plans in which a rank has few ring peers."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import POLICIES, ClusterSpec, CostModel, Planner, StepPlan

COST = CostModel(1e-9, 1e-6, 1e-4, piece=1e-7, ring_step=1e-5, kv_intra=1e-6, kv_inter=8e-6, latency_inter=1e-5)
STEP = ClusterSpec(ranks=24, capacity=100, ranks_per_node=4)
LENGTHS = [random.Random(5).randint(1, 700) for _ in range(60)]


def most_peers(plan: StepPlan) -> int:
    """Counted from the micro-batches, one rank after the other."""
    peers = defaultdict(set)
    for batch in plan.micro_batches:
        for place, rank in enumerate(batch.ranks):
            peers[rank] |= {batch.ranks[place - 1], batch.ranks[(place + 1) % len(batch.ranks)]} - {rank}
    return max(map(len, peers.values()), default=0)


def refused(planner: Planner, lengths: list[int]) -> bool:
    try:
        planner.plan(lengths)
    except InvalidUsage as error:
        return f"and ring_peers is {planner.ring_peers}: give at least" in str(error)
    return False


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_policy_keeps_the_limit_or_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 30)
    cluster = ClusterSpec(
        ranks=ranks,
        capacity=100,
        ranks_per_node=rng.randint(1, 8),
        nics=rng.choice([None, 1]),
        pipeline=rng.choice([1, 1, 1, 2]),
        speeds=tuple(rng.choice([1.0, 0.7]) for _ in range(ranks)) if rng.random() < 0.2 else None,
    )
    longest = rng.choice([80, 50 * ranks])
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 30))]
    limit = rng.randint(2, 6)
    made: dict[str, StepPlan] = {}
    for policy in POLICIES:
        free = Planner(None, cluster, policy, COST).plan(lengths)
        planner = Planner(None, cluster, policy, COST, ring_peers=limit)
        if policy in ("naive", "pow2") and limit < min(4, most_peers(free)) and refused(planner, lengths):
            continue  # groups of neighbours have 4 peers
        plan = made[policy] = planner.plan(lengths)
        planner.validate(plan, lengths)
        assert most_peers(plan) <= limit
        assert plan.lower_bound_s == free.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
        if most_peers(free) <= limit:
            assert plan.hash == free.hash
    assert made["balanced"].makespan_s <= min(plan.makespan_s for plan in made.values()) * (1 + 1e-9)


def test_a_plan_with_more_peers_is_refused() -> None:
    free = Planner(None, STEP, "naive", COST).plan(LENGTHS)
    assert most_peers(free) == 5
    planner = Planner(None, STEP, "naive", COST, ring_peers=4)
    with pytest.raises(InvalidUsage, match="up to 5 ring peers in the plan, and ring_peers is 4: plan again"):
        planner.validate(free)
    assert most_peers(planner.plan(LENGTHS)) <= 4
    assert planner.with_costs(COST, STEP).ring_peers == 4


@pytest.mark.parametrize("value", [1, 0, -1, 2.5, "4", True])
def test_limits_that_no_ring_keeps(value: Any) -> None:
    with pytest.raises(InvalidUsage, match="ring_peers"):
        Planner(None, STEP, cost_model=COST, ring_peers=value)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, free, found = tmp_path / "lengths", tmp_path / "free.json", tmp_path / "found.json"
    lengths.write_text("\n".join(map(str, LENGTHS)))
    step = ["--ranks", "24", "--capacity", "100"]
    plan = ["plan", *step, "--lengths", str(lengths)]
    assert main([*plan, "--policy", "naive", "--out", str(free)]) == 0
    assert main([*plan, "--ring-peers", "4", "--compare", "naive,static", "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert " peers " in shown
    written = json.loads(found.read_text())
    assert f"at most {written['ring_peers']} ring peers a rank" in shown
    assert max(written["ring_peers"], *(each["ring_peers"] for each in written["compared"])) <= 4
    assert main(["simulate", "--plan", str(free), *step, "--ring-peers", "4"]) == 6
    assert "and ring_peers is 4: plan again" in capsys.readouterr().err
    assert main([*plan, "--ring-peers", "1"]) == 6
    assert "ring_peers" in capsys.readouterr().err

"""benchmarks/zero_bubble.py: its time without split passes is the simulated one, and what it gains is a gap's."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path

import pytest

from hdpcomm.plan import ClusterSpec, CostModel, Planner

PROGRAM = Path(__file__).parents[3] / "benchmarks/zero_bubble.py"


@pytest.mark.parametrize("chunks", [1, 2])
def test_without_split_passes_it_is_the_simulation(chunks: int) -> None:
    split_seconds = runpy.run_path(str(PROGRAM))["split_seconds"]
    draw = random.Random(2)
    for ranks, stages in ((1, 2), (3, 4), (2, 3)):
        cluster = ClusterSpec(ranks, capacity=500, pipeline=stages, chunks=chunks)
        costs = CostModel(attention=1e-7, linear=2e-5, fixed=1e-3)
        planner = Planner(None, cluster, cost_model=costs)
        plan = planner.plan([draw.randint(1, 500 * ranks) for _ in range(12)])
        plain, split = (split_seconds(planner, plan, split=split) for split in (False, True))
        assert plain == pytest.approx(planner.simulate(plan)["makespan"])
        work = max(
            sum(batch.predicted_s for batch in plan.for_rank(rank)) for rank in range(ranks)
        )  # of a device, which none can do in less
        assert work * (1 - 1e-9) <= split < plain


def test_two_stages_and_one_micro_batch_by_hand() -> None:
    split_seconds = runpy.run_path(str(PROGRAM))["split_seconds"]
    planner = Planner(None, ClusterSpec(1, capacity=900, pipeline=2), cost_model=CostModel(0.0, 3e-3))
    plan = planner.plan([300])  # each stage 0.3 s forward, and 0.3 s each for inputs and weights
    assert split_seconds(planner, plan, split=False) == pytest.approx(1.8)
    assert split_seconds(planner, plan, split=True) == pytest.approx(0.3 * 5)
    assert split_seconds(planner, planner.plan([]), split=True) == 0.0


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--small", "--seeds", "1", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["ranks"], row["pipeline"]) for row in rows] == [(1, 2), (2, 2), (2, 4), (4, 4)]
    assert len(capsys.readouterr().out.splitlines()) == 6

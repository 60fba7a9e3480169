"""Pictures and traces of plans."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, Planner
from hdpcomm.plan.distributions import sample_lengths
from hdpcomm.sim import simulate_stream
from hdpcomm.trace import plot_plans, write_plan_trace, write_stream_trace
from hdpcomm.trace.gantt import _raster

CLUSTER = ClusterSpec(ranks=8, capacity=8192, ranks_per_node=4)
LENGTHS = sample_lengths("lognormal:7:1.5", tokens=2**17, context=2**15, seed=1)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_written(tmp_path: Path, suffix: str) -> None:
    plans = [Planner(MODELS["llama-7b"], CLUSTER, policy).plan(LENGTHS) for policy in ("balanced", "static")]
    plot_plans(plans, tmp_path / f"plan{suffix}")
    assert (tmp_path / f"plan{suffix}").stat().st_size > 10_000


@pytest.mark.parametrize("chunks", [1, 2])
def test_pipelines_have_a_row_for_each_device(tmp_path: Path, chunks: int) -> None:
    cluster = ClusterSpec(ranks=3, capacity=8192, pipeline=2, chunks=chunks)
    planner = Planner(MODELS["llama-7b"], cluster)
    plan = planner.plan([20_000, 4000, 3000, 1])
    image, forward = _raster(plan, planner, plan.makespan_s)
    assert image.shape == forward.shape == (6, 560)
    busy = ~np.isnan(image)
    assert not forward[~busy].any()
    found = planner.simulate(plan)
    for rank in range(3):
        for device in range(2):
            own = {i for i, batch in enumerate(plan.micro_batches) if rank in batch.ranks}
            spans = [k for k, (i, stage, _) in enumerate(found["which"]) if i in own and stage % 2 == device]
            share = sum(found["times"][k][1] - found["times"][k][0] for k in spans) / plan.makespan_s
            assert busy[2 * rank + device].mean() == pytest.approx(share, abs=0.02)
            assert forward[2 * rank + device].any()
    shortest = np.log2(min(max(s.length for s in batch.sequences) for batch in plan.micro_batches))
    assert np.isclose(image[busy], shortest).any()  # the shortest one is seen
    plot_plans([plan], tmp_path / "plan.png", [planner])
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    with pytest.raises(InvalidUsage, match="1 planners were given for 2 plans"):
        plot_plans([plan, plan], tmp_path / "plan.png", [planner])


def test_an_empty_plan_can_be_drawn(tmp_path: Path) -> None:
    plot_plans([Planner(MODELS["llama-7b"], CLUSTER).plan([])], tmp_path / "plan.png")
    with pytest.raises(InvalidUsage, match="no plan to draw"):
        plot_plans([], tmp_path / "plan.png")
    with pytest.raises(InvalidUsage, match=r"ends in \.png"):
        plot_plans([Planner(MODELS["llama-7b"], CLUSTER).plan([])], tmp_path / "plan.gif")
    with pytest.raises(InvalidUsage, match="cannot write"):
        plot_plans([Planner(MODELS["llama-7b"], CLUSTER).plan([5])], tmp_path / "no" / "plan.png")


def test_spans_of_a_rank_do_not_overlap(tmp_path: Path) -> None:
    planner = Planner(MODELS["llama-7b"], CLUSTER)
    report = simulate_stream(planner, [LENGTHS, LENGTHS[:40]])
    write_stream_trace(tmp_path / "trace.json", report.steps, report.waits_s, CLUSTER)
    write_plan_trace(tmp_path / "plan.json", report.steps[0].plan, CLUSTER)
    for name in ("trace.json", "plan.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for event in events:
            if event["ph"] == "X":
                tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        assert len(tracks) == 8 + (name == "trace.json")
        for spans in tracks.values():
            spans.sort()
            assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(spans))
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert "rank 7" in names
    assert "node 1" in names

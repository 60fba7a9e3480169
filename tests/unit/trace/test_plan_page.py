"""The page of plans: its bars are the plan's micro-batches, and it needs no other file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, Planner
from hdpcomm.trace import write_plan_page

LENGTHS = [30_000, 9_000, 4_000, 4_000, *[300] * 40, 1]


def traces(page: Path) -> list[dict[str, Any]]:
    """What the page gives to plotly."""
    text = page.read_text(encoding="utf-8")
    assert "<script src=" not in text
    assert "<link" not in text
    start = text.index("[", text.rindex("Plotly.newPlot("))
    found, _ = json.JSONDecoder().raw_decode(text[start:])
    return [trace for trace in found if trace["type"] == "bar"]


def busy(trace: dict[str, Any], row: float) -> float:
    """Seconds of the bars that cover a row."""
    bars = zip(trace["y"], trace["width"], trace["x"], strict=True)
    return sum(seconds for middle, width, seconds in bars if abs(middle - row) < width / 2)


def planner_of(**changed: Any) -> Planner:
    return Planner(MODELS["llama-7b"], ClusterSpec(ranks=6, capacity=8192, **changed))


def test_each_rank_is_busy_as_planned(tmp_path: Path) -> None:
    planner = planner_of()
    plan = planner.plan(LENGTHS)
    write_plan_page([plan, plan], tmp_path / "plan.html", [planner, planner])
    found = traces(tmp_path / "plan.html")
    assert len(found) == 2
    for trace in found:
        for rank in range(6):
            assert busy(trace, rank) == pytest.approx(sum(b.predicted_s for b in plan.for_rank(rank)), rel=1e-6)
        for batch in plan.micro_batches:
            lengths = sorted((s.length for s in batch.sequences), reverse=True)
            told = [text for text in trace["hovertext"] if text.startswith(f"<b>micro-batch {batch.index}</b>")]
            assert told
            for text in told:
                assert f"{len(lengths)} sequence" in text
                assert f"{sum(lengths):,} tokens" in text
                assert f"lengths {lengths[0]:,}" in text
                assert f": {', '.join(map(str, batch.ranks))}<br>" in text


def test_pipelines_have_a_row_for_each_device(tmp_path: Path) -> None:
    planner = planner_of(pipeline=2)
    plan = planner.plan(LENGTHS)
    write_plan_page([plan], tmp_path / "plan.html", [planner])
    (trace,) = traces(tmp_path / "plan.html")
    simulated = planner.simulate(plan)
    for rank in range(6):
        own = {i for i, batch in enumerate(plan.micro_batches) if rank in batch.ranks}
        for device in range(2):
            spans = [k for k, (i, stage, _) in enumerate(simulated["which"]) if i in own and stage % 2 == device]
            expected = sum(simulated["times"][k][1] - simulated["times"][k][0] for k in spans)
            assert busy(trace, rank - 0.25 + 0.5 * device) == pytest.approx(expected, rel=1e-6)
    assert {text.split("</b> ")[1].split("<br>")[0] for text in trace["hovertext"]} == {
        f"{name} of stage {stage}" for name in ("forward", "backward") for stage in range(2)
    }


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = ["--ranks", "16", "--capacity", "8K", "--tokens", "512K", "--context", "64K", "--compare", "static"]
    assert main(["plan", *options, "--html", str(page)]) == 0
    assert len(traces(page)) == 2


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of()
    empty, plan = planner.plan([]), planner.plan([5])
    write_plan_page([empty], tmp_path / "plan.html", [planner])
    with pytest.raises(InvalidUsage, match="0 planners were given for 1 plans"):
        write_plan_page([plan], tmp_path / "plan.html", [])
    with pytest.raises(InvalidUsage, match="0 planners were given for 0 plans"):
        write_plan_page([], tmp_path / "plan.html", [])
    with pytest.raises(InvalidUsage, match=r"ends in \.html"):
        write_plan_page([plan], tmp_path / "plan.png", [planner])
    with pytest.raises(InvalidUsage, match="cannot write"):
        write_plan_page([plan], tmp_path / "no" / "plan.html", [planner])
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(InvalidUsage, match=r"pip install 'hdpcomm\[plot\]'"):
        write_plan_page([plan], tmp_path / "plan.html", [planner])

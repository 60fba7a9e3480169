"""A page of plans in which a person can hover over sequences and ranks, and zoom. Needs plotly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MicroBatch, Planner, StepPlan

__all__ = ["write_plan_page"]

_SEQUENCES_NAMED = 8
_RANKS_NAMED = 16
_FORWARD_OPACITY = 0.55
_ROW_SHARE = 0.92  # of a row's height that a bar takes
_PIXELS_A_ROW = 18


@dataclass(frozen=True, slots=True)
class _Bar:
    """Bar of a device, or of neighbouring ranks. ``row``: the middle of the bar; ``rows``: its height."""

    plan: StepPlan
    batch: MicroBatch
    start_s: float
    seconds: float
    row: float
    rows: float
    pass_name: str = ""


def _tokens(count: float) -> str:
    return f"{count / 1024:.0f}K" if count >= 10240 else f"{count:.0f}"


def _some(values: Sequence[Any], most: int) -> str:
    shown = ", ".join(f"{value:,}" for value in values[:most])
    return f"{shown} and {len(values) - most:,} more" if len(values) > most else shown


def _tooltip(bar: _Bar) -> str:
    batch, planned = bar.batch, bar.plan.slices.get(bar.batch.index)
    lengths = sorted((sequence.length for sequence in batch.sequences), reverse=True)
    lines = [
        f"<b>micro-batch {batch.index}</b> {bar.pass_name}",
        f"{len(batch.ranks)} rank{'' if len(batch.ranks) == 1 else 's'}: {_some(batch.ranks, _RANKS_NAMED)}",
        f"{len(lengths):,} sequence{'' if len(lengths) == 1 else 's'}, {sum(lengths):,} tokens",
        f"lengths {_some(lengths, _SEQUENCES_NAMED)}"
        if planned is None
        else (f"slice {planned.number + 1} of {len(planned.rows)} of {planned.bounds[-1]:,} tokens"),
        f"from {bar.start_s:.4g} s, for {bar.seconds:.4g} s",
    ]
    if batch.offload_ratio:
        lines.append(f"offload ratio {batch.offload_ratio:.2f}")
    return "<br>".join(lines)


def _bars(plan: StepPlan) -> Iterator[_Bar]:
    """A bar for each run of neighbouring ranks of each micro-batch."""
    for batch, start in zip(plan.micro_batches, plan.timeline(), strict=True):
        ranks = np.sort(np.asarray(batch.ranks))
        for run in np.split(ranks, np.flatnonzero(np.diff(ranks) != 1) + 1):
            yield _Bar(plan, batch, start, batch.predicted_s, float(run[0] + run[-1]) / 2, len(run) - 1 + _ROW_SHARE)


def _pipeline_bars(plan: StepPlan, planner: Planner) -> Iterator[_Bar]:
    """A bar for each pass through a stage, in the row of its device, by the simulated schedule."""
    devices = planner.cluster.pipeline
    found = planner.simulate(plan)
    passes = zip(found["which"].tolist(), found["alone"].tolist(), found["times"].tolist(), strict=True)
    for (which, stage, kind), alone, (start, end) in passes:
        batch = plan.micro_batches[which]
        name = f"{('forward', 'backward', 'weight gradients')[kind]} of stage {stage}"
        for rank in batch.ranks if alone < 0 else (alone,):
            row = rank + (stage % devices + 0.5) / devices - 0.5
            yield _Bar(plan, batch, start, end - start, row, _ROW_SHARE / devices, name)


def _trace(bars: list[_Bar], limits: tuple[int, int]) -> Any:
    """The bars of a plan. ``limits``: of the colours, in octaves of tokens."""
    from plotly import graph_objects

    ticks = range(limits[0], limits[1] + 1, max(1, (limits[1] - limits[0]) // 4))
    return graph_objects.Bar(
        orientation="h",
        base=[bar.start_s for bar in bars],
        x=[bar.seconds for bar in bars],
        y=[bar.row for bar in bars],
        width=[bar.rows for bar in bars],
        hovertext=[_tooltip(bar) for bar in bars],
        hoverinfo="text",
        showlegend=False,
        marker={
            "color": [float(np.log2(bar.plan.longest_of(bar.batch))) for bar in bars],
            "opacity": [_FORWARD_OPACITY if bar.pass_name.startswith("forward") else 1.0 for bar in bars],
            "colorscale": "Viridis_r",
            "cmin": limits[0],
            "cmax": limits[1],
            "line": {"color": "white", "width": 0.5},
            "colorbar": {
                "title": "longest sequence<br>(tokens)",
                "tickvals": list(ticks),
                "ticktext": [_tokens(2**tick) for tick in ticks],
            },
        },
    )


def write_plan_page(plans: Sequence[StepPlan], path: str | Path, planners: Sequence[Planner]) -> None:
    """Writes one HTML file, without other files or network, of plans of the same step under each other.

    Time runs to the right on one scale, ranks downwards; a bar is a micro-batch on neighbouring ranks, its colour its
    longest sequence. Hovering tells its ranks, its lengths and its time. The dashed line is the lower bound. Ranks that
    are pipelines have a row for each device, with forward passes lighter. 4.5 MB, most of it plotly's own code.

    Args:
        planners: of the plans, in order.

    Raises:
        InvalidUsage: no plan, another number of planners, a name that does not end in .html, or no plotly.
    """
    if not plans or len(planners) != len(plans):
        raise InvalidUsage(f"{len(planners)} planners were given for {len(plans)} plans: give plans, and that of each")
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise InvalidUsage(f"cannot write a page to {path}, expected a name that ends in .html")
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise InvalidUsage("a page is drawn with plotly; pip install 'hdpcomm[plot]'") from error
    octaves = np.log2([plan.longest_of(batch) for plan in plans for batch in plan.micro_batches] or [1])
    limits = int(np.floor(octaves.min())), int(np.ceil(octaves.max() + 1e-6))
    titles = [
        f"{plan.policy}: {plan.makespan_s:.4g} s, idle {100 * plan.idle_share:.1f}%, "
        f"{len(plan.micro_batches):,} micro-batches"
        for plan in plans
    ]
    figure = make_subplots(rows=len(plans), cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.08)
    height = 0
    for row, (plan, planner) in enumerate(zip(plans, planners, strict=True), start=1):
        devices = planner.cluster.pipeline
        bars = list(_pipeline_bars(plan, planner) if devices > 1 else _bars(plan))
        figure.add_trace(_trace(bars, limits), row=row, col=1)
        figure.add_vline(plan.lower_bound_s, line_dash="dash", line_color="crimson", row=row, col=1)
        label = "rank" if devices == 1 else f"rank, each a pipeline of {devices} devices"
        ranks = {"range": [plan.num_ranks - 0.5, -0.5], "tick0": 0, "dtick": max(1, plan.num_ranks // 16)}
        figure.update_yaxes(title_text=label, **ranks, row=row, col=1)
        height += min(800, max(200, _PIXELS_A_ROW * plan.num_ranks * devices)) + 120
    lighter = "; lighter: forward" if any(planner.cluster.pipeline > 1 for planner in planners) else ""
    figure.update_xaxes(title_text=f"seconds; dashed: lower bound{lighter}", row=len(plans), col=1)
    figure.update_layout(height=height, barmode="overlay", template="plotly_white", hovermode="closest", bargap=0)
    text = figure.to_html(include_plotlyjs=True, full_html=True)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidUsage(f"cannot write {path}: {error}") from error

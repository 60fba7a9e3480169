"""Gantt charts of plans: what each rank runs when, coloured by sequence length. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MicroBatch, Planner, StepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_plans"]

_Pass = tuple[MicroBatch, NDArray[np.int64], float, float, bool]
"""(micro-batch, its rows, begin, end, whether it is a forward pass)"""

_IDLE = "#c9c9c9"
_OCTAVES = 9  # most octaves of length on the colour scale
_COLUMNS = 560  # of the time axis: none is narrower than a pixel, so the shortest micro-batch is seen
_FORWARD_TINT = 0.55  # share of white in the forward passes of pipelines
_FEW_RANKS = 64  # up to this many ranks, all micro-batches have borders


def _human(tokens: float) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            value = tokens / size
            return f"{value:.0f}{unit}" if value >= 10 or value == int(value) else f"{value:.1f}{unit}"
    return f"{tokens:.0f}"


def _columns(start: float, end: float, width: float) -> slice:
    first = min(_COLUMNS - 1, round(start / width * _COLUMNS))
    return slice(first, max(round(end / width * _COLUMNS), first + 1))


def _passes(plan: StepPlan, planner: Planner | None) -> list[_Pass]:
    """All that runs, longest first; of pipelines each pass by the simulated schedule, with a row for each device."""
    if planner is None or planner.cluster.pipeline == 1:
        timed = zip(plan.micro_batches, plan.timeline(), strict=True)
        passes = [(batch, np.asarray(batch.ranks), start, start + batch.predicted_s, False) for batch, start in timed]
    else:
        devices, found = planner.cluster.pipeline, planner.simulate(plan)
        passes = []
        for (which, stage, backward), alone, times in zip(found["which"], found["alone"], found["times"], strict=True):
            batch = plan.micro_batches[which]
            rows = np.asarray(batch.ranks if alone < 0 else [alone]) * devices + stage % devices
            passes.append((batch, rows, *times, not backward))
    return sorted(passes, key=lambda each: each[2] - each[3])


def _raster(plan: StepPlan, planner: Planner | None, end: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """log2 of the longest sequence that each row runs at each time, NaN where it is idle; and whether it is a forward
    pass of a pipeline."""
    image = np.full((plan.num_ranks * (1 if planner is None else planner.cluster.pipeline), _COLUMNS), np.nan)
    forward = np.zeros(image.shape, dtype=np.bool_)
    for batch, rows, start, stop, is_forward in _passes(plan, planner):  # short ones last, so that they stay visible
        columns = _columns(start, stop, end)
        image[rows, columns] = np.log2(plan.longest_of(batch))
        forward[rows, columns] = is_forward
    return image, forward


def _mark_groups(axes: Axes, plan: StepPlan, end: float, limits: tuple[float, float]) -> None:
    """Draws borders around micro-batches that are large enough, and their length where there is room."""
    from matplotlib.patches import Rectangle

    few = plan.num_ranks <= _FEW_RANKS
    for batch, start in zip(plan.micro_batches, plan.timeline(), strict=True):
        if not few and (batch.predicted_s < 0.02 * end or len(batch.ranks) < 0.02 * plan.num_ranks):
            continue
        ranks = np.sort(np.asarray(batch.ranks))
        runs = np.split(ranks, np.flatnonzero(np.diff(ranks) != 1) + 1)
        for run in runs:
            corner = (start, float(run[0]) - 0.5)
            axes.add_patch(Rectangle(corner, batch.predicted_s, len(run), fill=False, edgecolor="white", linewidth=0.7))
        widest = max(runs, key=len)
        text = _human(plan.longest_of(batch))
        if len(batch.sequences) > 1:
            text += f" +{len(batch.sequences) - 1}"
        if (planned := plan.slices.get(batch.index)) is not None:
            text += f" {planned.number + 1}/{len(planned.rows)}"
        if batch.predicted_s > 0.013 * len(text) * end and len(widest) >= plan.num_ranks / 40:
            shade = "black" if np.log2(plan.longest_of(batch)) < limits[0] + 0.35 * (limits[1] - limits[0]) else "white"
            middle = float(widest[0] + widest[-1]) / 2
            centre = start + batch.predicted_s / 2
            axes.text(centre, middle, text, ha="center", va="center", fontsize=7, color=shade)


def _draw_plan(
    axes: Axes, plan: StepPlan, planner: Planner | None, end: float, limits: tuple[float, float], colours: Any
) -> None:
    """A row for each rank, or for each device of its pipeline, these under each other."""
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    image, forward = _raster(plan, planner, end)
    shades = colours(np.ma.masked_invalid(Normalize(*limits)(image)))
    shades[forward, :3] += _FORWARD_TINT * (1 - shades[forward, :3])
    extent = (0.0, end, plan.num_ranks - 0.5, -0.5)
    axes.imshow(shades, extent=extent, aspect="auto", interpolation="nearest")
    legend: list[Any] = []
    if len(image) == plan.num_ranks:
        _mark_groups(axes, plan, end, limits)
    else:
        if plan.num_ranks <= _FEW_RANKS:
            for rank in range(1, plan.num_ranks):
                axes.axhline(rank - 0.5, color="white", linewidth=1.0)
        middle = np.array(colours(0.5)[:3])
        legend.append(Patch(color=tuple(middle + _FORWARD_TINT * (1 - middle)), label="forward"))
        legend.append(Patch(color=tuple(middle), label="backward"))
    if plan.num_ranks <= 16:
        axes.set_yticks(range(plan.num_ranks))
    bound = axes.axvline(plan.lower_bound_s, color="crimson", linewidth=1.2, linestyle="--", label="lower bound")
    if legend or plan.lower_bound_s < 0.8 * end:
        axes.legend(handles=[*legend, bound], loc="lower right", fontsize=8)
    axes.set_title(
        f"{plan.policy}: {plan.makespan_s:.4g} s, idle {100 * plan.idle_share:.1f}%", fontsize=11, loc="left"
    )
    axes.set_xlabel("seconds")


def _draw_lengths(axes: Axes, plan: StepPlan, limits: tuple[float, float], colours: Any) -> None:
    """Draws the shares of the sequences and of the tokens by octave of length."""
    lengths = plan.sequences()[0].astype(np.float64)
    shortest, longest = (lengths.min(), lengths.max()) if len(lengths) else (1.0, 1.0)
    edges = np.arange(np.floor(np.log2(shortest)), np.floor(np.log2(longest)) + 1)
    octaves = np.clip(np.floor(np.log2(lengths)), edges[0], edges[-1]) if len(lengths) else lengths
    counts = np.array([np.mean(octaves == edge) if len(lengths) else 0.0 for edge in edges])
    tokens = np.array([lengths[octaves == edge].sum() / max(lengths.sum(), 1) for edge in edges])
    span = max(limits[1] - limits[0], 1e-9)
    shades = [colours(min(1.0, max(0.0, (edge + 0.5 - limits[0]) / span))) for edge in edges]
    axes.bar(edges - 0.2, 100 * counts, width=0.4, color="white", edgecolor=shades, linewidth=1.2, hatch="////")
    axes.bar(edges + 0.2, 100 * tokens, width=0.4, color=shades)
    axes.set_xticks(edges, [f"{_human(2**edge)}" for edge in edges])
    axes.set_xlabel("sequence length, from (tokens)")
    axes.set_ylabel("share in %")
    axes.set_title(
        f"{len(lengths):,} sequences, {int(lengths.sum()):,} tokens; hatched: share of sequences, filled: of tokens",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)


def plot_plans(plans: Sequence[StepPlan], path: str | Path, planners: Sequence[Planner] = ()) -> None:
    """Writes a chart (PNG, SVG or PDF, by the name) of several plans of the same step, side by side.

    Time runs to the right on one scale, ranks downwards. The colour is the longest sequence of a micro-batch, grey is
    idle, the dashed line is the lower bound. Ranks that are pipelines have a row for each device, forward passes in a
    lighter shade. Below is a histogram of the lengths.

    Args:
        planners: of the plans, in order; without them pipelines are drawn as if each rank were one device.

    Raises:
        InvalidUsage: no plan, another number of planners than of plans, or a file name with another ending.
    """
    if not plans:
        raise InvalidUsage("no plan to draw: give at least one")
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidUsage(f"cannot draw to {path}, expected a name that ends in .png, .svg or .pdf")
    if planners and len(planners) != len(plans):
        raise InvalidUsage(f"{len(planners)} planners were given for {len(plans)} plans: give that of each, or none")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    end = 1.01 * max((plan.makespan_s for plan in plans), default=0.0) or 1.0
    longest = [plan.longest_of(batch) for plan in plans for batch in plan.micro_batches] or [1]
    top = float(np.log2(max(longest))) + 1e-6
    limits = (max(float(np.log2(min(longest))), top - _OCTAVES) - 1e-6, top)
    colours = colormaps["viridis_r"].with_extremes(bad=_IDLE)
    figure = Figure(figsize=(max(9.0, 6.2 * len(plans)), 8.5), layout="constrained")
    grid = figure.add_gridspec(2, len(plans), height_ratios=(3, 1))
    panels: list[Axes] = []
    for column, plan in enumerate(plans):
        axes = figure.add_subplot(grid[0, column], sharey=panels[0] if panels else None)
        _draw_plan(axes, plan, planners[column] if planners else None, end, limits, colours)
        panels.append(axes)
    stages = planners[0].cluster.pipeline if planners else 1
    panels[0].set_ylabel("rank" if stages == 1 else f"rank, each a pipeline of {stages} devices")
    ticks = np.arange(np.ceil(limits[0]), np.floor(limits[1]) + 1, max(1, (limits[1] - limits[0]) // 6))
    picture = ScalarMappable(Normalize(*limits), colours)
    bar = figure.colorbar(picture, ax=panels, ticks=ticks, fraction=0.03, pad=0.01)
    bar.ax.set_yticklabels([_human(2**tick) for tick in ticks])
    bar.set_label("longest sequence (tokens); grey: idle")
    _draw_lengths(figure.add_subplot(grid[1, :]), plans[0], limits, colours)
    try:
        figure.savefig(str(path), dpi=110)
    except OSError as error:
        raise InvalidUsage(f"cannot write {path}: {error}") from error

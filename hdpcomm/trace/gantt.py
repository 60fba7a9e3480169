"""Gantt charts of plans: what each rank runs when, coloured by sequence length. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MicroBatch, Planner, StepPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SHARES", "curves", "lengths", "plot_plans", "step_gantt", "time_shares"]


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


Rows = Sequence[Mapping[str, Any]]
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5")
_WAIT, _GRADIENTS, _OPTIMIZER = "#cbd5e0", "#d69e2e", "#b83280"
_POINTS = 2000  # of a curve; more are not seen and make the page slow
SHARES = {
    "compute": ("compute_s", "#2b6cb0"),
    "exposed": ("exposed_s", "#c05621"),
    "stalled": ("stall_s", "#718096"),
    "idle": ("idle_s", _WAIT),
    "optimizer": ("optimizer_s", _OPTIMIZER),
    "waiting for the plan": ("plan_wait_s", "#2f855a"),
}
"""Where a step's time goes: names, and the columns of ``metrics.jsonl``."""


def curves(by_policy: Mapping[str, Rows], evaluations: Mapping[str, Rows]) -> str:
    """Loss, tokens/s, gradient norm, and predicted against measured seconds of each step."""
    figure = _figure(11, 6.4)
    axes = figure.subplots(2, 2).reshape(-1)
    for colour, (policy, rows) in zip(_COLOURS * 9, by_policy.items(), strict=False):
        rows = rows[:: -(-len(rows) // _POINTS)]
        steps = [row["step"] + 1 for row in rows]
        axes[0].plot(steps, [row["loss"] for row in rows], color=colour, label=policy, linewidth=1.3)
        held_out = evaluations.get(policy, ())
        if held_out:
            places = [row["step"] for row in held_out]
            axes[0].plot(
                places, [row["loss"] for row in held_out], "o", color=colour, markersize=4, label=f"{policy}, held out"
            )
        rates = [row["tokens"] / row["seconds"] if row["seconds"] else 0.0 for row in rows]
        axes[1].plot(steps, rates, color=colour, label=policy, linewidth=1.0)
        axes[2].plot(steps, [row["grad_norm"] for row in rows], color=colour, label=policy, linewidth=1.0)
        axes[3].plot(steps, [row["seconds"] for row in rows], color=colour, label=f"{policy}, measured", linewidth=1.0)
        predicted = [row["predicted_s"] for row in rows]
        axes[3].plot(
            steps, predicted, color=colour, linestyle=":", label=f"{policy}, predicted (without the optimizer)"
        )
    for each, title in zip(axes, ("loss (nats a token)", "tokens/s", "gradient norm", "seconds a step"), strict=True):
        _style(each, x="step", title=title)
        each.xaxis.get_major_locator().set_params(integer=True)
        each.legend(fontsize=7, frameon=False)
        each.margins(x=0.02)
    for each in axes[1:]:
        each.set_ylim(bottom=0)
    return _svg(figure)


def step_gantt(row: Mapping[str, Any]) -> str:
    """A line of ``timeline.jsonl``: above as planned, below as measured, on one scale of seconds."""
    ranks = int(row["ranks"])
    figure = _figure(11, 1.6 + 2 * min(5.0, 0.32 * ranks + 0.4))
    planned, measured = figure.subplots(2, 1, sharex=True)
    longest = {batch["index"]: max(batch["lengths"]) for batch in row["planned"]}
    names = {batch["index"]: f"#{batch['index']} ({len(batch['lengths'])})" for batch in row["planned"]}
    shade = _Shades(list(longest.values()))
    end = max([batch["end_s"] for batch in row["planned"]] + [s["end_s"] for r in row["measured"] for s in r["spans"]])
    for batch in row["planned"]:
        index = batch["index"]
        for rank in batch["ranks"]:
            _bar(planned, rank, batch["start_s"], batch["end_s"], shade(longest[index]), names[index], end)
    for rank, told in enumerate(row["measured"]):
        for span in told["spans"]:
            index, start, stop = span["index"], span["start_s"], span["end_s"]
            if index in longest:
                busy = max(start, stop - max(span["wait_s"], span.get("apart_s", 0.0)))
                _bar(measured, rank, start, busy, shade(longest[index]), names[index], end)
                _bar(measured, rank, busy, stop, shade(longest[index]), "", end, waiting=True)
            else:
                colour = {"gradients": _GRADIENTS, "optimizer": _OPTIMIZER}.get(span["phase"], _WAIT)
                _bar(measured, rank, start, stop, colour, "", end)
    titles = ("as planned: number of the micro-batch (its sequences)", "as measured")
    for axes, title in zip((planned, measured), titles, strict=True):
        _style(axes, x="seconds since the ranks agreed on the plan" if axes is measured else "", y="rank", title=title)
        axes.set_ylim(ranks - 0.5, -0.5)
        if ranks <= 16:
            axes.set_yticks(range(ranks))
    measured.set_xlim(0, end * 1.01)
    _gantt_legend(measured, shade)
    return _svg(figure)


class _Shades:
    """Colours by the logarithm of the longest sequence."""

    def __init__(self, lengths: Sequence[int]) -> None:
        from matplotlib import colormaps

        self._map = colormaps["viridis_r"]
        self.low, self.high = min(lengths, default=1), max(lengths, default=1)

    def __call__(self, length: int) -> Any:
        span = np.log2(self.high / self.low) or 1.0
        return self._map(0.1 + 0.8 * np.log2(length / self.low) / span)


def _bar(
    axes: Axes, rank: int, start: float, stop: float, colour: Any, name: str, end: float, *, waiting: bool = False
) -> None:
    hatch: dict[str, Any] = {"hatch": "////", "alpha": 0.45} if waiting else {}
    axes.barh(rank, stop - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.4, **hatch)
    if stop - start > 0.012 * len(name) * end and name:
        axes.text((start + stop) / 2, rank, name, ha="center", va="center", fontsize=7, color="white")


def _gantt_legend(axes: Axes, shade: _Shades) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=shade(shade.low), label=f"longest sequence: {shade.low:,} tokens"),
        Patch(color=shade(shade.high), label=f"longest sequence: {shade.high:,} tokens"),
        Patch(
            facecolor="#a0aec0",
            hatch="////",
            edgecolor="white",
            label="waited inside the micro-batch (shown at its end)",
        ),
        Patch(color=_WAIT, label="idle"),
        Patch(color=_GRADIENTS, label="gradients"),
        Patch(color=_OPTIMIZER, label="optimizer"),
    ]
    axes.legend(handles=patches, fontsize=7, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.28))


def lengths(octaves: Rows) -> str:
    """Shares of the sequences and of the tokens by octave of length."""
    figure = _figure(11, 3.0)
    axes = figure.subplots()
    sequences = np.array([row["sequences"] for row in octaves], dtype=np.float64)
    tokens = np.array([row["tokens"] for row in octaves], dtype=np.float64)
    places = np.arange(len(octaves))
    axes.bar(places - 0.2, 100 * sequences / sequences.sum(), width=0.4, color="#a0aec0", label="of the sequences")
    axes.bar(places + 0.2, 100 * tokens / tokens.sum(), width=0.4, color="#2b6cb0", label="of the tokens")
    axes.set_xticks(places, [f"{row['from']:,}" for row in octaves], fontsize=8)
    _style(axes, x="length, from (tokens)", y="share in %")
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def time_shares(by_policy: Mapping[str, Mapping[str, float]]) -> str:
    """Mean seconds of a step by where they went, a bar for each policy. ``by_policy``: the names of :data:`SHARES`."""
    figure = _figure(11, 1.2 + 0.5 * len(by_policy))
    axes = figure.subplots()
    for place, shares in enumerate(by_policy.values()):
        left = 0.0
        for name, seconds in shares.items():
            colour = SHARES[name][1] if name in SHARES else "#edf2f7"
            axes.barh(
                place, seconds, left=left, height=0.6, color=colour, edgecolor="white", label=None if place else name
            )
            left += seconds
    axes.set_yticks(range(len(by_policy)), list(by_policy), fontsize=9)
    axes.invert_yaxis()
    _style(axes, x="seconds of a step, mean over steps and ranks")
    axes.legend(fontsize=7, ncols=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    return _svg(figure)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Names the axes in small letters, and leaves out the lines that no value stands at."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _svg(figure: Figure) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]

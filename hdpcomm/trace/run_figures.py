"""Figures of a training run, as SVG: curves, a step as planned and as measured, lengths, where the time went."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SHARES", "curves", "lengths", "step_gantt", "time_shares"]

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

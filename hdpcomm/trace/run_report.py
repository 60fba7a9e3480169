"""A training run as one HTML page that needs no other file."""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hdpcomm.arguments import ranks_text
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.files import read_text
from hdpcomm.run import read_lines, read_metrics
from hdpcomm.trace.gantt import SHARES, curves, lengths, step_gantt, time_shares

__all__ = ["run_report"]

Row = Mapping[str, Any]
_MESH = ("ranks", "pipeline", "tensor", "expert")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.note { color: #4a5568; font-size: 0.9rem; max-width: 110ch; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.25rem 0.8rem; border-bottom: 1px solid #e2e8f0; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } svg { width: 100%; min-width: 46rem; height: auto; }
pre { background: #f7fafc; padding: 1rem; overflow-x: auto; font-size: 0.8rem; }
@media (prefers-color-scheme: dark) {
  body { background: #14181f; color: #e2e8f0; } p.note { color: #a0aec0; } pre { background: #1f2630; }
  th, td { border-color: #2d3748; } svg { filter: invert(0.9) hue-rotate(180deg); }
}
"""


def run_report(run: Path) -> str:
    """The page of the run in folder ``run``: curves, a step as planned and as measured, lengths, where the time went,
    policies side by side, and the configuration. Local.

    Raises: InvalidUsage if there is no run, one without a step, or values in its files that no run writes.
    """
    try:
        return _page(run)
    except Error:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidUsage(
            f"{run}: a file of this run has values that no run writes ({type(error).__name__}: {error!s:.100}); "
            "metrics.jsonl, evaluations.jsonl, timeline.jsonl and lengths.json are read"
        ) from error


def _page(run: Path) -> str:
    try:
        metrics = read_metrics(run / "metrics.jsonl")
    except OSError as error:
        raise InvalidUsage(
            f"{run}: no run there ({error.strerror}: metrics.jsonl); give the folder of hdpcomm train --out"
        ) from None
    metrics = [row for row in metrics if _complete(row)]
    if not metrics:
        raise InvalidUsage(f"{run}: no step was done yet; look again when {run}/metrics.jsonl has a line")
    by_policy = _by_policy(metrics)
    evaluations = _by_policy(_lines(run / "evaluations.jsonl"))
    timelines = _drawn(_by_policy(_lines(run / "timeline.jsonl")))
    parts = [_head(run, by_policy)]
    parts.append(_section("Curves", curves(by_policy, evaluations)))
    parts.append(_section("Policies side by side", _policies(by_policy, timelines), _long_steps(run, by_policy)))
    told = "".join(tell(by_policy) for tell in (_slow_ranks, _queue))
    parts.append(_section("Plans against the clock", _clock(by_policy), told))
    parts.append(_section("Where the time went", time_shares({p: _shares(rows) for p, rows in by_policy.items()})))
    for place, (policy, row) in enumerate(timelines.items()):
        about = "" if place else "Of the traced steps, the plan matters most in this one, by the run's own costs. "
        parts.append(_section(f"Step {row['step'] + 1} under {policy}", step_gantt(row), about + _gantt_note(row)))
    parts += _lengths(run / "lengths.json")
    if (run / "config.yaml").is_file():
        text = html.escape(read_text(run / "config.yaml", errors="replace"))
        parts.append(f"<h2>Configuration</h2><pre>{text}</pre>")
    title = html.escape(run.resolve().name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: hdpcomm run</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _complete(row: Row) -> bool:
    names = ("step", "loss", "tokens", "seconds", "grad_norm", "predicted_s")
    return all(isinstance(row.get(name), (int, float)) for name in names) and isinstance(row.get("policy"), str)


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.is_file() else []


def _by_policy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["policy"]), []).append(row)
    return found


def _drawn(timelines: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
    """By policy, the step in which the first policy's plan matters most by the run's own costs: in which the others
    would take longest, as shares of its time."""
    first, *others = [{row["step"]: row for row in rows} for rows in timelines.values()] or [{}]

    def gain(step: int) -> float:
        rivals = [own[step]["predicted_s"] for own in others if step in own]
        rivals += [each["makespan_s"] for each in first[step].get("policies", {}).values()]
        return max(rivals, default=0.0) / (first[step]["predicted_s"] or 1.0)

    best = max(first, key=gain, default=None)
    return {policy: row for policy, rows in timelines.items() for row in rows if row["step"] == best}


def _long_steps(run: Path, by_policy: Mapping[str, Sequence[Row]]) -> str:
    """How much longer the policies beside the first take in steps with a sequence that one rank does not hold, and in
    the others."""
    try:
        room = int(json.loads(read_text(run / "calibration.json"))["memory"]["capacity"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # of an older run
    policy, *rivals = by_policy
    own = {row["step"]: row for row in by_policy[policy] if row["seconds"]}
    told = ""
    for rival in rivals:
        ratios: dict[bool, list[float]] = {True: [], False: []}
        for row in by_policy[rival]:
            if row["step"] in own:
                same = own[row["step"]]
                ratios[same.get("longest", 0) > room].append(row["seconds"] / same["seconds"])
        if ratios[True]:
            told += (
                f"In steps with a sequence of more than the {room:,} tokens that a rank holds {rival} took "
                f"{median(ratios[True]):.2f} times as long as {policy}"
            )
            told += f", in the others {median(ratios[False]):.2f} times (medians). " if ratios[False] else " (median). "
    return told


def _head(run: Path, by_policy: Mapping[str, Sequence[Row]]) -> str:
    first = next(iter(by_policy.values()))
    tokens, seconds = sum(row["tokens"] for row in first), sum(row["seconds"] for row in first)
    return (
        f"<h1>{html.escape(run.resolve().name)}</h1><p class=note>{len(first):,} steps, {tokens:,} tokens in "
        f"{seconds:,.1f} s; loss {first[0]['loss']:.4f} at step {first[0]['step'] + 1}, {first[-1]['loss']:.4f} at "
        f"step {first[-1]['step'] + 1}.{_mesh_changes(first)}</p>"
    )


def _mesh_changes(rows: Sequence[Row]) -> str:
    """Where a run went on with other ranks, or with another mesh of them."""
    meshes = [(row["step"], ", ".join(f"{name} {row[name]:.0f}" for name in _MESH if name in row)) for row in rows]
    changes = [
        f" From step {step + 1} on: {mesh} (before: {last})."
        for (_, last), (step, mesh) in itertools.pairwise(meshes)
        if mesh != last
    ]
    return "".join(changes)


def _section(title: str, content: str, note: str = "") -> str:
    about = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return f"<h2>{html.escape(title)}</h2>{about}<div class=scroll>{content}</div>"


def _policies(by_policy: Mapping[str, Sequence[Row]], timelines: Mapping[str, Row]) -> str:
    names = ("policy", "tokens/s", "seconds/step", "idle", "exposed", "ring bytes/step", "gradient bytes/step", "MFU")
    rows = []
    for policy, steps in by_policy.items():
        count, seconds = len(steps), sum(row["seconds"] for row in steps) or 1.0
        known = [row["mfu"] for row in steps if "mfu" in row]
        rows.append(
            (
                f"{policy}, measured",
                f"{sum(row['tokens'] for row in steps) / seconds:,.0f}",
                f"{seconds / count:.4f}",
                f"{sum(row.get('idle_s', 0.0) for row in steps) / seconds:.1%}",
                f"{sum(row.get('exposed_s', 0.0) for row in steps) / seconds:.1%}",
                f"{sum(row.get('ring_bytes', 0) for row in steps) / count:,.0f}",
                f"{sum(row.get('gradient_bytes', 0) for row in steps) / count:,.0f}",
                f"{sum(known) / len(known):.1%}" if known else "peak unknown",
            )
        )
    tables = [_table(names, rows)]
    for row in list(timelines.values())[:1]:
        predicted = [
            (policy, f"{each['makespan_s']:.4f}", f"{each['idle_share']:.1%}", f"{each['micro_batches']:,}")
            for policy, each in row.get("policies", {}).items()
        ]
        if predicted:
            note = f"Step {row['step'] + 1} as each policy would plan it, predicted by the run's own costs:"
            heads = ("policy", "seconds", "idle", "micro-batches")
            tables.append(f"<p class=note>{note}</p>{_table(heads, predicted)}")
    return "".join(tables)


def _clock(by_policy: Mapping[str, Sequence[Row]]) -> str:
    """Predicted over measured seconds of forward and backward, early and late."""
    rows = []
    for policy, steps in by_policy.items():
        ratios = [
            row["measured_s"] / row["predicted_s"]
            for row in steps
            if isinstance(row.get("measured_s"), (int, float)) and row["predicted_s"] > 0
        ]
        tenth = max(1, len(ratios) // 10)
        ends = [f"{median(part):.2f}" if part else "unknown" for part in (ratios[:tenth], ratios[-tenth:])]
        rows.append((policy, *ends, f"{median(ratios):.2f}" if ratios else "unknown"))
    return _table(("measured / predicted", "first tenth", "last tenth", "median step"), rows)


_SLOW = 0.9  # of the other ranks' speed


def _slow_ranks(by_policy: Mapping[str, Sequence[Row]]) -> str:
    """Names the ranks that were slow in half of the steps or more."""
    found = []
    for policy, steps in by_policy.items():
        speeds: dict[int, list[float]] = {}
        for row in steps:
            rank, speed = row.get("slowest_rank"), row.get("slowest_speed")
            if isinstance(rank, int) and isinstance(speed, (int, float)) and speed < _SLOW:
                speeds.setdefault(rank, []).append(speed)
        found += [
            f"rank {rank} computed at {median(own):.2f} of the others' speed under {policy}"
            for rank, own in sorted(speeds.items())
            if 2 * len(own) >= len(steps)
        ]
    if not found:
        return "No rank was slow in half of the steps or more."
    return f"Slow ranks: {'; '.join(found)}. hdpcomm train --learn-costs gives them less; with --queue they take less."


def _queue(by_policy: Mapping[str, Sequence[Row]]) -> str:
    """How often a rank took what was predicted for another one."""
    told = []
    for policy, steps in by_policy.items():
        queued, moved = (sum(row.get(name, 0) for row in steps) for name in ("queued", "moved"))
        if queued:
            told.append(f"{moved / queued:.0%} of {queued:,} micro-batches under {policy}")
    return f" Taken from the queue by another rank than predicted: {', '.join(told)}." if told else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _shares(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds of a step by :data:`SHARES`, and what is left."""
    count = len(rows)
    shares = {name: sum(row.get(column, 0.0) for row in rows) / count for name, (column, _) in SHARES.items()}
    left = sum(row["seconds"] for row in rows) / count - sum(shares.values())
    return shares | {"other": max(0.0, left)}


def _gantt_note(row: Row) -> str:
    sequences = sum(len(batch["lengths"]) for batch in row["planned"])
    return (
        f"{sequences:,} sequences in {len(row['planned']):,} micro-batches on {ranks_text(row['ranks'])}; predicted "
        f"{row['predicted_s']:.4f} s for forward and backward, measured {row['seconds']:.4f} s with the optimizer."
    )


def _lengths(path: Path) -> list[str]:
    try:
        found = json.loads(read_text(path))
        return [_section("Lengths", lengths(found["octaves"]), str(found["text"]))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # of an older run, or cut short: the rest of the page is as good without

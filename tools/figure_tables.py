"""Writes the tables of docs/ that are made from benchmarks/results: ``python tools/figure_tables.py``.

A line ``<!-- table: NAME -->`` stands before each of them; TABLES says how it is made. tests/unit/test_figure_tables.py
fails where a page and the files differ.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(?<=<!-- table: )(\w+)( -->\n\n)((?:\|[^\n]*\n)*)\n*")
Cells = list[list[str]]


def result(name: str) -> Any:
    """The content of a file of benchmarks/results."""
    return json.loads((TOP / f"benchmarks/results/{name}.json").read_text())


def percent(ratio: float) -> str:
    """Percent above 1."""
    return f"{round(100 * (ratio - 1), 2) + 0.0:.2f}"


def gap(rows: Iterable[dict[str, Any]]) -> str:
    """Mean and worst gap to the bound in percent; empty where nothing was measured."""
    rows = list(rows)
    if not rows:
        return ""
    return f"{percent(statistics.mean(r['mean_ratio'] for r in rows))} ({percent(max(r['worst_ratio'] for r in rows))})"


def gaps() -> Cells:
    """Gaps with the costs of H100, by stages and lengths."""
    rows = [row for row in result("planner_families")["rows"] if row["cost"] == "h100"]
    sizes = (256, 4096)
    table = [["stages", "lengths", *(f"{size:,} ranks" for size in sizes), "best of others"]]
    for stages, lengths in dict.fromkeys((row["stages"], row["lengths"]) for row in rows):
        chosen = [row for row in rows if (row["stages"], row["lengths"]) == (stages, lengths)]
        cells = [gap(row for row in chosen if row["ranks"] == size) for size in sizes]
        table.append([str(stages), lengths, *cells, f"{min(row['least_other'] for row in chosen):.2f}x"])
    return table


def gaps_by_cost() -> Cells:
    """Gaps over all lengths and ranks, by stages and costs."""
    rows = result("planner_families")["rows"]
    costs = ("compute", "h100", "offload")
    table = [["stages", *costs]]
    for stages in (1, 4, 8):
        table.append([str(stages), *(gap(r for r in rows if (r["stages"], r["cost"]) == (stages, c)) for c in costs)])
    return table


def unseen() -> Cells:
    """Gap and planning time of one step each."""
    rows = {tuple(name.split(" | ")): row for name, row in result("planner_unseen")["rows"].items()}
    columns = [(stages, "16384") for stages in ("1", "4", "4, 16 slices")]
    table = [["lengths, stages", *(stages for stages, _ in columns)]]
    known = {row["lengths"] for row in result("planner_families")["rows"]}
    for lengths in dict.fromkeys(name[1] for name in rows if name[1] not in known):
        cells = [rows[stages, lengths, ranks] for stages, ranks in columns]
        table.append([lengths, *(f"{percent(ratio)} ({seconds:.2f} s)" for ratio, seconds, *_ in cells)])
    return table


def planning_ms() -> Cells:
    """Mean and worst planning time, by costs and lengths."""
    sizes = (256, 4096, 16384)
    table = [["cost, lengths", *(f"{size:,} ranks" for size in sizes)]]
    for name, rows in result("planner")["tables"].items():
        times = {row["ranks"]: f"{1e3 * row['mean_s']:.1f} ({1e3 * row['worst_s']:.1f})" for row in rows}
        if set(sizes) <= set(times):
            table.append([name, *(times[size] for size in sizes)])
    return table


def planning_time() -> Cells:
    """Planning time and gap of the steps that take longest to plan."""
    rows = result("planning_time")["rows"]
    lengths = list(dict.fromkeys(row["lengths"] for row in rows))
    table = [["ranks", *lengths]]
    for ranks, kind in dict.fromkeys((row["ranks"], row["kind"]) for row in rows if row["kind"] != "8 stages"):
        chosen = {row["lengths"]: row for row in rows if (row["ranks"], row["kind"]) == (ranks, kind)}
        cells = [
            f"{chosen[name]['seconds']:.2f} s, {percent(chosen[name]['makespan_s'] / chosen[name]['bound_s'])}"
            if name in chosen
            else ""
            for name in lengths
        ]
        table.append([f"{ranks:,}, {kind}", *cells])
    return table


def large_clusters() -> Cells:
    """Plans of the largest clusters: time, memory, files."""
    table = [["ranks, lengths", "plan s", "gap", "memory MB", "JSON MB", "load s", "hash ms"]]
    for row in result("scale")["rows"]:
        if row["ranks"] == 131072:
            sizes = [f"{row['mbytes']:.0f}", f"{row['json_mbytes']:.1f}", f"{row['json_read_s']:.2f}"]
            cells = [f"{row['seconds']:.2f}", percent(row["gap"]), *sizes, f"{1e3 * row['hash_s']:.0f}"]
            table.append([f"{row['ranks']:,}, {row['lengths']}", *cells])
    return table


def uneven_links() -> Cells:
    """Steps of two clusters with slow links, by what the plan knows."""
    plans = ("aware", "blind", "static")
    table = [["cluster", *(f"{plan} s" for plan in plans)]]
    for file in ("two_hosts", "racks"):
        for case, found in result(file)["cases"].items():
            times = [f"{statistics.median(found['seconds'][plan]):.3f}" for plan in plans]
            table.append([f"{file.replace('_', ' ')}: {case}", *times])
    return table


def shared_nics() -> Cells:
    """How many times as fast steps are with plans that know of shared interfaces."""
    gains = {(r["lengths"], r["ranks"], r["policy"]): r for r in result("shared_nics")["rows"]}
    table = [["lengths", "ranks", "balanced", "static"]]
    for lengths, ranks in dict.fromkeys(name[:2] for name in gains):
        rows = [gains[lengths, ranks, policy] for policy in ("balanced", "static")]
        table.append([lengths, f"{ranks:,}", *(f"{row['gain']:.2f} ({row['least_gain']:.2f})" for row in rows)])
    return table


def closed_loop() -> Cells:
    """Steps over their bound while costs are learned."""
    rows = {(row["case"], row["ranks"], row["step"]): row for row in result("closed_loop")["rows"]}
    table = [["case, 256 ranks", "step 0", "step 5", "step 5 without learning"]]
    for case in dict.fromkeys(case for case, ranks, _ in rows if ranks == 256):
        steps = [rows[case, 256, step] for step in (0, 5)]
        cells = [f"{row['over_bound']:.3f} ({row['worst_over_bound']:.3f})" for row in steps]
        table.append([case, *cells, f"{steps[-1]['not_learning_over_bound']:.3f}"])
    return table


def queue_steps() -> Cells:
    """Steps with and without a queue, run by processes."""
    table = [["context", "static / bound", "queue / bound", "quicker by", "moved"]]
    for row in result("queue_steps")["rows"]:
        times = [f"{row[name]:.3f}" for name in ("static", "queue", "quicker")]
        table.append([row["case"], *times, f"{100 * row['moved']:.0f}%"])
    return table


def collectives() -> Cells:
    """Collectives on 2 ranks beside gloo and two MPIs."""
    peers = ("gloo", "Open MPI", "MPICH", "hdpcomm, comm.empty()")
    rows = [row for row in result("collectives-2")["rows"] if row["language"] == "python"]
    times = {(row["op"], row["bytes"], row["library"]): row["median_us"] for row in rows}
    table = [["2 ranks", "hdpcomm us", *peers[:3], "comm.empty()"]]
    for op in ("sendrecv", "all_gather", "all_reduce", "reduce_scatter"):
        for size, name in ((8, "8 B"), (65536, "64 KiB"), (2**20, "1 MiB"), (2**26, "64 MiB")):
            own = times[op, size, "hdpcomm"]
            found = [times.get((op, size, peer)) for peer in peers]
            table.append([f"{op}, {name}", f"{own:,.2f}", *(f"{time / own:.2f}" if time else "" for time in found)])
    return table


def torch_backend() -> Cells:
    """Functions of torch.distributed, beside gloo."""
    sizes = ((8, "8 B"), (65536, "64 KiB"), (2**20, "1 MiB"))
    rows = {(row["operation"], row["bytes"]): row for row in result("torch_backend")["rows"]}
    table = [["us (gloo)", *(name for _, name in sizes), "torch alone"]]
    for operation in (name for name, size in rows if size == 2**20):
        chosen = [rows[operation, size] for size, _ in sizes]
        cells = [f"{row['hdpcomm']:.3g} ({row['gloo'] / row['hdpcomm']:.1f}x)" for row in chosen]
        table.append([operation, *cells, f"{chosen[0]['torch alone']:.1f}"])
    return table


def training() -> Cells:
    """Speed of training steps relative to DDP, by the clock and by processor time."""
    parts = {part["context"]: {row["name"]: row for row in part["rows"]} for part in result("train")["tables"]}
    header = ["trainer"]
    for context in parts:
        header += [f"up to {context:,} tokens", "by processor time"]
    table = [header]
    for name in next(iter(parts.values())):
        cells = []
        for rows in parts.values():
            by_processor = rows["torch DDP"]["processor_s"] / rows[name]["processor_s"]
            cells += [f"{rows[name]['against_ddp']:.2f}", f"{by_processor:.2f}"]
        table.append([name, *cells])
    return table


def zero_bubble() -> Cells:
    """Gain of split backward passes over 1F1B, and the most that its order could gain."""
    table = [["model", "HDP ranks", "PP", "byted", "at most", "github", "at most"]]
    for row in (row for row in result("zero_bubble")["rows"] if row["ranks"] not in (1, 64)):
        gains = [row[lengths][kind]["mean"] for lengths in ("byted", "github") for kind in ("runs", "most")]
        table.append([row["model"], str(row["ranks"]), str(row["pipeline"]), *(f"{gain:.1%}" for gain in gains)])
    return table


def tree_attention() -> Cells:
    """Attention over a tree beside flattened trajectories."""
    table = [["pack", "s", "pairs", "sent MB", "least MB"]]
    for name, row in result("trees")["rows"].items():
        sizes = [f"{row[key] / 1e6:.2f}" for key in ("bytes", "least_bytes")]
        table.append([name, f"{row['seconds']:.3f}", f"{row['pairs'] / 1e6:.1f} M", *sizes])
    return table


def layer_bytes() -> Cells:
    """Bytes that a layer sends on four ranks, of the longest pack measured; KDA sends what the delta rule does."""
    rows = {row["layer"]: row for row in result("layer_bytes")["results"] if not row["layer"].startswith("KDA")}
    table = [["layer", "tokens", "forward", "backward", "over the least"]]
    for name, row in rows.items():
        sent = [f"{row[key]:,}" for key in ("forward_bytes", "backward_bytes")]
        table.append([name, f"{row['length']:,}", *sent, f"{row['times_minimum']:.2f}"])
    return table


def chosen_keys() -> Cells:
    """Work and traffic of attention that chooses its keys."""
    kinds = ("index", "chosen", "ring")
    table = [["ranks, tokens", "index", "chosen", "ring", "bytes: index + chosen"]]
    for row in result("chosen_keys")["rows"]:
        seconds = [f"{row[kind][0]:.2f}" for kind in kinds]
        share = (row["index"][1] + row["chosen"][1]) / row["gather"][1]
        table.append([f"{row['ranks']}, {row['tokens']:,}", *seconds, f"{share:.2f}"])
    return table


def paper_pipelines() -> Cells:
    """Speed-up over the static mesh of the paper's models that are cut into stages."""
    papers = {"llama-70b": "4.28x", "mistral-8x7b": "3.42x to 4.13x", "mistral-8x22b": "3.42x to 4.13x"}
    results = result("paper_pipelines")
    table = [["model, inputs, lengths", "paper", "ours", "bf16 KV gradients", "with slices", "no plan above"]]
    for name, row in results["rows"].items():
        model, inputs, lengths = name.split()
        half, sliced = results["bf16_gradients"][name], results["slices"][name]
        cells = [papers[model] if lengths == "github" else ""]
        cells += [f"{row['static_s'] / row['balanced_s']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"]
        cells += [f"{half['static_s'] / half['balanced_s']:.2f}x", f"{sliced['static_s'] / sliced['sliced_s']:.2f}x"]
        table.append([f"{model}, {inputs}, {lengths}", *cells, f"{row['static_pass_s'] / row['bound_s']:.2f}x"])
    return table


def lean_layers() -> Cells:
    """Operators and bytes of a layer of models of transformers, as it came and with lean parts."""
    rows = {(row["model"], row["form"]): row for row in result("lean_layers")["rows"]}
    table = [["layer", "launches", "GB read and written", "MB kept"]]
    for model in dict.fromkeys(model for model, _ in rows):
        forms = [rows[model, form] for form in ("plain", "lean") if (model, form) in rows]
        moved = [f"{(row['read_bytes'] + row['written_bytes']) / 1e9:.1f}" for row in forms]
        cells = [[str(row["launches"]) for row in forms], moved, [f"{row['kept_bytes'] / 1e6:,.0f}" for row in forms]]
        table.append([model, *(" -> ".join(each) for each in cells)])
    return table


def fit_sweep() -> Cells:
    """Published models: memory of the fullest device, what is most of it, and the step; or what the command says."""
    table = [["model", "H100s", "mesh", "GB", "most of it", "s/step", "CPU s"]]
    for row in result("fit_sweep")["rows"]:
        mesh = " x ".join(f"{name} {size}" for name, size in row["mesh"].items())
        cells, cpu_s = [row["model"], f"{row['ranks']:,}", mesh], f"{row['cpu_s']:.0f}" if "cpu_s" in row else ""
        if "limit" in row:
            memory = f"{row['together'] / 1e9:.1f}" + ("" if row["fits"] else " (no)")
            seconds = f"{row['step_s']:.1f}" if row["step_s"] else ""
            table.append([*cells, memory, f"{row['limit']} {row[row['limit']] / 1e9:.1f}", seconds, cpu_s])
        else:
            table.append([*cells, "", re.split("[;:,]", row["message"])[0], "", cpu_s])
    return table


TABLES: dict[str, Callable[[], Cells]] = {
    make.__name__: make
    for make in (
        gaps,
        gaps_by_cost,
        unseen,
        planning_ms,
        planning_time,
        large_clusters,
        uneven_links,
        shared_nics,
        closed_loop,
        queue_steps,
        collectives,
        torch_backend,
        training,
        zero_bubble,
        tree_attention,
        layer_bytes,
        lean_layers,
        chosen_keys,
        paper_pipelines,
        fit_sweep,
    )
}


def markdown(cells: Cells) -> str:
    """A table of Markdown whose first row is its header."""
    lines = [f"| {' | '.join(row)} |\n" for row in cells]
    return "".join([lines[0], "|" + "---|" * len(cells[0]) + "\n", *lines[1:]])


def updated(page: str) -> str:
    """The page with its marked tables made anew."""
    made = MARKED.sub(lambda match: f"{match[1]}{match[2]}{markdown(TABLES[match[1]]())}\n", page)
    return made.rstrip("\n") + "\n"


def main() -> None:
    """Writes the tables of all pages."""
    for path in sorted((TOP / "docs").rglob("*.md")):
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()

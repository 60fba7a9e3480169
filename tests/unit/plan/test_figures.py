"""The figures of docs/planner-figures.md are those of the files that the benchmarks wrote."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

TOP = Path(__file__).parents[3]
PAGE = (TOP / "docs/planner-figures.md").read_text()
PROSE = " ".join(PAGE.split())  # lines joined: a sentence may be wrapped anywhere


def rows_of(header: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    lines = PAGE.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_gaps_and_times() -> None:
    found = json.loads((TOP / "benchmarks/results/planner.json").read_text())["tables"]
    rows = rows_of("| cost | lengths | ranks |")
    assert len(rows) == sum(len(table) for table in found.values())
    names = {"256 lognormal": "lognormal"}
    for cost, lengths, ranks, mean, worst, mean_ms, worst_ms, _ in rows:
        table = found[f"{cost} {names.get(lengths, lengths)}"]
        row = next(row for row in table if row["ranks"] == int(ranks.replace(",", "")))
        assert [mean, worst] == [f"{row['mean_ratio']:.4f}", f"{row['worst_ratio']:.4f}"]
        assert [mean_ms, worst_ms] == [f"{1e3 * row['mean_s']:.1f}", f"{1e3 * row['worst_s']:.1f}"]


def test_gaps_of_pipelines() -> None:
    found = json.loads((TOP / "benchmarks/results/planner_pipelines.json").read_text())["rows"]
    rows = rows_of("| cost | lengths | stages |")
    assert len(rows) == len(found)
    for (*names, ranks, mean, worst, mean_ms, longest), row in zip(rows, found, strict=True):
        assert names == [row["cost"], row["lengths"], str(row["stages"])]
        assert (ranks, mean, worst) == (f"{row['ranks']:,}", f"{row['mean_ratio']:.4f}", f"{row['worst_ratio']:.4f}")
        assert (mean_ms, longest) == (f"{1e3 * row['mean_s']:.0f}", f"{row['longest_is_the_bound']} of {row['seeds']}")
    mean = statistics.mean(row["mean_ratio"] for row in found)
    assert f"Plans are {mean:.3f} of the bound on average" in PROSE
    assert f"and {max(row['worst_ratio'] for row in found):.3f} at worst" in PROSE
    assert mean <= 1.05


def test_gaps_of_all_kinds_of_steps() -> None:
    file = json.loads((TOP / "benchmarks/results/planner_families.json").read_text())
    assert f"`{file['command']} --json benchmarks/results/planner_families.json`" in PROSE
    found = {(str(row["stages"]), row["cost"], row["lengths"], row["ranks"]): row for row in file["rows"]}
    shown = 0
    for stages, cost, lengths, *cells, best in rows_of("| stages | cost | lengths |"):
        others = []
        for ranks, cell in zip((32, 256, 1024, 4096, 16384), cells, strict=True):
            row = found.get((stages, cost, lengths, ranks))
            assert (cell == "") == (row is None)
            if row is None:
                continue
            mean, worst = (round(100 * (row[key] - 1), 2) + 0.0 for key in ("mean_ratio", "worst_ratio"))
            assert cell == f"{mean:.2f} ({worst:.2f})"
            others.append(row["least_other"])
            shown += 1
        assert best == f"{min(others):.2f}x"
        assert min(others) >= 1 - 1e-9
    assert shown == len(found)


def test_planning_time() -> None:
    found = json.loads((TOP / "benchmarks/results/planning_time.json").read_text())["rows"]
    rows = rows_of("| ranks | lengths | sequences | s before |")
    assert len(rows) == len(found)
    for (where, lengths, sequences, was_s, seconds, was_gap, gap), row in zip(rows, found, strict=True):
        assert where == f"{row['ranks']:,}, {row['kind']}"
        assert (lengths, sequences) == (row["lengths"], f"{row['sequences']:,}")
        assert (was_s, seconds) == (f"{row['before_s']:.2f}", f"{row['seconds']:.2f}")
        bound = row["bound_s"]
        assert was_gap == f"{100 * (row['before_expected_s'] / bound - 1):.2f}"
        assert gap == f"{100 * (row['expected_s'] / bound - 1):.2f}"
        assert row["expected_s"] <= row["before_expected_s"]


def test_the_largest_clusters() -> None:
    rows = json.loads((TOP / "benchmarks/results/scale.json").read_text())["rows"]
    for row, name in zip((row for row in rows if row["ranks"] == 131072), ("byted", "GitHub"), strict=True):
        what = f"({name}, {row['gap']:.4f}" + (" of the bound" if name == "byted" else "")
        assert f"{row['seconds']:.1f} s {what}, {row['mbytes']:.0f} MB)" in PROSE
    byted, github = (row for row in rows if row["ranks"] == 131072)
    for name, digits in (("json", 2), ("safetensors", 3)):
        sizes = f"{byted[f'{name}_mbytes']:.1f} and {github[f'{name}_mbytes']:.1f} MB"
        seconds = f"{byted[f'{name}_read_s']:.{digits}f} and {github[f'{name}_read_s']:.{digits}f} s"
        assert sizes in PROSE
        assert seconds in PROSE
    assert f"hash takes {1e3 * byted['hash_s']:.0f} and {1e3 * github['hash_s']:.0f} ms" in PROSE


def test_shared_interfaces() -> None:
    found = json.loads((TOP / "benchmarks/results/shared_nics.json").read_text())["rows"]
    rows = rows_of("| lengths | ranks | policy | blind s |")
    assert len(rows) == len(found)
    for row, one in zip(rows, found, strict=True):
        crossings = f"{one['blind_crossings']:,}, {one['aware_crossings']:,}"
        figures = [f"{one['blind_s']:.3f}", f"{one['aware_s']:.3f}", f"{one['gain']:.3f} ({one['least_gain']:.3f})"]
        peers = f"{one['blind_peers']}, {one['aware_peers']}"
        assert row == [one["lengths"], f"{one['ranks']:,}", one["policy"], *figures, crossings, peers]
        assert one["least_gain"] >= 1 - 1e-9


def test_closed_loop() -> None:
    found = json.loads((TOP / "benchmarks/results/closed_loop.json").read_text())
    assert f"`{found['command']} --json benchmarks/results/closed_loop.json`" in PROSE
    by_case = {(row["case"], row["ranks"], row["step"]): row for row in found["rows"]}
    rows = rows_of("| case | ranks | step |")
    assert len(rows) >= 20
    for case, ranks, step, square, work, noise, planned, bound, blind in rows:
        row = by_case[case, int(ranks), int(step)]
        assert square == f"{row['square_term']:.2f} ({row['worst_square_term']:.2f})"
        assert work == f"{row['slowest_share']:.2f}"
        assert noise == f"{100 * row['noise']:.1f}%"
        assert planned == f"{row['over_planned']:.3f}"
        assert bound == f"{row['over_bound']:.3f} ({row['worst_over_bound']:.3f})"
        assert blind == f"{row['not_learning_over_bound']:.3f}"
    for step in range(6):
        assert by_case["noise alone, queue", 256, step]["over_bound"] <= 1.04


def test_noise_floor() -> None:
    found = json.loads((TOP / "benchmarks/results/noise_floor.json").read_text())
    assert f"`{found['command']} --json benchmarks/results/noise_floor.json`" in PROSE
    rows = rows_of("| context | floor |")
    assert len(rows) == len(found["rows"])
    for (context, *figures, batches, queue, expected, more), row in zip(rows, found["rows"], strict=True):
        assert context == f"{row['context']:,}"
        names = ("floor", "long", "blind", "knowing", "expected")
        assert figures == [f"{row[name]:.3f}" if name in row else "" for name in names]
        assert [batches, more] == [f"x {row[name]:.2f}" for name in ("more_batches", "queue_more_batches")]
        assert [queue, expected] == [f"{row[name]:.3f}" for name in ("queue", "queue_expected")]


def test_steps_with_a_queue() -> None:
    found = json.loads((TOP / "benchmarks/results/queue_steps.json").read_text())
    assert f"`{found['command']} --json benchmarks/results/queue_steps.json`" in PROSE
    rows = rows_of("| context | static / bound |")
    assert len(rows) == len(found["rows"])
    for (case, *figures, moved), row in zip(rows, found["rows"], strict=True):
        assert case == row["case"]
        assert figures == [f"{row[name]:.3f}" for name in ("static", "queue", "quicker")]
        assert moved == f"{100 * row['moved']:.0f}%"


def test_trees() -> None:
    found = json.loads((TOP / "benchmarks/results/trees_plan.json").read_text())["plans"]
    rows = rows_of("| seed | tokens | fragments |")
    assert len(rows) == len(found)
    for row, plan in zip(rows, found, strict=True):
        sizes = [str(plan["seed"]), f"{plan['tokens']:,}", str(plan["fragments"])]
        assert row == [*sizes, f"{1e3 * plan['seconds']:.1f}", f"{plan['ratio']:.4f}"]


def test_simulator_against_real_steps() -> None:
    rows = json.loads((TOP / "benchmarks/results/sim_vs_real.json").read_text())["rows"]
    errors = [abs(simulated / real - 1) for simulated, real in rows]
    text = f"differ by {100 * sum(errors) / len(errors):.1f}% on average and {100 * max(errors):.1f}% at worst"
    assert text in PROSE


def test_the_table_of_racks_is_that_of_its_file() -> None:
    found = json.loads((TOP / "benchmarks/results/racks.json").read_text())["cases"]
    for case, one in found.items():
        for name, times in one["seconds"].items():
            ratio = statistics.median(t / a for t, a in zip(times, one["seconds"]["aware"], strict=True))
            crossed = statistics.median(one["tokens_between_racks"][name])
            assert f"| {case} | {name} | {statistics.median(times):.3f} | {ratio:.2f}x | {crossed:,.0f} |" in PROSE
        assert len({tuple(round(loss, 4) for loss in losses) for losses in one["losses"].values()}) == 1


def test_the_table_of_two_hosts_is_that_of_its_file() -> None:
    found = json.loads((TOP / "benchmarks/results/two_hosts.json").read_text())["cases"]
    for case, one in found.items():
        for name, times in one["seconds"].items():
            ratio = statistics.median(t / a for t, a in zip(times, one["seconds"]["aware"], strict=True))
            crossed = statistics.median(one["bytes_between_hosts"][name]) / 1e6
            assert f"| {case} | {name} | {statistics.median(times):.3f} | {ratio:.2f}x | {crossed:.1f} |" in PROSE
        assert len({tuple(round(loss, 4) for loss in losses) for losses in one["losses"].values()}) == 1

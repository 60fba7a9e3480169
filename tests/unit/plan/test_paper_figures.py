"""The figures of docs/paper.md are those of the files that the benchmarks wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parents[3]
PAGE = (TOP / "docs/paper.md").read_text()


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TOP / f"benchmarks/results/{name}.json").read_text())
    return found


def test_tables_are_those_of_the_file() -> None:
    spec = importlib.util.spec_from_file_location("paper", TOP / "benchmarks/paper.py")
    assert spec is not None
    assert spec.loader is not None
    paper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(paper)
    found = result("paper")
    assert f"`{found['command']} --json benchmarks/results/paper.json`" in PAGE
    for title, make in paper.SECTIONS.items():
        section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
        assert make(found) in section


def test_text_has_the_figures_of_the_tables() -> None:
    at_2m = {name: rows[str(2**21)] for name, rows in result("paper")["contexts"]["case"].items()}
    github, byted = (rows["mean_s"][0] / rows["mean_s"][3] for rows in (at_2m["github"], at_2m["byted"]))
    assert f"GitHub {github:.2f}x beside 7.89x, Byted {byted:.2f}x beside 4.26x" in PAGE


def test_the_parts_make_the_speed_up() -> None:
    for row in result("paper_pipelines")["rows"].values():
        links, packs = row["static_pass_s"] / row["static_free_links_s"], row["static_free_links_s"] / row["even_s"]
        bound, plan = row["bound_s"] / row["even_s"], row["balanced_pass_s"] / row["bound_s"]
        speedup = row["static_pass_s"] / row["balanced_pass_s"]
        assert links * packs / (bound * plan) == pytest.approx(speedup)
        assert min(links, packs, bound, plan) >= 1
        assert row["low"] <= row["high"]

"""The figures of docs/paper.md and paper-pipelines.md are those of the files that the benchmarks wrote."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOP = Path(__file__).parents[3]
PAGES = {name: (TOP / f"docs/{name.replace('_', '-')}.md").read_text() for name in ("paper", "paper_pipelines")}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOP / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # paper_pipelines imports paper
    spec.loader.exec_module(module)
    return module


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TOP / f"benchmarks/results/{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def modules() -> Any:
    names = ("paper", "paper_pipelines")
    yield {name: load(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["paper", "paper_pipelines"])
def test_tables_are_those_of_the_file(modules: dict[str, ModuleType], name: str) -> None:
    found = result(name)
    assert f"`{found['command']} --json benchmarks/results/{name}.json`" in PAGES[name]
    for title, make in modules[name].SECTIONS.items():
        section = PAGES[name].split(f"## {title}\n")[1].split("\n## ")[0]
        assert make(found) in section


def test_text_has_the_figures_of_the_tables() -> None:
    at_2m = {name: rows[str(2**21)] for name, rows in result("paper")["contexts"]["case"].items()}
    github, byted = (rows["mean_s"][0] / rows["mean_s"][3] for rows in (at_2m["github"], at_2m["byted"]))
    assert f"GitHub {github:.2f}x beside 7.89x, Byted {byted:.2f}x beside 4.26x" in PAGES["paper"]
    page = PAGES["paper_pipelines"]
    rows = result("paper_pipelines")["rows"]
    ratios = [rows[f"{name} case github"] for name in ("llama-70b", "mistral-8x7b")]
    dense, sparse = (row["static_s"] / row["balanced_s"] for row in ratios)
    assert f"ours {dense:.2f}x for 70B and {sparse:.2f}x for 8x7B after {github:.2f}x" in page
    case, fig6 = rows["llama-70b case github"], rows["llama-70b fig6 github"]
    most = case["static_pass_s"] / case["bound_s"]
    assert f"70B, case: {case['static_s'] / case['balanced_s']:.2f}x, and no plan has more than {most:.2f}x" in page
    assert f"the same plans reach {fig6['static_s'] / fig6['balanced_s']:.2f}x" in page
    assert f"**The bound** is {case['bound_s'] / case['even_s']:.2f} times the even split" in page


def test_the_parts_make_the_speed_up() -> None:
    for row in result("paper_pipelines")["rows"].values():
        links, packs = row["static_pass_s"] / row["static_free_links_s"], row["static_free_links_s"] / row["even_s"]
        bound, plan = row["bound_s"] / row["even_s"], row["balanced_pass_s"] / row["bound_s"]
        speedup = row["static_pass_s"] / row["balanced_pass_s"]
        assert links * packs / (bound * plan) == pytest.approx(speedup)
        assert min(links, packs, bound, plan) >= 1
        assert row["low"] <= row["high"]

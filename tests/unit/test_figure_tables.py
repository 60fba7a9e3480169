"""The marked tables of docs/ are those that tools/figure_tables.py makes from benchmarks/results."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (TOP / "docs").rglob("*.md") if "<!-- table: " in path.read_text())


@pytest.fixture(scope="module")
def figure_tables() -> ModuleType:
    sys.path.insert(0, str(TOP / "tools"))
    try:
        return importlib.import_module("figure_tables")
    finally:
        sys.path.remove(str(TOP / "tools"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tables_are_those_of_the_files(figure_tables: ModuleType, path: Path) -> None:
    page = path.read_text()
    assert figure_tables.updated(page) == page, "run python tools/figure_tables.py"


def test_every_table_is_on_a_page(figure_tables: ModuleType) -> None:
    marks = [match[1] for path in PAGES for match in figure_tables.MARKED.finditer(path.read_text())]
    assert sorted(marks) == sorted(figure_tables.TABLES)

"""Each option of transformers' and TRL's trainers works, has no effect, or is refused; the docs say which."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

TOOLS = Path(__file__).resolve().parents[3] / "tools"
TABLES: dict[str, Any] = runpy.run_path(str(TOOLS / "trainer_options.py"))["HUGGINGFACE"]
KINDS = [*TABLES["works"]]


def fields_of(kind: str) -> set[str]:
    """The options that a configuration adds to those of transformers."""
    base = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    if kind == "TrainingArguments":
        return base
    trl = pytest.importorskip("trl")
    return {each.name for each in dataclasses.fields(getattr(trl, kind))} - base


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_each_option_of_the_installed_package_once(kind: str) -> None:
    listed = [name for table in TABLES.values() for names in table.get(kind, {}) for name in names.split()]
    assert len(listed) == len(set(listed))
    assert set(listed) == fields_of(kind)


def test_the_docs_have_a_page_of_it() -> None:
    page: str = runpy.run_path(str(TOOLS / "docs_pages.py"))["options_page"]()
    for kind in KINDS:
        assert f"## {kind}" in page
    for table in TABLES.values():
        for groups in table.values():
            for names, reason in groups.items():
                assert reason in page
                assert all(f"`{name}`" in page for name in names.split())


def test_no_reason_is_empty() -> None:
    reasons: list[Any] = [text for table in TABLES.values() for groups in table.values() for text in groups.values()]
    assert min(map(len, reasons)) > 10

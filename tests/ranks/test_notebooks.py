"""The notebooks in examples/notebooks run from the top, and show what they showed when they were saved."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE

TOP = Path(__file__).parents[2]
NOTEBOOKS = sorted((TOP / "examples" / "notebooks").glob("*.ipynb"))


def texts(book: Any) -> list[str]:
    """Standard output of each cell, without figures."""
    printed = [
        "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    return [re.sub(r"[\d.,]+|\s+", " ", text).strip() for text in printed]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name, value in {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    book = nbformat.read(path, as_version=4)
    shown = texts(book)
    client = nbclient.NotebookClient(
        book, timeout=int(120 * PATIENCE), kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert any(shown)
    assert texts(book) == shown

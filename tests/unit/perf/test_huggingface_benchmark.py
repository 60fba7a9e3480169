"""benchmarks/huggingface.py: its options, and the fields of its result file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.warm_python import run_python

TOP = Path(__file__).resolve().parents[3]


def test_too_few_documents_are_refused() -> None:
    done = run_python([str(TOP / "benchmarks/huggingface.py"), "--documents", "95"], timeout=60)
    assert done.returncode == 2
    assert "95 documents are not 6 steps of 2 x 8" in done.stderr


def test_the_result_compares_the_same_losses() -> None:
    result = json.loads((TOP / "benchmarks/results/huggingface.json").read_text())
    assert result["documents"] == 500
    assert result["ranks"] == 2
    ours, theirs = result["rows"]
    assert [ours["name"], theirs["name"]] == ["hdpcomm", "transformers"]
    assert len(ours["losses"]) == len(theirs["losses"]) > 20
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    assert max(abs(a - b) / b for a, b in pairs) <= result["largest_loss_difference"] < 1e-4

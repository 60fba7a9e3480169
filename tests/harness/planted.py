"""Checks of .ci, run on this tree and on small trees that a test has planted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["TOP", "run_check", "run_planted"]

TOP = Path(__file__).resolve().parents[2]


def run_check(name: str, top: Path = TOP) -> subprocess.CompletedProcess[str]:
    """Runs `.ci/<name>` on the tree at ``top``."""
    command = [sys.executable, str(TOP / ".ci" / name), "--top", str(top)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def run_planted(name: str, top: Path, files: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Writes the files (text by path) below ``top``, and runs the check there."""
    for path, text in files.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    return run_check(name, top)

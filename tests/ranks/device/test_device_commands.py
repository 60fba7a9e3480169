"""The commands over streams."""

from __future__ import annotations

import json
from pathlib import Path

from hdpcomm.cli.main import main


def test_perf(tmp_path: Path) -> None:
    file = tmp_path / "perf.json"
    options = ["-b", "8", "-e", "4096", "-f", "512", "-n", "3", "-w", "1", "-c", "1"]
    assert main(["perf", "all_reduce", "--transport", "sim", "--ranks", "2", *options, "-J", str(file)]) == 0
    assert '"sim"' in file.read_text()


def test_train(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    sizes = ["--context", "128", "--tokens-per-step", "256", "--layers", "1", "--hidden", "16", "--ffn", "24"]
    options = ["--ranks", "2", "--steps", "2", "--policy", "naive", *sizes]
    assert main(["train", "--transport", "sim", *options, "--json", str(file)]) == 0
    assert '"transport": "sim"' in json.dumps(json.loads(file.read_text()))

"""``hdpcomm replay``: steps of a run again, to the bit on as many ranks, else up to rounding."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hdpcomm.cli.main import main

SIZES = ["--context", "300", "--tokens-per-step", "900", "--hidden", "16", "--layers", "2", "--trackers", "none"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return str(folder)


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, options in {"plain": [], "mesh": ["--pipeline", "2", "--zero", "1", "--dtype", "bf16"]}.items():
        made[name] = folder / name
        given = ["--ranks", "2", "--steps", "7", "--save-every", "3", "--keep", "9", "--eval-fraction", "0.2"]
        assert main(["train", "--data", data, *SIZES, *given, *options, "--out", str(made[name])]) == 0
    return made


def replayed(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, dict[int, str]]:
    """The exit code, and what is said of each step."""
    capsys.readouterr()
    code = main(["--quiet", "replay", *given])
    rows = (re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    return code, {int(row[0]): row[-1] for row in rows if len(row) == 7 and row[0].isdigit()}


@pytest.mark.parametrize("name", ["plain", "mesh"])
def test_on_as_many_ranks_it_has_the_same_bits(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs[name].rglob("*"))
    bits = "the same bits"
    assert replayed(capsys, str(runs[name]), "--step", "5") == (0, {4: bits, 5: bits})
    assert sorted((path, path.stat().st_mtime_ns) for path in runs[name].rglob("*")) == before


@pytest.mark.parametrize("name", ["plain", "mesh"])
def test_on_one_rank_it_is_equal_up_to_rounding(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, told = replayed(capsys, str(runs[name]), "--step", "7", "--ranks", "1")
    assert code == 0
    assert list(told) == [7]
    gap = float(told[7].removeprefix("within ")) if told[7] != "the same bits" else 0.0
    assert gap < (1e-6 if name == "plain" else 1e-3)


def test_from_the_first_step_and_where_figures_differ(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["plain"], run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1]["loss"] *= 1.001  # as if a rank had computed something else
    del rows[0]  # as if it was left out
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replayed(capsys, str(run), "--step", "2") == (1, {1: "not noted", 2: "within 0.001"})
    assert main(["replay", str(run), "--step", "8"]) == 6
    assert "--step 8 was given, and the run has 7 steps" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "8"]) == 6
    assert "no run there (no config.yaml)" in capsys.readouterr().err

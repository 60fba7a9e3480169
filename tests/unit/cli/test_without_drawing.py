"""``import hdpcomm`` and the commands that draw nothing work where rich and matplotlib cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hdpcomm.cli.main import COMMANDS

TOP = Path(__file__).resolve().parents[3]
WITHOUT = "import sys\nsys.modules['rich'] = sys.modules['matplotlib'] = None\n"
MAIN = "from hdpcomm.cli.main import main\nsys.exit(main(sys.argv[1:]))"
ROOMS = (
    "attention",
    "comm",
    "data",
    "kernels",
    "models",
    "offload",
    "parallel",
    "perf",
    "plan",
    "run",
    "sim",
    "torch_backend",
    "trace",
    "train",
)
SMALL = ["--ranks", "4", "--capacity", "8K", "--tokens", "64K", "--context", "16K"]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=TOP)


def test_rich_and_matplotlib_are_blocked() -> None:
    for module in ("rich", "matplotlib"):
        assert "ModuleNotFoundError" in run(f"import {module}.text").stderr


def test_all_rooms_are_imported() -> None:
    """And torch's modules that take a second to import are not: what starts ranks, or plans, needs none of them."""
    slow = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
    lines = ["import hdpcomm", *(f"import hdpcomm.{room}" for room in ROOMS)]
    lines.append(f"assert not set(sys.modules) & {set(slow)!r}, set(sys.modules) & {set(slow)!r}")
    done = run("\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command, "--help"] for command in COMMANDS),
        ["plan", *SMALL],
        ["simulate", *SMALL],
        ["perf", "all_reduce", "--ranks", "2", "-b", "1K", "-e", "1K", "-n", "2", "-w", "1"],
    ],
    ids=" ".join,
)
def test_commands_that_draw_nothing(arguments: list[str]) -> None:
    done = run(MAIN, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_draws_names_what_is_missing(tmp_path: Path) -> None:
    done = run(MAIN, "plan", *SMALL, "--plot", str(tmp_path / "plan.png"))
    assert done.returncode == 1
    assert "matplotlib" in done.stderr
    done = run(MAIN, "report", str(tmp_path))
    assert done.returncode == 6
    assert done.stderr == "hdpcomm: error: hdpcomm report draws with matplotlib; pip install 'hdpcomm[plot]'\n"

"""``import hdpcomm`` and the commands that draw nothing work where rich and matplotlib cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hdpcomm.cli.main import COMMANDS

TOP = Path(__file__).resolve().parents[3]
WITHOUT = "import sys\nsys.modules['rich'] = sys.modules['matplotlib'] = None\n"
# Each command in a fork of one process that has imported main: that takes a second.
FORKS = """
import json, os, tempfile
from hdpcomm.cli.main import main

done = []
for arguments in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    if (child := os.fork()) == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.exit(main(arguments))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    done.append([code, *(file.read() for file in files)])
print(json.dumps(done))
"""
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


SILENT = [
    ["--help"],
    *([command, "--help"] for command in COMMANDS),
    ["plan", *SMALL],
    ["simulate", *SMALL],
    ["perf", "all_reduce", "--ranks", "2", "-b", "1K", "-e", "1K", "-n", "2", "-w", "1"],
]


def commands(*arguments: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    done = run(FORKS, json.dumps(arguments))
    assert done.returncode == 0, done.stderr
    return [(code, out, error) for code, out, error in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def silent() -> list[tuple[int, str, str]]:
    return commands(*SILENT)


@pytest.mark.parametrize("place", range(len(SILENT)), ids=[" ".join(arguments) for arguments in SILENT])
def test_commands_that_draw_nothing(silent: list[tuple[int, str, str]], place: int) -> None:
    code, out, error = silent[place]
    assert code == 0, error
    assert out


def test_what_draws_names_what_is_missing(tmp_path: Path) -> None:
    plan, report = commands(["plan", *SMALL, "--plot", str(tmp_path / "plan.png")], ["report", str(tmp_path)])
    assert plan[0] == 6
    assert plan[2].endswith("hdpcomm: error: --plot draws with matplotlib; pip install 'hdpcomm[plot]'\n")
    assert report[0] == 6
    assert report[2] == "hdpcomm: error: hdpcomm report draws with matplotlib; pip install 'hdpcomm[plot]'\n"

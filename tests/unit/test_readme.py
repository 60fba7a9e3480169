"""The code in the README and in docs/ runs as printed, and the commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hdpcomm.testing import spawn
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_two_examples() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_examples_run_under_torchrun(index: int, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(BLOCKS[index])
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"sequence number {i}; " * (3 + i * i % 97))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    result = run_python(command, cwd=tmp_path, env=environment, timeout=110)
    assert result.returncode == 0, result.stderr
    if index == 0:
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", result.stdout)]
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def run_as_printed(code: str) -> None:
    exec(compile(code, "docs", "exec"), {})


@pytest.mark.parametrize(
    ("document", "num_ranks"),
    [
        ("attention", 1),
        ("attention", 2),
        ("planner", 1),
        ("device", 1),
        ("torch-backend", 2),
        ("training", 2),
        ("parallel", 2),
    ],
)
def test_the_first_example_of_a_document_runs(document: str, num_ranks: int) -> None:
    """In processes of its own: a program may end without closing what it has opened."""
    first, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{document}.md").read_text(), re.DOTALL)
    spawn(run_as_printed, num_ranks, first)


def test_commands_exist() -> None:
    for command in re.findall(r"^\| `hdpcomm (\w+)", README, re.MULTILINE):
        result = run_python(["-m", "hdpcomm.cli.main", command, "--help"], timeout=60, cwd=ROOT)
        assert result.returncode == 0, (command, result.stderr)


def test_documents_exist() -> None:
    for link in re.findall(r"\]\((docs/[^)#]+)", README):
        assert (ROOT / link).exists(), link

"""The code in the README and in docs/ runs as printed, and the commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hdpcomm.testing import spawn
from tests.harness.warm_python import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


# What a program has before it comes to the three lines of the README: a model of transformers, arguments, rows.
BEFORE_HUGGING_FACE = """
import transformers

config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
args = transformers.TrainingArguments(
    "out", use_cpu=True, max_steps=2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True
)
dataset = [{"input_ids": list(range(1, n))} for n in (4, 30, 9, 17) * 8]
"""


def run_under_torchrun(code: str, folder: Path) -> str:
    script = folder / "loop.py"
    script.write_text(code)
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text(f"sequence number {i}; " * (3 + i * i % 97))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    result = run_python(command, cwd=folder, env=environment, timeout=110)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_hugging_face_trainer_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found, _ = BLOCKS
    printed = run_under_torchrun(BEFORE_HUGGING_FACE + found, tmp_path)
    assert len(re.findall(r"'hdp_tokens'", printed)) >= 2, printed


def test_loop_learns_as_printed(tmp_path: Path) -> None:
    _, found = BLOCKS
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", run_under_torchrun(found, tmp_path))]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_readme_ends_within_a_screen_and_a_half() -> None:
    assert len(README.splitlines()) <= 95


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
        ("tensor", 2),
        ("experts", 2),
    ],
)
def test_the_first_example_of_a_document_runs(document: str, num_ranks: int) -> None:
    """In processes of its own: a program may end without closing what it has opened."""
    first, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{document}.md").read_text(), re.DOTALL)
    spawn(run_as_printed, num_ranks, first)


def test_commands_exist() -> None:
    found = set(re.findall(r"`hdpcomm (\w+)|^hdpcomm (\w+)", README, re.MULTILINE))
    commands = sorted({one or other for one, other in found})
    assert {"train", "report", "plan"} <= set(commands)
    for command in commands:
        result = run_python(["-m", "hdpcomm.cli.main", command, "--help"], timeout=60, cwd=ROOT)
        assert result.returncode == 0, (command, result.stderr)


def test_documents_exist() -> None:
    for link in re.findall(r"\]\((docs/[^)#]+)", README):
        assert (ROOT / link).exists(), link

"""Plans and profiles that nobody wrote: one clear error each, never a crash."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.plan import ClusterSpec, CostModel, Planner, StepPlan

COEFFICIENTS = {"attention": 1e-12, "linear": 1e-7, "fixed": 1e-4, "piece": 1e-9, "ring_step": 1e-5}
CLUSTER = ClusterSpec(ranks=8, ranks_per_node=4, device="h100", capacity=4096)
LENGTHS = [30_000, 9000, 4000, *[500] * 30]


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("value", [1e308, 1e200, 1e30])
@pytest.mark.parametrize("policy", ["balanced", "pipeline", "static"])
def test_coefficients_that_no_machine_has(name: str, value: float, policy: str) -> None:
    """1e308 was a segmentation fault."""
    cost = CostModel(**(COEFFICIENTS | {name: value}))
    planner = Planner(None, CLUSTER, policy=policy, cost_model=cost)
    with pytest.raises(hdp.InvalidUsage, match=r"by this profile all 33 sequences take .* give seconds per token"):
        planner.plan(LENGTHS)


def test_a_profile_that_a_machine_may_have() -> None:
    plan = Planner(None, CLUSTER, policy="balanced", cost_model=CostModel(**COEFFICIENTS)).plan(LENGTHS)
    plan.validate(LENGTHS)
    assert math.isfinite(plan.makespan_s)


DEEP = "[" * 200_000
READERS: dict[str, Callable[[Path], Any]] = {
    "plan": lambda path: StepPlan.from_json(path.read_text()),
    "cost model": lambda path: CostModel.from_json(path.read_text()),
}
TEXTS = {
    "deep": DEEP,
    "deep object": '{"micro_batches":' * 100_000,
    "nothing": "",
    "null": "null",
    "a number": "1e999",
    "a text": '"x"',
    "an empty list": "[]",
    "an empty object": "{}",
    "huge": json.dumps(dict.fromkeys(COEFFICIENTS, 10**400)),
    "infinite": json.dumps({"attention": math.inf, "ranks": math.inf, "micro_batches": [], "device": {}}),
    "a plan of infinity": '{"micro_batches": [{"index": Infinity, "ranks": [0], "sequences": [], "offload_ratio": 0}]}',
    "zero byte": "\0",
}


@pytest.mark.parametrize(("reader", "text"), list(itertools.product(READERS, TEXTS)))
def test_files_that_nobody_wrote(tmp_path: Path, reader: str, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(TEXTS[text])
    with pytest.raises(hdp.InvalidUsage):
        READERS[reader](path)


def test_commands_say_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan"
    path.write_text(DEEP)
    assert main(["simulate", "--plan", str(path)]) != 0
    errors = capsys.readouterr().err
    assert "is no step plan" in errors
    assert len(errors.splitlines()) == 1
    assert "Traceback" not in errors

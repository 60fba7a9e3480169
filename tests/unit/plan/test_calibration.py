"""Calibrations: their file, other numbers of ranks, and the commands that take them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import DEVICES, Calibration, ClusterSpec, CostModel, CostSample, MemoryModel, ModelSpec, Planner
from hdpcomm.sim import simulate_step

COST = CostModel(2e-9, 1e-6, 1e-4, 1e-7, 2e-5)
BETWEEN = replace(COST, kv_inter=3e-7, latency_inter=1e-4)
MODEL = ModelSpec(4, 64, 4, 2, 192, 256, dtype_bytes=4)


def calibration(cost: CostModel = COST, **cluster: Any) -> Calibration:
    spec = {"ranks": 4, "capacity": 1000, "ranks_per_node": 4, "device": DEVICES["h100"]} | cluster
    samples = tuple(CostSample(d, (length,), cost.seconds([length], d)) for d in (1, 2) for length in (100, 400, 1000))
    memory = MemoryModel(1000, offloadable=0.5, copy_s=1e-8, host_tokens=5000.0, token_bytes=1e4, state_bytes=1e6)
    facts = {"model": {"layers": 4}, "dtype": "fp32", "recompute": "none"}
    return Calibration(cost, ClusterSpec(**spec), memory, MODEL, facts, 0.25, 0.125, samples)


def test_it_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    mixed = replace(MODEL, mixing=(replace(MODEL.token_mixing[0], layers=3), replace(MODEL.token_mixing[0], layers=1)))
    other = replace(calibration(BETWEEN, cores=2), model=None, samples=())
    for each in (calibration(), other, replace(calibration(), model=mixed)):
        each.save(path)
        assert Calibration.load(path) == each
    assert calibration().errors() == pytest.approx([0.0] * 6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "other"}, "its schema is not 'hdpcomm-calibration-1'"),
        ({"cost_model": {"attention": -1.0, "linear": 1.0}}, "attention is -1.0"),
        ({"cost_model": {"linear": 1.0}}, "'attention' is missing"),
        ({"cluster": {"ranks": 4}}, "KeyError: 'device'"),
        ({"memory": {"capacity": 0}}, "capacity is 0"),
        ({"memory": {"capacity": 10, "copy_s": float("nan")}}, "copy_s is nan"),
        ({"model": {"layers": 4}}, "TypeError"),
        ({"samples": [{"ranks": 1}]}, "KeyError: 'lengths'"),
        ({"facts": 3}, "TypeError"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "calibration.json"
    calibration().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidUsage, match=r"holds no calibration") as caught:
        Calibration.load(path)
    assert told in str(caught.value)
    assert "hdpcomm calibrate --out" in str(caught.value)
    for text in ("", "[]", "{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(InvalidUsage, match="holds no calibration"):
            Calibration.load(path)


def test_other_numbers_of_ranks() -> None:
    with pytest.raises(InvalidUsage, match=r"8 ranks on hosts of 4 send between hosts.*4 ranks of one host"):
        calibration().with_ranks(8)
    assert calibration().with_ranks(8, 8).cluster.ranks_per_node == 8
    assert calibration(BETWEEN).with_ranks(8).cluster.ranks_per_node == 4
    shared = calibration(cores=2)
    assert shared.with_ranks(2).cluster.cores == 1
    assert shared.with_ranks(1).cluster.cores is None
    assert calibration(speeds=(1.0, 0.5, 1.0, 1.0)).with_ranks(4).cluster.speeds is None
    larger = calibration().with_capacity(2000)
    assert larger.memory.capacity == larger.cluster.capacity == 2000


def test_plan_and_simulate_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, lengths, out = tmp_path / "calibration.json", tmp_path / "lengths", tmp_path / "out.json"
    calibration(BETWEEN).save(path)
    items = [3000, 900, 800, 500, 400, 100, 100]
    lengths.write_text(" ".join(map(str, items)))
    own = Calibration.load(path)
    common = ["--calibration", str(path), "--lengths", str(lengths), "--json", str(out)]
    assert main(["plan", *common]) == 0
    planner = Planner(own.model, own.cluster, cost_model=own.cost_model, memory=replace(own.memory, offloadable=0.0))
    assert json.loads(out.read_text())["makespan_s"] == planner.plan(items).makespan_s
    assert main(["simulate", *common, "--policy", "balanced", "--ranks", "8"]) == 0
    eight = own.with_ranks(8)
    planner = Planner(own.model, eight.cluster, cost_model=own.cost_model, memory=replace(own.memory, offloadable=0.0))
    step = json.loads(out.read_text())["balanced"]["steps"][0]
    report = simulate_step(planner, items)
    assert (step["ranks"], step["compute_s"], step["sync_s"]) == (8, report.compute_s, report.sync_s)
    assert main(["plan", *common, "--offload", "--capacity", "700"]) == 0
    capsys.readouterr()
    for extra, told in (
        (["--model", "llama-70b"], "--model llama-70b was given with --calibration"),
        (["--pipeline", "2"], "--pipeline 2 was given with --calibration"),
        (["--ranks", "2"], "3,000"),
    ):
        assert main(["plan", *common, *extra]) == 6
        assert told in capsys.readouterr().err.replace("3000", "3,000")
    replace(own, memory=MemoryModel(1000)).save(path)
    assert main(["plan", *common, "--offload"]) == 6
    assert "calibrate with --offload SIZE" in capsys.readouterr().err

"""``hdpcomm calibrate`` on ranks, and runs that take its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hdpcomm as hdp
from hdpcomm.cli.main import main
from hdpcomm.data import open_corpus
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import Calibration
from hdpcomm.run import RunConfig, calibrate, train
from hdpcomm.run import costs as run_costs
from hdpcomm.sim import optimizer_seconds, reduction_seconds
from hdpcomm.testing import run_threads

MODEL = LlamaConfig(layers=4, hidden=16, heads=2, kv_heads=1, ffn=24)
SIZES = ["--layers", "4", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24", "--capacity", "128"]
CONFIG = RunConfig(MODEL, steps=3, capacity=128, tokens_per_step=700)


def measured(config: RunConfig) -> list[Calibration]:
    def on_rank() -> Calibration:
        with hdp.init() as comm:
            return calibrate(comm, config)

    return run_threads(on_rank, 2, timeout=100.0)


@pytest.fixture(scope="module")
def found() -> Calibration:
    one, other = measured(replace(CONFIG, offload=64 << 20))
    assert one == other
    return one


def test_what_is_measured(found: Calibration) -> None:
    assert (found.cluster.ranks, found.cluster.node_ranks, found.memory.capacity) == (2, 2, 128)
    assert {sample.ranks for sample in found.samples} == {1, 2}
    assert max(sum(sample.lengths) for sample in found.samples if sample.ranks == 1) == 128
    assert found.facts["parameters"] == sum(p.numel() for p in hdp.models.Llama(MODEL).parameters())
    assert found.memory.offloadable > 0
    assert found.memory.copy_s > 0
    assert found.model is not None
    # The simulator says for this cluster what was measured on it.
    assert reduction_seconds(found.model, found.cluster) == pytest.approx(found.reduction_s)
    assert optimizer_seconds(found.model, found.cluster) == pytest.approx(found.optimizer_s)


def losses(data: str, config: RunConfig) -> list[float]:
    with hdp.init() as comm:
        result = train(comm, open_corpus([data], context=200, comm=comm), config)
    return [step.loss for step in result.steps["balanced"]]


def test_runs_take_it(found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(run_costs, "profile_samples", profile)
    monkeypatch.setattr(run_costs, "profile_activations", profile)
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("text " * (3 * i + 1))
    for config in (CONFIG, replace(CONFIG, offload=32 << 20)):
        known = replace(config, calibration=found)
        first, again = (run_threads(lambda: losses(str(tmp_path), known), 2, timeout=100.0) for _ in range(2))  # noqa: B023
        assert first == again  # the same costs, so the same plans, to the bit


def test_plans_know_the_interfaces_that_it_measured(found: Calibration, tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("text " * 90)

    def nics(config: RunConfig) -> int | None:
        with hdp.init() as comm:
            corpus = open_corpus([str(tmp_path)], context=200, comm=comm)
            costs = run_costs.measure_costs(comm, config, longest=corpus.longest, capacity=128)
            return run_costs.make_planner(comm, corpus, config, costs, "balanced").cluster.nics

    measured = replace(found, cluster=replace(found.cluster, nics=2))
    measured.save(tmp_path / "calibration.json")
    for calibration, expected in ((found, 1), (Calibration.load(tmp_path / "calibration.json"), 2)):
        known = replace(CONFIG, calibration=calibration)
        assert run_threads(lambda: nics(known), 2, timeout=100.0) == [expected] * 2  # noqa: B023


def test_another_model_is_refused(found: Calibration) -> None:
    def check(config: RunConfig, ranks: int = 2, local: int = 2) -> None:
        run_costs.check_calibration(found, config, ranks=ranks, ranks_per_node=local)

    check(CONFIG)
    check(replace(CONFIG, recompute=0), ranks=4, local=4)
    for config, told in (
        (replace(CONFIG, model=replace(MODEL, hidden=32)), "made with hidden 16 and this run has 32"),
        (replace(CONFIG, dtype="bf16"), "made with dtype 'fp32' and this run has 'bf16'"),
        (replace(CONFIG, recompute="full"), "made with recompute 'none' and this run has 'full'"),
    ):
        with pytest.raises(hdp.InvalidUsage, match=told):
            check(config)
    with pytest.raises(hdp.InvalidUsage, match="send between hosts"):
        check(CONFIG, ranks=4)
    plain = replace(found, memory=replace(found.memory, offloadable=0.0))
    with pytest.raises(hdp.InvalidUsage, match="knows no offload"):
        run_costs.check_calibration(plain, replace(CONFIG, offload=1 << 20), ranks=2, ranks_per_node=2)
    with pytest.raises(hdp.InvalidUsage, match="ranks without pipelines"):
        replace(CONFIG, calibration=found, pipeline=2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):  # this process is the one rank of a launcher
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    file, data = tmp_path / "calibration.json", tmp_path / "text.txt"
    assert main(["calibrate", "--out", str(file), *SIZES]) == 0
    told, err = capsys.readouterr()
    assert err.startswith("hdpcomm: measures links, micro-batches of up to")
    assert "ranks: 1, 1 a host" in told
    assert "predicted against measured, " in told
    assert Calibration.load(file).facts["model"]["hidden"] == 16
    data.write_text("some text " * 60)
    run = ["train", "--data", str(data), "--context", "100", "--steps", "1", "--calibration", str(file)]
    assert main([*run, *SIZES]) == 0
    assert main([*run, *SIZES[:2]]) == 6
    assert "made with hidden 16 and this run has 32" in capsys.readouterr().err
    assert main(["calibrate", "--out", str(file), "--recompute", "auto"]) == 6
    assert "depends on what is measured here" in capsys.readouterr().err

"""``hdpcomm simulate --like RUN``: the plans of a run from its folder alone, beside what its steps took."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from hdpcomm.run import read_metrics

SIZE = ["--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24"]
LIMITS = ["--context", "300", "--tokens-per-step", "700", "--trackers", "none", "--steps", "3"]


@pytest.fixture(autouse=True)
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return folder


def trained(data: Path, run: Path, *options: str) -> Path:
    command = ["train", "--data", str(data), *SIZE, *LIMITS, "--ranks", "2", "--out", str(run), *options]
    assert main(command) == 0
    return run


@pytest.mark.parametrize(
    "options", [["--compare", "static"], ["--pipeline", "2"], ["--experts", "2", "--top-k", "1", "--expert", "2"]]
)
def test_its_plans_are_those_of_the_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run, file = trained(data, tmp_path / "run", *options), tmp_path / "out.json"
    capsys.readouterr()
    policies = ["balanced", *options[1:]] if options[0] == "--compare" else ["balanced"]
    assert main(["simulate", "--like", str(run), "--policy", ",".join(policies), "--json", str(file)]) == 0
    told, found = capsys.readouterr().out, json.loads(file.read_text())
    rows = {(row["policy"], row["step"]): row for row in read_metrics(run / "metrics.jsonl")}
    for policy in policies:
        assert f"{policy}: forward and backward of a step" in told
        compared = found["like"][policy]
        assert compared["steps"] == [0, 1, 2]
        for step, simulated in enumerate(found[policy]["steps"]):
            row = rows[policy, step]
            assert simulated["tokens"] == row["tokens"]
            assert simulated["predicted_s"] == pytest.approx(row["predicted_s"], rel=1e-9)
            assert compared["measured_s"][step] == row["measured_s"]
            assert compared["measured_processor_s"][step] == row["passes_processor_s"] > 0
            assert compared["simulated_processor_s"][step] > 0
            assert compared["rest_s"][step] == pytest.approx(row["seconds"] - row["measured_s"] - row["plan_wait_s"])
    # A plan for more ranks, and a step of two: the last ones.
    more = "4" if "--expert" in options else "3"
    assert main(["simulate", "--like", str(run), "--ranks", more, "--ranks-per-node", more, "--steps", "2"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.split("ratio\n")[1].splitlines()[:2]] == ["1", "2"]


def test_what_is_no_run_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(data, tmp_path / "run", "--ranks", "1")
    capsys.readouterr()
    for option, value in (("--tokens", "1k"), ("--seed", "3"), ("--lengths", "x"), ("--calibration", "x")):
        assert main(["simulate", "--like", str(run), option, value]) == 6
        told = capsys.readouterr().err
        assert f"{option} " in told
        assert "was given with --like, whose run says what it is" in told
    for extra in (["--model", "llama-13b"], ["--offload"]):
        assert main(["simulate", "--like", str(run), *extra]) == 6
        assert "was given with --like, whose run says what it is" in capsys.readouterr().err
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("loader: index", "loader: threads"))
    assert main(["simulate", "--like", str(run)]) == 6
    assert "made its tokens as it went (--loader threads)" in capsys.readouterr().err
    for name in ("metrics.jsonl", "calibration.json", "config.yaml"):
        (run / name).unlink()
        assert main(["simulate", "--like", str(run)]) == 6
        assert f"--like {run} has no {name}; give the folder of a run" in capsys.readouterr().err


def test_data_that_moved_and_another_mesh(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = tmp_path / "here"
    shutil.copytree(data, here)
    run = trained(here, tmp_path / "run", "--ranks", "1", "--experts", "2")
    capsys.readouterr()
    # What a rank with all experts takes is not what one with half of them takes.
    command = ["train", "--data", str(here), *SIZE, *LIMITS, "--calibration", str(run / "calibration.json")]
    assert main([*command, "--ranks", "2", "--experts", "2", "--expert", "2"]) == 6
    assert "made with expert 1 and this run has 2" in capsys.readouterr().err
    shutil.rmtree(here)
    assert main(["simulate", "--like", str(run)]) == 6
    assert str(here) in capsys.readouterr().err

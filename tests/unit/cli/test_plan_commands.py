"""``hdpcomm plan`` and ``hdpcomm simulate``: flags, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from hdpcomm.cli.plan import ranks_per_node
from hdpcomm.plan import StepPlan

SMALL = ["--ranks", "16", "--capacity", "8K", "--tokens", "512K", "--context", "64K"]


def test_plan_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"plan.{kind}" for name, kind in (("plot", "png"), ("trace", "trace"), ("json", "json"))}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert main(["plan", *SMALL, "--compare", "naive,static", *options]) == 0
    out = capsys.readouterr().out
    assert "policy balanced on 16 ranks: 524,288 tokens" in out
    assert "lower bound" in out
    assert "static" in out
    data = json.loads(files["json"].read_text())
    for key in ("policy", "ranks", "makespan_s", "lower_bound_s", "planning_s", "idle_share", "micro_batches"):
        assert key in data
    assert set(data["micro_batches"][0]) >= {"ranks", "sequences", "offload_ratio", "predicted_s"}
    assert StepPlan.from_json(files["json"].read_text()).tokens == 2**19
    assert [entry["policy"] for entry in data["compared"]] == ["naive", "static"]
    assert files["plot"].stat().st_size > 10_000
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_plan_of_given_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3000 200 900")
    assert main(["plan", "--ranks", "4", "--capacity", "1024", "--lengths", str(lengths)]) == 0
    assert "4,100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "policy is 'best'"),
        (["--model", "gpt"], "unknown model 'gpt'"),
        (["--cluster", "tpu"], "unknown device 'tpu'"),
        (["--distribution", "zipf"], "distribution is 'zipf'"),
        (["--capacity", "1K"], "raise capacity to at least 4096"),
        (["--json", "/no/folder/x"], "does not exist"),
        (["--capacity", "1G"], "even with all layers recomputed"),
        (["--expert", "4"], "llama-7b has no experts"),
        (["--ranks-per-node", "3"], "do not fill such nodes"),
        (["--lengths", "a.txt"], "--tokens 524288 was given with --lengths, whose file says what it is"),
        (["--lengths", "a.txt", "--tokens", "32M"], "--context 65536 was given with --lengths"),
        (["--lengths", "a.txt", "--tokens", "32M", "--seed", "1"], "was given with --lengths"),
    ],
)
def test_bad_options_end_with_6(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *options]) == 6
    assert message in capsys.readouterr().err


def test_simulate_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "2", "--policy", "all", "--json", str(tmp_path / "x.json")]
    options += ["--trace", str(tmp_path / "x.trace"), "--plot", str(tmp_path / "x.png")]
    assert main(["simulate", *SMALL, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "policy"
    assert len(lines) == 6
    data = json.loads((tmp_path / "x.json").read_text())
    assert set(data) == {"balanced", "pipeline", "naive", "pow2", "static"}
    assert len(data["balanced"]["steps"]) == 2
    assert data["static"]["steps"][0]["mfu"] > 0
    assert (tmp_path / "x.png").exists()
    assert any(
        event.get("name") == "plan step 1" for event in json.loads((tmp_path / "x.trace").read_text())["traceEvents"]
    )


def test_simulate_refuses_an_unknown_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--policy", "balanced,best"]) == 6
    assert "policy is 'best'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tensor", "pipeline", "ranks", "warns"),
    [(1, 1, 8, False), (2, 2, 2, False), (8, 1, 1, False), (8, 4, 1, False), (3, 1, 2, True), (6, 2, 1, True)],
)
def test_ranks_per_node_follow_from_the_devices_of_a_rank(
    tensor: int, pipeline: int, ranks: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert ranks_per_node(tensor, pipeline) == ranks
    assert ("give --ranks-per-node" in caplog.text) == warns


@pytest.mark.parametrize("ranks", [1, 3, 16])
@pytest.mark.parametrize("policy", ["balanced", "pow2", "static"])
def test_by_default_sequences_fit_the_ranks(ranks: int, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", str(ranks), "--capacity", "8K", "--tokens", "512K", "--policy", policy]) == 0
    held = 8192 << ranks.bit_length() - 1
    assert f"sequences are cut to the {held:,} tokens that the ranks hold" in capsys.readouterr().err


def test_the_default_context_of_a_large_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "512", "--capacity", "8K", "--tokens", "1M"]) == 0
    assert capsys.readouterr().err == ""


def test_simulate_runs_a_plan_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "--policy", "naive", "--out", str(path)]) == 0
    assert main(["simulate", *SMALL, "--policy", "naive", "--json", str(tmp_path / "made.json")]) == 0
    capsys.readouterr()
    made = json.loads((tmp_path / "made.json").read_text())["naive"]["steps"][0]
    command = ["simulate", "--plan", str(path), "--capacity", "8K", "--json", str(tmp_path / "read.json")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == "naive"
    assert len(lines) == 2
    read = json.loads((tmp_path / "read.json").read_text())["naive"]["steps"][0]
    assert {**read, "planning_s": 0} == {**made, "planning_s": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "3"], "--seed 3 was given with --plan"),
        (["--tokens", "1M"], "--tokens 1048576 was given with --plan"),
        (["--policy", "naive"], "--policy naive was given with --plan"),
        (["--steps", "2"], "--steps 2 was given with --plan"),
        (["--ranks", "8"], "the plan is for 16 ranks, the cluster has 8"),
        (["--capacity", "64"], "tokens on a rank, expected at most 64"),
    ],
)
def test_a_plan_from_a_file_is_not_made_again(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "--out", str(path)]) == 0
    capacity = [] if "--capacity" in options else ["--capacity", "8K"]
    assert main(["simulate", "--plan", str(path), *capacity, *options]) == 6
    assert message in capsys.readouterr().err


def test_shared_interfaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blind, aware = tmp_path / "blind.json", tmp_path / "aware.json"
    step = ["--ranks", "32", "--capacity", "8K", "--tokens", "1M", "--context", "256K"]
    assert main(["plan", *step, "--out", str(blind)]) == 0
    assert main(["plan", *step, "--nics", "1", "--out", str(aware)]) == 0
    seconds = []
    for path in (blind, aware):
        command = ["simulate", "--plan", str(path), "--capacity", "8K", "--nics", "1", "--json", str(tmp_path / "x")]
        assert main(command) == 0
        seconds.append(json.loads((tmp_path / "x").read_text())["balanced"]["steps"][0]["compute_s"])
    assert seconds[1] < seconds[0]
    capsys.readouterr()
    assert main(["plan", *step, "--nics", "1", "--calibration", "none.json"]) == 6
    assert "--nics 1 was given with --calibration" in capsys.readouterr().err

"""``hdpcomm train`` from its options to its tables and its JSON."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys

import pytest

from hdpcomm.arguments import size_text
from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.trace.run_report import run_report
from tests.harness.warm_python import Python, run_python

SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24", "--steps", "3"]
POLICIES = ("balanced", "static", "ddp")
LIMITS = ["--context", "300", "--tokens-per-step", "700"]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    for i in range(10):
        (path / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    return str(path)


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_trains_and_compares(folder, tmp_path):
    """As a user starts it, from a new interpreter."""
    path, run = tmp_path / "out.json", tmp_path / "run"
    options = ["--ranks", "2", "--capacity", "150", "--compare", "static", "ddp", "--out", str(run)]
    options += ["--trackers", "none", "--json", str(path)]
    command = [sys.executable, "-m", "hdpcomm.cli.main", "train", "--data", folder, *SMALL, *LIMITS, *options]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    # No progress bar where stderr is no terminal, but a line a step.
    first, *lines = told.stderr.splitlines()
    assert first.startswith(f"hdpcomm: train: {{data: [{folder}]")
    assert [line.split()[1:4] for line in lines] == [
        ["step", f"{step}/3", policy] for step in (1, 2, 3) for policy in POLICIES
    ]
    for words in (
        "10 documents",
        "cut into pieces",
        "policy balanced",
        "static DP1 x CP2",
        "the tokens/s",
        "losses equal",
        "torch DDP, gloo",
    ):
        assert words in " ".join(told.stdout.split())
    result = json.loads(path.read_text())
    assert (result["policy"], result["ranks"], result["transport"]) == ("balanced", 2, "shm")
    assert len(result["steps"]) == result["totals"]["steps"] == 3
    for step in result["steps"]:
        assert {"loss", "tokens", "seconds", "bytes_sent", "idle_share"} <= step.keys()
        assert f"{step['loss']:.3f}" in told.stdout
    static, ddp = result["comparison"]
    assert (static["policy"], ddp["policy"]) == POLICIES[1:]
    for other in (static, ddp):
        losses = [step["loss"] for step in other["steps"]]
        assert losses == pytest.approx([step["loss"] for step in result["steps"]], rel=1e-4)
    ratios = {True: [], False: []}
    for step, other in zip(result["steps"], ddp["steps"], strict=True):
        ratios[step["longest"] > 150].append(other["seconds"] / step["seconds"])
    page = run_report(run)
    for long, text in ((True, "took {:.2f} times as long as balanced"), (False, "others {:.2f} times (medians)")):
        if ratios[long]:
            words = text.format(statistics.median(ratios[long]))
            assert words in page
    assert ratios[True]
    for step in result["steps"]:
        sequences = {int(ranks): count for ranks, count in step["sequences_on_ranks"].items()}
        assert max(sequences) == step["longest_ranks"]
        text = ", ".join(f"{count} on {ranks}" for ranks, count in result["totals"]["sequences_on_ranks"].items())
    assert text in told.stdout
    assert [step["sequences_on_ranks"].keys() for step in ddp["steps"]] == [{"1"}] * 3
    for mine, other in zip(result["steps"], static["steps"], strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert other["longest_ranks"] == 2
    assert result["totals"]["last_loss"] < result["totals"]["first_loss"]
    assert result["totals"]["bytes_sent"] == sum(step["bytes_sent"] for step in result["steps"])
    assert result["config"]["capacity"] == 150
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["policy"], line["step"]) for line in lines] == [(p, s) for s in range(3) for p in POLICIES]
    assert [line["loss"] for line in lines[::3]] == [step["loss"] for step in result["steps"]]
    for line in lines[2::3]:  # DDP's own messages and waiting, which the communicator does not see
        assert line["bytes_sent"] - 200 < line["gradient_bytes"] <= line["bytes_sent"]
        assert line["idle_s"] > 0
        assert "slowest_rank" not in line


def test_memory_savers(folder, tmp_path, capfd):
    """The curve of a plain run, but for what bf16 rounds; as many messages of ranks as are asked for."""
    curves = []
    narrow = ["--zero", "1", "--dtype", "bf16"]
    cases = ["--quiet"], ["--zero", "1", "--recompute", "full", "--verbose"], narrow, [*narrow, "--optimizer-offload"]
    for place, options in enumerate(cases):
        path = tmp_path / f"{place}.json"
        common = ["--ranks", "2", "--json", str(path)]
        # A process of its own: ranks write to the stderr that their fork server began with.
        command = ["-m", "hdpcomm.cli.main", "train", "--data", folder, *SMALL, *LIMITS, *common, *options]
        messages = run_python(command, timeout=100, check=True).stderr
        curves.append([step["loss"] for step in json.loads(path.read_text())["steps"]])
        assert [text in messages for text in ("hdpcomm: step 3/3", "hdpcomm: rank 1 of 2 joined")] == [
            place > 0,
            place == 1,
        ]
        assert bool(messages) == (place > 0)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=1e-2)
    assert curves[3] == pytest.approx(curves[2], rel=1e-4)
    assert main(["train", "--data", folder, *SMALL, *LIMITS, "--recompute", "2"]) != 0
    assert "recompute is 2; give 'none', 'full' or a number of layers from 0 to 1" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--recompute", "some"])
    assert "'some' is neither none, full, auto nor a number of layers" in capfd.readouterr().err


def test_recomputation_chosen_by_the_memory(folder, tmp_path, capfd):
    """The less memory, the more layers, with the same losses; what cannot fit is refused."""
    options = ["train", "--data", folder, *SMALL, *LIMITS, "--layers", "4", "--ranks", "1", "--capacity", "300"]
    curves, recomputed = [], []
    for size in ("1G", "1M", "700k"):
        path = tmp_path / f"{size}.json"
        assert main([*options, "--recompute", "auto", "--memory", size, "--json", str(path)]) == 0
        told = capfd.readouterr().out
        recomputed.append(int(told.split(" of 4 layers are recomputed")[0].split()[-1]))
        curves.append([step["loss"] for step in json.loads(path.read_text())["steps"]])
    assert recomputed[0] == 0
    assert 0 < recomputed[1] < recomputed[2]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=1e-4)
    assert main([*options, "--recompute", "auto", "--memory", "300k"]) != 0
    assert "lower the capacity, or take more ranks" in capfd.readouterr().err


@pytest.mark.parametrize("options", [["--policy", "naive"], ["--policy", "static"]])
def test_without_comparison(folder, tmp_path, capfd, options):
    path = tmp_path / "out.json"
    assert main(["train", "--data", folder, *SMALL, *LIMITS, "--ranks", "1", *options, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["policy"] == options[1]
    assert result["comparison"] == []
    assert result["totals"]["bytes_sent"] == 0
    assert "against the static mesh" not in capfd.readouterr().out


def test_jsonl_and_the_seed(tmp_path, capfd):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": f"line {i} " * (i + 1)}) + "\n" for i in range(20)))
    losses = []
    for seed in ("1", "1", "2"):
        out = tmp_path / "out.json"
        options = ["--text-field", "body", "--ranks", "1", "--seed", seed, "--json", str(out)]
        assert main(["train", "--data", str(path), *SMALL, *LIMITS, *options]) == 0
        losses.append([step["loss"] for step in json.loads(out.read_text())["steps"]])
    assert losses[0] == pytest.approx(
        losses[1], rel=1e-5
    )  # plans follow the measured cost, so sums may round differently
    assert losses[0] != pytest.approx(losses[2], rel=1e-5)
    capfd.readouterr()


def test_joins_the_world_of_torchrun(folder, tmp_path):
    path = tmp_path / "out.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--data", folder, *SMALL, *LIMITS, "--json", str(path)]
    arguments = [*launcher, "-m", "hdpcomm.cli.main", "train", *options]
    done = run_python(arguments, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the whole run") == 1  # rank 0 alone reports
    assert json.loads(path.read_text())["ranks"] == 2


def test_joins_the_world_of_mpirun(folder, tmp_path):
    path = tmp_path / "out.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["-m", "hdpcomm.cli.main", "train", "--data", folder, *SMALL, *LIMITS]
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(port)}
    ranks = [
        Python(
            [*command, "--json", str(path)],
            env=os.environ | variables | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
            merged=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(path.read_text())["ranks"] == 2


BAD = {
    "--data /no/such/path": "/no/such/path: no such file or folder",
    "--data {folder} --capacity 100 --ranks 2": "raise --capacity to at least 150 or --ranks to 3, or lower "
    "--context to 200",
    "--data {folder} --tokens-per-step 200": "raise --tokens-per-step to at least 300 or lower --context to 200",
    "--data {folder} --hidden 30 --heads 4": "choose hidden as a multiple of 2 x heads",
    "--data {folder} --heads 4 --kv-heads 3": "kv_heads must divide heads",
    "--data {folder} --json /no/such/folder/out.json": "the folder /no/such/folder does not exist",
    "--data {folder} --compare balanced": "--compare balanced is the policy of the run itself",
    "--data {folder} --compare ddp --zero 1": "compare with it without dtype, zero, offload and",
    "--data {folder} --recompute auto": "no limit was given; give what a rank's step may take, as --memory 4G",
    "--data {folder} --memory 1G": "a limit of 1.1 GB was given and recompute is 'none', which keeps to none",
    "--data {folder} --save-every 5": "--save-every was given without --out",
    "--data {folder} --resume auto": "--resume was given without --out",
    "--data {folder} --out {folder}/0.txt": "this is a file; give a folder",
    "--data {folder} --export {folder}": "this folder is not empty",
    "--data {folder} --export {folder}/0.txt": "this is a file; give a folder",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_values_are_told_once_before_any_rank_starts(options, folder, capfd, monkeypatch):
    monkeypatch.setattr("hdpcomm.comm.launch.RankPool", lambda *_, **__: pytest.fail("ranks were started"))
    assert main(["train", *SMALL, *LIMITS, *options.format(folder=folder).split()]) == 6
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.startswith("hdpcomm: error: ")
    assert told.err.count("\n") == 1
    assert BAD[options] in told.err


def test_ranks_must_be_those_of_torchrun(folder, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--data", folder, "--ranks", "3"]) == 6
    assert "--ranks 3 was given, but the launcher started 2 ranks" in capfd.readouterr().err


def test_an_error_inside_a_rank_is_one_message(folder, capfd, monkeypatch):
    def fail(*_, **__):
        raise InvalidUsage("given here, told there")

    monkeypatch.setattr("hdpcomm.comm.launch.RankPool", fail)
    assert main(["train", "--data", folder, *SMALL, *LIMITS]) == 6
    assert capfd.readouterr().err.endswith("hdpcomm: error: given here, told there\n")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e9, "2.0 GB"), (5e15, "5000.0 TB")]
)
def test_size_text(count, text):
    assert size_text(count) == text

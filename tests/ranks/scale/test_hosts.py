"""Worlds of two and three hosts: network namespaces with their own processes and /dev/shm, under torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hdpcomm.attention import unshard
from hdpcomm.cli.main import main
from tests.harness.attention_oracle import GRADS, error, expected
from tests.harness.host_program import RESHARD_SHAPE, RING, TRAFFIC_BYTES, TRAFFIC_SUBSETS
from tests.harness.hosts import Hosts, WarmHosts, why_not

PROGRAM = "tests.harness.host_program"
TRAIN = ["--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "24", "--steps", "3"]
TRAIN += ["--context", "300", "--tokens-per-step", "700", "--capacity", "100"]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def two() -> Iterator[Hosts]:
    with WarmHosts(2) as hosts:
        yield hosts


def load(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=False)


def test_collectives_and_ring_attention_on_two_hosts(two: Hosts, tmp_path: Path) -> None:
    two.ranks([PROGRAM, "everything", str(tmp_path)], [0, 0, 1, 1])
    two.finish(90)
    assert {load(tmp_path, f"transport{rank}") for rank in range(4)} == {"shm+tcp"}
    parts = [load(tmp_path, f"ring{rank}") for rank in range(4)]
    want = expected(RING)
    for name, cuts in zip(GRADS, (RING.cu, RING.cu, RING.cu_k, RING.cu_k), strict=True):
        assert error(unshard([part[name] for part in parts], cuts), want[name]) <= 1e-12
    check_traffic([load(tmp_path, f"traffic{rank}") for rank in range(4)])


def check_traffic(found: list[dict[tuple[str, tuple[int, ...]], tuple[int, int]]]) -> None:
    """Data crosses between two hosts, with ranks 0, 1 and 2, 3, once if it must, by both counts."""
    for ranks in TRAFFIC_SUBSETS:
        for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            minimum = TRAFFIC_BYTES * (2 if op == "all_reduce" else 1) if {*ranks} - {2, 3} else 0
            counted = sum(rank[op, ranks][0] for rank in found)
            wire = found[0][op, ranks][1] + found[2][op, ranks][1]  # of the two interfaces
            assert minimum <= counted <= 1.01 * minimum + 1000, (op, ranks, counted)
            assert wire <= 1.1 * minimum + 100_000, (op, ranks, wire)  # and the barriers


def test_weights_cross_to_another_host_once(two: Hosts, tmp_path: Path) -> None:
    two.ranks([PROGRAM, "reshard", str(tmp_path)], [0, 0, 1, 1])
    two.finish(90)
    found = [load(tmp_path, f"reshard{rank}") for rank in range(4)]
    size = 4 * RESHARD_SHAPE[0] * RESHARD_SHAPE[1]
    assert all(right for right, *_ in found)
    assert {between for _, _, between, _ in found} == {size}
    # halves for rank 1, the whole for one rank of the other host, which passes it on
    assert sum(sent for _, sent, _, _ in found) == size // 2 + 2 * size
    assert size <= found[0][3] + found[2][3] <= 1.1 * size + 100_000  # of the two interfaces


def test_the_ranks_of_a_host_share_its_interface(two: Hosts, tmp_path: Path) -> None:
    two.limit(400)  # far less than one rank sends, even where other tests run beside it
    two.ranks([PROGRAM, "interfaces", str(tmp_path)], [0, 0, 1, 1])
    two.finish(90)
    assert [load(tmp_path, f"nics{rank}") for rank in range(4)] == [1] * 4


def test_the_backend_of_torch_on_two_hosts(two: Hosts, tmp_path: Path) -> None:
    environment = {"HDPCOMM_SECRET": "a secret of sixteen characters"}
    two.ranks([PROGRAM, "torch_backend", str(tmp_path)], [0, 0, 1, 1], environment)
    two.finish(90)
    assert [load(tmp_path, f"told{rank}") for rank in range(4)] == [[(rank, "shm+tcp") for rank in range(4)]] * 4
    wire = load(tmp_path, "sent0") + load(tmp_path, "sent2")  # of the two interfaces: a sum crosses once each way
    assert 2 * TRAFFIC_BYTES <= wire <= 2.2 * TRAFFIC_BYTES + 200_000


@pytest.mark.parametrize("options", [[], ["--zero", "3"], ["--zero", "2", "--dtype", "bf16"]], ids=" ".join)
def test_training_on_two_hosts_has_the_losses_of_one(options: list[str], two: Hosts, tmp_path: Path) -> None:
    """With ZeRO-3 each host has all parts, and compares them with those of the other one after the first step."""
    data = tmp_path / "data"
    data.mkdir()
    for i in range(10):
        (data / f"{i}.txt").write_text(f"the {i}th text; " * (i * i + 1))
    command = ["train", "--data", str(data), *TRAIN, "--layers", "3", "--json"]
    two.torchrun(["hdpcomm.cli.main", *command, str(tmp_path / "two.json"), *options], per_host=2)
    two.finish(90)
    assert main([*command, str(tmp_path / "one.json"), "--ranks", "4"]) == 0
    one, several = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert several["ranks"] == 4
    assert one["transport"] != several["transport"]
    for here, there in zip(one["steps"], several["steps"], strict=True):
        assert here["tokens"] == there["tokens"]
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-2 if "bf16" in options else 1e-5)


def test_a_host_that_is_cut_off_is_lost_on_all_others(tmp_path: Path) -> None:
    with WarmHosts(3) as hosts:
        hosts.ranks([PROGRAM, "cut", str(tmp_path)], [0, 0, 1, 2], {"HDPCOMM_SILENCE_S": "2"})
        limit = time.monotonic() + 60
        while len(list(tmp_path.glob("ready?"))) < 4:
            assert time.monotonic() < limit, hosts.finish(1)
            time.sleep(0.05)
        hosts.cut(2)
        (tmp_path / "cut").touch()
        outputs = hosts.finish(90)
    for rank in range(4):
        found = load(tmp_path, f"found{rank}")
        assert found["type"] == "PeerLost", found
        if rank < 3:
            assert "rank 3" in found["text"], found
            assert found["sum"] == 3.0  # the others work on
    assert "terminate" not in "".join(outputs)


def test_all_hosts_hear_of_a_rank_that_dies_while_they_join(two: Hosts, tmp_path: Path) -> None:
    two.ranks([PROGRAM, "dies_while_joining", str(tmp_path)], [0, 0, 1, 1])
    two.finish(60)
    for rank in range(3):
        peer, text = load(tmp_path, f"found{rank}")
        assert peer == 3
        assert text.startswith("rank 3 died (")
        assert text.endswith(": look for its error")


def test_a_slurm_step_on_two_hosts_needs_nothing(two: Hosts) -> None:
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "10.77.0.[1-2]"}
    step |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    command = [sys.executable, "-m", "hdpcomm.cli.main", "perf", "all_reduce", "-b", "8", "-e", "8", "-n", "2"]
    for rank, (node, local) in enumerate([(0, 0), (0, 1), (1, 0)]):
        task = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        two.start(node, command, step | task | {"PMI_RANK": str(rank), "PMI_SIZE": "3"})  # as with --mpi=pmi2
    outputs = two.finish(60)
    assert [output.count("# Avg bus bandwidth") for output in outputs] == [1, 0, 0]  # torch warns on stderr
    told = outputs[0]
    assert "# transport: shm+tcp" in told
    assert "# Out of bounds values : 0 OK" in told
    ranks = [line.split() for line in told.splitlines() if line.startswith("#  Rank")]
    assert [(words[7], words[9]) for words in ranks] == [("on", "device")] * 3
    assert [(words[8], words[10]) for words in ranks] == [("host0", "0"), ("host0", "1"), ("host1", "0")]


def test_shm_alone_is_refused_across_hosts(two: Hosts) -> None:
    code = (
        "import hdpcomm as hdp\n"
        "try:\n    hdp.init(transport='shm', timeout=30)\n"
        "except hdp.InvalidUsage as error:\n    print(error)"
    )
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": two.address(0), "MASTER_PORT": "29400"}
        two.start(rank, [sys.executable, "-c", code], environment)
    for output in two.finish(60):
        assert "ranks [1] run on another host" in output
        assert "transport='auto'" in output

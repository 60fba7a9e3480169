"""Loaders on three local Ray nodes: order and losses of threads, also when servers are killed. By ``make ray``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import hdpcomm as hdp
from hdpcomm.data import LoaderService, open_stream
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.plan import ClusterSpec, CostModel, Planner
from hdpcomm.run import Loading, MetricsLog, RunConfig, RunResult, Saving, Watching, read_metrics, train
from hdpcomm.train import pack_shard
from hdpcomm.train.shards import parts_of_rank

if not os.environ.get("HDPCOMM_RAY_TESTS"):
    pytest.skip("run by make ray", allow_module_level=True)
pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(280)
CONFIG = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24)
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of three nodes on this machine."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    del node["include_dashboard"]
    for _ in range(2):
        cluster.add_node(**node)
    cluster.wait_for_nodes(60)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"{i} text; " * (i % 9 * 30 + 1)} for i in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def trained(data: str, out: str, address: str | None, kill_at: int = -1, resume: str | None = None) -> RunResult:
    """One rank of a run, saved every second step; without an address by threads. Rank 0 may kill a server."""
    torch.set_num_threads(1)
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    config = RunConfig(model=CONFIG, steps=8, capacity=500, tokens_per_step=2000)
    saving = Saving(Path(out) / "checkpoints", every=2, resume=resume)
    loading = Loading("threads" if address is None else "ray", folder=Path(out) / "spool")
    with hdp.init() as comm, MetricsLog(Path(out) / f"metrics-{comm.rank}.jsonl") as log:

        def on_step(policy: str, metrics: Any, costs: Any) -> None:
            log.write(policy, metrics, costs)
            if metrics.step == kill_at and comm.rank == 0:
                kill_one()

        stream = open_stream([data], context=1000, block_bytes=3000, shuffled=3, comm=comm)
        return train(comm, stream, config, saving=saving, watching=Watching(on_step=on_step), loading=loading)


def servers() -> list[Any]:
    """Handles of the servers of this process's loader."""
    import ray

    return [ray.get_actor(name) for name in ray.util.list_named_actors() if not name.endswith("scheduler")]


def about(server: Any) -> tuple[int, str]:
    """(process, node) of an actor."""
    import ray

    facts = lambda _: (os.getpid(), ray.get_runtime_context().get_node_id())
    return ray.get(server.__ray_call__.remote(facts), timeout=60)


def kill_one() -> None:
    pid, _ = about(servers()[1])
    os.kill(pid, signal.SIGKILL)


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics-0.jsonl")]


@pytest.fixture(scope="module")
def by_threads() -> dict[str, Path]:
    return {}


@pytest.fixture
def whole(ranks: Ranks, data: str, by_threads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks by threads."""
    if data not in by_threads:
        out = tmp_path_factory.mktemp("threads")
        ranks(2, trained, data, str(out), None)
        by_threads[data] = out
    return by_threads[data]


def test_order_and_losses_are_those_of_threads(
    ranks: Ranks, data: str, address: str, whole: Path, tmp_path: Path
) -> None:
    """Up to rounding: both runs measure costs of their own, which the plans follow, and so the order of sums."""
    ranks(2, trained, data, str(tmp_path), address, timeout=240)
    ours, theirs = (read_metrics(out / "metrics-0.jsonl") for out in (tmp_path, whole))
    assert [row["tokens"] for row in ours] == [row["tokens"] for row in theirs]
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)
    assert ours[-1]["loader_restarts"] == 0


@pytest.mark.parametrize("kill_at", [-1, 4])
def test_a_resumed_run_has_the_bits_of_threads(
    ranks: Ranks, data: str, address: str, whole: Path, tmp_path: Path, kill_at: int
) -> None:
    """Though a server is killed in the midst: no sequence is lost or comes again. With the costs of the checkpoint."""
    ranks(2, trained, data, str(tmp_path), address, kill_at, str(whole / "checkpoints/step-4"), timeout=240)
    assert losses(tmp_path) == losses(whole)[4:]
    restarts = [row["loader_restarts"] for row in read_metrics(tmp_path / "metrics-0.jsonl")]
    assert (restarts[-1] > 0) == (kill_at >= 0)


def texts(stream: Any, steps: int, during: Callable[[int], None] = lambda _: None, **options: Any) -> list[bytes]:
    found = []
    with LoaderService(stream, tokens=2000, **options) as loader:
        for step in range(steps):
            reader = loader.reader(step)
            found += [bytes(reader(place)[0].tolist()) for place in range(len(reader.batch.sequences))]
            loader.done(step + 1)
            during(step)
    return found


def test_every_server_and_the_scheduler_may_die_at_any_time(data: str, address: str, monkeypatch: Any) -> None:
    """One after the other, while blocks are made and read; ``KILLS`` of them."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", address)
    stream = open_stream([data], context=1000, block_bytes=3000, shuffled=3)
    kills = int(os.environ.get("KILLS", "3"))

    def kill(step: int) -> None:
        if step < kills:
            names = sorted(ray.util.list_named_actors())
            assert len(names) == 4
            pid, _ = about(ray.get_actor(names[step % 4 - 1]))
            os.kill(pid, signal.SIGKILL)

    steps = max(20, kills + 1)
    assert texts(stream, steps, kill, servers="ray") == texts(stream, steps)


def test_servers_are_on_several_nodes(data: str, address: str, monkeypatch: Any) -> None:
    """One a node where Ray's scheduler has its way, which it need not on a busy machine."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    found: list[tuple[int, str]] = []
    texts(open_stream([data], context=1000), 1, lambda _: found.extend(map(about, servers())), servers="ray")
    assert len({pid for pid, _ in found}) == 3
    assert len({node for _, node in found}) >= 2


def shard_and_bytes(data: str, address: str) -> tuple[int, int]:
    os.environ["RAY_ADDRESS"] = address
    with hdp.init() as comm:
        planner = Planner(None, ClusterSpec(ranks=comm.size, capacity=500), cost_model=CostModel(1e-9, 1e-6))
        stream = open_stream([data], context=1000, block_bytes=5000, comm=comm)
        shard = 0
        with LoaderService(stream, tokens=2000, comm=comm, servers="ray") as loader:
            for step in range(10):
                plan = planner.plan(loader.batch(step).lengths)
                loader.prefetch(step, parts_of_rank(plan, comm.rank))
                for micro_batch in plan.for_rank(comm.rank):
                    group = comm.subset(micro_batch.ranks)
                    packed = pack_shard(micro_batch, loader.reader(step), comm=group, device=comm.device)
                    shard += packed.tokens.numel()
                comm.barrier()
                loader.done(step + 1)
            return shard, loader.take_stats().bytes_read


def test_a_rank_reads_its_shard_and_no_more(ranks: Ranks, data: str, address: str) -> None:
    for shard, read in ranks(2, shard_and_bytes, data, address, timeout=240):
        assert 0 < shard <= read <= 1.05 * shard


def refusal(data: str, out: str, address: str) -> str:
    try:
        trained(data, out, address)
    except InvalidUsage as error:
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_wrong_record_is_named_on_all_ranks(ranks: Ranks, address: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 400 + "{\n")
    messages = ranks(2, refusal, str(tmp_path), str(tmp_path), address, timeout=240)
    assert len(set(messages)) == 1
    assert "a.jsonl:401: this line is not JSON" in messages[0]


def leaving(data: str, address: str) -> int:
    """Rank 1 leaves at once; sequences that rank 0 reads all the same."""
    os.environ["RAY_ADDRESS"] = address
    with hdp.init() as comm:
        stream = open_stream([data], context=1000, comm=comm)
        found = texts(stream, 0 if comm.rank else 20, comm=comm, servers="ray")
        comm.barrier()
        return len(found)


def test_a_client_that_leaves_blocks_nobody(ranks: Ranks, data: str, address: str) -> None:
    assert ranks(2, leaving, data, address, timeout=240)[0] == len(texts(open_stream([data], context=1000), 20))


def test_payloads_and_masks_travel(address: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    rows = [{"messages": chat}, {"text": "plain"}, {"text": "t", "image": "AAEC", "payload_tokens": 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = open_stream([tmp_path / "a.jsonl"], context=100, payload_field="image")
    found = []
    for kind in ("threads", "ray"):
        with LoaderService(stream, tokens=300, servers=kind) as loader:
            reader = loader.reader(0)
            loader.prefetch(0, [(place, 0, length) for place, length in enumerate(reader.batch.lengths)])
            places = range(len(reader.batch.lengths))
            found.append([(*(each.tolist() for each in reader(place)), reader.payloads(place)) for place in places])
    assert found[0] == found[1]
    assert any(payloads == ((0, 2, b"\0\1\2"),) for _, _, payloads in found[1])


def test_no_cluster_is_told_in_a_line(data: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InvalidUsage, match=r"Ray cannot be reached or started .nobody answers at 127.0.0.1:1") as error:
        LoaderService(open_stream([data], context=1000), tokens=1000, servers="ray")
    assert "\n" not in str(error.value)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that a command has left: all that have the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HDPCOMM_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("end", ["the end", "Ctrl-C", "an error", "a kill"])
def test_no_process_is_left(data: str, tmp_path: Path, end: str) -> None:
    """The cluster that a run starts by itself leaves no process behind, however the run ends."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "HDPCOMM_TEST_MARK": mark}
    environment.pop("RAY_ADDRESS", None)
    if end == "an error":
        data = str(tmp_path / "bad.jsonl")
        Path(data).write_text('{"text": "fine"}\n' * 400 + "{\n")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hdpcomm", "train", "--data", data, "--loader", "ray", "--loaders", "2"]
    command += ["--ranks", "2", "--context", "500", "--tokens-per-step", "2000", "--trackers", "none"]
    command += ["--steps", "3" if end == "the end" else "2000", "--out", str(out)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    if end in ("Ctrl-C", "a kill"):
        limit = time.monotonic() + 200
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.1)
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    _, told = process.communicate(timeout=200)
    assert process.returncode == {"the end": 0, "Ctrl-C": 130, "an error": 6, "a kill": -signal.SIGKILL}[end], told
    if end == "an error":
        assert "bad.jsonl:401: this line is not JSON" in told
    limit = time.monotonic() + 60
    while left := marked(mark):
        assert time.monotonic() < limit, [each.cmdline() for each in left]
        time.sleep(0.2)

"""``hdpcomm train --elastic --loader ray``: a rank dies, the other goes on with the order and losses of threads."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.warm_python import Python, run_python
from tests.ranks.run.test_elastic import SIZE, TOLD, losses, ranks_of, wait_for_steps

if not os.environ.get("HDPCOMM_RAY_TESTS"):
    pytest.skip("run by make ray", allow_module_level=True)
pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(280)
STEPS = 20


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster that outlives every rank: what Ray starts for rank 0 ends with it."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.wait_for_nodes(60)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.parametrize("dies", [0, 1])
def test_the_other_goes_on_with_the_losses_of_threads(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: int
) -> None:
    """Rank 0 owns the actors: where it dies, the rank that is left starts others."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    data, out = tmp_path / "a.jsonl", tmp_path / "run"
    rows = [{"text": f"{i} text; " * (i % 9 * 10 + 1)} for i in range(300)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(folder: Path, *options: str) -> list[str]:
        limits = ["--context", "300", "--tokens-per-step", "700", "--capacity", "300", "--trackers", "none"]
        run = ["--out", str(folder), "--steps", str(STEPS), *options]
        return ["-m", "hdpcomm.cli.main", "train", "--data", str(data), *SIZE, *limits, *run]

    options = ["--save-every", "3", "--keep", "100"]
    process = Python(command(out, *options, "--loader", "ray", "--elastic", "--ranks", "2"))
    wait_for_steps(process, out, 5)
    limit = time.monotonic() + 100
    while not (out / "checkpoints/step-3").is_dir():  # written beside the steps, so it may come after them
        assert time.monotonic() < limit
        time.sleep(0.01)
    ranks_of(process, 2)[dies].kill()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    ((count, step),) = TOLD.findall(errors)
    assert int(count) == 1
    found = losses(out)
    first = max(i for i, row in enumerate(found) if row[0] == int(step))
    assert [number for number, _ in found[first:]] == list(range(int(step), STEPS))
    by_hand = tmp_path / "by hand"
    (by_hand / "checkpoints").mkdir(parents=True)
    shutil.copytree(out / f"checkpoints/step-{step}", by_hand / f"checkpoints/step-{step}")
    again = command(by_hand, *options, "--loader", "threads", "--ranks", "1", "--resume", "auto")
    run_python(again, timeout=150, check=True)
    assert losses(by_hand) == found[first:]
    assert not [each for each in psutil.process_iter(["ppid"]) if each.info["ppid"] == process.pid]

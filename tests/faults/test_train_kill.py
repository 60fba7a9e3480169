"""A rank is killed in the middle of ``hdpcomm train``: the others stop soon, the error names it, nothing is left."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.harness.fault_cases import LONG_S
from tests.harness.warm_python import Python

MODEL = ["--layers", "1", "--hidden", "16", "--ffn", "16"]
OPTIONS = ["--ranks", "4", "--steps", "100000", "--context", "512", "--tokens-per-step", "2048", *MODEL]


def wait_until(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.02)


@pytest.mark.usefixtures("nothing_left_in_shm")
@pytest.mark.parametrize("victim", [0, 2])
def test_sigkill_of_a_rank(victim, tmp_path):
    log = tmp_path / "run/metrics.jsonl"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["HDPCOMM_TIMEOUT"] = str(LONG_S)  # something else ends the others' waits
    with Python(["-m", "hdpcomm.cli.main", "train", *OPTIONS, "--out", str(tmp_path / "run")], env=environment) as run:
        wait_until(lambda: log.exists() and log.read_text().count("\n") >= 3, 60)
        everyone = psutil.Process(run.pid).children(recursive=True)
        server = next(p for p in everyone if len(p.children()) == 4)
        ranks = sorted(server.children(), key=lambda process: (process.create_time(), process.pid))
        ranks[victim].send_signal(signal.SIGKILL)
        out, err = run.communicate(timeout=100)
    assert run.returncode == 3
    assert out == ""
    assert f"rank {victim} ended by signal SIGKILL" in err
    assert "Traceback" not in err
    wait_until(lambda: not any(process.is_running() for process in ranks), 30)

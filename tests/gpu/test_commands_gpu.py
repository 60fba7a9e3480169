"""``hdpcomm train`` on a GPU that ranks share: the losses of one process without."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

TRANSPORT = "cuda"
FEW_QUEUES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8"
}  # the clients of MPS share its queues, and tests run beside each other
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MODEL = ["--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--ffn", "512"]
EXPERTS, MUON = ["--experts", "4", "--router-aux-loss", "0.01"], ["--optimizer", "torch.optim:Muon", "--lr", "0.001"]
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "bf16, ZeRO-3": ([], ["--dtype", "bf16", "--zero", "3"]),
    "offload": ([], ["--dtype", "bf16", "--offload", "256M", "--capacity", "2000"]),
    "recomputation": ([], ["--recompute", "auto", "--memory", "4G", "--zero", "2"]),
    "interleaved stages": ([], ["--pipeline", "2", "--chunks", "2"]),
    "slices": ([], ["--pipeline", "2", "--slices", "4"]),
    "split backward": ([], ["--pipeline", "2", "--split-backward"]),
    "tensor": ([], ["--tensor", "2"]),
    "experts": (EXPERTS, ["--expert", "2"]),
    "queue": ([], ["--queue", "--learn-costs"]),
    "elastic": ([], ["--elastic", "--zero", "1"]),
    "muon": (MUON, []),
    "policies": ([], ["--compare", "static", "ddp"]),
}


@functools.cache
def losses_of(transport: str, ranks: int, *options: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.json")
        sizes = ["--context", "4096", "--tokens-per-step", "8192", "--steps", "3", *MODEL]
        sizes += [] if "--dtype" in options else ["--dtype", "fp32"]
        words = ["--ranks", str(ranks), "--transport", transport, *sizes, *options, "--json", str(file)]
        if "--elastic" in options:
            words += ["--out", folder]
        command = [sys.executable, "-m", "hdpcomm", "train", *words]
        environment = os.environ | FEW_QUEUES
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        print(done.stdout)
        return [step["loss"] for step in json.loads(file.read_text())["steps"]]


@pytest.mark.parametrize("name", RUNS)
def test_the_command(name: str) -> None:
    """Losses on the GPU are those of one process."""
    task, ways = RUNS[name]
    limit = 2e-2 if "bf16" in ways else 1e-3
    assert losses_of(TRANSPORT, 2, *task, *ways) == pytest.approx(losses_of("shm", 1, *task), rel=limit)

"""Checks of whole steps: a ring attention, a planned training step, and a job that loses a rank."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.acceptance.report import BROKEN, GOOD, NOT_TRIED, Row, Rule, rated
from hdpcomm.attention import ring_attention
from hdpcomm.comm.launchers import master
from hdpcomm.comm.secret import new_secret
from hdpcomm.comm.topology import cores_of_rank
from hdpcomm.data.agree import from_rank, gather_json
from hdpcomm.data.corpus import standard_library
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.timing import slowest_s
from hdpcomm.models import LlamaConfig
from hdpcomm.run import RunConfig, train

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["check_recovery", "check_ring", "check_step", "step_config"]

_HIDDEN = Rule(0.8, 0.4)
_RIVAL = Rule(0.9, 0.7)
_PREDICTION = Rule(0.75, 0.3)
_STEPS = 12
_RECOVERY_S = 120.0


def check_ring(comm: Communicator) -> list[Row]:
    """Forward and backward of one sequence on all ranks, beside as many pairs of tokens on each rank alone. Collective.

    The sequence has p times the tokens of a rank, which so computes a p-th of p^2 as many pairs: those of a sequence
    that is sqrt(p) times as long as its part.
    """
    if comm.size == 1:
        return []
    on_gpu = comm.device.type == "cuda"
    part, heads, dim = (8192, 16, 128) if on_gpu else (2048, 2, 32)
    alone = comm.subset([comm.rank])
    assert alone is not None
    same = 2 * math.ceil(part * math.sqrt(comm.size) / 2)

    def call(group: Communicator, tokens: int) -> None:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        q, k, v = (torch.randn(tokens // group.size, heads, dim, device=group.device).to(dtype).requires_grad_()
                   for _ in range(3))  # fmt: skip
        out = ring_attention(q, k, v, comm=group, cu_seqlens=[0, tokens])
        assert isinstance(out, torch.Tensor)  # not asked for more
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]

    lone_s = slowest_s(comm, lambda: call(alone, same))
    ring_s = slowest_s(comm, lambda: call(comm, part * comm.size))
    note = f"{1 - lone_s / ring_s:.0%} of the time waits for messages: look at the links"
    return [rated("steps", f"ring attention, {part * comm.size:,} tokens", ring_s, lone_s, "s", _HIDDEN, note)]


def step_config(comm: Communicator) -> RunConfig:
    """The model of the check where none was given: a Llama that trains on this device in seconds."""
    if comm.device.type == "cuda":
        model = LlamaConfig(layers=4, hidden=2048, heads=16, kv_heads=4, ffn=5632)
        return RunConfig(model=model, capacity=16384)
    return RunConfig(capacity=2048)


def check_step(comm: Communicator, config: RunConfig) -> list[Row]:
    """Steps that are planned, beside those of static context parallelism and of torch's DDP on the same batches.
    Collective."""
    torch.set_num_threads(cores_of_rank(comm))
    on_gpu = comm.device.type == "cuda"
    policies = ("balanced", "static") if on_gpu else ("balanced", "static", "ddp")
    dtype, tokens = "bf16" if on_gpu else "fp32", config.capacity * comm.size
    config = replace(config, policies=policies, steps=_STEPS, dtype=dtype, tokens_per_step=tokens)
    corpus = standard_library(context=tokens if on_gpu else config.capacity, whole_every=16)  # of DDP's one rank
    result = train(comm, corpus, config)
    seconds = {name: statistics.median(each.seconds for each in steps[1:]) for name, steps in result.steps.items()}
    ours = seconds["balanced"]
    rows = []
    for rival, name in (("static", "static CP"), ("ddp", "DDP")):
        if rival in seconds:
            rows.append(rated("steps", f"step beside {name}", ours, seconds[rival], "s", _RIVAL,
                              f"a planned step takes longer than one of {name}"))  # fmt: skip
    predicted = statistics.median(step.predicted_s for step in result.steps["balanced"][1:])
    ratio = min(predicted / ours, ours / predicted)
    judged = _PREDICTION.judge(ratio)
    note = "" if judged == GOOD else "the costs that plans are made from do not hold: look for what else runs here"
    rows.append(Row("steps", "step beside its prediction", judged, f"{ours:.3g} s", f"{predicted:.3g} s", ratio, note))
    return rows


def check_recovery(comm: Communicator) -> list[Row]:
    """A job of as many processes, of which one is killed in its fourth step: do the others go on? Collective."""
    check = "pause when a rank is killed"
    if comm.size == 1:
        return []
    if comm.device.type == "cuda":
        return [Row("recovery", check, NOT_TRIED, note="runs with devices end with a rank and begin again")]
    place = json.loads(from_rank(comm, json.dumps(_meeting_place()) if comm.rank == 0 else ""))
    with tempfile.TemporaryDirectory(prefix="hdpcomm-acceptance-") as folder:
        found, error = _in_child(comm, place, Path(folder))
    every = gather_json(comm, [found, error])
    victim = comm.size - 1
    errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text and rank != victim]
    if errors:
        return [Row("recovery", check, BROKEN, note="; ".join(errors[:3]))]
    gone_on = [each for rank, (each, _) in enumerate(every) if rank != victim]
    seconds, again = (max(each[name] for each in gone_on) for name in ("pause_s", "again"))
    note = f"{again} steps were made again" if again > 1 else ""
    return [Row("recovery", check, BROKEN if again > 1 else GOOD, f"{seconds:.3g} s", note=note)]


def _meeting_place() -> dict[str, str]:
    """Where the processes of the job meet: on rank 0's host, as the ranks themselves do."""
    try:
        address = master()[0]
    except InvalidUsage:  # ranks that were started without a launcher of several hosts
        address = "127.0.0.1"
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    return {"MASTER_ADDR": address, "MASTER_PORT": port, "HDPCOMM_SECRET": new_secret(), "HDPCOMM_SECRET_FILE": ""}


def _in_child(comm: Communicator, place: dict[str, str], folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Figures of this rank's process of the job, or why it failed. Local."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    kept.pop("HDPCOMM_STORE", None)
    environment = kept | place | {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size), "HDPCOMM_TRANSPORT": ""}
    command = [sys.executable, "-m", "hdpcomm.acceptance.victim", str(folder)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=_RECOVERY_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return None, f"its process did not end within {_RECOVERY_S:g} s"
    if child.returncode == -signal.SIGKILL:
        return None, "its process was killed"
    if child.returncode:
        return None, (err.strip().splitlines() or ["no message"])[-1]
    return json.loads(out.splitlines()[-1]), ""

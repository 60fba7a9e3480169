"""Seconds of calls, with the work that they leave to the rank's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hdpcomm.comm import Communicator

__all__ = ["call_s", "repeated_s", "slowest_s"]


def call_s(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of a call until ``device`` has done the work that it enqueued. Local."""
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def repeated_s(device: torch.device, call: Callable[[], object], count: int) -> float:
    """Seconds of one of ``count`` calls without a pause. Local."""

    def run() -> None:
        for _ in range(count):
            call()

    return call_s(device, run) / count


def slowest_s(comm: Communicator, call: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of a call that all ranks begin together, on the slowest of them; the first one does not count.
    Collective."""
    seconds = torch.zeros(repeats + 1, dtype=torch.float64)
    for place in range(repeats + 1):
        comm.barrier()
        seconds[place] = call_s(comm.device, call)
    comm.all_reduce(seconds, "max")
    return float(statistics.median(seconds[1:].tolist()))

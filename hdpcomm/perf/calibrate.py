"""Measures what a transport costs: alpha + beta * bytes for a message, gamma * bytes for a reduction.

The numbers go to the file from which ``algorithm="auto"`` chooses.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hdpcomm.errors import InvalidUsage

__all__ = ["default_path", "measure"]

_SIZES = (8, 256, 4096, 65_536, 262_144, 1 << 20, 4 << 20)
_ROUNDS = 5


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/hdpcomm/costs.json``, without it ``~/.cache/hdpcomm/costs.json``."""
    cache = environment.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "hdpcomm" / "costs.json"


def measure(comm: Any) -> dict[str, Any]:
    """The constants of the transport of ``comm``; collective over all its ranks, which get the same dict.

    Rank 0 and rank 1 play ping-pong while the others wait (alpha_s: seconds of the smallest message; beta_s_per_byte:
    the slope of a least-squares line weighted by 1 / time); every rank adds float32 numbers in its own memory
    (gamma_s_per_byte: seconds for each byte of one operand). Also ``measured``: the medians it comes from.
    Raises: InvalidUsage on one rank.
    """
    if comm.size < 2:
        raise InvalidUsage("--calibrate measures messages between ranks; give --ranks 2 or more")
    times = torch.zeros(len(_SIZES) + 1, dtype=torch.float64)
    pair = comm.subset([0, 1])
    for index, size in enumerate(_SIZES):
        comm.barrier()
        if pair is not None:
            times[index] = statistics.median(_one_way(pair, size) for _ in range(_ROUNDS))
    comm.barrier()
    times[-1] = _reduction_s_per_byte()
    comm.broadcast(times, 0)
    seconds = times.tolist()
    alpha, beta = _line(_SIZES, seconds[:-1])
    return {
        "alpha_s": alpha,
        "beta_s_per_byte": beta,
        "gamma_s_per_byte": seconds[-1],
        "transport": comm.transport,
        "ranks": comm.size,
        "measured": {str(size): time for size, time in zip(_SIZES, seconds[:-1], strict=True)},
    }


def _one_way(pair: Any, size: int) -> float:
    x = torch.zeros(size, dtype=torch.uint8)
    peer, trips = 1 - pair.rank, max(5, min(400, 20_000_000 // (size + 50_000)))
    for _ in range(3):
        _round_trip(pair, x, peer)
    started = time.perf_counter()
    for _ in range(trips):
        _round_trip(pair, x, peer)
    return (time.perf_counter() - started) / trips / 2


def _round_trip(pair: Any, x: torch.Tensor, peer: int) -> None:
    if pair.rank == 0:
        pair.send(x, peer)
        pair.recv(x, peer)
    else:
        pair.recv(x, peer)
        pair.send(x, peer)


def _reduction_s_per_byte() -> float:
    """Adding two operands of 1 MiB, from the cache as a pipelined reduction finds them."""
    a, b = np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        np.add(a, b, out=a)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / a.nbytes


def _line(sizes: tuple[int, ...], seconds: list[float]) -> tuple[float, float]:
    """alpha and beta: alpha the smallest message's time, beta by least squares on relative errors of the rest."""
    alpha = min(seconds)
    x, t = np.array(sizes, np.float64), np.array(seconds, np.float64)
    weight = 1.0 / np.maximum(t, 1e-12)
    beta = float(((t - alpha) * x * weight**2).sum() / (x * x * weight**2).sum())
    return alpha, max(beta, 1e-13)

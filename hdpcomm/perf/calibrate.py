"""Measures what a transport costs, in the terms of the model by which ``algorithm="auto"`` chooses.

A step with k messages each way takes alpha_s + k * message_s + bytes * beta_s_per_byte; reducing adds gamma_s_per_byte.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hdpcomm.errors import InvalidUsage

__all__ = ["COSTS", "fit", "measure"]

COSTS = ("alpha_s", "message_s", "beta_s_per_byte", "gamma_s_per_byte")

_SIZES = (8, 256, 4096, 65_536, 262_144, 1 << 20, 4 << 20)
_MANY = 8  # messages of a step, to tell the cost of a message from that of a step
_ROUNDS = 5
_LEAST = 1e-13  # seconds; a cost of 0 would make the choice blind to it


def measure(comm: Any) -> dict[str, Any]:
    """The costs (:data:`COSTS`) of the transport of ``comm``; collective over all its ranks, which get the same dict.

    Rank 0 and rank 1 exchange messages while the others wait; rank 0 adds float32 numbers in its own memory. Also
    ``transport`` and ``measured``: the median seconds of a step by bytes each way, and of one with 8 messages.
    Raises: InvalidUsage on one rank.
    """
    if comm.size < 2:
        raise InvalidUsage("--calibrate measures messages between ranks; give --ranks 2 or more")
    times = torch.zeros(len(_SIZES) + 2, dtype=torch.float64)
    pair = comm.subset([0, 1])
    for index, (size, messages) in enumerate([*((size, 1) for size in _SIZES), (_SIZES[0], _MANY)]):
        comm.barrier()
        if pair is not None:
            times[index] = statistics.median(_step_s(pair, size, messages) for _ in range(_ROUNDS))
    comm.barrier()
    times[-1] = _reduction_s_per_byte()
    comm.broadcast(times, 0)
    *steps, many, gamma = times.tolist()
    return {
        **fit(_SIZES, steps, many, gamma),
        "transport": comm.transport,
        "measured": {str(size): seconds for size, seconds in zip(_SIZES, steps, strict=True)} | {"8 x 8": many},
    }


def fit(sizes: Sequence[int], steps: Sequence[float], many: float, gamma: float) -> dict[str, float]:
    """The costs from the seconds of steps with one message of ``sizes`` bytes, and of one with 8 of the smallest.

    beta: least squares of the relative errors beyond the smallest message's time.
    """
    message = max((many - steps[0]) / (_MANY - 1), _LEAST)
    x, t = np.array(sizes, np.float64) - sizes[0], np.array(steps, np.float64)
    weight = 1.0 / np.maximum(t, _LEAST) ** 2
    beta = float(((t - t[0]) * x * weight).sum() / (x * x * weight).sum())
    return {
        "alpha_s": max(steps[0] - message, _LEAST),
        "message_s": message,
        "beta_s_per_byte": max(beta, _LEAST),
        "gamma_s_per_byte": max(gamma, _LEAST),
    }


def _step_s(pair: Any, size: int, messages: int) -> float:
    """Seconds of a step: ``messages`` of ``size`` bytes each way at once."""
    peer, steps = 1 - pair.rank, max(5, min(400, 20_000_000 // (size * messages + 50_000)))
    sends = [(torch.zeros(size, dtype=torch.uint8), peer) for _ in range(messages)]
    recvs = [(torch.zeros(size, dtype=torch.uint8), peer) for _ in range(messages)]
    for _ in range(3):
        pair.exchange(sends, recvs)
    started = time.perf_counter()
    for _ in range(steps):
        pair.exchange(sends, recvs)
    return (time.perf_counter() - started) / steps


def _reduction_s_per_byte() -> float:
    """Adding two operands of 1 MiB that are in the cache, as a pipelined reduction finds them."""
    a, b = np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        np.add(a, b, out=a)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / a.nbytes

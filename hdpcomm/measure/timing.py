"""Seconds of calls, with the work that they leave to the rank's device; and the costs of a transport by such seconds,
as the parameters of the model by which ``algorithm="auto"`` chooses.

A step with k messages each way takes alpha_s + k * message_s + bytes * beta_s_per_byte; reducing adds gamma_s_per_byte.
On p ranks with devices, a kernel that reads the peers takes round_s + 2 (p - 1) signal_s + the bytes that it moves from
peers * read_s_per_byte; copies in the own memory cost gamma_s_per_byte.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdpcomm import kernels
from hdpcomm.comm import Communicator
from hdpcomm.comm.costs import cost_names
from hdpcomm.comm.topology import nodes_of
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan.cost import fit_coefficients

__all__ = ["call_s", "fit", "fit_reads", "measure", "measure_world", "repeated_s", "slowest_s"]


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


_SIZES = (8, 256, 4096, 65_536, 262_144, 1 << 20, 4 << 20)
_LARGE = 4 << 20
_MANY = 8  # messages of a step, to separate the cost of a message from that of a step
_ROUNDS = 7  # the fastest counts, since disturbances only add time
_LEAST = 1e-13  # seconds; a cost must not be 0


def measure_world(world: Any) -> dict[str, dict[str, float]]:
    """The costs of a world's transport inside a host and between hosts, by the names under which ``init()`` reads them.

    Measures the first pair of ranks of each kind; a kind without a pair is left out. Where both kinds have one name,
    the pair between hosts is measured. Collective over the whole world; all ranks get the same result.

    Raises: InvalidUsage if the world has one rank.
    """
    _check_size(world)
    nodes = nodes_of(world)
    inside, between = cost_names(world.transport)
    chosen: dict[str, tuple[int, int]] = {}
    for name, crossing in ((between, True), (inside, False)):
        for a, b in itertools.combinations(range(world.size), 2):
            if (nodes[a] != nodes[b]) == crossing:
                chosen.setdefault(name, (a, b))
                break
    return {name: measure(world, pair) for name, pair in chosen.items()}


def measure(comm: Any, members: tuple[int, int] = (0, 1)) -> dict[str, float]:
    """The costs of the transport of ``comm``, as ``save_costs()`` takes them. Collective; all ranks get the same.

    The two members exchange messages while the others wait; the first one adds float32 numbers in its own memory. On
    devices, first the two and then all ranks run one-shot collectives. Raises: InvalidUsage if ``comm`` has one rank.
    """
    _check_size(comm)
    pair, reads = comm.subset(members), "one_shot" in comm.algorithms("all_reduce")
    steps = [(size, 1) for size in _SIZES] + [(_SIZES[0], _MANY)]
    times = torch.full((len(steps) + 4,), torch.inf, dtype=torch.float64)
    for _ in range(_ROUNDS):
        for index, (size, messages) in enumerate(steps):
            comm.barrier()
            if pair is not None:
                times[index] = min(float(times[index]), _step_s(pair, size, messages))
        for index, (group, size) in enumerate(((pair, 1), (comm, 1), (pair, _LARGE)) if reads else ()):
            comm.barrier()
            if group is not None:
                at = len(steps) + 1 + index
                times[at] = min(float(times[at]), _one_shot_s(group, size))
    comm.barrier()
    times[len(steps)] = _reduction_s_per_byte(comm)
    comm.broadcast(on_device := times.to(comm.device), members[0])
    *lone, many, gamma, of_two, of_all, large = on_device.tolist()
    costs = fit(_SIZES, lone, many, gamma)
    if reads:
        costs |= fit_reads(of_two, of_all, comm.size, large, costs["gamma_s_per_byte"])
    return costs


def _check_size(comm: Any) -> None:
    if comm.size < 2:
        raise InvalidUsage("the costs of a transport are those of messages between ranks; give --ranks 2 or more")


def fit(sizes: Sequence[int], steps: Sequence[float], many: float, gamma: float) -> dict[str, float]:
    """The costs from the seconds of steps with one message of ``sizes`` bytes, and of one with 8 of the smallest, by
    least squares of the relative errors."""
    rows = [(1.0, 1.0, float(size)) for size in sizes] + [(1.0, float(_MANY), float(_MANY * sizes[0]))]
    costs = (*fit_coefficients(rows, [*steps, many]), gamma)
    names = ("alpha_s", "message_s", "beta_s_per_byte", "gamma_s_per_byte")
    return {name: max(value, _LEAST) for name, value in zip(names, costs, strict=True)}


def fit_reads(of_two: float, of_all: float, num_ranks: int, large: float, gamma: float) -> dict[str, float]:
    """The costs of kernels that read peers, from seconds of one-shot all-reduces.

    ``of_two``, ``of_all``: seconds for one number on 2 and on all ranks; ``large``: for 4 MiB on two. With two ranks
    the cost of signals cannot be separated from the rest; half of the time is then taken for it.
    """
    signal = (of_all - of_two) / (2 * (num_ranks - 2)) if num_ranks > 2 else of_two / 4
    signal = min(max(signal, _LEAST), of_two / 4)
    return {
        "round_s": max(of_two - 2 * signal, _LEAST),
        "signal_s": signal,
        "read_s_per_byte": max((large - of_two) / _LARGE - gamma, _LEAST),
    }


def _steps_s(comm: Any, call: Callable[[], object], num_bytes: int) -> float:
    """Seconds of a call that moves ``num_bytes``, including the work that it enqueues."""
    steps = max(5, min(400, 20_000_000 // (num_bytes + 50_000)))
    if comm.device.type == "cuda":  # processes that share a GPU wait for each other's time slices, of milliseconds
        steps = min(steps, 60)
    for _ in range(2):
        call()
    call_s(comm.device, call)
    return repeated_s(comm.device, call, steps)


def _step_s(pair: Any, size: int, messages: int) -> float:
    """Seconds of a step with ``messages`` messages of ``size`` bytes each way."""
    peer = 1 - pair.rank
    buffers = torch.zeros(2, messages, size, dtype=torch.uint8, device=pair.device)
    sends, recvs = ([(x, peer) for x in part] for part in buffers)
    return _steps_s(pair, lambda: pair.exchange(sends, recvs), size * messages)


def _one_shot_s(comm: Any, size: int) -> float:
    """Seconds of a one-shot all-reduce of ``size`` bytes."""
    x = torch.zeros(size, dtype=torch.uint8, device=comm.device)
    return _steps_s(comm, lambda: comm.all_reduce(x, algorithm="one_shot"), size)


def _reduction_s_per_byte(comm: Any) -> float:
    """Seconds per byte of an addition of two operands: on a CPU of 1 MiB in the cache, as in a pipelined reduction,
    else of 256 MiB."""
    size = (256 if comm.device.type == "cuda" else 1) << 20
    a, b = (torch.ones(size // 4, device=comm.device) for _ in range(2))
    return statistics.median(_steps_s(comm, lambda: kernels.reduce(a, a, b), size) for _ in range(15)) / size

"""Measures one side of one row: warm-up, timed iterations, and a check of the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hdpcomm.data.agree import gather_json
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.operation import Bound, Case, Operation
from hdpcomm.perf.results import IterationStats, Side

__all__ = ["measure_side"]


def measure_side(
    world: Any, operation: Operation, case: Case | None, config: PerfConfig, members: tuple[int, ...]
) -> Side:
    """Measures one side of a row. Collective over ``world``, which also carries the engine's own messages.

    ``case``: ``None`` on a rank that is not among ``members``, which only waits. All ranks return the same Side.
    """
    own: list[float] = []  # wrong elements, bytes of column size(B), and the times
    if case is None:
        world.barrier()
    else:
        bound = Bound(operation, case)
        bound.fill()
        times = _timed(bound, config, world.barrier)
        own = [float(_checked(bound, config.check)), float(case.shape.total * case.kind.bytes), *times]
    rows = gather_json(world, own)
    mine = [rows[rank] for rank in members]
    scale = 1e6 / operation.operations_per_call(len(members))
    per_rank = [[seconds * scale for seconds in times] for _, _, *times in mine]
    time_us = statistics.fmean(sum(times) / len(times) for times in per_rank)
    algbw = mine[0][1] / time_us / 1e3 if time_us > 0 else 0.0
    return Side(
        time_us=time_us,
        algbw=algbw,
        busbw=algbw * operation.bus_factor(len(members)),
        wrong=sum(int(row[0]) for row in mine) if config.check else None,
        stats=IterationStats.of(per_rank) if config.per_iter else None,
    )


def _timed(bound: Bound, config: PerfConfig, barrier: Callable[[], Any]) -> list[float]:
    """Seconds of each iteration; without -I their mean alone."""
    run = bound.run
    for _ in range(config.warmup):
        run()
    clock = time.perf_counter
    bound.synchronize()
    barrier()
    times = []
    if config.per_iter:
        for _ in range(config.iters):
            started = clock()
            run()
            bound.synchronize()
            times.append(clock() - started)
        return times
    started = clock()
    for _ in range(config.iters):
        run()
    bound.synchronize()
    return [(clock() - started) / config.iters]


def _checked(bound: Bound, rounds: int) -> int:
    wrong = 0
    for _ in range(rounds):
        bound.fill()
        bound.synchronize()
        bound.case.comm.barrier()
        bound.run()
        bound.synchronize()
        # A slower rank may still read its peers' buffers, which must not change before it is done.
        bound.case.comm.barrier()
        wrong += bound.wrong()
    return wrong

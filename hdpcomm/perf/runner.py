"""The sweep: every size, type, operator and root, on every subset, on this rank."""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hdpcomm.comm import Communicator, init
from hdpcomm.comm.launchers import local_place
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.data import ElementType, element_type
from hdpcomm.perf.ops import Bound, Case, Operation, operation
from hdpcomm.perf.results import Device, IterationStats, Point, Report, Row, Side

__all__ = ["check", "measure_side", "now", "points", "run_rank"]


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


def check(config: PerfConfig, ranks: int) -> None:
    """Raises InvalidUsage if ``ranks`` ranks cannot measure ``config``."""
    op = operation(config.op)
    op.check(config)
    for subset in config.subsets:
        bad = [rank for rank in subset if not 0 <= rank < ranks]
        if bad or len(set(subset)) != len(subset) or not subset:
            raise InvalidUsage(
                f"--subset {','.join(map(str, subset))}: give distinct ranks in 0..{ranks - 1}, separated by commas"
            )
    if op.rooted and config.roots is not None:
        smallest = min((len(subset) for subset in config.subsets), default=ranks)
        for root in config.roots:
            if not 0 <= root < smallest:
                raise InvalidUsage(f"-r {root}: there are {smallest} ranks; give 0..{smallest - 1}, or all")
    for _ in points(config, ranks):
        pass


def points(config: PerfConfig, ranks: int) -> Iterator[Point]:
    """All rows of one cycle, in order. Sizes with the same number of elements are measured once."""
    op = operation(config.op)
    for members in config.subsets or (tuple(range(ranks)),):
        roots = (range(len(members)) if config.roots is None else config.roots) if op.rooted else (-1,)
        for name in config.dtypes:
            kind = element_type(name)
            for redop in _redops(op, kind, config.redops):
                for root in roots:
                    last = None
                    for size in config.sizes():
                        shape = op.shape(size // kind.bytes or (1 if size else 0), len(members))
                        if shape != last:
                            yield Point(members, shape, kind, redop, root)
                        last = shape


def _redops(op: Operation, kind: ElementType, asked: tuple[str, ...]) -> tuple[str, ...]:
    if not op.reduces:
        return ("none",)
    possible = tuple(redop for redop in asked if redop != "avg" or kind.floating)
    if not possible:
        raise InvalidUsage(f"-o avg does not exist for -d {kind.name}; give a floating type or another -o")
    return possible


def run_rank(
    config: PerfConfig,
    report: Report,
    emit: Callable[[str, Any], None] | None = None,
    *,
    world: Communicator | None = None,
) -> Report:
    """Runs this rank's part of a run; collective over all ranks of the job.

    ``emit(event, value)`` is called on rank 0 only, with ``("start", report)``, ``("row", row)`` for each row and
    ``("cycle", report)``. ``world``: a communicator to measure, which stays open; without it
    the run joins a new world and leaves it at the end.
    """
    torch.set_num_threads(1)
    with init(transport=config.transport, timeout=config.timeout) if world is None else nullcontext(world) as ranks:
        notify = emit if emit is not None and ranks.rank == 0 else lambda *_: None
        report.transport, report.devices = ranks.transport, _devices(ranks, config)
        notify("start", report)
        for _ in range(config.cycles) if config.cycles else itertools.count():
            for point in points(config, ranks.size):
                report.rows.append(_measure(ranks, config, point))
                notify("row", report.rows[-1])
            notify("cycle", report)
        ranks.barrier()
    report.end_time = now()
    return report


def _measure(world: Communicator, config: PerfConfig, point: Point) -> Row:
    """Measures one row."""
    op = operation(config.op)
    comm = world if point.ranks == tuple(range(world.size)) else world.subset(point.ranks)
    sides = {}
    for in_place in (False, True) if op.in_place else (False,):
        case = None
        if comm is not None:
            case = Case(
                comm=comm,
                kind=point.kind,
                shape=point.shape,
                redop=point.redop,
                root=point.root,
                algorithm=config.algorithm,
                unalign=config.unalign,
                registered=config.register,
                in_place=in_place,
            )
        sides[in_place] = measure_side(world, op, case, config, point.ranks)
    return Row(point, out_of_place=sides.get(False), in_place=sides.get(True))


def now() -> str:
    """The time as nccl-tests writes it."""
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")


def _devices(world: Communicator, config: PerfConfig) -> list[Device]:
    """Where each rank runs, gathered on all ranks."""
    if world.device.type == "cuda":
        number, info = world.device.index, torch.cuda.get_device_name(world.device)
    else:
        number, info = local_place(world.rank, world.size)[0], _processor()
    own = [os.getpid(), socket.gethostname(), number, str(world.device), info]
    devices = []
    for rank, facts in enumerate(gather_json(world, own)):
        group = next((k for k, subset in enumerate(config.subsets) if rank in subset), -1) if config.subsets else 0
        devices.append(Device(rank, group, *facts))
    return devices


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

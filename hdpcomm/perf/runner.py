"""The sweep: every size, type, operator and root, on every subset, with hdpcomm and, if asked for, gloo."""

from __future__ import annotations

import datetime
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hdpcomm import _core
from hdpcomm.comm import Communicator, init
from hdpcomm.comm.bootstrap import default_timeout, open_store
from hdpcomm.comm.launchers import joined, local_place, rank_and_size
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import CommTimeout, Error, InvalidUsage
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.data import ElementType, element_type
from hdpcomm.perf.engine import check_modes, measure_side
from hdpcomm.perf.operation import Case, Operation, Shape
from hdpcomm.perf.ops import operation
from hdpcomm.perf.results import Device, Report, Row, Side

__all__ = ["Point", "check", "join_gloo", "now", "points", "run_rank"]


@dataclass(frozen=True, slots=True)
class Point:
    """The configuration of a row. ``ranks``: positions in the world."""

    ranks: tuple[int, ...]
    shape: Shape
    kind: ElementType
    redop: str
    root: int

    @property
    def size(self) -> int:
        """Column size(B)."""
        return self.shape.total * self.kind.bytes

    def row(self, config: PerfConfig, library: str, sides: Mapping[bool, Side | None], note: str = "") -> Row:
        """The row of one library; ``sides``: out of place (``False``) and in place (``True``), if measured."""
        return Row(
            library=library,
            op=config.op,
            ranks=self.ranks,
            size=self.size,
            count=self.shape.count,
            type=self.kind.name,
            redop=self.redop,
            root=self.root,
            out_of_place=sides.get(False),
            in_place=sides.get(True),
            iterations=config.iters,
            note=note,
        )


def check(config: PerfConfig, ranks: int) -> None:
    """Raises InvalidUsage (NotImplementedError for 8-bit floats) if ``ranks`` ranks cannot measure ``config``."""
    op = operation(config.op)
    reason = check_modes(op, config)
    if reason:
        raise InvalidUsage(reason)
    known = Communicator.algorithms(op.core_name) if op.core_name else ()
    if op.core_name and config.transport in ("cuda", "cuda+nccl", "sim"):
        known += tuple(_core.comm.peer_readers_of(_core.comm.OPS[op.core_name]))
    op.check_algorithm(config.algorithm, known)
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

    ``emit(event, value)`` is called on rank 0 only, with ``("start", report)``, ``("row", row)`` for each row (those of
    ``--compare``, too) and ``("cycle", report)``. ``world``: a communicator to measure, which stays open; without it
    the run joins a new world and leaves it at the end.
    """
    torch.set_num_threads(1)
    notify = emit or _silent
    resident = _resident_bytes()
    gloo = join_gloo(config.timeout) if "gloo" in config.compare else None
    try:
        if world is not None:
            _run_cycles(world, gloo, config, report, notify, resident)
        else:
            with init(transport=config.transport, timeout=config.timeout) as own:
                _run_cycles(own, gloo, config, report, notify, resident)
    finally:
        if gloo is not None:
            torch.distributed.destroy_process_group()
    report.end_time = now()
    return report


def _run_cycles(
    world: Communicator,
    gloo: Any,
    config: PerfConfig,
    report: Report,
    notify: Callable[[str, Any], None],
    resident: int,
) -> None:
    """Runs the sweep ``config.cycles`` times. ``resident``: bytes of this process before it joined."""
    joined = _resident_bytes()
    report.transport = world.transport
    report.devices = _devices(world, config)
    if world.rank:
        notify = _silent
    notify("start", report)
    subsets = _Subsets(world, gloo)
    cycle = 0
    while config.cycles == 0 or cycle < config.cycles:
        for point in points(config, world.size):
            _measure(world, subsets, config, point, report, notify)
        cycle += 1
        notify("cycle", report)
    if config.memory:
        report.memory_bytes = _memory(world, joined - resident, _resident_bytes() - joined)
    world.barrier()


def _silent(event: str, value: Any) -> None:
    """The listener of a rank that reports nothing."""
    del event, value


class _Subsets:
    """The communicators of the run's subsets, for every library; created in the same order on all ranks."""

    def __init__(self, world: Communicator, gloo: Any) -> None:
        self._world, self._gloo = world, gloo
        self._made: dict[tuple[int, ...], list[tuple[str, Any]]] = {}

    def of(self, ranks: tuple[int, ...]) -> list[tuple[str, Any]]:
        """``(library, communicator or None)`` for each library."""
        if ranks not in self._made:
            whole = ranks == tuple(range(self._world.size))
            pairs: list[tuple[str, Any]] = [("hdpcomm", self._world if whole else self._world.subset(ranks))]
            if self._gloo is not None:
                pairs.append(("gloo", self._gloo if whole else self._gloo.subset(ranks)))
            self._made[ranks] = pairs
        return self._made[ranks]


def _measure(
    world: Communicator,
    subsets: _Subsets,
    config: PerfConfig,
    point: Point,
    report: Report,
    notify: Callable[[str, Any], None],
) -> None:
    """Measures one row with every library in turn, so that noise of the machine affects all of them alike."""
    op = operation(config.op)
    libraries = subsets.of(point.ranks)
    sides: dict[str, dict[bool, Any]] = {name: {} for name, _ in libraries}
    notes: dict[str, str] = {}
    if "gloo" in sides:
        from hdpcomm.perf.libraries import unsupported

        reason = unsupported(point.kind, point.redop)
        notes = {"gloo": reason} if reason else {}
    for in_place in (False, True) if op.in_place else (False,):
        for name, comm in libraries:
            if name not in notes:
                case = None if comm is None else _case(comm, point, config, in_place, ours=name == "hdpcomm")
                sides[name][in_place] = measure_side(world, op, case, config, point.ranks)
    for name, _ in libraries:
        row = point.row(config, name, sides[name], notes.get(name, ""))
        (report.rows if name == "hdpcomm" else report.peers).append(row)
        notify("row", row)


def _case(comm: Any, point: Point, config: PerfConfig, in_place: bool, *, ours: bool) -> Case:
    return Case(
        comm=comm,
        kind=point.kind,
        shape=point.shape,
        redop=point.redop,
        root=point.root,
        algorithm=config.algorithm if ours else "auto",
        unalign=config.unalign,
        registered=config.register and ours,
        in_place=in_place,
    )


def join_gloo(timeout: float | None = None) -> Any:
    """torch.distributed on the job's own store, before ``init()``, which then uses the same one. Collective.

    ``timeout``: seconds for joining and for every operation; ``None``: the default of ``init()``.
    Raises: InvalidUsage (environment, port in use), CommTimeout.
    """
    import torch.distributed as dist

    from hdpcomm.perf.libraries import Gloo

    seconds = default_timeout() if timeout is None else timeout
    limit = datetime.timedelta(seconds=seconds)
    rank, size = rank_and_size() if joined() else (0, 1)
    try:
        store = dist.HashStore() if size == 1 else _store_of_run(rank, seconds)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, CommTimeout) as error:  # of torch or gloo, or of the job's store
        if dist.is_initialized():
            dist.destroy_process_group()
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, CommTimeout) or "timed out" in text.lower() or "timeout" in text.lower():
            raise CommTimeout(
                f"rank {rank} did not join the other ranks over gloo within {seconds:g} s: {text}; look for their "
                "errors, or raise -T",
                rank=rank,
                op="--compare gloo",
            ) from error
        raise Error(f"rank {rank} cannot join the other ranks over gloo: {text}", rank=rank) from error
    return Gloo(dist.group.WORLD, range(size), timeout=limit)


def _store_of_run(rank: int, seconds: float) -> Any:
    """A part of the job's store for this run: ranks that live for several runs must not find old addresses."""
    store = open_store(rank, seconds)
    store.set_timeout(datetime.timedelta(seconds=seconds))
    run = store.add(f"hdpcomm/perf/{rank}", 1)
    return torch.distributed.PrefixStore(f"perf/{run}", store)  # type: ignore[attr-defined]


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


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _memory(world: Communicator, joining: int, running: int) -> dict[str, int]:
    """The largest growth of a rank, in bytes."""
    grown = torch.tensor([max(0, joining), max(0, running)], dtype=torch.int64)
    world.all_reduce(grown, "max")
    return {"INIT": int(grown[0]), "RUN": int(grown[1])}

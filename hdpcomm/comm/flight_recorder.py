"""The last operations of each rank, as torch's ``torchfrtrace`` reads them (docs/how-to/flight-recorder.md)."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hdpcomm import _core, errors
from hdpcomm.errors import InvalidUsage

__all__ = ["PREFIX", "VERSION", "dump", "record", "watch"]

#: What the names of the files begin with; the rank follows.
PREFIX = "hdpcomm_trace_"

#: Version of the format of torch's dumps (FlightRecorder.hpp) that torch 2.7 and newer write and read.
VERSION = "2.10"

_UNDER_WAY, _QUEUED, _DONE, _FAILED = range(4)
_STATES = {_UNDER_WAY: "started", _QUEUED: "scheduled", _DONE: "completed", _FAILED: "started"}


class _Worlds:
    """The worlds of this process that still exist, in the order in which they were joined, and who reads them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.joined: list[tuple[int, int, int, str, _core.comm.FlightSource]] = []  # rank, size, number, backend
        self.numbers: dict[int, int] = {}  # of the next world of a rank
        self.watching = False

    def add(self, rank: int, size: int, sources: Iterable[tuple[str, _core.comm.FlightSource]]) -> None:
        with self.lock:
            number = self.numbers.get(rank, 0)
            self.numbers[rank] = number + 1
            self.joined = [each for each in self.joined if not each[4].gone]
            self.joined += [(rank, size, number, backend, source) for backend, source in sources]

    def ranks(self) -> list[int]:
        """Ranks that have a world; several where ranks are threads."""
        with self.lock:
            return sorted({rank for rank, _, _, _, source in self.joined if not source.gone})

    def of(self, rank: int) -> list[tuple[int, int, str, _core.comm.Flight]]:
        """Size and number of each world of the rank, the backend, and what it recorded."""
        with self.lock:
            joined = [each for each in self.joined if each[0] == rank]
        read = [(size, number, backend, source.read()) for _, size, number, backend, source in joined]
        return [(size, number, backend, flight) for size, number, backend, flight in read if flight is not None]


_worlds = _Worlds()


def watch(world: _core.comm.World, engine: _core.comm.StreamEngine | None = None) -> None:
    """Takes a joined world into the dumps, which are written on errors and on SIGUSR1 if there is a folder for them."""
    sources = [("gloo", _core.comm.flight_of_world(world))]  # torchfrtrace knows no other names of backends
    if engine is not None:
        sources.append(("nccl", _core.comm.flight_of_engine(engine)))
    _worlds.add(world.rank, world.size, sources)
    if not _core.settings().flight_folder:
        return
    errors.on_failure(_dump_quietly)
    if not _worlds.watching and threading.current_thread() is threading.main_thread():
        _worlds.watching = True
        _dump_on_signal()


def _dump_on_signal() -> None:
    """SIGUSR1 writes a dump, then does what it did before."""
    before = signal.getsignal(signal.SIGUSR1)

    def on_signal(number: int, frame: Any) -> None:
        _dump_quietly()
        if callable(before):
            before(number, frame)

    # In ranks of our launchers the signal prints the stacks. (mypy's stub knows of no result.)
    stacks: object = faulthandler.unregister(signal.SIGUSR1)  # type: ignore[func-returns-value]
    signal.signal(signal.SIGUSR1, on_signal)
    if stacks:
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def _dump_quietly(_: object = None) -> None:
    """On an error: what cannot be written does not hide it."""
    folder = _core.settings().flight_folder
    if folder:
        with contextlib.suppress(OSError, InvalidUsage):
            dump(folder)


def dump(folder: str | Path, rank: int | None = None) -> list[Path]:
    """Writes the last operations of this process's ranks into ``folder``, a file a rank; returns the files.

    Local; any thread. The file of an earlier dump of the rank is replaced. ``torchfrtrace FOLDER`` compares those of
    all ranks. ``rank``: only of that one, where ranks are threads.
    Raises: InvalidUsage (HDPCOMM_FLIGHT_RECORDS=0, no world was joined), OSError.
    """
    if not _core.settings().flight_records:
        raise InvalidUsage("nothing is recorded: unset HDPCOMM_FLIGHT_RECORDS=0, or give the number of operations")
    ranks = [each for each in _worlds.ranks() if rank in (None, each)]
    if not ranks:
        raise InvalidUsage("no world was joined, so that there is nothing to dump: call this after hdpcomm.init()")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for each in ranks:
        path = folder / f"{PREFIX}{each}"
        draft = folder / f".{os.getpid()}.{threading.get_ident()}.{each}"  # read by nobody, since its name is another
        try:
            draft.write_bytes(pickle.dumps(record(each), protocol=2))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        written.append(path)
    return written


def record(rank: int) -> dict[str, Any]:
    """The last operations of a rank of this process, in the form of torch's flight recorder.

    Beside torch's keys each entry has ``error`` (whether the operation failed) and ``seq`` (its number on this rank).
    Messages with tags (the torch backend's ``send`` and ``recv``) are not recorded.
    """
    groups: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    for size, number, backend, flight in _worlds.of(rank):
        entries += _entries(flight, groups, rank, size, f"{number}.{backend}", backend)
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    for i, entry in enumerate(entries):
        entry["op_id"] = entry["record_id"] = i
    return {
        "version": VERSION,
        "entries": entries,
        "pg_config": groups,
        "pg_status": {},
        "host_name": os.uname().nodename,
        "rank": rank,
    }


def _entries(
    flight: _core.comm.Flight, groups: dict[str, dict[str, str]], rank: int, size: int, world: str, backend: str
) -> list[dict[str, Any]]:
    found = []
    for each in flight.records:
        if each.peer == rank:
            continue
        if each.peer < 0:
            name, ranks = f"{world}.{each.subset:x}", sorted(flight.groups[each.subset])
            kind, order, shapes = each.op, each.order, _shapes(each, len(ranks), flight.groups[each.subset].index(rank))
        else:
            ranks = sorted((rank, each.peer))
            name = f"{world}.pair.{ranks[0]}-{ranks[1]}"
            kind, order, shapes = _message(each, ranks.index(rank))
        whole = len(ranks) == size and each.peer < 0
        groups.setdefault(name, {"name": name, "desc": "world" if whole else "subset", "ranks": str(ranks)})
        found.append(
            {
                "pg_id": 0,
                "process_group": (name, groups[name]["desc"]),
                "collective_seq_id": order,
                "p2p_seq_id": order if each.peer >= 0 else 0,
                "is_p2p": each.peer >= 0,
                "profiling_name": f"{backend}:{kind}",
                "time_created_ns": each.started_ns,
                "time_discovered_started_ns": None if each.state == _QUEUED else each.started_ns,
                "time_discovered_completed_ns": each.ended_ns or None,
                "duration_ms": (each.ended_ns - each.started_ns) / 1e6 if each.ended_ns else None,
                "input_sizes": shapes[0],
                "output_sizes": shapes[1],
                "input_dtypes": [each.dtype],
                "output_dtypes": [each.dtype],
                "state": _STATES[each.state],
                "error": each.state == _FAILED,
                "retired": each.state in (_DONE, _FAILED),
                "timeout_ms": 0,
                "seq": each.seq,
                "frames": [],
            }
        )
    return found


def _message(each: _core.comm.FlightRecord, own: int) -> tuple[str, int, tuple[list[list[int]], list[list[int]]]]:
    """Name, number and sizes of a message between this rank, ``own`` of the pair, and the other."""
    shape = [each.count]
    if each.sends:
        return f"send {own}->{1 - own}", 2 * each.order + own, ([shape], [shape])
    return f"recv {own}<-{1 - own}", 2 * each.order + 1 - own, ([shape], [shape])


def _shapes(each: _core.comm.FlightRecord, size: int, own: int) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes of input and output, in elements, as torch's recorder has them."""
    one, all_of_them = [[each.count]], [[each.count * size]]
    return {
        "all_gather": (one, all_of_them),
        "reduce_scatter": (all_of_them, one),
        "gather": (one, all_of_them if own == each.root else [[]]),
        "scatter": (all_of_them if own == each.root else [[]], one),
    }.get(each.op, (one, one))

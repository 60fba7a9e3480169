"""``--compare mpi``: the same sweep through mpi4py, in an mpirun of its own, after hdpcomm's ranks have ended."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.environment import without_launcher
from hdpcomm.perf.operation import Case
from hdpcomm.perf.ops import operation
from hdpcomm.perf.ops.mixed import windows
from hdpcomm.perf.ops.subset import members
from hdpcomm.perf.results import Row, Side, average
from hdpcomm.perf.runner import Point, points

__all__ = ["check_mpi", "launcher", "lines", "run_mpi", "spec_of"]

_SCRIPT = Path(__file__).with_name("mpi_peer.py")


def check_mpi(config: PerfConfig) -> None:
    """Raises InvalidUsage, saying what to install, where mpirun or mpi4py is missing."""
    if config.agg > 1 or config.blocking or config.cpu_time or config.per_iter:
        raise InvalidUsage("--compare mpi measures blocking calls back to back; leave out -m, -z, -C and -I")
    missing = []
    if shutil.which("mpirun") is None:
        missing.append("an MPI with mpirun (Debian, Ubuntu: apt install openmpi-bin libopenmpi-dev)")
    if importlib.util.find_spec("mpi4py") is None:
        missing.append("mpi4py (pip install mpi4py)")
    if missing:
        raise InvalidUsage(f"--compare mpi needs {' and '.join(missing)}")


def launcher(mpirun: str, ranks: int) -> list[str]:
    """The start of the command line; Open MPI needs an option to run more ranks than cores."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    options = []
    if "Open MPI" in version or "OpenRTE" in version:
        options = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return [mpirun, *options, "-n", str(ranks)]


def lines(
    spec: dict[str, Any], ranks: int, *, timeout: float, mpirun: str = "mpirun", variables: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Runs the peers and yields the records that they print; ends after ``timeout`` seconds (MPICH spins on shared
    cores).

    Raises: InvalidUsage when mpirun fails before the first line, Error when it fails later.
    """
    environment = without_launcher(os.environ) | {"OMPI_MCA_btl_base_warn_component_unused": "0"} | (variables or {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec))
        arguments = [*launcher(mpirun, ranks), sys.executable, str(_SCRIPT), str(path)]
        with open(Path(folder) / "stderr", "w+") as errors:
            process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
            )
            expired = threading.Event()

            def expire() -> None:
                expired.set()
                _end(process)

            timer = threading.Timer(timeout, expire)
            timer.start()
            number = 0
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    with contextlib.suppress(ValueError):
                        record = json.loads(line)
                        number += 1
                        yield record
                process.wait()
            finally:
                timer.cancel()
                _end(process)
            if not number or (process.returncode and not expired.is_set()):
                errors.seek(0)
                reason = "\n".join(errors.read().strip().splitlines()[-8:]) or f"no answer within {timeout} s"
                kind = Error if number else InvalidUsage
                raise kind(f"--compare mpi: {mpirun} with mpi4py failed: {reason}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends mpirun and all that it started, which is one session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def spec_of(config: PerfConfig, rows: Sequence[Point], ranks: int) -> dict[str, Any]:
    """The specification of what the peers measure."""
    size = len(rows[0].ranks) if rows else ranks
    return {
        "members": [list(members(k, size)) for k in range(config.iters)] if config.op == "subset" else [],
        "subsets": [list(s) for s in (config.subsets or windows(ranks))] if config.op == "mixed" else [],
        "rows": [
            {
                "op": config.op,
                "iters": config.iters,
                "warmup": config.warmup,
                "ranks": list(point.ranks),
                "count": point.shape.count,
                "send": point.shape.send,
                "recv": point.shape.recv,
                "total": point.shape.total,
                "type": point.kind.name,
                "redop": point.redop,
                "root": point.root,
            }
            for point in rows
        ],
    }


def run_mpi(config: PerfConfig, ranks: int, *, timeout: float = 600.0) -> Iterator[Row]:
    """The rows of one cycle, measured through MPI; rows that were not reached within ``timeout`` have a note."""
    rows = list(points(config, ranks))
    library, measured = "mpi", 0
    for record in lines(spec_of(config, rows, ranks), ranks, timeout=timeout):
        if "library" in record:
            library = f"mpi: {record['library']}"
            continue
        yield _row(config, rows[record["index"]], record, library, ranks)
        measured += 1
    for point in rows[measured:]:
        note = f"{library}: no result within {timeout:g} s"
        yield _row(config, point, {"note": note, "out_of_place": [], "in_place": [], "create": []}, library, ranks)


def _row(config: PerfConfig, point: Point, record: dict[str, Any], library: str, ranks: int) -> Row:
    op = operation(config.op)

    def side(name: str) -> Side | None:
        times = [time for time in record[name] if time is not None]
        if not times:
            return None
        time_us = average(times, config.average)
        case = Case(_Sized(ranks), point.kind, point.shape, subsets=point.subsets)
        algbw = op.aggregate(case) * point.size / time_us / 1e3
        details = {}
        if name == "out_of_place" and record["create"] and record["create"][0] is not None:
            details["create_us"] = float(record["create"][0])
        return Side(time_us, algbw, algbw * op.bus_factor(len(point.ranks)), None, details=details)

    return point.row(config, library, {False: side("out_of_place"), True: side("in_place")}, record["note"])


class _Sized:
    """A communicator with only the size, which is all that the columns are computed from."""

    def __init__(self, size: int) -> None:
        self.size = size

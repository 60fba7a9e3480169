"""The rows of a sweep of ``hdpcomm perf`` through mpi4py, in an mpirun of its own."""

from __future__ import annotations

import contextlib
import json
import os
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
from hdpcomm.perf.results import Point

__all__ = ["launcher", "lines", "rows_of"]

_SCRIPT = Path(__file__).with_name("peer.py")


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
    environment = _without_launcher() | {"OMPI_MCA_btl_base_warn_component_unused": "0"} | (variables or {})
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
                raise kind(f"{mpirun} with mpi4py failed: {reason}")


def _without_launcher() -> dict[str, str]:
    """The environment without the variables of an outer launcher."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_", "SLURM_", "TORCHELASTIC_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in names}


def _end(process: subprocess.Popen[str]) -> None:
    """Ends mpirun and all that it started, which is one session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows_of(config: PerfConfig, rows: Sequence[Point]) -> list[dict[str, Any]]:
    """The specification of what the peers measure."""
    return [
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
    ]

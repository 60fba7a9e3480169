"""``hdpcomm perf --calibrate``: measures a transport and stores what ``algorithm="auto"`` chooses by."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hdpcomm.cli.output import check_writable
from hdpcomm.errors import InvalidUsage

__all__ = ["USED", "calibrate"]

USED = frozenset(("calibrate", "ranks", "transport", "timeout"))
"""The options of ``perf`` that mean something here."""


def calibrate(file: Path | None, joined: bool, ranks: int, *, transport: str, timeout: float | None) -> int:
    """Measures the transport, and replaces its entry in the file; those of other transports stay.

    ``file``: ``None`` for the one that ``init()`` reads. ``joined``: this process is a rank of a launcher's job of
    ``ranks`` ranks; otherwise they are started here. Returns the exit code.
    """
    from hdpcomm.comm.costs import costs_path, save_costs

    path = file or costs_path()
    _check_costs(path)
    os.environ.pop("HDPCOMM_COSTS", None)  # init() is not to look for the file that is made here
    if joined:
        name, costs = calibrate_rank(transport, timeout)
        if int(os.environ["RANK"]) != 0:
            return 0
    else:
        from hdpcomm.comm.launch import run_ranks

        name, costs = run_ranks(calibrate_rank, ranks, transport, timeout)[0]
    save_costs(name, costs, path)
    print(f"{name}: {', '.join(_shown(key, value) for key, value in costs.items())}")
    print(f"written to {path}")
    return 0


def _shown(key: str, seconds: float) -> str:
    """As "alpha 1.00 us", "beta 0.1200 ns/byte"."""
    name = key.split("_")[0]
    return f"{name} {seconds * 1e9:.4f} ns/byte" if key.endswith("_per_byte") else f"{name} {seconds * 1e6:.2f} us"


def calibrate_rank(transport: str, timeout: float | None) -> tuple[str, dict[str, float]]:
    """A rank of --calibrate: the name of the transport, and its costs."""
    from hdpcomm.comm import init
    from hdpcomm.perf.calibrate import measure

    with init(transport=transport, timeout=timeout) as comm:
        costs = measure(comm)
        comm.barrier()
        return comm.transport, costs


def _check_costs(path: Path) -> None:
    """Raises InvalidUsage for a file that is there and is none of --calibrate, or that may not be written."""
    if path.parent.is_dir():
        check_writable(path)
    if not path.is_file():
        return
    try:
        known = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidUsage(f"{path}: is no file of --calibrate ({error}); give another file or remove it") from error
    if not isinstance(known, dict):
        raise InvalidUsage(f"{path}: is no file of --calibrate; give another file or remove it")

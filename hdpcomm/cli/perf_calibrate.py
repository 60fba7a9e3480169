"""``hdpcomm perf --calibrate``: measures a transport and saves the costs by which ``algorithm="auto"`` chooses."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hdpcomm.cli.output import check_writable
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text

__all__ = ["USED", "calibrate"]

USED = frozenset(("calibrate", "ranks", "transport", "timeout"))
"""The options of ``perf`` that have an effect here."""


def calibrate(file: Path | None, rank: int | None, ranks: int, *, transport: str, timeout: float | None) -> int:
    """Measures the transport, and replaces its entries in the file, but not those of other transports.

    ``file``: ``None`` for the one that ``init()`` reads. ``rank``: of this process in a launcher's job of ``ranks``
    ranks; ``None``: they are started here. Rank 0 writes the file. Returns the exit code.
    """
    from hdpcomm.comm.costs import costs_path, save_costs

    path = file or costs_path()
    _check_costs(path)
    os.environ.pop("HDPCOMM_COSTS", None)  # else init() would look for the file that is written here
    if rank is not None:
        measured = calibrate_rank(transport, timeout)
        if rank != 0:
            return 0
    else:
        from hdpcomm.comm.launch import run_ranks

        measured = run_ranks(calibrate_rank, ranks, transport, timeout)[0]
    for name, costs in measured.items():
        save_costs(name, costs, path)
        print(f"{name}: {', '.join(_shown(key, value) for key, value in costs.items())}")
    print(f"written to {path}")
    return 0


def _shown(key: str, seconds: float) -> str:
    """A cost as text, like "alpha 1.00 us" or "beta 0.1200 ns/byte"."""
    name = key.split("_")[0]
    return f"{name} {seconds * 1e9:.4f} ns/byte" if key.endswith("_per_byte") else f"{name} {seconds * 1e6:.2f} us"


def calibrate_rank(transport: str, timeout: float | None) -> dict[str, dict[str, float]]:
    """Runs one rank of --calibrate; returns the costs by the names under which they are saved."""
    from hdpcomm.comm import init
    from hdpcomm.measure.links import measure_world

    with init(transport=transport, timeout=timeout) as comm:
        measured = measure_world(comm)
        comm.barrier()
        return measured


def _check_costs(path: Path) -> None:
    """Raises InvalidUsage for a file that cannot be written, or that exists and is not a result of --calibrate."""
    if path.parent.is_dir():
        check_writable(path)
    if not path.is_file():
        return
    try:
        known = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"{path}: is no file of --calibrate ({error}); give another file or remove it") from error
    if not isinstance(known, dict):
        raise InvalidUsage(f"{path}: is no file of --calibrate; give another file or remove it")

"""Checks of the hosts: versions, processors, disks."""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import torch

from hdpcomm import __version__, _core
from hdpcomm.acceptance.report import BROKEN, GOOD, LOOK, Row, Rule, named, rated
from hdpcomm.comm.device.nccl_library import describe
from hdpcomm.comm.topology import nodes_of, shared_cores
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["check_disks", "check_processors", "check_versions"]

_MUST_AGREE = ("hdpcomm", "torch", "NCCL", "CUDA")
"""Others that differ are named only: messages and results do not depend on them."""
_DISK_BYTES = 64 << 20
_DISK = Rule(1.0, 0.1)
_LEAST_DISK = 2e8
"""bytes/s: a checkpoint of 7B with its optimizer, 84 GB, then takes 7 minutes."""


def check_versions(comm: Communicator) -> list[Row]:
    """Versions and devices of all ranks, which have to be alike. Collective."""
    facts = gather_json(comm, _facts(comm.device))
    rows = []
    for name in facts[0]:
        ranks = defaultdict(list)
        for rank, each in enumerate(facts):
            ranks[each[name]].append(rank)
        common = max(ranks, key=lambda value: len(ranks[value]))
        unlike = "; ".join(f"{named(who)} {'has' if len(who) == 1 else 'have'} {value}"
                           for value, who in ranks.items() if value != common)  # fmt: skip
        judged = GOOD if not unlike else BROKEN if name in _MUST_AGREE else LOOK
        rows.append(Row("versions", name, judged, common, note=unlike and f"{unlike}; give all hosts the same"))
    return rows


def _facts(device: torch.device) -> dict[str, str]:
    try:
        there, nccl = describe()
    except InvalidUsage as error:
        there, nccl = False, str(error)
    return {
        "hdpcomm": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "CUDA": str(_core.build_info()["cuda"] or "none"),
        "NCCL": nccl if there else "none",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
    }


def check_processors(comm: Communicator) -> list[Row]:
    """Cores of a rank. Collective."""
    shared = shared_cores(comm)
    if shared is None:
        return [Row("hosts", "cores for each rank", GOOD, "1 or more")]
    note = "ranks share cores, so no time below is broken for sure: start fewer ranks, or bind each to cores of its own"
    return [Row("hosts", "cores for all ranks", LOOK, str(shared), str(comm.size), shared / comm.size, note)]


def check_disks(comm: Communicator, folder: Path) -> list[Row]:
    """Writes a file in ``folder`` from the first rank of each host, as a checkpoint would. Collective."""
    nodes = nodes_of(comm)
    rate, error = 0.0, ""
    if comm.rank == nodes.index(nodes[comm.rank]):
        try:
            rate = _write_rate(folder)
        except OSError as failure:
            error = f"{platform.node()}, rank {comm.rank}: {failure.strerror or failure}"
    found = gather_json(comm, [rate, error])
    errors = [text for _, text in found if text]
    check = f"writing to {folder}"
    if errors:
        note = f"{'; '.join(errors)}: give --folder a place where checkpoints can be written"
        return [Row("hosts", check, BROKEN, note=note)]
    slowest, rank = min((rate, rank) for rank, (rate, _) in enumerate(found) if rate)
    return [rated("hosts", check, slowest, _LEAST_DISK, "GB/s", _DISK, f"the host of rank {rank} is the slowest")]


def _write_rate(folder: Path) -> float:
    """bytes/s of a file that is written and reaches the disk."""
    data = os.urandom(1 << 20)
    with NamedTemporaryFile(dir=folder, prefix="hdpcomm-acceptance-") as file:
        started = time.perf_counter()
        for _ in range(_DISK_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - started)

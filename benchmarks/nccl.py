"""Subset collectives: hdpcomm over one NCCL communicator compared with one communicator per subset (ncclCommSplit), in
time and device memory. Started by benchmarks/nccl.sh under torchrun, one rank per GPU; prints tables and writes JSON.

The other side is torch.distributed: ``new_group()`` splits the communicator of the world when that is bound to a
device. Every subset is created once and used for all sizes. Times are medians of the slowest rank; both sides
alternate. Device memory of a side is what its init and its subsets allocate. hdpcomm comes first, so
what NCCL loads once per process is counted for hdpcomm; the CUDA context is counted for neither.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Protocol

import torch

import hdpcomm as hdp

__all__ = [
    "Group",
    "Hdpcomm",
    "Machine",
    "Report",
    "Row",
    "Side",
    "compare",
    "subsets_of",
    "table",
]

OPS = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = (8 * 1024, 1 << 20, 64 << 20)


class Group(Protocol):
    """A group of ranks on one side. ``x``: the whole buffer; ``part``: this rank's share of it."""

    def run(self, op: str, x: torch.Tensor, part: torch.Tensor) -> None: ...


class Side(Protocol):
    name: str

    def group(self, ranks: Sequence[int]) -> Group | None:
        """Creates a group; all ranks call it, and those that are not in the group get None."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What the comparison needs from the device: waiting for all work, and the bytes in use."""

    device: torch.device
    synchronize: Callable[[], None]
    used_bytes: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on one subset; microseconds by side."""

    op: str
    ranks: tuple[int, ...]
    bytes: int
    us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """The rows, and for each side the milliseconds to create a subset and the bytes of all of them, of which
    ``init_bytes`` were allocated before the first subset."""

    rows: list[Row]
    subsets: int
    make_ms: dict[str, float]
    first_use_ms: dict[str, float]
    init_bytes: dict[str, int]
    device_bytes: dict[str, int]


class _Subset:
    def __init__(self, comm: hdp.Communicator) -> None:
        self.comm = comm

    def run(self, op: str, x: torch.Tensor, part: torch.Tensor) -> None:
        if op == "all_gather":
            self.comm.all_gather(x, part)
        elif op == "reduce_scatter":
            self.comm.reduce_scatter(part, x)
        else:
            self.comm.all_reduce(x)


class Hdpcomm:
    """The side of hdpcomm: one NCCL communicator for all subsets."""

    name = "hdpcomm"

    def __init__(self, world: hdp.Communicator) -> None:
        self.world = world

    def group(self, ranks: Sequence[int]) -> Group | None:
        made = self.world.subset(list(ranks)) if self.world.rank in ranks else None
        return None if made is None else _Subset(made)


class _Split:
    def __init__(self, group: Any) -> None:
        self.group = group

    def run(self, op: str, x: torch.Tensor, part: torch.Tensor) -> None:
        import torch.distributed as dist

        if op == "all_gather":
            dist.all_gather_into_tensor(x, part, group=self.group)
        elif op == "reduce_scatter":
            dist.reduce_scatter_tensor(part, x, group=self.group)
        else:
            dist.all_reduce(x, group=self.group)


class Split:
    """The side of torch.distributed: one communicator per subset, by ncclCommSplit, since the default group is bound to
    a device."""

    name = "ncclCommSplit"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def group(self, ranks: Sequence[int]) -> Group | None:
        import torch.distributed as dist

        made = dist.new_group(sorted(ranks))
        return _Split(made) if self.rank in ranks else None


def subsets_of(size: int) -> list[tuple[int, ...]]:
    """The subsets that a step with sequences of many lengths uses: halves, quarters and so on, every pair of
    neighbours, the even and the odd ranks, and the world."""
    found: dict[tuple[int, ...], None] = {tuple(range(size)): None}
    width = size // 2
    while width >= 2:
        for start in range(0, size - width + 1, max(1, width // 2)):
            found[tuple(range(start, start + width))] = None
        width //= 2
    for ranks in (range(0, size, 2), range(1, size, 2)):
        if len(ranks) > 1:
            found[tuple(ranks)] = None
    return list(found)


def compare(
    world: hdp.Communicator,
    sides: Sequence[Side],
    machine: Machine,
    *,
    sizes: Sequence[int],
    repeats: int,
    init_bytes: Mapping[str, int],
) -> Report:
    """Compares both sides. Collective over the world; the report is complete on rank 0.

    ``init_bytes``: for each side, the bytes that its init allocated on this rank's device.
    """
    subsets = subsets_of(world.size)
    groups: dict[str, list[Group | None]] = {}
    make_ms, first_use_ms, device_bytes = {}, {}, {}
    taken = {side.name: int(_slowest(world, init_bytes[side.name])) for side in sides}
    for side in sides:
        before = machine.used_bytes()
        made, seconds = [], []
        for ranks in subsets:
            world.barrier()
            started = time.perf_counter()
            made.append(side.group(ranks))
            machine.synchronize()
            seconds.append(time.perf_counter() - started)
        make_ms[side.name] = _slowest(world, statistics.mean(seconds)) * 1e3
        started = time.perf_counter()
        for ranks, group in zip(subsets, made, strict=True):
            _time(world, group, "all_reduce", len(ranks), 1024, machine, 1)
        first_use_ms[side.name] = _slowest(world, (time.perf_counter() - started) / len(subsets)) * 1e3
        device_bytes[side.name] = int(_slowest(world, init_bytes[side.name] + machine.used_bytes() - before))
        groups[side.name] = made
    rows = []
    for index, ranks in enumerate(subsets):
        for op in OPS:
            for size in sizes:
                us = {
                    side.name: _time(world, groups[side.name][index], op, len(ranks), size, machine, repeats)
                    for side in sides
                }
                rows.append(Row(op, ranks, size, us))
    return Report(rows, len(subsets), make_ms, first_use_ms, taken, device_bytes)


def _time(
    world: hdp.Communicator,
    group: Group | None,
    op: str,
    members: int,
    size: int,
    machine: Machine,
    repeats: int,
) -> float:
    """Microseconds of an operation on the slowest member; other ranks only take part in finding it."""
    seconds = 0.0
    world.barrier()
    if group is not None:
        count = size // 4 // members * members
        x = torch.ones(count, device=machine.device)
        part = torch.ones(count // members, device=machine.device)
        group.run(op, x, part)
        machine.synchronize()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            group.run(op, x, part)
            machine.synchronize()
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times)
    return _slowest(world, seconds) * 1e6


def _slowest(world: hdp.Communicator, value: float) -> float:
    largest = torch.tensor([value], dtype=torch.float64)
    world.all_reduce(largest, "max")
    return float(largest[0])


def table(report: Report, names: Sequence[str]) -> str:
    """The report in Markdown: one row per operation, subset and size, then the costs of creating and keeping them."""
    lines = [f"| operation | ranks | bytes | {' us | '.join(names)} us |", "|---" * (3 + len(names)) + "|"]
    for row in report.rows:
        ranks = f"{len(row.ranks)} from {row.ranks[0]}"
        figures = " | ".join(f"{row.us[name]:.1f}" for name in names)
        lines.append(f"| {row.op} | {ranks} | {row.bytes:,} | {figures} |")
    for what, figures_of, form in (
        ("making one, ms", report.make_ms, "{:.3f}"),
        ("first use of one, ms", report.first_use_ms, "{:.3f}"),
        ("device memory of init alone, bytes", report.init_bytes, "{:,}"),
        ("device memory of all, bytes", report.device_bytes, "{:,}"),
    ):
        figures = " | ".join(form.format(figures_of[name]) for name in names)
        lines.append(f"| {what} | {report.subsets} subsets | | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--repeats", type=int, default=20, help="runs of an operation (default 20)")
    arguments = parser.parse_args()
    import torch.distributed as dist

    from hdpcomm.comm.device import nccl_library

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # init() would set it after the context is created here
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # the context and torch's first block are counted for neither side

    def used_bytes() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    bare = used_bytes()
    with hdp.init(transport="nccl") as world:
        ours = used_bytes()
        dist.init_process_group("nccl", device_id=device)
        init_bytes = {Hdpcomm.name: ours - bare, Split.name: used_bytes() - ours}
        machine = Machine(device, torch.cuda.synchronize, used_bytes)
        sides: list[Side] = [Hdpcomm(world), Split(world.rank)]
        report = compare(world, sides, machine, sizes=SIZES, repeats=arguments.repeats, init_bytes=init_bytes)
        if world.rank == 0:
            print(table(report, [side.name for side in sides]), flush=True)
        if world.rank == 0 and arguments.json:
            about = {
                "date": date.today().isoformat(),
                "device": torch.cuda.get_device_name(device),
                "ranks": world.size,
                "versions": {
                    "hdpcomm": hdp.__version__,
                    "torch": torch.__version__,
                    "nccl": nccl_library.describe()[1],
                },
                "python": platform.python_version(),
            }
            with open(arguments.json, "w") as file:
                json.dump(about | asdict(report), file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Checks of hosts, devices and links: versions, disks, matrix products, copies, messages between each two ranks."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
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
from hdpcomm.measure.timing import call_s, repeated_s
from hdpcomm.measure.topology import host_facts, pair_costs
from hdpcomm.offload import PinnedPool, measure_copies
from hdpcomm.run.flops import known_device

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = [
    "BUSBW",
    "check_copies",
    "check_disks",
    "check_links",
    "check_processors",
    "check_products",
    "check_versions",
]


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


BUSBW = Rule(0.8, 0.5)
"""A link that has lost more than a fifth of what others of its kind reach is set up wrongly, or has lost a lane."""
_STRAGGLER = Rule(1 / 1.1, 0.6)
"""A job that runs 1.1 times as long as without its slowest worker is a straggling one (arXiv 2505.05713)."""
_LATENCY = Rule(0.5, 0.2)
_TOGETHER = Rule(0.7, 0.3)
_OWN_MEMORY = Rule(0.3, 0.1)
"""A message between two processes on CPUs beside a copy that one of them makes, whose bytes are in its caches."""
_MOST_RANKS = 8
"""Up to so many, each two ranks are measured; of more, neighbours on hosts, and neighbouring hosts."""
_REPEATS, _SAMPLE_S = 7, 0.05
_COPY_BYTES = 4 << 20


def check_products(comm: Communicator) -> list[Row]:
    """FLOP/s of matrix products on all ranks at once, and while each exchanges messages with its neighbours.
    Collective."""
    size, dtype = (8192, torch.bfloat16) if comm.device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=comm.device).to(dtype) for _ in range(2))
    flops = 2.0 * size**3
    count = max(1, round(_SAMPLE_S / min(call_s(comm.device, lambda: a @ b) for _ in range(_REPEATS))))
    comm.barrier()
    # A rank that shares its core gets it for milliseconds in turn, so one product may seem to have it alone.
    alone_s = statistics.median(repeated_s(comm.device, lambda: a @ b, count) for _ in range(_REPEATS))
    rates = [flops / seconds for seconds in gather_json(comm, alone_s)]
    spec = known_device(comm.device)
    typical = statistics.median(rates)
    rows = [
        rated("devices", "matrix products", typical, spec.peak_flops * 0.65 if spec else None, "TFLOP/s", BUSBW,
              "below what such devices sustain: look at clock rates, power limits and other jobs on them"),
    ]  # fmt: skip
    if comm.size == 1:
        return rows
    slow = [rank for rank, rate in enumerate(rates) if rate < typical * _STRAGGLER.good]
    note = f"{named(slow)} slower than others: look at what else runs there, clock rates, cooling" if slow else ""
    rows.append(rated("devices", "slowest of the ranks", min(rates), typical, "TFLOP/s", _STRAGGLER, note))
    return [*rows, _beside_messages(comm, a, b, alone_s)]


def _beside_messages(comm: Communicator, a: torch.Tensor, b: torch.Tensor, alone_s: float) -> Row:
    """Products while messages of as many seconds are on their way; without a limit on CPUs, which copy the bytes
    themselves."""
    out, back = (torch.zeros(16 << 20, dtype=torch.uint8, device=comm.device) for _ in range(2))
    around = [(comm.rank + step) % comm.size for step in (1, -1)]

    def exchange() -> None:
        comm.exchange([(out, around[0])], [(back, around[1])])

    def both() -> None:
        work = comm.exchange([(out, around[0])], [(back, around[1])], async_op=True)
        for _ in range(products):
            a @ b
        work.wait()

    comm.barrier()
    message_s = min(call_s(comm.device, exchange) for _ in range(_REPEATS))
    products = max(1, round(statistics.median(gather_json(comm, message_s / alone_s))))
    comm.barrier()
    together_s = min(call_s(comm.device, both) for _ in range(_REPEATS))
    found = gather_json(comm, [together_s, max(products * alone_s, message_s)])
    seconds, limit = max(found)
    known, note = limit if comm.device.type == "cuda" else None, "messages take cores of the device"
    return rated("devices", "products beside messages", seconds, known, "s", _TOGETHER, note)


def check_copies(comm: Communicator) -> list[Row]:
    """Copies between devices and host memory, of one rank of each host, and of all at once, as offload makes them.
    Collective."""
    nodes = nodes_of(comm)
    first = nodes.index(nodes[comm.rank])
    pool = PinnedPool(8 * _COPY_BYTES, device=comm.device)
    alone = max(gather_json(comm, measure_copies(pool, _COPY_BYTES) if comm.rank == first else 0.0))
    together = gather_json(comm, measure_copies(pool, _COPY_BYTES))
    spec, found = known_device(comm.device), alone if comm.device.type == "cuda" else None
    limit = min(spec.d2h_bandwidth, spec.h2d_bandwidth) if spec else found
    slowest, rank = min((rate, rank) for rank, rate in enumerate(together))
    note = f"rank {rank} is the slowest: bind ranks to the memory nearest their device"
    return [rated("devices", "copies to host memory", slowest, limit, "GB/s", _TOGETHER, note)]


def check_links(comm: Communicator) -> list[Row]:
    """Latency and bandwidth of messages between ranks. Collective."""
    if comm.size == 1:
        return []
    nodes = nodes_of(comm)
    facts = gather_json(comm, host_facts())
    figures = pair_costs(comm, _pairs(nodes))
    spec = known_device(comm.device)
    copy = max(gather_json(comm, _copy_rate(comm.device) if comm.rank == 0 else 0.0))
    rows: list[Row] = []
    for inside in (True, False):
        pairs = [pair for pair in figures if (nodes[pair[0]] == nodes[pair[1]]) == inside]
        if not pairs:
            continue
        if inside:
            limit = spec.intra_bandwidth if spec else copy
        else:
            speeds = [min(_network(facts[a]), _network(facts[b])) for a, b in pairs]
            limit = spec.inter_bandwidth if spec else min(speeds)
        found = {pair: figures[pair] for pair in pairs}
        rule = _OWN_MEMORY if inside and spec is None else BUSBW
        names = [each["name"] for each in facts]
        rows += _of_kind("on a host" if inside else "between hosts", found, limit or None, rule, names)
    return rows


def _pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of ranks that are measured, one after the other."""
    size = len(nodes)
    if size <= _MOST_RANKS:
        return [(a, b) for a in range(size) for b in range(a + 1, size)]
    firsts = [nodes.index(node) for node in sorted(set(nodes))]
    along = [(a, b) for a in range(size) if (b := next((c for c in range(a + 1, size) if nodes[c] == nodes[a]), None))]
    around = list(zip(firsts, firsts[1:] + firsts[:1], strict=True)) if len(firsts) > 2 else [tuple(firsts)]
    return along + [(a, b) for a, b in around if len(firsts) > 1]


def _of_kind(
    where: str, pairs: dict[tuple[int, int], tuple[float, float]], limit: float | None, rule: Rule, names: Sequence[str]
) -> list[Row]:
    """Rows of the pairs on hosts, or between hosts: the better half beside the limit, and the worst pair beside it."""
    late = sorted((latency, pair) for pair, (latency, _) in pairs.items())
    slow = sorted((bandwidth, pair) for pair, (_, bandwidth) in pairs.items())
    half = len(pairs) // 2
    latency = statistics.median(each for each, _ in late[: len(late) - half])
    bandwidth = statistics.median(each for each, _ in slow[half:])
    note = "below the speed of the link: look at what else uses it, its cable, and which interface messages take"
    rows = [
        rated("links", f"latency {where}, 8 B", latency, None, "us", _LATENCY),
        rated("links", f"bandwidth {where}, 16 MiB", bandwidth, limit, "GB/s", rule, note),
    ]
    if len(pairs) > 1:
        behind = [pair for each, pair in late if latency < _LATENCY.good * each]
        rows.append(
            rated("links", f"latest pair {where}", late[-1][0], latency, "us", _LATENCY, _of_all(behind, names))
        )
        behind = [pair for each, pair in slow if each < BUSBW.good * bandwidth]
        rows.append(
            rated("links", f"slowest pair {where}", slow[0][0], bandwidth, "GB/s", BUSBW, _of_all(behind, names))
        )
    return rows


def _of_all(pairs: Sequence[tuple[int, int]], names: Sequence[str]) -> str:
    """Names the ranks of slow pairs: one, if it is in all of several."""
    if not pairs:
        return ""
    shared = set(pairs[0]).intersection(*pairs) if len(pairs) > 1 else set()
    ranks = sorted(shared or {rank for pair in pairs for rank in pair})
    return f"{named(ranks)} on {', '.join(sorted({names[rank] for rank in ranks}))}: look at its links"


def _network(facts: dict[str, list[list[float]]]) -> float:
    """bytes/s of a host's fastest interface; 0 where none says."""
    return max((float(speed) * 1e9 / 8 for _, speed in facts["links"]), default=0.0)


def _copy_rate(device: torch.device) -> float:
    """bytes/s of a copy in the rank's own memory, which a message on a host has to make."""
    data, out = (torch.zeros(16 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    return data.numel() / min(call_s(device, lambda: out.copy_(data)) for _ in range(_REPEATS))

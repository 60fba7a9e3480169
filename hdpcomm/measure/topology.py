"""The topology of a world: its hosts and domains, and costs of messages inside and between them."""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.topology import domains_of, nodes_of
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.timing import call_s

__all__ = ["LinkCost", "Topology", "host_facts", "measure_topology", "pair_costs"]

_PAIRS = 3  # as many are measured inside and between hosts
_LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Costs of messages one way between ranks of one host, or of two; medians over the pairs that were measured, from
    device memory to device memory where the communicator has devices.

    Attributes:
        pairs: how many were measured.
        latency_s: of a message of 8 bytes.
        bandwidth: bytes/s of a message of 16 MiB.
    """

    pairs: int
    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of a world, and message costs inside (``intra``) and between hosts; ``None`` where no such pair is.

    Attributes:
        hosts: the ranks of each.
        inter: between hosts, of different domains where there are any.
        nics: network interfaces that the ranks of a host share: how much more all of them send to the next host at
            once than one alone does. ``None`` where each rank has its own, and where no two ranks share a host.
        domain_of_rank: by global rank, a number for those that are near each other, as ``HDPCOMM_DOMAIN`` says;
            ``None`` where all hosts are alike.
        domain: between hosts of one domain.
    """

    transport: str
    hosts: tuple[tuple[int, ...], ...]
    intra: LinkCost | None
    inter: LinkCost | None
    nics: int | None = None
    domain_of_rank: list[int] | None = None
    domain: LinkCost | None = None


def host_facts() -> dict[str, Any]:
    """This host's name, and its network interfaces with their speed in Gbit/s by sysfs (0: unknown). Local."""
    links = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        links.append([port.parts[-4], float(port.read_text().split()[0])])
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if interface.name == "lo" or _read(interface / "operstate") not in ("up", "unknown"):
            continue
        speed = _read(interface / "speed")
        links.append([interface.name, max(0.0, float(speed) / 1000) if speed.lstrip("-").isdigit() else 0.0])
    return {"name": platform.node(), "links": links[:32]}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of an interface without a carrier cannot be read
        return ""


def measure_topology(comm: Communicator) -> Topology:
    """Describes the hosts and measures messages of a few pairs of each class. Collective over the whole world.

    Raises: InvalidUsage unless ``comm`` is the whole world in its order; the errors of the messages.
    """
    if comm.ranks != tuple(range(comm._core.world.size)):
        raise InvalidUsage(f"measure_topology() got the ranks {comm.ranks}; give what init() returned")
    nodes = nodes_of(comm)
    hosts = tuple(tuple(rank for rank in comm.ranks if nodes[rank] == node) for node in sorted(set(nodes)))
    nics, where = _shared_links(comm, hosts), domains_of(comm)
    if where is not None and not 1 < len(set(where)) < len(hosts):
        where = None
    pairs = list(itertools.combinations(comm.ranks, 2))
    intra = _measure(comm, [(a, b) for a, b in pairs if nodes[a] == nodes[b]])
    apart = [(a, b) for a, b in pairs if nodes[a] != nodes[b]]
    near = [(a, b) for a, b in apart if where is not None and where[a] == where[b]]
    far = _measure(comm, [(a, b) for a, b in apart if where is None or where[a] != where[b]])
    return Topology(comm.transport, hosts, intra, far, nics, where, _measure(comm, near))


def _shared_links(comm: Communicator, groups: Sequence[tuple[int, ...]]) -> int | None:
    """Links that the ranks of a host share to those of the next one, by messages that go round the hosts, of one rank
    each and of as many as each host has. ``None``: each rank has its own. Collective."""
    local = min(len(ranks) for ranks in groups)
    if len(groups) == 1 or local == 1:
        return None
    out, back = (torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=comm.device) for _ in range(2))
    place = next((number, ranks.index(comm.rank)) for number, ranks in enumerate(groups) if comm.rank in ranks)
    before, after = (groups[(place[0] + step) % len(groups)] for step in (-1, 1))

    def seconds(senders: int) -> float:
        comm.barrier()
        sent = [(out, after[place[1]])], [(back, before[place[1]])]
        return call_s(comm.device, lambda: comm.exchange(*sent) if place[1] < senders else None)

    # In turns, so that what else runs on the hosts is beside both.
    found = [[seconds(1), seconds(local)] for _ in range(5)]
    slowest = torch.tensor(found[1:], dtype=torch.float64)
    comm.all_reduce(slowest, "max")
    alone, together = slowest.amin(0).tolist()
    links = max(1, round(local * alone / together))
    return links if links < local else None


def _measure(comm: Communicator, pairs: Sequence[tuple[int, int]]) -> LinkCost | None:
    if not pairs:
        return None
    figures = pair_costs(comm, pairs[:: max(1, len(pairs) // _PAIRS)][:_PAIRS]).values()
    latency, bandwidth = (statistics.median(column) for column in zip(*figures, strict=True))
    return LinkCost(len(figures), latency, bandwidth)


def pair_costs(comm: Communicator, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[float, float]]:
    """Seconds of a message of 8 bytes one way, and bytes/s of one of 16 MiB, of each pair, one after the other.
    Collective."""
    found = {}
    for a, b in pairs:
        comm.barrier()
        mine = torch.zeros(2, dtype=torch.float64)
        if comm.rank in (a, b):
            mine[:] = torch.tensor(_ping_pong(comm, b if comm.rank == a else a, first=comm.rank == a))
        comm.broadcast(mine, a)
        latency, bandwidth = mine.tolist()
        found[a, b] = latency, bandwidth
    return found


def _ping_pong(comm: Communicator, peer: int, *, first: bool) -> tuple[float, float]:
    """Seconds of 8 bytes one way (median of 30), and bytes/s of 16 MiB one way (the best of 3); of the communicator's
    device."""
    small, large = (torch.zeros(n, dtype=torch.uint8, device=comm.device) for n in (8, _LARGE_BYTES))
    latency = statistics.median([_one_way(comm, peer, small, first=first) for _ in range(35)][5:])
    bandwidth = large.numel() / min([_one_way(comm, peer, large, first=first) for _ in range(4)][1:])
    return latency, bandwidth


def _one_way(comm: Communicator, peer: int, buffer: torch.Tensor, *, first: bool) -> float:
    """Seconds of a message there and back, halved."""

    def both_ways() -> None:
        for send in (first, not first):
            if send:
                comm.send(buffer, peer)
            else:
                comm.recv(buffer, peer)

    return call_s(comm.device, both_ways) / 2

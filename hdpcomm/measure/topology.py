"""The topology of a world: its hosts, their devices and links, and what messages cost inside and between hosts."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hdpcomm.comm.communicator import Communicator
from hdpcomm.comm.topology import domains_of, nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.measure.timing import call_s

__all__ = ["Host", "LinkCost", "Topology", "host_facts", "measure_topology"]

_PAIRS = 3  # as many are measured inside and between hosts
_LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Host:
    """One host of the world.

    Attributes:
        ranks: global ranks on it.
        gpus: names of its GPUs.
        links: network interfaces with their speed in Gbit/s (0: unknown), by sysfs: ``("eth0", 25.0)``.
    """

    name: str
    ranks: tuple[int, ...]
    cores: int
    gpus: tuple[str, ...]
    links: tuple[tuple[str, float], ...]


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
        inter: between hosts, of different domains where there are any.
        domains: hosts that are near each other, by their place in ``hosts``, as ``HDPCOMM_DOMAIN`` says. Empty where
            all hosts are alike.
        domain: between hosts of one domain.
        nics: network interfaces that the ranks of a host share: how much more all of them send to the next host at
            once than one alone does. ``None`` where each rank has its own, and where no two ranks share a host.
    """

    transport: str
    hosts: tuple[Host, ...]
    intra: LinkCost | None
    inter: LinkCost | None
    nics: int | None = None
    domains: tuple[tuple[int, ...], ...] = ()
    domain: LinkCost | None = None

    @property
    def domain_of_rank(self) -> list[int] | None:
        """By global rank, the place of its domain in ``domains``; ``None`` where there are none."""
        if not self.domains:
            return None
        found = {rank: k for k, hosts in enumerate(self.domains) for host in hosts for rank in self.hosts[host].ranks}
        return [found[rank] for rank in range(self.ranks)]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)


def host_facts() -> dict[str, object]:
    """This host's name, cores, GPUs and network interfaces; what is not there is left out. Local."""
    links = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        links.append([port.parts[-4], float(port.read_text().split()[0])])
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if interface.name == "lo" or _read(interface / "operstate") not in ("up", "unknown"):
            continue
        speed = _read(interface / "speed")
        links.append([interface.name, max(0.0, float(speed) / 1000) if speed.lstrip("-").isdigit() else 0.0])
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"name": platform.node(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus, "links": links[:32]}


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
    node_of_rank = nodes_of(comm)
    described = gather_json(comm, host_facts())
    hosts = []
    for node in sorted(set(node_of_rank)):
        ranks = tuple(rank for rank, where in enumerate(node_of_rank) if where == node)
        fact = described[ranks[0]]
        links = tuple((str(name), float(speed)) for name, speed in fact["links"])
        hosts.append(Host(fact["name"], ranks, fact["cores"], tuple(fact["gpus"]), links))
    pairs = [(a, b) for a in range(comm.size) for b in range(a + 1, comm.size)]
    intra = [pair for pair in pairs if node_of_rank[pair[0]] == node_of_rank[pair[1]]]
    apart = [pair for pair in pairs if node_of_rank[pair[0]] != node_of_rank[pair[1]]]
    nics = _shared_links(comm, [host.ranks for host in hosts])
    domains = _find_domains(comm, hosts)
    found = Topology(comm.transport, tuple(hosts), _measure(comm, intra), None, nics, domains)
    where = found.domain_of_rank
    near = [pair for pair in apart if where is not None and where[pair[0]] == where[pair[1]]]
    far = [pair for pair in apart if where is None or where[pair[0]] != where[pair[1]]]
    return dataclasses.replace(found, inter=_measure(comm, far), domain=_measure(comm, near))


def _find_domains(comm: Communicator, hosts: list[Host]) -> tuple[tuple[int, ...], ...]:
    """See :attr:`Topology.domains`. Collective over ``comm``."""
    named = domains_of(comm)
    if named is None:
        return ()
    groups: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        groups.setdefault(named[host.ranks[0]], []).append(place)
    return tuple(map(tuple, groups.values())) if 1 < len(groups) < len(hosts) else ()


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


def _measure(comm: Communicator, pairs: list[tuple[int, int]]) -> LinkCost | None:
    if not pairs:
        return None
    chosen = pairs[:: max(1, len(pairs) // _PAIRS)][:_PAIRS]
    figures = []
    for a, b in chosen:
        comm.barrier()
        mine = torch.zeros(2, dtype=torch.float64)
        if comm.rank in (a, b):
            mine[:] = torch.tensor(_ping_pong(comm, b if comm.rank == a else a, first=comm.rank == a))
        comm.broadcast(mine, a)
        figures.append(mine.tolist())
    latency, bandwidth = (statistics.median(column) for column in zip(*figures, strict=True))
    return LinkCost(len(chosen), latency, bandwidth)


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

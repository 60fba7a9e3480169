"""``hdpcomm doctor --topology``: hosts, devices and links of a world, and what messages cost on them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from hdpcomm.arguments import ranks_text
from hdpcomm.cli.output import ranks_here, write_json
from hdpcomm.options import count

if TYPE_CHECKING:
    from hdpcomm.measure.topology import LinkCost, Topology

__all__ = ["add_topology_options", "show_topology"]


def add_topology_options(parser: argparse.ArgumentParser) -> None:
    """The options of the report on several ranks."""
    group = parser.add_argument_group("topology")
    group.add_argument(
        "--topology",
        action="store_true",
        help="describe the hosts of a world and measure its messages instead; under a launcher its ranks, "
        "else new ones on this host",
    )
    group.add_argument(
        "--ranks", type=count, metavar="N", help="start N ranks here (default 2; under a launcher: its ranks)"
    )


def show_topology(options: argparse.Namespace) -> int:
    """Measures and prints on rank 0; returns the exit code."""
    from hdpcomm.comm.launch import run_ranks

    rank, ranks = ranks_here(options.ranks, default=2)
    topology = _on_rank() if rank is not None else run_ranks(_on_rank, ranks)[0]
    if topology is None:
        return 0
    print("\n".join(_lines(topology)))
    if options.json:
        write_json(options.json, asdict(topology))
    return 0


def _on_rank() -> Topology | None:
    from hdpcomm.comm import init
    from hdpcomm.measure.topology import measure_topology

    with init() as comm:
        topology = measure_topology(comm)
        return topology if comm.rank == 0 else None


def _lines(topology: Topology) -> list[str]:
    hosts = len(topology.hosts)
    lines = [f"{ranks_text(topology.ranks)} on {hosts} host{'' if hosts == 1 else 's'}, transport {topology.transport}"]
    for host in topology.hosts:
        links = ", ".join(f"{name} {speed:g} Gbit/s" if speed else name for name, speed in host.links) or "none found"
        gpus = ", ".join(host.gpus) or "none"
        lines.append(f"  {host.name}: ranks {list(host.ranks)}, {host.cores} cores, GPUs: {gpus}, links: {links}")
    between = "between hosts"
    if topology.domains:
        named = (", ".join(topology.hosts[host].name for host in hosts) for hosts in topology.domains)
        lines.append("  domains of hosts that are near each other: " + "; ".join(named))
        between = "between domains"
    costs = [("inside a host", topology.intra), (between, topology.inter)]
    if topology.domains:
        costs.insert(1, ("inside a domain", topology.domain))
    lines += [f"  {name:<15}{' ' * bool(topology.domains)}{_cost(cost)}" for name, cost in costs]
    if topology.nics is not None:
        lines.append(f"  the ranks of a host share {topology.nics} network interface{'s' * (topology.nics > 1)}")
    return lines


def _cost(cost: LinkCost | None) -> str:
    if cost is None:
        return "no such pair of ranks"
    return (
        f"{cost.latency_s * 1e6:.1f} us one way (8 bytes), {cost.bandwidth / 1e9:.2f} GB/s (16 MiB); {cost.pairs} pairs"
    )

"""``hdpcomm doctor --topology``: hosts, devices and links of a world, and what messages cost on them."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hdpcomm.arguments import ranks_text
from hdpcomm.cli.output import TRANSPORTS, check_writable, ranks_here, write_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.files import read_text
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
    group.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="how the ranks exchange messages (default %(default)s)"
    )
    group.add_argument(
        "--costs",
        nargs="?",
        const="",
        metavar="FILE",
        help="also write the costs that algorithm=auto uses into FILE (default ~/.cache/hdpcomm/costs.json)",
    )


_Found = tuple["Topology", dict[str, dict[str, float]]]


def show_topology(options: argparse.Namespace) -> int:
    """Measures and prints on rank 0, which writes the files; returns the exit code."""
    from hdpcomm.comm.costs import costs_path, save_costs
    from hdpcomm.comm.launch import run_ranks

    path = Path(options.costs) if options.costs else costs_path()
    if options.costs is not None:
        _check_costs(path)
        os.environ.pop("HDPCOMM_COSTS", None)  # else init() would look for the file that is written here
    rank, ranks = ranks_here(options.ranks, default=2)
    task = options.transport, options.costs is not None
    found = measure_rank(*task) if rank is not None else run_ranks(measure_rank, ranks, *task)[0]
    if found is None:
        return 0
    topology, measured = found
    print("\n".join(_lines(topology)))
    if options.json:
        write_json(options.json, asdict(topology))
    for name, costs in measured.items():  # those of other transports stay
        save_costs(name, costs, path)
        print(f"{name}: {', '.join(_cost_text(key, value) for key, value in costs.items())}")
    if measured:
        print(f"written to {path}")
    return 0


def measure_rank(transport: str, costs: bool) -> _Found | None:
    """The topology, and with ``costs`` those of the transport by the names under which they are saved; ``None`` on
    ranks other than 0. Collective."""
    from hdpcomm.comm import init
    from hdpcomm.measure.links import measure_world
    from hdpcomm.measure.topology import measure_topology

    with init(transport=transport) as comm:
        topology = measure_topology(comm)
        measured = measure_world(comm) if costs else {}
        comm.barrier()
        return (topology, measured) if comm.rank == 0 else None


def _cost_text(key: str, seconds: float) -> str:
    """A cost as text, like "alpha 1.00 us" or "beta 0.1200 ns/byte"."""
    name = key.split("_")[0]
    return f"{name} {seconds * 1e9:.4f} ns/byte" if key.endswith("_per_byte") else f"{name} {seconds * 1e6:.2f} us"


def _check_costs(path: Path) -> None:
    """Raises InvalidUsage for a file that cannot be written, or that exists and does not hold costs."""
    if path.parent.is_dir():
        check_writable(path)
    if not path.is_file():
        return
    try:
        known = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"{path}: is no file of --costs ({error}); give another file or remove it") from error
    if not isinstance(known, dict):
        raise InvalidUsage(f"{path}: is no file of --costs; give another file or remove it")


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

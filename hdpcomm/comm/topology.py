"""Which ranks share a host, a domain or processors, and orders of ranks by it."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import cast

import torch

from hdpcomm import _core
from hdpcomm.comm.communicator import Communicator

__all__ = [
    "by_host",
    "cores_of_rank",
    "domain_block",
    "domains_of",
    "host_order",
    "node_block",
    "nodes_of",
    "shared_cores",
]


def nodes_of(comm: Communicator) -> list[int]:
    """The host of each rank of the whole world, as a number. Local."""
    return comm._core.world.nodes()


def domains_of(comm: Communicator) -> list[int] | None:
    """By position in ``comm``, a number for the rank's domain, as ``HDPCOMM_DOMAIN`` of the hosts names them: a host
    without a name is a domain of its own. ``None`` where no host has a name. Collective over ``comm``.
    """
    name = _core.settings().domain
    own = f"name {name}" if name else f"host {nodes_of(comm)[comm.ranks[comm.rank]]}"
    everyone, named = _gathered(comm, own), torch.tensor([int(bool(name))])
    comm.all_reduce(named)
    return _numbered(everyone) if named.item() else None


def _gathered(comm: Communicator, text: str) -> list[int]:
    """By position in ``comm``, a number for the rank's text, equal for equal ones. Collective."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.int64)[:1]
    everyone = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(everyone, mine)
    return everyone.tolist()


def _numbered(values: Sequence[int]) -> list[int]:
    """Equal values as equal numbers, by their first appearance."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def host_order(comm: Communicator, domains: Sequence[int] | None = None) -> list[int]:
    """The positions in ``comm`` host by host, hosts by their first rank; those of a domain side by side. Local.

    Args:
        domains: the domain of each position (:func:`domains_of`).
    """
    nodes = [nodes_of(comm)[rank] for rank in comm.ranks]
    hosts = _numbered(nodes)
    near = hosts if domains is None else _numbered(domains)
    return sorted(range(comm.size), key=lambda position: (near[position], hosts[position]))


def by_host(comm: Communicator, domains: Sequence[int] | None = None) -> Communicator:
    """A communicator of the same ranks, those of a host side by side, whatever order the launcher dealt them in; rank 0
    stays rank 0.

    Plans give neighbouring ranks to a sequence, so a trainer that plans over this communicator sends least between
    hosts; :func:`node_block` of it is the planner's ``ranks_per_node``. Local.

    Args:
        domains: the domain of each position in ``comm`` (:func:`domains_of`): hosts of one are side by side, too.
    """
    order = host_order(comm, domains)
    return comm if order == list(range(comm.size)) else cast("Communicator", comm.subset(order))


def node_block(comm: Communicator, positions: Sequence[int] | None = None) -> int:
    """The largest k for which each run of k of these ranks (the first k, the next k, ...) lies on one host. Local.

    This is the planner's ``ranks_per_node``: equal hosts in order give their number of ranks, unequal or dealt out ones
    less, down to 1.

    Args:
        positions: in ``comm``, in the order in which a plan numbers them; default: all.
    """
    nodes = nodes_of(comm)
    ranks = comm.ranks if positions is None else [comm.ranks[position] for position in positions]
    borders = [i for i in range(1, len(ranks)) if nodes[ranks[i]] != nodes[ranks[i - 1]]]
    return math.gcd(*borders) if borders else len(ranks)


def domain_block(
    comm: Communicator, domains: Sequence[int] | None, positions: Sequence[int] | None = None
) -> int | None:
    """The largest multiple k of :func:`node_block` for which each run of k of these ranks lies in one domain. Local.

    This is the planner's ``ranks_per_domain``: ``None`` where that is no more than a host.

    Args:
        domains: the domain of each position in ``comm`` (:func:`domains_of`).
        positions: as for :func:`node_block`.
    """
    if domains is None:
        return None
    near = [domains[position] for position in (range(comm.size) if positions is None else positions)]
    borders = [i for i in range(1, len(near)) if near[i] != near[i - 1]]
    local = node_block(comm, positions)
    block = math.gcd(*borders) if borders else len(near)
    return block if block % local == 0 and block > local else None


def cores_of_rank(comm: Communicator) -> int:
    """How many cores a rank has to itself: those that it may run on, shared with the ranks that may run on the same.

    So ranks that their launcher has bound take what it gave them, others divide their host. At least 1. Collective over
    ``comm``.
    """
    cores, sharers = _cores_and_sharers(comm)
    return max(1, cores // sharers)


def shared_cores(comm: Communicator) -> int | None:
    """Cores of all ranks together, if any rank has less than one to itself; else None. Collective over ``comm``."""
    cores, sharers = _cores_and_sharers(comm)
    shares = torch.tensor([cores / sharers, float(cores < sharers)], dtype=torch.float64)
    comm.all_reduce(shares)
    total, crowded = shares.tolist()
    return max(1, round(total)) if crowded else None


def _cores_and_sharers(comm: Communicator) -> tuple[int, int]:
    """How many cores this rank may run on, and how many ranks may run on the same. Collective over ``comm``."""
    cores = sorted(os.sched_getaffinity(0))
    everyone = _gathered(comm, f"{_core.comm.host_identity()} {cores}")
    return len(cores), everyone.count(everyone[comm.rank])

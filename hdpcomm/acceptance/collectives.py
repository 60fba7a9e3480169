"""Checks of collectives: right results, and times beside those of torch.distributed on the same ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hdpcomm.acceptance.report import BROKEN, Row, Rule, named, rated
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.measure.timing import call_s, repeated_s
from hdpcomm.perf.data import element_type
from hdpcomm.perf.ops import Bound, Case, operation
from hdpcomm.train.step.data_parallel import torch_group

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["check_collectives"]

_RIVAL = Rule(0.9, 0.5)
"""Ours to choose: times of two runs differ by a tenth on a quiet host (docs/acceptance.md)."""
_BUDGET_S = 2.0
_TIMEOUT_S = 60.0
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "alltoall")


def check_collectives(comm: Communicator) -> list[Row]:
    """The four on all ranks, on those of each host, and on half of the ranks in no order. Collective."""
    if comm.size == 1:
        return []
    rows = []
    backend = "nccl" if comm.device.type == "cuda" else "gloo"
    with torch_group(comm, backend, timeout=_TIMEOUT_S):
        for name, groups in _groups(comm):
            # torch orders the ranks of a group as they are given only if it is asked to; all call it for each group.
            limit = timedelta(seconds=_TIMEOUT_S)
            theirs = [dist.new_group(each, timeout=limit, backend=backend, sort_ranks=False) for each in groups]
            place = next((index for index, ranks in enumerate(groups) if comm.rank in ranks), None)
            ours = None if place is None else comm.subset(groups[place])
            for called in _OPERATIONS:
                measured = None
                comm.barrier()
                if place is not None and ours is not None:
                    measured = _measured(ours, theirs[place], called)
                rows.append(_row(comm, called, name, groups, backend, measured))
    return rows


def _groups(comm: Communicator) -> list[tuple[str, list[list[int]]]]:
    nodes = nodes_of(comm)
    everyone = list(range(comm.size))
    hosts = [[rank for rank in everyone if nodes[rank] == node] for node in sorted(set(nodes))]
    found = [(f"all {comm.size} ranks", [everyone])]
    if len(hosts) > 1 and all(len(ranks) > 1 for ranks in hosts):
        found.append(("each host", hosts))
    if comm.size > 2:
        half = random.Random(0).sample(everyone, max(2, comm.size // 2))
        found.append((named(half), [half]))
    return found


class _Torch:
    """torch's group with the methods of a communicator that the operations of ``hdpcomm perf`` call."""

    def __init__(self, comm: Communicator, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.device, self._group = comm.rank, comm.size, comm.device, group

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, x, group=self._group)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str) -> None:
        del op  # sum
        (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(out, x, group=self._group)

    def all_reduce(self, x: torch.Tensor, op: str, *, out: torch.Tensor) -> None:
        del op
        dist.all_reduce(out.copy_(x), group=self._group)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        dist.all_to_all_single(out, x, group=self._group)


def _measured(comm: Communicator, group: dist.ProcessGroup, name: str) -> tuple[float, float, int]:
    """Seconds of a call of ours and of torch's, the fastest of rounds in turns, and wrong elements of ours; 64 MiB on
    devices, else 1 MiB."""
    kind = element_type("float")
    shape = operation(name).shape((1 << 24 if comm.device.type == "cuda" else 1 << 18), comm.size)
    both = [Bound(operation(name), Case(each, kind, shape)) for each in (comm, _Torch(comm, group))]
    slowest = torch.zeros(1, dtype=torch.float64)
    for bound in both:
        bound.fill()
        slowest += sum(call_s(comm.device, bound.run) for _ in range(2))  # the first one makes connections
    comm.all_reduce(slowest, "max")
    turns = 2 * _BUDGET_S / float(slowest)
    calls, rounds = (max(1, min(5, round(turns / share))) for share in (5, 25))
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for place, bound in enumerate(both):
            comm.barrier()
            best[place] = min(best[place], repeated_s(comm.device, bound.run, calls))
    ours = both[0]
    for step in (ours.fill, ours.synchronize, comm.barrier, ours.run, ours.synchronize):
        step()
    return best[0], best[1], ours.wrong()


def _row(
    comm: Communicator,
    called: str,
    name: str,
    groups: Sequence[Sequence[int]],
    backend: str,
    measured: tuple[float, float, int] | None,
) -> Row:
    found = gather_json(comm, measured)
    members = [found[rank] for ranks in groups for rank in ranks]
    check = f"{called}, {name}"
    bad = [rank for rank, each in enumerate(found) if each is not None and each[2]]
    if bad:
        return Row("collectives", check, BROKEN, note=f"wrong elements on {named(bad)}: report it")
    ours, theirs = (max(each[place] for each in members) for place in range(2))
    return rated("collectives", check, ours, theirs, "us", _RIVAL, f"slower than torch's {backend}")

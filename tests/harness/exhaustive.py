"""The best possible plan of a tiny step, found by trying all plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product
from typing import Any

import numpy as np

from hdpcomm._core import planner as core
from hdpcomm.plan import ClusterSpec, CostModel, MemoryModel
from hdpcomm.plan.cost import core_cost

__all__ = ["TooManyNodes", "fits", "optimum", "partitions", "pipeline_optimum", "sliced_optimum"]


class TooManyNodes(Exception):
    """The search would take too long."""


def most_offload(lengths: Sequence[int], cost: CostModel, memory: MemoryModel) -> float:
    """The largest ratio at which the copies of a micro-batch hide behind its forward pass (Eq. 3 of the paper)."""
    if not memory.offloadable or not memory.copy_s:
        return 0.0
    tokens = sum(lengths)
    work = cost.attention * sum(s * s for s in lengths) + (cost.piece + cost.linear) * tokens
    return min(1.0, cost.forward * work / (memory.copy_s * tokens))


def fits(lengths: Sequence[int], size: int, cost: CostModel, memory: MemoryModel) -> bool:
    """Whether each of ``size`` ranks can hold its share of a micro-batch."""
    held = sum(-(-length // size) for length in lengths)
    return held <= memory.token_limit(most_offload(lengths, cost, memory))


def canonical(ready: Sequence[float], *blocks: int) -> tuple[float, ...]:
    """The same times with the ranks of a block, and the full blocks, in order: they are alike. ``blocks``: ranks of the
    smallest blocks, then of those made of them."""
    *inner, size = blocks
    parts = [tuple(ready[first : first + size]) for first in range(0, len(ready), size)]
    parts = [canonical(part, *inner) if inner else tuple(sorted(part)) for part in parts]
    whole = sorted(times for times in parts if len(times) == size)
    return tuple(time for times in [*whole, *(t for t in parts if len(t) < size)] for time in times)


def places(group: Sequence[int], cluster: ClusterSpec) -> tuple[bool, bool]:
    """Whether all ranks are on one node, and in one domain."""
    nodes = {rank // cluster.node_ranks for rank in group}
    domains = {rank // cluster.domain_ranks for rank in group} if cluster.ranks_per_domain else nodes
    return len(nodes) == 1, len(domains) == 1


def optimum(
    lengths: Sequence[int],
    cluster: ClusterSpec,
    cost: CostModel,
    memory: MemoryModel,
    *,
    above: float = float("inf"),
    max_nodes: int = 5_000,
) -> float:
    """The smallest makespan over all packs, group sizes, placements and orders.

    Micro-batches are placed by rising start, which is possible for any plan. A rank that is free before the start of
    the last placed one cannot be used before it any more, so its time moves up to that start. Returns ``above`` if no
    plan is better than that.

    Raises:
        TooManyNodes: after ``max_nodes`` placements.
    """
    count, ranks = len(lengths), cluster.ranks
    speeds = cluster.speeds or (1.0,) * ranks
    full = (1 << count) - 1
    groups = [g for size in range(1, ranks + 1) for g in combinations(range(ranks), size)]
    inside = {g: places(g, cluster) for g in groups}
    options: list[tuple[int, tuple[int, ...], float]] = []  # (sequences as bits, ranks, seconds)
    for mask in range(1, full + 1):
        members = [lengths[i] for i in range(count) if mask >> i & 1]
        for size in range(1, ranks + 1):
            if fits(members, size, cost, memory):
                seconds = {
                    (node, domain): cost.seconds(members, size, one_node=node, one_domain=domain)
                    for node, domain in ((True, True), (False, True), (False, False))
                }
                options += [
                    (mask, g, seconds[inside[g]] / min(speeds[rank] for rank in g)) for g in groups if len(g) == size
                ]
    # The minimum of rank-seconds for a set of sequences, by the cheapest cover: prunes without losing the optimum.
    cheapest = {
        mask: min((len(g) * s for m, g, s in options if m == mask), default=float("inf")) for mask in range(full + 1)
    }
    least = [0.0] + [float("inf")] * full
    for mask in range(1, full + 1):
        members = mask
        while members:
            least[mask] = min(least[mask], least[mask & ~members] + cheapest[members])
            members = (members - 1) & mask
    best = above
    nodes = 0
    seen: dict[int, list[tuple[float, ...]]] = {}

    def search(left: int, ready: tuple[float, ...], now: float) -> None:
        nonlocal best, nodes
        nodes += 1
        if nodes > max_nodes:
            raise TooManyNodes
        if left == 0:
            best = min(best, max(ready))
            return
        if max(max(ready), (sum(ready) + least[left]) / ranks) >= best * (1 - 1e-12):
            return
        known = seen.setdefault(left, [])
        if any(all(a <= b for a, b in zip(other, ready, strict=True)) for other in known):
            return
        known[:] = [other for other in known if not all(a <= b for a, b in zip(ready, other, strict=True))]
        known.append(ready)
        tried = set()
        for members, group, seconds in options:
            if members & ~left:
                continue
            # Starting later than when the group is free only helps by keeping the order, which `now` does.
            start = max(now, *(ready[rank] for rank in group))
            if start + seconds >= best * (1 - 1e-12):
                continue
            after = [start + seconds if rank in group else max(time, start) for rank, time in enumerate(ready)]
            state = (
                members,
                canonical(after, cluster.node_ranks, cluster.domain_ranks) if len(set(speeds)) == 1 else tuple(after),
            )
            if state not in tried:
                tried.add(state)
                search(left & ~members, state[1], start)

    search(full, (0.0,) * ranks, 0.0)
    return best


def partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to cut the items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            left = tuple(item for item in rest if item not in others)
            for tail in partitions(left):
                yield [(first, *others), *tail]


Slice = tuple[int, int, int, bool]
"""Number of a micro-batch, first token, token after the last one, whether another slice follows."""


def simulated(
    solver: core.CostModel, order: Sequence[tuple[Sequence[int], Sequence[int]]], slices: Sequence[Slice] = ()
) -> dict[str, Any]:
    """The simulated step of micro-batches given as (ranks, lengths), some of them slices."""
    lengths = np.array([length for _, members in order for length in members])
    columns = (
        np.arange(len(order)),
        np.cumsum([0, *(len(group) for group, _ in order)]),
        np.array([rank for group, _ in order for rank in group], dtype=np.int32),
        np.cumsum([0, *(len(members) for _, members in order)]),
        np.arange(len(lengths)),
        lengths,
        np.zeros(len(order)),
        np.zeros(len(order)),
    )
    squares = lengths.astype(np.float64) ** 2
    for number, first, end, _ in slices:
        squares[columns[3][number]] = float(end**2 - first**2)
    found: dict[str, Any] = core.simulate(solver, columns, squares, slices)
    return found


def pipeline_optimum(
    lengths: Sequence[int], cluster: ClusterSpec, cost: CostModel, memory: MemoryModel, *, max_plans: int = 20_000
) -> float:
    """The smallest simulated makespan over all packs, groups of ranks and orders of micro-batches.

    Raises:
        TooManyNodes: there are more than ``max_plans`` plans.
    """
    ranks = cluster.ranks
    groups = [g for size in range(1, ranks + 1) for g in combinations(range(ranks), size)]
    solver = core_cost(cost, memory, cluster)
    best = float("inf")
    plans = 0
    for packs in partitions(tuple(range(len(lengths)))):
        choices = []
        for pack in packs:
            members = [lengths[i] for i in pack]
            choices.append([(g, members) for g in groups if fits(members, len(g), cost, memory)])
        for chosen in product(*choices):
            work = 0.0
            for g, members in chosen:
                node, domain = places(g, cluster)
                work += len(g) * cost.seconds(members, len(g), one_node=node, one_domain=domain)
            if work / ranks >= best:
                continue
            for order in permutations(chosen):
                plans += 1
                if plans > max_plans:
                    raise TooManyNodes
                best = min(best, simulated(solver, order)["makespan"])
    return best


def sliced_optimum(
    lengths: Sequence[int],
    cluster: ClusterSpec,
    cost: CostModel,
    memory: MemoryModel,
    slices: int,
    *,
    above: float,
    max_plans: int = 4_000,
) -> float:
    """The smallest simulated makespan over all packs, groups of ranks, orders of micro-batches, and all ways to cut a
    sequence into at most ``slices`` slices, in the memory of the devices. Returns ``above`` if no plan is better.

    Raises:
        TooManyNodes: there are more than ``max_plans`` plans that a glance does not rule out.
    """
    ranks, stages = cluster.ranks, cluster.pipeline
    groups = [g for size in range(1, ranks + 1) for g in combinations(range(ranks), size)]
    solver = core_cost(cost, memory, cluster, slices=slices)
    chunks = cluster.chunks
    first = 0 if cluster.stage_work else (stages - 1) / chunks  # passes, before the largest stage begins
    most_held = stages if chunks == 1 else stages + (stages - 1) / chunks
    most_tokens = most_held * memory.capacity * (1 + 1e-9)
    best, plans = above, 0
    for packs in partitions(tuple(range(len(lengths)))):
        choices = [
            [
                (group, members, bounds, sum(seconds))
                for bounds in _cuts(members, slices)
                for group in groups
                if _held(members, bounds, len(group), memory) <= most_tokens
                and sum(seconds := _seconds(members, bounds, group, cluster, cost)) + first * seconds[0] < best
            ]
            for members in ([lengths[i] for i in pack] for pack in packs)
        ]
        for chosen in product(*choices):
            busy = [0.0] * ranks
            for group, _, _, seconds in chosen:
                for rank in group:
                    busy[rank] += seconds
            if max(busy) >= best:
                continue
            for order in permutations(chosen):
                plans += 1
                if plans > max_plans:
                    raise TooManyNodes
                rows: list[tuple[Sequence[int], Sequence[int]]] = []
                parts: list[Slice] = []
                for group, members, bounds, _ in order:
                    if len(bounds) == 2:
                        rows.append((group, members))
                        continue
                    for first, end in pairwise(bounds):
                        parts.append((len(rows), first, end, end < bounds[-1]))
                        rows.append((group, (end - first,)))
                found = simulated(solver, rows, parts)
                if found["peak_tokens"].max() <= most_tokens:
                    best = min(best, found["makespan"])
    return best


def _cuts(members: Sequence[int], slices: int) -> Iterator[tuple[int, ...]]:
    """All bounds of slices of a micro-batch, the whole first; a pack is not cut."""
    last = sum(members)
    for number in range(1, slices + 1 if len(members) == 1 else 2):
        for inner in combinations(range(1, last), number - 1):
            yield (0, *inner, last)


def _held(members: Sequence[int], bounds: Sequence[int], size: int, memory: MemoryModel) -> float:
    """Tokens that a rank holds of it; infinity where a micro-batch is larger than the capacity."""
    held = [-(-(b - a) // size) for a, b in pairwise(bounds)]
    if len(bounds) == 2:
        held = [sum(-(-length // size) for length in members)]
    return sum(held) if max(held) <= memory.capacity else float("inf")


def _seconds(
    members: Sequence[int], bounds: Sequence[int], group: Sequence[int], cluster: ClusterSpec, cost: CostModel
) -> list[float]:
    """What each of its micro-batches takes, without sending kept keys again."""
    size, (node, domain) = len(group), places(group, cluster)
    loads = [(float(b * b - a * a), b - a) for a, b in pairwise(bounds)]
    if len(bounds) == 2:
        loads = [(sum(float(s * s) for s in members), sum(members))]
    return [cost.load_seconds(squares, n, size, one_node=node, one_domain=domain) for squares, n in loads]

"""The best possible plan of a tiny step, found by trying all plans."""

from __future__ import annotations

from collections.abc import Sequence

from hdpcomm.plan import CostModel

__all__ = ["TooManyNodes", "optimum"]


class TooManyNodes(Exception):
    """The search would take too long."""


def optimum(
    lengths: Sequence[int],
    ranks: int,
    capacity: int,
    cost: CostModel,
    *,
    above: float = float("inf"),
    max_nodes: int = 5_000,
) -> float:
    """The smallest makespan over all packs, group sizes, placements and orders (one node, no offload).

    Micro-batches are placed by rising start, which is possible for any plan. A rank that is free before the start of
    the last placed one cannot be used before it any more, so its time moves up to that start. Returns ``above`` if no
    plan is better than that.

    Raises:
        TooManyNodes: after ``max_nodes`` placements.
    """
    count = len(lengths)
    full = (1 << count) - 1
    options: list[tuple[int, int, float]] = []  # (sequences as bits, ranks, seconds)
    for mask in range(1, full + 1):
        members = [lengths[i] for i in range(count) if mask >> i & 1]
        for size in range(1, ranks + 1):
            if sum(-(-length // size) for length in members) <= capacity:
                options.append((mask, size, cost.seconds(members, size)))
    # The minimum of rank-seconds for a set of sequences, by the cheapest cover: prunes without losing the optimum.
    least = [0.0] + [float("inf")] * full
    for mask in range(1, full + 1):
        for members, size, seconds in options:
            if members & ~mask == 0:
                least[mask] = min(least[mask], least[mask & ~members] + size * seconds)
    best = above
    nodes = 0
    seen: dict[int, list[tuple[float, ...]]] = {}

    def search(left: int, ready: tuple[float, ...]) -> None:
        nonlocal best, nodes
        nodes += 1
        if nodes > max_nodes:
            raise TooManyNodes
        if left == 0:
            best = min(best, ready[-1])
            return
        if max(ready[-1], (sum(ready) + least[left]) / ranks) >= best * (1 - 1e-12):
            return
        known = seen.setdefault(left, [])
        if any(all(a <= b for a, b in zip(other, ready, strict=True)) for other in known):
            return
        known[:] = [other for other in known if not all(a <= b for a, b in zip(ready, other, strict=True))]
        known.append(ready)
        for members, size, seconds in options:
            if members & ~left:
                continue
            starts = sorted(set(ready[size - 1 :]))
            for start in starts:
                if start + seconds >= best * (1 - 1e-12):
                    break
                free = sum(time <= start for time in ready)
                rest = (start,) * (free - size) + ready[free:] + (start + seconds,) * size
                search(left & ~members, tuple(sorted(rest)))

    search(full, (0.0,) * ranks)
    return best

"""Replicas of busy experts: which rank of an expert group holds a copy of which expert, and which rows go to it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdpcomm.kernels.transfers import to_device

__all__ = ["ExpertPlacement", "place_replicas"]


def place_replicas(rows: Sequence[float], ranks: int, replicas: int) -> list[list[int]]:
    """The experts of which each rank gets a copy beside its own, so that the busiest rank has fewer rows. Local.

    One after the other goes to the expert whose copies have the most rows, on the rank with the fewest; the last ones
    are left out where the busiest rank has no fewer rows for them.

    Args:
        rows: for each expert, as expected; rank r of n has the experts from ``r x experts / n`` on. Copies of an expert
            share its rows equally.
        replicas: the most copies on a rank.
    """
    size = len(rows) // ranks
    held = [set(range(rank * size, rank * size + size)) for rank in range(ranks)]
    loads = [float(sum(rows[rank * size : rank * size + size])) for rank in range(ranks)]
    copies = [1] * len(rows)
    heap = [(-float(count), expert) for expert, count in enumerate(rows)]
    heapq.heapify(heap)
    placed: list[tuple[int, int]] = []
    least, kept = max(loads), 0
    while heap and len(placed) < replicas * ranks:
        before, expert = heapq.heappop(heap)
        free = [rank for rank in range(ranks) if len(held[rank]) < size + replicas and expert not in held[rank]]
        if not free:
            continue
        rank = min(free, key=loads.__getitem__)
        copies[expert] += 1
        share = rows[expert] / copies[expert]
        for other in range(ranks):
            if expert in held[other]:
                loads[other] += share + before
        held[rank].add(expert)
        loads[rank] += share
        placed.append((expert, rank))
        heapq.heappush(heap, (-share, expert))
        if max(loads) < least * (1 - 1e-9):  # else by rounding only
            least, kept = max(loads), len(placed)
    return [sorted(expert for expert, place in placed[:kept] if place == rank) for rank in range(ranks)]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """The replicas of a layer's experts on the ranks of a group, as one of them needs them.

    A rank has equally many places as each other: those of its own experts, and then those of replicas, the last of
    which may be empty.

    Attributes:
        expert_of: int64 ``[ranks x places]``, the expert at each place; any at an empty one.
        places_of: int64 ``[experts, most copies]``, the places of an expert's copies.
        copies: int64 ``[experts]``, how many those are.
        sent: which of this rank's own experts others have replicas of, those of rank 0 first.
        sends, gets: replicas for each rank and from each.
    """

    expert_of: Tensor
    places_of: Tensor
    copies: Tensor
    sent: tuple[int, ...]
    sends: tuple[int, ...]
    gets: tuple[int, ...]

    @classmethod
    def of(cls, held: Sequence[Sequence[int]], experts: int, rank: int, device: torch.device) -> ExpertPlacement:
        """From the replicas of each rank, in order, as :func:`place_replicas` gives them, for ``rank``."""
        size = experts // len(held)
        width = size + max(map(len, held))
        at: list[list[int]] = [[] for _ in range(experts)]
        expert_of = torch.zeros(len(held), width, dtype=torch.int64)
        for place, others in enumerate(held):
            here = [*range(place * size, place * size + size), *others]
            expert_of[place, : len(here)] = torch.tensor(here)
            for number, expert in enumerate(here):
                at[expert].append(place * width + number)
        most = max(map(len, at))
        places_of = torch.tensor([(places * most)[:most] for places in at])
        sent = [[expert % size for expert in others if expert // size == rank] for others in held]
        owners = [expert // size for expert in held[rank]]
        return cls(
            to_device(expert_of.flatten(), device),
            to_device(places_of, device),
            to_device(torch.tensor([len(places) for places in at]), device),
            tuple(expert for others in sent for expert in others),
            tuple(map(len, sent)),
            tuple(owners.count(owner) for owner in range(len(held))),
        )

    def spread(self, chosen: Tensor, rank: int) -> Tensor:
        """The places of rows ``[tokens, top_k]`` in place of their experts: rows of an expert go to its copies in turn,
        in the order of tokens. Local."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        in_order = flat[order]
        firsts = torch.searchsorted(in_order, torch.arange(self.copies.shape[0], device=flat.device))
        number = torch.empty_like(order)
        number[order] = torch.arange(order.shape[0], device=flat.device) - firsts[in_order]
        # From another copy on, on each rank: else the first ones would get what is left over of all ranks.
        return self.places_of[flat, (number + rank) % self.copies[flat]].view_as(chosen)

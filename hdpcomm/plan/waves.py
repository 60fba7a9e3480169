"""Waves of ranks that share experts: which micro-batches run at the same time, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hdpcomm.plan.cluster import ClusterSpec
from hdpcomm.plan.cost import CostModel
from hdpcomm.plan.step import MicroBatch

__all__ = ["WaveTimes", "in_waves", "make_waves", "passes_without_tokens", "sorted_for_waves", "wave_times"]


def make_waves(batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """The micro-batches of each wave, in their order: each one comes after all earlier ones of its ranks."""
    last: dict[int, int] = {}
    waves: list[list[MicroBatch]] = []
    for batch in batches:
        wave = max(last.get(rank, 0) for rank in batch.ranks)
        last.update(dict.fromkeys(batch.ranks, wave + 1))
        if wave == len(waves):
            waves.append([])
        waves[wave].append(batch)
    return waves


def sorted_for_waves(batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    """The same micro-batches, the longest first, so that those of a wave take about as long."""
    order = sorted(batches, key=lambda batch: -batch.predicted_s)
    return tuple(replace(batch, index=place) for place, batch in enumerate(order))


def passes_without_tokens(batches: Sequence[MicroBatch], expert: int) -> int:
    """How often a rank has none of the micro-batches of a wave, and another one of its ``expert`` ranks has."""
    idle = 0
    for wave in make_waves(batches):
        ranks = {rank for batch in wave for rank in batch.ranks}
        idle += len({rank // expert for rank in ranks}) * expert - len(ranks)
    return idle


@dataclass(frozen=True, slots=True)
class WaveTimes:
    """When micro-batches run if the ranks of an expert group wait for each other in every layer.

    Attributes:
        start_s, end_s: of each micro-batch, in the given order.
        rank_end: by rank, seconds until its last wave has ended.
        rank_busy: by rank, seconds of its own work, with its part of the experts' work for others.
    """

    start_s: list[float]
    end_s: list[float]
    rank_end: list[float]
    rank_busy: list[float]

    @property
    def makespan_s(self) -> float:
        return max(self.rank_end, default=0.0)


def wave_times(
    batches: Sequence[MicroBatch], seconds: Sequence[float], costs: CostModel, cluster: ClusterSpec
) -> WaveTimes:
    """Runs micro-batches in waves. Local.

    In a wave, the ranks of an expert group, and all groups that a micro-batch joins, end together: after the longest of
    what their micro-batches take without experts, and the experts' work for all tokens of a group, of which each of its
    ranks does an equal part (``cluster.expert_imbalance`` times that the busiest one).

    Args:
        seconds: what each micro-batch would take if all ranks of its groups had as much to do.
    """
    experts, size = min(costs.experts, costs.linear) * cluster.expert_imbalance, cluster.expert
    place = {batch.index: i for i, batch in enumerate(batches)}
    start_s, end_s = [0.0] * len(batches), [0.0] * len(batches)
    rank_end, rank_busy = [0.0] * cluster.ranks, [0.0] * cluster.ranks
    for wave in make_waves(batches):
        for joined, groups in _joined(wave, size):
            ranks = [rank for group in groups for rank in range(group * size, (group + 1) * size)]
            rows = dict.fromkeys(groups, 0.0)
            for batch in joined:
                for rank in batch.ranks:
                    rows[rank // size] += batch.tokens / len(batch.ranks)
            shared = {group: experts * tokens / size for group, tokens in rows.items()}
            alone = {
                batch.index: max(0.0, seconds[place[batch.index]] - experts * batch.tokens / len(batch.ranks))
                for batch in joined
            }
            start = max(rank_end[rank] for rank in ranks)
            end = start + max(alone.values()) + max(shared.values())
            for rank in ranks:
                rank_end[rank] = end
                rank_busy[rank] += shared[rank // size]
            for batch in joined:
                start_s[place[batch.index]], end_s[place[batch.index]] = start, end
                for rank in batch.ranks:
                    rank_busy[rank] += alone[batch.index]
    return WaveTimes(start_s, end_s, rank_end, rank_busy)


def in_waves(
    found: dict[str, Any], batches: Sequence[MicroBatch], costs: CostModel, cluster: ClusterSpec
) -> dict[str, Any]:
    """What the simulator of the core says of a step without waves, moved to when its waves run."""
    which, times = found["which"], found["times"]
    took = np.zeros((len(batches), 2))
    took[which[:, 0], which[:, 2]] = times[:, 1] - times[:, 0]
    waves = wave_times(batches, took.sum(1).tolist(), costs, cluster)
    start, end = np.array(waves.start_s), np.array(waves.end_s)
    turn = start + (end - start) * took[:, 0] / np.maximum(took.sum(1), 1e-300)
    moved = np.where(which[:, 2:] == 0, np.stack((start, turn), 1)[which[:, 0]], np.stack((turn, end), 1)[which[:, 0]])
    order = np.lexsort((which[:, 0], moved[:, 0]))
    changed = {"which": which[order], "times": moved[order], "makespan": waves.makespan_s}
    changed["alone"] = found["alone"][order]
    return found | changed | {"end": np.array(waves.rank_end), "busy": np.array(waves.rank_busy)}


def _joined(wave: Sequence[MicroBatch], size: int) -> Iterator[tuple[list[MicroBatch], list[int]]]:
    """The micro-batches of a wave that wait for each other, with the numbers of their expert groups."""
    parts: list[tuple[list[MicroBatch], set[int]]] = []
    for batch in wave:
        groups, own = {rank // size for rank in batch.ranks}, [batch]
        apart = []
        for others, theirs in parts:
            if groups.isdisjoint(theirs):
                apart.append((others, theirs))
            else:
                own, groups = [*others, *own], groups | theirs
        parts = [*apart, (own, groups)]
    for own, groups in parts:
        yield own, sorted(groups)

"""Waves of ranks that share experts: which micro-batches run at the same time, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from hdpcomm.plan.cluster import ClusterSpec
from hdpcomm.plan.cost import CostModel
from hdpcomm.plan.micro_batch import MicroBatch, PlannedSlice, SequenceFragment, SequenceInfo
from hdpcomm.plan.pipeline_schedule import PipelineSchedule
from hdpcomm.plan.step import StepPlan

__all__ = [
    "PlannedWaves",
    "Slices",
    "WaveTimes",
    "blocks_of",
    "in_turns",
    "in_waves",
    "make_waves",
    "passes_without_tokens",
    "plan_waves",
    "sorted_for_waves",
    "wave_times",
]

Slices: TypeAlias = Mapping[int, PlannedSlice]
"""The micro-batches that are slices of sequences, by their index: :attr:`hdpcomm.plan.StepPlan.slices`."""
_NONE: Slices = {}


def make_waves(batches: Sequence[MicroBatch], slices: Slices = _NONE) -> list[list[MicroBatch]]:
    """The micro-batches of each wave, in their order: each one comes after all earlier ones of its ranks.

    Slices have blocks of waves of their own: wave k of a block has slice k of sequences that begin together, and a rank
    has one of these at most. So all ranks of a wave run the same kinds of passes, and a rank holds no more at a time
    than in a plan without waves. A sequence in one slice is as any other.
    """
    last: dict[int, int] = {}
    waves: list[list[MicroBatch]] = []
    blocks: dict[int, int] = {}
    """Where those of slices begin and end."""
    for batch in batches:
        wave, planned = max(last.get(rank, 0) for rank in batch.ranks), slices.get(batch.index)
        if planned is None or len(planned.rows) == 1:
            while block := next((end for first, end in blocks.items() if first <= wave < end), 0):
                wave = block
        elif planned.number == 0:
            count = len(planned.rows)
            room = (
                first for first, end in blocks.items() if first >= wave and (end - first >= count or end == len(waves))
            )
            wave = next(room, len(waves))
            blocks[wave] = max(blocks.get(wave, 0), wave + count)
            waves += [[] for _ in range(blocks[wave] - len(waves))]
        last.update(dict.fromkeys(batch.ranks, wave + 1))
        if wave == len(waves):
            waves.append([])
        waves[wave].append(batch)
    return waves


def blocks_of(waves: Sequence[list[MicroBatch]], slices: Slices) -> list[list[list[MicroBatch]]]:
    """The waves with those of a block of slices together, each other one alone."""
    blocks: list[list[list[MicroBatch]]] = []
    for wave in waves:
        planned = slices.get(wave[0].index)
        if planned is not None and planned.number:
            blocks[-1].append(wave)
        else:
            blocks.append([wave])
    return blocks


def in_turns(waves: Sequence[list[MicroBatch]], slices: Slices) -> list[tuple[list[MicroBatch], bool]]:
    """Waves in the order in which ranks that hold all layers run them, and for each whether it is forward only.

    All slices but the last of a sequence run forward, for what they keep; then all run forward and backward, from the
    last one to the first.
    """
    found: list[tuple[list[MicroBatch], bool]] = []
    for block in blocks_of(waves, slices):
        keep = [[batch for batch in wave if batch.index in slices and not slices[batch.index].last] for wave in block]
        found += [(wave, True) for wave in keep if wave]
        found += [(wave, False) for wave in reversed(block)]
    return found


def sorted_for_waves(batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    """The same micro-batches, the longest first, so that those of a wave take about as long."""
    order = sorted(batches, key=lambda batch: -batch.predicted_s)
    return tuple(replace(batch, index=place) for place, batch in enumerate(order))


def passes_without_tokens(batches: Sequence[MicroBatch], expert: int, slices: Slices = _NONE) -> int:
    """How often a rank has none of the micro-batches of a wave, and another one of its ``expert`` ranks has."""
    idle = 0
    for wave in make_waves(batches, slices):
        ranks = {rank for batch in wave for rank in batch.ranks}
        idle += len({rank // expert for rank in ranks}) * expert - len(ranks)
    return idle


@dataclass(frozen=True, slots=True)
class WaveTimes:
    """When micro-batches run if the ranks of an expert group wait for each other in every layer.

    Attributes:
        start_s, end_s: of each micro-batch, in the given order; of one that runs forward twice, the second time.
        kept_s: start and end of these forward passes the first time, by place.
        rank_end: by rank, seconds until its last wave has ended.
        rank_busy: by rank, seconds of its own work, with its part of the experts' work for others.
    """

    start_s: list[float]
    end_s: list[float]
    rank_end: list[float]
    rank_busy: list[float]
    kept_s: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        return max(self.rank_end, default=0.0)


def wave_times(
    batches: Sequence[MicroBatch],
    seconds: Sequence[float],
    costs: CostModel,
    cluster: ClusterSpec,
    slices: Slices = _NONE,
) -> WaveTimes:
    """Runs micro-batches in waves. Local.

    In a wave, the ranks of an expert group, and all groups that a micro-batch joins, end together: after the longest of
    what their micro-batches take without experts, and the experts' work for all tokens of a group, of which each of its
    ranks does an equal part (``cluster.expert_imbalance`` times that the busiest one).

    Args:
        seconds: what each micro-batch would take if all ranks of its groups had as much to do; of slices that run
            forward twice, both times.
    """
    experts, size = min(costs.experts, costs.linear) * cluster.expert_imbalance, cluster.expert
    place = {batch.index: i for i, batch in enumerate(batches)}
    times = WaveTimes([0.0] * len(batches), [0.0] * len(batches), [0.0] * cluster.ranks, [0.0] * cluster.ranks)
    for wave, keeps in in_turns(make_waves(batches, slices), slices):
        share = costs.forward if keeps else 1.0  # of what a micro-batch takes that runs forward once
        for joined, groups in _joined(wave, size):
            ranks = [rank for group in groups for rank in range(group * size, (group + 1) * size)]
            rows = dict.fromkeys(groups, 0.0)
            alone = {}
            for batch in joined:
                for rank in batch.ranks:
                    rows[rank // size] += batch.tokens / len(batch.ranks)
                twice = costs.forward if batch.index in slices and not slices[batch.index].last else 0.0
                once = seconds[place[batch.index]] / (1 + twice)
                alone[batch.index] = share * max(0.0, once - experts * batch.tokens / len(batch.ranks))
            shared = {group: share * experts * tokens / size for group, tokens in rows.items()}
            start = max(times.rank_end[rank] for rank in ranks)
            end = start + max(alone.values()) + max(shared.values())
            for rank in ranks:
                times.rank_end[rank] = end
                times.rank_busy[rank] += shared[rank // size]
            for batch in joined:
                at = place[batch.index]
                if keeps:
                    times.kept_s[at] = start, end
                else:
                    times.start_s[at], times.end_s[at] = start, end
                for rank in batch.ranks:
                    times.rank_busy[rank] += alone[batch.index]
    return times


def in_waves(
    found: dict[str, Any],
    batches: Sequence[MicroBatch],
    costs: CostModel,
    cluster: ClusterSpec,
    slices: Slices = _NONE,
) -> dict[str, Any]:
    """What the simulator of the core says of a step without waves, moved to when its waves run."""
    which, times = found["which"], found["times"]
    took = np.zeros((len(batches), 2))
    took[which[:, 0], which[:, 2]] = times[:, 1] - times[:, 0]
    waves = wave_times(batches, took.sum(1).tolist(), costs, cluster, slices)
    start, end = np.array(waves.start_s), np.array(waves.end_s)
    turn = start + (end - start) * took[:, 0] / np.maximum(took.sum(1), 1e-300)
    forward, backward = np.stack((start, turn), 1), np.stack((turn, end), 1)
    for place, kept in waves.kept_s.items():
        forward[place], backward[place, 0] = kept, start[place]  # which runs forward again
    moved = np.where(which[:, 2:] == 0, forward[which[:, 0]], backward[which[:, 0]])
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


@dataclass(frozen=True, slots=True)
class PlannedWaves:
    """What pipelines make a schedule for in place of a plan: its waves.

    Attributes:
        plan: micro-batch i is wave i, on all ranks of the expert groups that take part in it: these run its passes at
            the same time. It has the sequences of its longest micro-batch, which fit these ranks as they fit fewer.
            The waves of a block of slices are slices of one sequence, on all ranks of the block, each with as many
            tokens on every rank as any rank has.
    """

    plan: StepPlan
    _batches: Mapping[tuple[int, int], MicroBatch]

    def of_rank(self, rank: int) -> dict[int, MicroBatch | None]:
        """By number of the wave, what the rank runs in it: a micro-batch, or ``None`` for passes without tokens."""
        return {wave.index: self._batches.get((wave.index, rank)) for wave in self.plan.for_rank(rank)}

    def seconds(self, schedule: PipelineSchedule, took: Mapping[tuple[int, int], float], expert: int) -> float:
        """Seconds until the last pass has ended, if each takes as long as the longest of those that wait for it. Local.

        Args:
            schedule: of :attr:`plan`.
            took: seconds of the passes of each micro-batch, by its index and their kind (forward, backward, gradients
                of weights).
            expert: ranks that share experts.
        """
        wave_of: dict[int, dict[int, MicroBatch]] = {}
        for (wave, _), batch in self._batches.items():
            wave_of.setdefault(wave, {})[batch.index] = batch
        joined = {
            wave: [
                (
                    [batch.index for batch in own],
                    [rank for group in groups for rank in range(group * expert, (group + 1) * expert)],
                )
                for own, groups in _joined(list(batches.values()), expert)
            ]
            for wave, batches in wave_of.items()
        }
        free: dict[tuple[int, int], float] = {}
        """By rank and device."""
        ends: dict[tuple[int, int, int, int], float] = {}
        alone = [-1] * len(schedule.passes) if schedule.alone is None else schedule.alone.tolist()
        for (wave, stage, kind), rank in zip(schedule.passes.tolist(), alone, strict=True):
            device = stage % schedule.devices
            if rank >= 0:
                own = self._batches.get((wave, rank))
                free[rank, device] += 0.0 if own is None else took[own.index, kind]
                continue
            before = (stage - 1, 0) if kind == 0 else (stage + 1, 1)
            for batches, ranks in joined[wave]:
                start = max(max(free.get((rank, device), 0.0), ends.get((wave, rank, *before), 0.0)) for rank in ranks)
                end = start + max(took[index, kind] for index in batches)
                for rank in ranks:
                    free[rank, device] = ends[wave, rank, stage, kind] = end
        return max(free.values(), default=0.0)


def plan_waves(plan: StepPlan, expert: int) -> PlannedWaves:
    """The waves of a plan where ``expert`` neighbouring ranks share experts; with 1, each micro-batch is one. Local."""
    if expert == 1:
        return PlannedWaves(plan, {(batch.index, rank): batch for batch in plan.micro_batches for rank in batch.ranks})
    made: list[MicroBatch] = []
    batches: dict[tuple[int, int], MicroBatch] = {}
    fragments: list[SequenceFragment] = []
    next_id = int(plan.table.ids.max(initial=-1)) + 1
    for block in blocks_of(make_waves(plan.micro_batches, plan.slices), plan.slices):
        groups = sorted({rank // expert for wave in block for batch in wave for rank in batch.ranks})
        ranks = tuple(rank for group in groups for rank in range(group * expert, (group + 1) * expert))
        first, start = len(made), 0
        for wave in block:
            longest, number = max(wave, key=lambda batch: batch.predicted_s), len(made)
            batches |= {(number, rank): batch for batch in wave for rank in batch.ranks}
            if len(block) > 1:
                stop = start + max(batch.tokens_held for batch in wave) * len(ranks)
                longest = replace(longest, sequences=(SequenceInfo(next_id + len(fragments), stop - start),))
                fragments.append(SequenceFragment(first, start, stop))
                start = stop
            made.append(replace(longest, index=number, ranks=ranks))
    waves = replace(plan, micro_batches=tuple(made), fragments=tuple(fragments) if plan.slices else plan.fragments)
    return PlannedWaves(waves, batches)

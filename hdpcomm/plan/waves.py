"""Waves of ranks that share experts: which micro-batches run at the same time, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hdpcomm.plan.cost import CostModel
from hdpcomm.plan.specs import ClusterSpec
from hdpcomm.plan.step import StepPlan
from hdpcomm.plan.table import MicroBatch, PlannedSlice, PlanTable, SequenceFragment, SequenceInfo

__all__ = [
    *("Pass", "PipelineSchedule", "PlannedWaves", "Slices", "WaveClock", "blocks_of", "in_turns", "in_waves"),
    *("joined_batches", "make_waves", "plan_waves", "run_waves", "sorted_for_waves", "wave_times_in_order"),
]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro-batch (by its index in the plan) through one stage of the model on each of its ranks.

    ``weights``: of a split backward pass the gradients of weights, which each rank computes by itself; ``backward`` is
    set, too.
    """

    micro_batch: int
    stage: int
    backward: bool
    weights: bool = False


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """All passes of a step in one global order; each stage of each rank runs its own in that order.

    The planner's objective, the simulator and a runtime share it: it is the order of the simulated 1F1B, maybe with
    split backward passes. It is free of deadlocks, for any mix of groups: the first pass of the order that has not run
    needs only passes before it, and all of its ranks have run what comes before it.

    Attributes:
        stages: stages that the model is cut into.
        passes: int32 [passes, 3]: index of the micro-batch, stage; 0 for forward, 1 for backward, 2 for the gradients
            of weights that a split backward pass has left.
        handed: int64 [passes]: how many passes of the order have begun when this one has ended and hands what it gave
            to the next stage. Sender and receiver take a message at this place of the order, so that neither computes
            while the other waits.
        alone: int32 [passes]: the rank that computes gradients of weights, -1 for other passes. Where backward passes
            are split, each one has its gradients of weights after it, on each of its ranks.
        chunks: stages on each device of a rank's pipeline: stage s is on device ``s % (stages / chunks)``.
    """

    stages: int
    passes: NDArray[np.int32]
    handed: NDArray[np.int64]
    alone: NDArray[np.int32]
    chunks: int = 1

    @property
    def devices(self) -> int:
        """Devices of each rank's pipeline."""
        return self.stages // self.chunks


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
    """Sorts micro-batches, the longest first, so that those of a wave take about as long."""
    order = sorted(batches, key=lambda batch: -batch.predicted_s)
    return tuple(replace(batch, index=place) for place, batch in enumerate(order))


def run_waves(
    batches: Sequence[MicroBatch],
    seconds: Sequence[float] | NDArray[np.float64],
    costs: CostModel,
    cluster: ClusterSpec,
    slices: Slices = _NONE,
) -> WaveClock:
    """Runs micro-batches in waves. Local.

    Args:
        seconds: what each micro-batch would take if all ranks of its groups had as much to do; of slices that run
            forward twice, both times.
    """
    place = {batch.index: row for row, batch in enumerate(batches)}
    forward_only = [row for row, batch in enumerate(batches) if batch.index in slices and not slices[batch.index].last]
    clock = WaveClock(PlanTable.of(batches), seconds, costs, cluster, forward_only)
    for wave, keeps in in_turns(make_waves(batches, slices), slices):
        clock.run(np.array([place[batch.index] for batch in wave]), keeps)
    return clock


def wave_times_in_order(
    table: PlanTable, order: NDArray[np.int64], costs: CostModel, cluster: ClusterSpec
) -> tuple[float, float]:
    """Makespan and a rank's mean work, in seconds, of micro-batches without slices in an order of their rows. Local."""
    clock = WaveClock(table, table.predicted_s, costs, cluster)
    last, waves = [0] * cluster.ranks, list[list[int]]()
    ranks, bounds = table.ranks.tolist(), table.rank_bounds.tolist()
    for row in order.tolist():
        group = ranks[bounds[row] : bounds[row + 1]]
        wave = last[group[0]] if len(group) == 1 else max(last[rank] for rank in group)
        for rank in group:
            last[rank] = wave + 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(row)
    for rows in waves:
        clock.run(np.array(rows), False)
    return float(clock.rank_end.max()), float(clock.rank_busy.mean())


class WaveClock:
    """Runs waves one after the other, all micro-batches of a wave at once.

    In a wave, the ranks of an expert group, and all groups that a micro-batch joins, end together: after the longest of
    what their micro-batches take without experts, and the experts' work for all tokens of a group, of which each of its
    ranks does an equal part (``cluster.expert_imbalance`` times that the busiest one).

    Attributes:
        start, end: seconds, of each row of the table; of one that runs forward twice, the second time.
        kept: by row, start and end of its forward pass the first time.
        rank_end: by rank, seconds until its last wave has ended.
        rank_busy: by rank, seconds of its own work, with its part of the experts' work for others.
    """

    def __init__(
        self,
        table: PlanTable,
        seconds: Sequence[float] | NDArray[np.float64],
        costs: CostModel,
        cluster: ClusterSpec,
        forward_only: Sequence[int] = (),
    ) -> None:
        self._table, self._size, self._forward = table, cluster.expert, costs.forward
        self._experts = min(costs.experts, costs.linear) * cluster.expert_imbalance
        self._held = table.tokens() / table.group_sizes()
        once = np.array(seconds, dtype=np.float64)
        once[list(forward_only)] /= 1 + costs.forward
        self._alone = np.maximum(0.0, once - self._experts * self._held)
        self.start, self.end = np.zeros(len(table)), np.zeros(len(table))
        self.kept: dict[int, tuple[float, float]] = {}
        self.rank_end, self.rank_busy = np.zeros(cluster.ranks), np.zeros(cluster.ranks)

    def run(self, rows: NDArray[np.int64], keeps: bool) -> None:
        """``keeps``: forward only, for what later slices use."""
        table, size = self._table, self._size
        counts = np.diff(table.rank_bounds)[rows]
        places = np.repeat(table.rank_bounds[rows] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        ranks, which = table.ranks[places], np.repeat(np.arange(len(rows)), counts)
        groups, count = ranks // size, len(self.rank_end) // size
        part = _joined_groups(groups, which, count)
        share = self._forward if keeps else 1.0
        tokens = np.bincount(groups, weights=self._held[rows][which], minlength=count)
        shared, alone = share * self._experts * tokens / size, share * self._alone[rows]
        present = np.flatnonzero(np.bincount(groups, minlength=count))
        own = part[groups[np.searchsorted(which, np.arange(len(rows)))]]  # of each row
        ends = self.rank_end.reshape(count, size)
        start, longest, most_shared = np.zeros(count), np.zeros(count), np.zeros(count)
        np.maximum.at(start, part[present], ends[present].max(1))
        np.maximum.at(longest, own, alone)
        np.maximum.at(most_shared, part[present], shared[present])
        end = start + longest + most_shared
        ends[present] = end[part[present], None]
        self.rank_busy.reshape(count, size)[present] += shared[present, None]
        np.add.at(self.rank_busy, ranks, alone[which])
        if keeps:
            self.kept |= dict(zip(rows.tolist(), zip(start[own].tolist(), end[own].tolist(), strict=True), strict=True))
        else:
            self.start[rows], self.end[rows] = start[own], end[own]


def _joined_groups(groups: NDArray[np.int32], which: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """For each group of ranks that share experts one of those that micro-batches of a wave join it with.

    ``groups``, ``which``: of each rank of the micro-batches in turn its group, and which micro-batch it is of.
    """
    part = np.arange(count)
    crossing = np.flatnonzero((np.diff(groups) != 0) & (np.diff(which) == 0))
    if not len(crossing):
        return part
    of = part.tolist()

    def root(group: int) -> int:
        while of[group] != group:
            of[group] = group = of[of[group]]
        return group

    for a, b in zip(groups[crossing].tolist(), groups[crossing + 1].tolist(), strict=True):
        of[root(a)] = root(b)
    return np.array([root(group) for group in range(count)])


def in_waves(
    found: dict[str, Any],
    batches: Sequence[MicroBatch],
    costs: CostModel,
    cluster: ClusterSpec,
    slices: Slices = _NONE,
) -> dict[str, Any]:
    """The simulation of a step without waves, moved to when its waves run."""
    which, times = found["which"], found["times"]
    took = np.zeros((len(batches), 2))
    took[which[:, 0], which[:, 2]] = times[:, 1] - times[:, 0]
    clock = run_waves(batches, took.sum(1), costs, cluster, slices)
    start, end = clock.start, clock.end
    turn = start + (end - start) * took[:, 0] / np.maximum(took.sum(1), 1e-300)
    forward, backward = np.stack((start, turn), 1), np.stack((turn, end), 1)
    for place, kept in clock.kept.items():
        forward[place], backward[place, 0] = kept, start[place]  # which runs forward again
    moved = np.where(which[:, 2:] == 0, forward[which[:, 0]], backward[which[:, 0]])
    order = np.lexsort((which[:, 0], moved[:, 0]))
    changed = {"which": which[order], "times": moved[order], "makespan": float(clock.rank_end.max())}
    changed["alone"] = found["alone"][order]
    return found | changed | {"end": clock.rank_end, "busy": clock.rank_busy}


def joined_batches(wave: Sequence[MicroBatch], size: int) -> Iterator[tuple[list[MicroBatch], list[int]]]:
    """The micro-batches of a wave that wait for each other, with the numbers of their expert groups."""
    table = PlanTable.of(wave)
    groups, which = table.ranks // size, table.rows_of_ranks()
    part = _joined_groups(groups, which, int(groups.max()) + 1)
    joined: dict[int, tuple[list[MicroBatch], set[int]]] = {}
    for batch in wave:
        own = {rank // size for rank in batch.ranks}
        batches, theirs = joined.setdefault(int(part[batch.ranks[0] // size]), ([], set()))
        batches.append(batch)
        theirs |= own
    for batches, theirs in joined.values():
        yield batches, sorted(theirs)


@dataclass(frozen=True, slots=True)
class PlannedWaves:
    """Waves of a plan, which pipelines schedule in its place.

    Attributes:
        plan: micro-batch i is wave i, on all ranks of the expert groups that take part in it: these run its passes at
            the same time. It has the sequences of its longest micro-batch, which fit these ranks as they fit fewer; in
            a plan with slices, sequences that put as many tokens on every rank as any rank has, with about as much
            attention. The waves of a block of slices are slices of one sequence, on all ranks of the block.
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
                for own, groups in joined_batches(list(batches.values()), expert)
            ]
            for wave, batches in wave_of.items()
        }
        free: dict[tuple[int, int], float] = {}
        """By rank and device."""
        ends: dict[tuple[int, int, int, int], float] = {}
        for (wave, stage, kind), rank in zip(schedule.passes.tolist(), schedule.alone.tolist(), strict=True):
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


def plan_waves(plan: StepPlan, expert: int, offloadable: float = 0.0) -> PlannedWaves:
    """The waves of a plan where ``expert`` neighbouring ranks share experts; with 1, each micro-batch is one. Local.

    ``offloadable``: share of a token's bytes that offload can move (:class:`MemoryModel`).
    """
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
            if plan.slices:  # whose order counts the tokens that ranks hold
                most = max(wave, key=lambda batch: batch.tokens_held * (1 - batch.offload_ratio * offloadable))
                whole = len(block) == 1
                parts = min(most.tokens_held, max(1, len(ranks) // len(longest.ranks))) if whole else 1
                item = longest.sequences[0].id if whole else next_id + len(fragments)
                cuts = [most.tokens_held * part // parts * len(ranks) for part in range(parts + 1)]
                items = tuple(SequenceInfo(item, stop - start) for start, stop in pairwise(cuts))
                longest = replace(longest, sequences=items, offload_ratio=most.offload_ratio)
            if len(block) > 1:
                fragments.append(SequenceFragment(first, start, start + longest.tokens))
                start += longest.tokens
            made.append(replace(longest, index=number, ranks=ranks))
    waves = replace(plan, micro_batches=tuple(made), fragments=tuple(fragments) if plan.slices else plan.fragments)
    return PlannedWaves(waves, batches)

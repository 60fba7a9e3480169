"""The step as data: :class:`StepProgram`, what one device does in a step, in order.

A plan's program on ranks that hold all layers runs one micro-batch after the other (:func:`plan_program`). Those of
pipelines are made from a :class:`hdpcomm.plan.PipelineSchedule` (:func:`pipeline_program`): the schedule is one global
order of passes, in which messages have their places too, where the pass that produces one has ended. Both sender and
receiver take it there. So every device follows one global order of passes, rings and messages: nothing can wait in a
circle, even where messages block until both sides have come to them, or where a device runs all of its operations on
one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hdpcomm.plan import MicroBatch, StepPlan
from hdpcomm.plan.step import fixed_for_rank
from hdpcomm.plan.waves import Pass, PipelineSchedule, PlannedWaves, in_turns, joined_batches, make_waves

__all__ = [
    "Action",
    "StepProgram",
    "pipeline_program",
    "plan_program",
]

RUN, SEND, RECEIVE = "run", "send", "receive"
WHOLE, KEEP, TAKE = "run whole", "keep", "take"

_SHORTEST_S = 1e-9
"""Seconds of a micro-batch that a plan predicts no time for: its ranks end it after those before it."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a device.

    Attributes:
        kind: ``run`` the pass; ``send`` its output to the device with the stage ``peer`` of the same pipeline, or
            ``receive`` it from there; ``run whole``: the micro-batch's forward pass and, in training, its backward
            pass; ``keep``: a forward pass of a slice for the keys, values and states that later slices need, before it
            runs whole; ``take``: micro-batches of the queue, until there are none.
        done: the pass; of a message, the one that produced it.
        peer: -1 for a pass.
    """

    kind: str
    done: Pass
    peer: int = -1


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The actions of one device in a step.

    Attributes:
        batches: by the number that passes have, the micro-batch of this rank, or ``None``: passes without tokens, in
            which other ranks need its experts.
        backward_order: for each chunk of the model on this rank, the HDP ranks in the order in which their backward
            passes are to end, each as often as it has some.
        alone: no other HDP rank takes part in the last action.
        overlap: share of the last action's backward pass, counted from its end, beside which gradients may be reduced
            although ranks exchange messages in it (:func:`_overlap`); 0: none.
    """

    actions: Sequence[Action]
    batches: Mapping[int, MicroBatch | None]
    backward_order: Callable[[], list[list[int]]]
    alone: bool = False
    overlap: Callable[[], float] = lambda: 0.0


def plan_program(
    plan: StepPlan, rank: int, *, expert: int = 1, training: bool = True, queue: bool = False
) -> StepProgram:
    """Program of a rank that holds all layers, or the same share of each. Local.

    Where ``expert`` neighbouring ranks share experts, micro-batches run in waves. Each has a wave after those of all
    earlier micro-batches of its ranks, so that a rank has at most one in a wave and keeps the plan's order. In a wave
    the ranks of a group that have a micro-batch need all others of the group in every layer with experts; a wave in
    which none has one is left out for the group. All passes of a wave are of one kind: slices, which first run forward
    only, have waves of their own.

    No deadlock: a rank's operations are ordered by (action, pass, layer), and so are those of all ranks with which it
    shares experts or a micro-batch; so of all operations that have not run, the first one has all its ranks waiting.

    Args:
        training: whether there are backward passes, before which slices run forward again.
        queue: the rank takes micro-batches of the plan's queue after those that are bound to it.
    """
    if expert == 1:
        own = fixed_for_rank(plan, rank) if queue else plan.for_rank(rank)
        numbered = [(batch.index, [batch]) for batch in own]
    else:
        numbered = list(enumerate(make_waves(plan.micro_batches, plan.slices)))
    group = range(rank // expert * expert, (rank // expert + 1) * expert)
    number_of = {batch.index: number for number, wave in numbered for batch in wave}
    waves = [wave for _, wave in numbered]
    actions = [
        Action(KEEP if keeps else WHOLE, Pass(number_of[wave[0].index], 0, not keeps))
        for wave, keeps in (in_turns(waves, plan.slices) if training else [(wave, False) for wave in waves])
        if any(each in group for batch in wave for each in batch.ranks)
    ]
    batches = {number: next((batch for batch in wave if rank in batch.ranks), None) for number, wave in numbered}
    last = batches[actions[-1].done.micro_batch] if actions and expert == 1 and not queue else None
    if queue:
        actions.append(Action(TAKE, Pass(-1, 0, True)))
    alone = last is not None and len(last.ranks) == 1

    def overlap() -> float:
        if queue:
            return 0.0
        if expert == 1:
            rows, bounds = plan.table.rows_by_rank(plan.num_ranks)
            ends = np.where(np.diff(bounds) > 0, bounds[1:], 0)
            return _overlap(plan.table.predicted_s, plan.table.group_sizes(), np.append(rows, -1)[ends - 1], rank)
        seconds, sizes, last = list[float](), list[int](), np.full(plan.num_ranks, -1)
        for wave, _ in in_turns(make_waves(plan.micro_batches, plan.slices), plan.slices):
            for together, groups in joined_batches(wave, expert):
                last.reshape(-1, expert)[groups] = len(sizes)
                sizes.append(len(groups) * expert)
                seconds.append(max(batch.predicted_s for batch in together))
        return _overlap(np.array(seconds), np.array(sizes), last, rank)

    return StepProgram(actions, batches, partial(_backward_order, plan, expert), alone, overlap)


def _overlap(seconds: NDArray[np.float64], sizes: NDArray[np.int64], last: NDArray[np.int64], rank: int) -> float:
    """The share of a rank's last backward pass, from its end, beside which the gradients may be reduced.

    A rank's operations run in the order in which it calls them, so what its last pass exchanges after the first
    reduction waits until all other ranks have come to that, too. This can neither block for ever nor cost time, where
    all ranks of each last pass have it as their last one, and begin to reduce when as much of it is left as the
    shortest last pass of all ranks takes. Otherwise reductions begin after the pass.

    Args:
        seconds: of micro-batches, or of those that wait for each other.
        sizes: the number of ranks of each.
        last: for each HDP rank, the number of its last backward pass among these; -1: it has none.
    """
    rows = last[last >= 0]
    if last[rank] < 0:
        return 0.0
    seconds = np.maximum(seconds, _SHORTEST_S)
    shared = np.bincount(rows)[rows] == sizes[rows]
    return float(np.where(shared, seconds[rows], 0.0).min() / seconds[last[rank]])


def _backward_order(plan: StepPlan, expert: int) -> list[list[int]]:
    """The HDP ranks in the order in which their backward passes are to end."""
    free = [0.0] * plan.num_ranks
    ends: list[tuple[float, int, int]] = []
    waves = [([each], False) for each in plan.micro_batches]
    if expert > 1:
        waves = in_turns(make_waves(plan.micro_batches, plan.slices), plan.slices)
    for wave, (batches, keeps) in enumerate(waves):
        began, ran = list(free), set()
        for batch in batches:
            groups = {rank // expert for rank in batch.ranks}
            ranks = [rank for group in groups for rank in range(group * expert, (group + 1) * expert)]
            end = max(began[rank] for rank in ranks) + max(batch.predicted_s, _SHORTEST_S)
            for rank in ranks:
                free[rank] = max(free[rank], end)
            if not keeps:  # which has a backward pass
                ran.update(ranks)
        ends += [(free[rank], wave, rank) for rank in ran]
    return [[rank for *_, rank in sorted(ends)]]


def pipeline_program(
    schedule: PipelineSchedule, waves: PlannedWaves, rank: int, stage: int, *, training: bool = True
) -> StepProgram:
    """Program of the device with one stage of one HDP rank. Local.

    Args:
        schedule: of ``waves.plan``.
        waves: of the step's plan, see :func:`hdpcomm.plan.waves.plan_waves`.
    """
    devices, handed = schedule.devices, schedule.handed
    batches = waves.of_rank(rank)
    own = np.isin(schedule.passes[:, 0], np.array(list(batches), dtype=np.int32))
    numbers = np.flatnonzero(own & ((schedule.alone == -1) | (schedule.alone == rank)))
    rows = zip(numbers.tolist(), handed[numbers].tolist(), schedule.passes[numbers].tolist(), strict=True)
    actions: list[tuple[tuple[int, int, int], Action]] = []
    """With their places: a message that is handed on when n passes have begun comes before pass number n."""
    for number, place, (index, model_stage, kind) in rows:
        done = Pass(index, model_stage, kind != 0, kind == 2)
        if done.backward and not training:
            continue
        device = done.stage % devices
        following = done.stage - 1 if done.backward else done.stage + 1
        consumer = following % devices if 0 <= following < schedule.stages and not done.weights else device
        if device == stage:
            actions.append(((number, 1, 0), Action(RUN, done)))
        if consumer != device and stage in (device, consumer):
            message = Action(SEND, done, consumer) if device == stage else Action(RECEIVE, done, device)
            actions.append(((place, 0, number), message))

    def backward_order() -> list[list[int]]:
        groups = {batch.index: batch.ranks for batch in waves.plan.micro_batches}
        rows = zip(handed.tolist(), schedule.passes.tolist(), strict=True)
        ends = sorted((end, place, index, at) for place, (end, (index, at, kind)) in enumerate(rows) if kind == 1)
        own = range(stage, schedule.stages, devices)
        return [[rank for *_, index, at in ends if at == chunk for rank in groups[index]] for chunk in own]

    def overlap() -> float:
        table, last = waves.plan.table, np.full((waves.plan.num_ranks, 3), (-1, 0, 1))
        for index, at, kind in schedule.passes[schedule.passes[:, 1] % devices == stage].tolist():
            row = int(np.searchsorted(table.index, index))
            last[table.ranks[table.rank_bounds[row] : table.rank_bounds[row + 1]]] = row, at, kind
        ends = (last[:, 1:] == (0, 1)).all()  # else a message, or gradients of weights, may follow
        return _overlap(table.predicted_s, table.group_sizes(), last[:, 0], rank) if ends else 0.0

    in_order = [action for _, action in sorted(actions, key=lambda each: each[0])]
    return StepProgram(in_order, batches, backward_order, overlap=overlap)

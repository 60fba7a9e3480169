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
from dataclasses import dataclass, replace
from functools import partial

from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MemoryModel, MicroBatch, StepPlan
from hdpcomm.plan.pipeline_schedule import Pass, PipelineSchedule
from hdpcomm.plan.queue import fixed_for_rank
from hdpcomm.plan.waves import PlannedWaves, in_turns, make_waves, plan_waves

__all__ = [
    "Action",
    "StepProgram",
    "check_programs",
    "make_program",
    "make_programs",
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

    def __str__(self) -> str:
        if self.kind in (WHOLE, KEEP):
            return f"{self.kind} micro-batch {self.done.micro_batch}"
        where = "" if self.kind == RUN else f" {'to' if self.kind == SEND else 'from'} stage {self.peer}"
        return f"{self.kind} {self.done}{where}"


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The actions of one device in a step.

    Attributes:
        batches: by the number that passes have, the micro-batch of this rank, or ``None``: passes without tokens, in
            which other ranks need its experts.
        backward_order: for each chunk of the model on this rank, the HDP ranks in the order in which their backward
            passes are to end, each as often as it has some.
        alone: no other HDP rank takes part in the last action.
    """

    actions: Sequence[Action]
    batches: Mapping[int, MicroBatch | None]
    backward_order: Callable[[], list[list[int]]]
    alone: bool = False


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
    return StepProgram(actions, batches, partial(_backward_order, plan, expert), alone)


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
    actions = make_program(schedule, waves.plan, rank, stage)
    if not training:
        actions = tuple(action for action in actions if not action.done.backward)

    def backward_order() -> list[list[int]]:
        groups = {batch.index: batch.ranks for batch in waves.plan.micro_batches}
        rows = zip(schedule.places_of_messages().tolist(), schedule.passes.tolist(), strict=True)
        ends = sorted((end, place, index, stage) for place, (end, (index, stage, kind)) in enumerate(rows) if kind == 1)
        own = range(stage, schedule.stages, schedule.devices)
        return [[rank for *_, index, at in ends if at == chunk for rank in groups[index]] for chunk in own]

    return StepProgram(actions, waves.of_rank(rank), backward_order)


def make_program(schedule: PipelineSchedule, plan: StepPlan, rank: int, stage: int) -> tuple[Action, ...]:
    """Program of the device of one stage of one HDP rank. Local.

    Raises: InvalidUsage if there is no such rank or stage.
    """
    devices = schedule.devices
    if not 0 <= stage < devices:
        raise InvalidUsage(f"stage {stage} asked of a pipeline of {devices}: give 0 to {devices - 1}")
    numbers = schedule.rows_of(plan, rank)
    handed = schedule.places_of_messages()[numbers]
    actions: list[tuple[tuple[int, int, int], Action]] = []
    """With their places: a message that is handed on when n passes have begun comes before pass number n."""
    for number, place, row in zip(numbers.tolist(), handed.tolist(), schedule.passes[numbers].tolist(), strict=True):
        done = Pass.of_row(row)
        device = done.stage % devices
        following = done.stage - 1 if done.backward else done.stage + 1
        consumer = following % devices if 0 <= following < schedule.stages and not done.weights else device
        if device == stage:
            actions.append(((number, 1, 0), Action(RUN, done)))
        if consumer != device and stage in (device, consumer):
            message = Action(SEND, done, consumer) if device == stage else Action(RECEIVE, done, device)
            actions.append(((place, 0, number), message))
    return tuple(action for _, action in sorted(actions, key=lambda each: each[0]))


Programs = Mapping[tuple[int, int], Sequence[Action]]
"""By (HDP rank, stage of the device)."""


def make_programs(schedule: PipelineSchedule, plan: StepPlan) -> dict[tuple[int, int], tuple[Action, ...]]:
    """The programs of all devices. Local."""
    return {
        (rank, stage): make_program(schedule, plan, rank, stage)
        for rank in range(plan.num_ranks)
        for stage in range(schedule.devices)
    }


def check_programs(
    programs: Programs,
    plan: StepPlan,
    *,
    stages: int,
    split: bool = False,
    memory: MemoryModel | None = None,
    waves: PlannedWaves | None = None,
) -> None:
    """Proves that programs run to their end: runs them symbolically, with messages that block until both sides have
    come to them, and passes that wait for all ranks of their micro-batch. Local.

    It needs nothing of how the programs were made; a step of programs by hand is checked as well.

    Args:
        stages: of the model; stage s runs on device s modulo the devices of a pipeline.
        split: backward passes are split; then each device also computes the gradients of weights of its own.
        memory: checks that devices never hold more activations than they have room for.
        waves: where ``plan`` is of these (:func:`hdpcomm.plan.waves.plan_waves`), for what each rank runs in them.

    Raises:
        InvalidUsage: devices wait for each other in a circle (says for what), a pass runs before what it needs, a
            message has no counterpart, a pass is missing or doubled, or a device holds too much.
    """
    _SymbolicRun(programs, plan, stages, split).finish()
    if memory is not None:
        _check_memory(programs, waves or plan_waves(plan, 1), memory, stages // _devices(programs), split)


def _devices(programs: Programs) -> int:
    """Devices of each rank's pipeline."""
    return 1 + max((stage for _, stage in programs), default=0)


def _check_memory(programs: Programs, waves: PlannedWaves, memory: MemoryModel, chunks: int, split: bool) -> None:
    """Counts the tokens of each device, which a micro-batch takes from its forward pass to its last one."""
    devices = _devices(programs)
    room = memory.capacity * (devices + (devices - 1) / chunks if chunks > 1 else devices)
    tokens = {
        (rank, number): (1 - batch.offload_ratio * memory.offloadable) * batch.tokens_held / chunks
        for rank in {rank for rank, _ in programs}
        for number, batch in waves.of_rank(rank).items()
        if batch is not None
    }
    for (rank, stage), program in programs.items():
        held = 0.0
        for action in program:
            done = action.done
            if action.kind != RUN or (split and done.backward and not done.weights):
                continue
            held += (-1 if done.backward else 1) * tokens.get((rank, done.micro_batch), 0.0)
            if held > room * (1 + 1e-9):
                raise InvalidUsage(
                    f"rank {rank}, stage {stage} holds {held:.0f} tokens after {action}, and has room for {room:.0f} "
                    f"(capacity {memory.capacity}, {devices} device(s)): plan again"
                )


class _SymbolicRun:
    """One action at a time; which ones come first makes no difference to where it ends."""

    def __init__(self, programs: Programs, plan: StepPlan, stages: int, split: bool) -> None:
        self.programs, self.stages, self.split = programs, stages, split
        self.devices = _devices(programs)
        self.groups = {batch.index: batch.ranks for batch in plan.micro_batches}
        self.beside = {
            (index, backward): int(plan.table.index[each.rows[other]])
            for index, each in plan.slices.items()
            for backward, other in ((False, each.number - 1), (True, each.number + 1))
            if 0 <= other < len(each.rows)
        }
        """By micro-batch and way: the slice whose pass through the same stage comes first."""
        self.place = dict.fromkeys(programs, 0)
        self.held: set[tuple[int, int, Pass]] = set()
        """(rank, device stage, pass): what the pass gave is there."""
        self.ran: set[Pass] = set()
        self.weights: set[tuple[int, Pass]] = set()
        """(rank, pass): gradients of weights that have been computed."""

    def finish(self) -> None:
        ready = list(self.programs)
        while ready:
            device = ready.pop()
            partners = self._partners(device)
            if partners:
                for each in partners:
                    self.place[each] += 1
                ready.extend(partners)
        stuck = {device: at for device, at in self.place.items() if at < len(self.programs[device])}
        if stuck:
            told = [
                f"rank {rank}, stage {stage}: {self.programs[rank, stage][at]}"
                for (rank, stage), at in sorted(stuck.items())
            ]
            raise InvalidUsage(
                f"the pipelines would wait for ever; {len(stuck)} devices wait in a circle or for something that "
                f"nobody does: {'; '.join(told[:6])}{' ...' if len(told) > 6 else ''}"
            )
        wanted = 2 * self.stages * len(self.groups)
        if len(self.ran) != wanted:
            raise InvalidUsage(
                f"the programs run {len(self.ran)} passes, and {len(self.groups)} micro-batches through {self.stages} "
                f"stages have {wanted}"
            )
        wanted = self.stages * sum(map(len, self.groups.values())) if self.split else 0
        if len(self.weights) != wanted:
            raise InvalidUsage(
                f"the programs compute gradients of weights {len(self.weights)} times, and "
                f"{'split' if self.split else 'whole'} backward passes leave them {wanted} times"
            )

    def _next(self, device: tuple[int, int]) -> Action | None:
        program = self.programs.get(device, ())
        at = self.place.get(device, 0)
        return program[at] if at < len(program) else None

    def _partners(self, device: tuple[int, int]) -> list[tuple[int, int]]:
        """The devices that take part in the next action of this one, if all have come to it; it is done then."""
        rank, stage = device
        action = self._next(device)
        if action is None:
            return []
        if action.kind == RUN:
            return self._run(action, device)
        if action.kind in (WHOLE, KEEP):
            return self._run_whole(action, device)
        peer = (rank, action.peer)
        other = Action(RECEIVE if action.kind == SEND else SEND, action.done, stage)
        if peer == device or self._next(peer) != other:
            return []
        sender, receiver = (device, peer) if action.kind == SEND else (peer, device)
        if (*sender, action.done) not in self.held:
            raise InvalidUsage(f"rank {rank}, stage {sender[1]}: {action} comes before that pass has run there")
        self.held.add((*receiver, action.done))
        return [device, peer]

    def _run(self, action: Action, device: tuple[int, int]) -> list[tuple[int, int]]:
        done = action.done
        group = [(member, device[1]) for member in self.groups.get(done.micro_batch, ())]
        if device not in group or done.stage % self.devices != device[1] or not 0 <= done.stage < self.stages:
            raise InvalidUsage(f"rank {device[0]}, stage {device[1]}: {action} does not belong there")
        if done.weights:
            return self._compute_weights(action, device)
        if any(self._next(member) != action for member in group):
            return []
        if done in self.ran:
            raise InvalidUsage(f"rank {device[0]}, stage {device[1]}: {action} comes twice")
        for needed in _needed(done, self.stages):
            for member in group:
                if (*member, needed) not in self.held:
                    raise InvalidUsage(
                        f"rank {member[0]}, stage {member[1]}: {action} comes before what the "
                        f"{'backward' if needed.backward else 'forward'} pass of stage {needed.stage} gives it"
                    )
        other = self.beside.get((done.micro_batch, done.backward))
        if other is not None and replace(done, micro_batch=other) not in self.ran:
            raise InvalidUsage(
                f"rank {device[0]}, stage {device[1]}: {action} comes before that of the slice in micro-batch {other}"
            )
        self.ran.add(done)
        self.held.update((*member, done) for member in group)
        return group

    def _run_whole(self, action: Action, device: tuple[int, int]) -> list[tuple[int, int]]:
        """Runs a micro-batch through all layers, once all of its ranks have come to it."""
        index, backward = action.done.micro_batch, action.kind == WHOLE
        group = [(member, 0) for member in self.groups.get(index, ())]
        if device not in group or self.stages > 1:
            raise InvalidUsage(f"rank {device[0]}: {action} does not belong there")
        if any(self._next(member) != action for member in group):
            return []
        if action.done in self.ran:
            raise InvalidUsage(f"rank {device[0]}: {action} comes twice")
        ways = {False, backward}
        for way in ways:
            other = self.beside.get((index, way))
            if other is not None and Pass(other, 0, way) not in self.ran:
                raise InvalidUsage(f"rank {device[0]}: {action} comes before that of the slice in micro-batch {other}")
        self.ran.update(Pass(index, 0, way) for way in ways)
        return group

    def _compute_weights(self, action: Action, device: tuple[int, int]) -> list[tuple[int, int]]:
        """Checks and notes the gradients of weights that one device computes; no other device waits for them."""
        done, (rank, stage) = action.done, device
        if (rank, done) in self.weights:
            raise InvalidUsage(f"rank {rank}, stage {stage}: {action} comes twice")
        if (*device, replace(done, weights=False)) not in self.held:
            raise InvalidUsage(f"rank {rank}, stage {stage}: {action} comes before the backward pass that leaves them")
        self.weights.add((rank, done))
        return [device]


def _needed(done: Pass, stages: int) -> list[Pass]:
    if not done.backward:
        return [Pass(done.micro_batch, done.stage - 1, False)] if done.stage else []
    own = [Pass(done.micro_batch, done.stage, False)]
    return own if done.stage == stages - 1 else [*own, Pass(done.micro_batch, done.stage + 1, True)]

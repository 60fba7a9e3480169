"""Proof that the programs of a step run to their end, by running them symbolically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hdpcomm.errors import InvalidUsage
from hdpcomm.parallel import Action, pipeline_program
from hdpcomm.parallel.program import KEEP, RECEIVE, RUN, SEND, WHOLE
from hdpcomm.plan import MemoryModel, Pass, PipelineSchedule, StepPlan
from hdpcomm.plan.waves import PlannedWaves, plan_waves

__all__ = ["action_text", "check_programs", "pipeline_programs", "schedule_by_hand", "stage_passes"]

Programs = Mapping[tuple[int, int], Sequence[Action]]
"""By (HDP rank, stage of the device)."""


def schedule_by_hand(stages: int, passes: Any) -> PipelineSchedule:
    """A schedule of whole backward passes whose messages leave right after their passes have begun."""
    rows = np.array(passes, dtype=np.int32)
    return PipelineSchedule(stages, rows, np.arange(1, len(rows) + 1), np.full(len(rows), -1, dtype=np.int32))


def pipeline_programs(schedule: PipelineSchedule, plan: StepPlan) -> dict[tuple[int, int], tuple[Action, ...]]:
    """The actions of all devices."""
    waves = plan_waves(plan, 1)
    return {
        (rank, stage): tuple(pipeline_program(schedule, waves, rank, stage).actions)
        for rank in range(plan.num_ranks)
        for stage in range(schedule.devices)
    }


def stage_passes(schedule: PipelineSchedule, plan: StepPlan, rank: int, stage: int) -> list[Pass]:
    """Passes of one stage of one rank, in order."""
    actions = pipeline_program(schedule, plan_waves(plan, 1), rank, stage % schedule.devices).actions
    return [action.done for action in actions if action.kind == RUN and action.done.stage == stage]


def _pass_text(done: Pass) -> str:
    way = "weight gradients" if done.weights else "backward pass" if done.backward else "forward pass"
    return f"{way} of micro-batch {done.micro_batch}, stage {done.stage}"


def action_text(action: Action) -> str:
    if action.kind in (WHOLE, KEEP):
        return f"{action.kind} micro-batch {action.done.micro_batch}"
    where = "" if action.kind == RUN else f" {'to' if action.kind == SEND else 'from'} stage {action.peer}"
    return f"{action.kind} {_pass_text(action.done)}{where}"


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
                    f"rank {rank}, stage {stage} holds {held:.0f} tokens after {action_text(action)}, and has "
                    f"room for {room:.0f} (capacity {memory.capacity}, {devices} device(s)): plan again"
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
                f"rank {rank}, stage {stage}: {action_text(self.programs[rank, stage][at])}"
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
            raise InvalidUsage(
                f"rank {rank}, stage {sender[1]}: {action_text(action)} comes before that pass has run there"
            )
        self.held.add((*receiver, action.done))
        return [device, peer]

    def _run(self, action: Action, device: tuple[int, int]) -> list[tuple[int, int]]:
        done = action.done
        group = [(member, device[1]) for member in self.groups.get(done.micro_batch, ())]
        if device not in group or done.stage % self.devices != device[1] or not 0 <= done.stage < self.stages:
            raise InvalidUsage(f"rank {device[0]}, stage {device[1]}: {action_text(action)} does not belong there")
        if done.weights:
            return self._compute_weights(action, device)
        if any(self._next(member) != action for member in group):
            return []
        if done in self.ran:
            raise InvalidUsage(f"rank {device[0]}, stage {device[1]}: {action_text(action)} comes twice")
        for needed in _needed(done, self.stages):
            for member in group:
                if (*member, needed) not in self.held:
                    raise InvalidUsage(
                        f"rank {member[0]}, stage {member[1]}: {action_text(action)} comes before what the "
                        f"{'backward' if needed.backward else 'forward'} pass of stage {needed.stage} gives it"
                    )
        other = self.beside.get((done.micro_batch, done.backward))
        if other is not None and replace(done, micro_batch=other) not in self.ran:
            raise InvalidUsage(
                f"rank {device[0]}, stage {device[1]}: {action_text(action)} comes before that of the slice in "
                f"micro-batch {other}"
            )
        self.ran.add(done)
        self.held.update((*member, done) for member in group)
        return group

    def _run_whole(self, action: Action, device: tuple[int, int]) -> list[tuple[int, int]]:
        """Runs a micro-batch through all layers, once all of its ranks have come to it."""
        index, backward = action.done.micro_batch, action.kind == WHOLE
        group = [(member, 0) for member in self.groups.get(index, ())]
        if device not in group or self.stages > 1:
            raise InvalidUsage(f"rank {device[0]}: {action_text(action)} does not belong there")
        if any(self._next(member) != action for member in group):
            return []
        if action.done in self.ran:
            raise InvalidUsage(f"rank {device[0]}: {action_text(action)} comes twice")
        ways = {False, backward}
        for way in ways:
            other = self.beside.get((index, way))
            if other is not None and Pass(other, 0, way) not in self.ran:
                raise InvalidUsage(
                    f"rank {device[0]}: {action_text(action)} comes before that of the slice in micro-batch {other}"
                )
        self.ran.update(Pass(index, 0, way) for way in ways)
        return group

    def _compute_weights(self, action: Action, device: tuple[int, int]) -> list[tuple[int, int]]:
        """Checks and notes the gradients of weights that one device computes; no other device waits for them."""
        done, (rank, stage) = action.done, device
        if (rank, done) in self.weights:
            raise InvalidUsage(f"rank {rank}, stage {stage}: {action_text(action)} comes twice")
        if (*device, replace(done, weights=False)) not in self.held:
            raise InvalidUsage(
                f"rank {rank}, stage {stage}: {action_text(action)} comes before the backward pass that leaves them"
            )
        self.weights.add((rank, done))
        return [device]


def _needed(done: Pass, stages: int) -> list[Pass]:
    if not done.backward:
        return [Pass(done.micro_batch, done.stage - 1, False)] if done.stage else []
    own = [Pass(done.micro_batch, done.stage, False)]
    return own if done.stage == stages - 1 else [*own, Pass(done.micro_batch, done.stage + 1, True)]

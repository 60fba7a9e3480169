"""The passes of pipelines: the program of one device, and messages to the stages beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hdpcomm.attention import BalancedPack, SequenceSlice, SlicedSequence
from hdpcomm.attention import positions as positions_of
from hdpcomm.models.moe import refuse_trees
from hdpcomm.models.weight_gradients import WeightGradients
from hdpcomm.parallel.program import RECEIVE, RUN, Action, make_program
from hdpcomm.plan.waves import PlannedWaves, plan_waves
from hdpcomm.train.micro_batch import micro_batch_loss
from hdpcomm.train.passes import Loss, Sliced, StepInputs, packed_shard
from hdpcomm.train.shards import PackedShard, empty_shard, pack_of
from hdpcomm.train.tree_shards import holds_trees

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator, Work
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.parallel.stages import Stage
    from hdpcomm.plan import MicroBatch, Planner, StepPlan
    from hdpcomm.plan.micro_batch import PlannedSlice
    from hdpcomm.plan.pipeline_schedule import Pass, PipelineSchedule

__all__ = ["PipelinePasses", "StageRunner"]


class PipelinePasses:
    """The passes of this rank's stages, in the order in which the planner's schedule has simulated them
    (:meth:`hdpcomm.plan.Planner.schedule`): it is checked, and compared between the ranks, before anything runs.

    Pipelines may have different numbers of micro-batches; inside a stage the ranks of a micro-batch run ring attention
    as without pipelines.

    Args:
        stages: of the model, on this device, in order.
        planner: makes the schedule. With ``split_backward=True`` in its cluster, weight gradients of linear layers are
            computed where the device would wait (:class:`hdpcomm.models.weight_gradients.WeightGradients`).
        loss: in place of the model's own, see :class:`hdpcomm.train.Trainer`.

    Source: ByteScale, arXiv 2502.21231, sections 5.3 and 6.2 (PP-Balance).
    """

    bytes_elsewhere = 0

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, planner: Planner, loss: Loss | None = None) -> None:
        self._stages, self._mesh, self._planner, self._loss = stages, mesh, planner, loss
        self.bytes_sent = 0
        self._planned: tuple[PipelineSchedule, PlannedWaves] | None = None
        self._weights: WeightGradients | None = None
        """Weight gradients that split backward passes leave for later."""
        if planner.cluster.split_backward:
            self._weights = WeightGradients()
            self._weights.watch(block for stage in stages for block in stage.blocks)

    def agree(self, plan: StepPlan) -> bytes:
        """Makes and checks the schedule; its order is what all ranks must have alike. Local."""
        self._planner.validate(plan)
        waves = plan_waves(plan, self._mesh.expert)
        schedule = self._planner.schedule(waves.plan)
        schedule.validate(waves.plan)
        self._planned = schedule, waves
        order: bytes = schedule.passes.tobytes() + schedule.places_of_messages().tobytes()
        return order if schedule.alone is None else order + schedule.alone.tobytes()

    def open(self, _: StepPlan) -> AbstractContextManager[object]:
        """Nothing: pipelines run a plan as it is."""
        return nullcontext()

    def plan_as_run(self, plan: StepPlan) -> StepPlan:
        """The plan as it is."""
        return plan

    def waited_s(self) -> tuple[float, float]:
        """See :class:`hdpcomm.train.passes.Passes`."""
        mesh = self._mesh
        return mesh.tensor_comm.waited_s(), mesh.expert_comm.waited_s() + mesh.pipeline_comm.waited_s()

    def run(self, step: StepInputs) -> Tensor:
        """See :class:`hdpcomm.train.passes.Passes`."""
        assert self._planned is not None
        (schedule, waves), mesh = self._planned, self._mesh
        program = make_program(schedule, waves.plan, mesh.hdp_rank, mesh.stage)
        if step.gradients is None:
            program = tuple(action for action in program if not action.done.backward)
        if self._weights is not None:
            self._weights.forget()
        batches = waves.of_rank(mesh.hdp_rank)
        runner = StageRunner(self._stages, mesh, step, batches, loss=self._loss, weights=self._weights)
        around = (
            nullcontext()
            if step.gradients is None
            else step.gradients.passes(lambda: None, partial(self._order, schedule, waves.plan))
        )
        with torch.set_grad_enabled(step.gradients is not None), around:
            runner.run(program)
        self.bytes_sent = runner.bytes_sent
        return runner.total if mesh.tensor_rank == 0 else torch.zeros_like(runner.total)

    def _order(self, schedule: PipelineSchedule, plan: StepPlan) -> list[list[int]]:
        """For each of this rank's stages, the HDP ranks in the order in which its backward passes end."""
        groups = {batch.index: batch.ranks for batch in plan.micro_batches}
        rows = zip(schedule.places_of_messages().tolist(), schedule.passes.tolist(), strict=True)
        ends = sorted((end, place, index, stage) for place, (end, (index, stage, kind)) in enumerate(rows) if kind == 1)
        own = range(self._mesh.stage, schedule.stages, self._mesh.pipeline)
        return [[rank for *_, index, at in ends if at == stage for rank in groups[index]] for stage in own]


class StageRunner:
    """One step on one device of a pipeline.

    Activations and their gradients go to the neighbours as they are, ``[local tokens, hidden]``, by messages whose
    sizes both sides know from the plan. Sends do not wait; a receive is posted as soon as the order of the program
    allows it and is waited for by the pass that needs it.

    Args:
        chunks: the stages of the model on this device, in order.
        step: what runs; its plan's ranks are those of ``mesh.hdp_comm``. ``fetch`` is called for this rank's sequences,
            only where the first or the last stage is.
        batches: what this rank works on, by the number that the program's passes have: a micro-batch of the step, or
            ``None``, for passes without tokens in which the others need its experts.
        loss: in place of the model's own, see :class:`hdpcomm.train.Trainer`.
        weights: where backward passes leave the gradients of weights, if they are split.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        mesh: Mesh,
        step: StepInputs,
        batches: Mapping[int, MicroBatch | None],
        *,
        loss: Loss | None,
        weights: WeightGradients | None = None,
    ) -> None:
        self.chunks, self.mesh, self.step, self.loss = chunks, mesh, step, loss
        self.weights = weights
        self.total = torch.zeros(2, dtype=torch.float64)
        """Summed loss and labels of the micro-batches whose last stage is here."""
        self.bytes_sent = 0
        """To the stages beside this device's."""
        self._batches = batches
        self._added_losses = loss is None and chunks[0].has_added_losses
        if self._added_losses:  # now, on all stages
            refuse_trees(step.planned.lengths)
        self._device = next(chunks[0].parameters()).device
        self._packs: dict[int, PackedShard] = {}
        self._slices = step.planned.plan.slices
        self._sliced: dict[tuple[int, int], SlicedSequence] = {}
        """By sequence and stage: what the layers have kept of the slices that ran."""
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        """By micro-batch and stage: input and output of the forward pass, and its routers' losses, until its backward
        pass has run."""
        self._given: dict[Pass, Tensor] = {}
        """Outputs of passes for a stage on the same device."""
        self._received: dict[Pass, tuple[Tensor, Work]] = {}
        self._sends: list[Work] = []

    def run(self, program: Sequence[Action]) -> None:
        """Runs a program to its end; this device's sends have ended then. Collective over the plan's pipelines.

        Under ``torch.no_grad()`` the program must have no backward passes.
        """
        pipeline = self.mesh.pipeline_comm
        for action in program:
            if action.kind == RUN:
                self._run(action.done)
                batch = self._batches[action.done.micro_batch]
                self.step.on_pass(None if batch is None else batch.index)
            elif action.kind == RECEIVE:
                buffer = self.chunks[0].boundary(self._pack(action.done.micro_batch).positions.numel())
                work = pipeline.exchange(recvs=[(buffer, action.peer)], async_op=True)
                self._received[action.done] = buffer, work
            else:
                self._sends = [work for work in self._sends if not _ended(work)]
                given = self._given.pop(action.done)
                self.bytes_sent += given.numel() * given.element_size()
                self._sends.append(pipeline.exchange([(given, action.peer)], async_op=True))
        for work in self._sends:
            work.wait()

    def _run(self, done: Pass) -> None:
        key = done.micro_batch, done.stage
        if done.backward and not done.weights and self.step.gradients is not None:
            self.step.gradients.begin_pass(done.stage // self.mesh.pipeline)
        if not done.backward:
            self._forward(done)
        elif self.weights is None:
            self._backward(done)
        elif done.weights:
            self.weights.compute(key)
        else:
            with self.weights.put_off(key):
                self._backward(done)

    def _forward(self, done: Pass) -> None:
        batch, chunk = self._batches[done.micro_batch], self._chunk(done.stage)
        pack, comm = self._kept(done), self._group(batch)
        x = pack.tokens if chunk.first else self._take(replace(done, stage=done.stage - 1)).requires_grad_()
        y: Any
        with nullcontext() if batch is None else self.step.around(batch.offload_ratio, pack.positions.numel()):
            if chunk.last:
                y = micro_batch_loss(chunk, replace(pack, tokens=x), comm, self.loss)
            else:
                labels = pack.labels if self._added_losses else None
                y = chunk(x, positions=pack.positions, cu_seqlens=pack.cu_seqlens, comm=comm, labels=labels)
        y, losses = y if isinstance(y, tuple) else (y, None)
        if torch.is_grad_enabled():
            self._open[done.micro_batch, done.stage] = x, y, losses
        if losses is not None:
            self.total[0] += float(losses.detach())
        if chunk.last:
            self.total += self.step.checked(batch, torch.stack((y.detach().double(), pack.trained.double())).cpu())
        else:
            self._given[done] = y.detach().contiguous()
        planned = self._planned(done)
        if planned is not None and planned.last and not torch.is_grad_enabled():
            del self._sliced[planned.sequence, done.stage]  # no backward pass needs it

    def _backward(self, done: Pass) -> None:
        chunk = self._chunk(done.stage)
        x, y, losses = self._open.pop((done.micro_batch, done.stage))
        if chunk.last:
            (y * self.step.scale).backward()  # type: ignore[no-untyped-call]
        else:
            gradient = self._take(replace(done, stage=done.stage + 1))
            roots = {y: gradient} if losses is None else {y: gradient, losses: torch.full_like(losses, self.step.scale)}
            roots = {root: upstream for root, upstream in roots.items() if root.requires_grad}
            if roots:  # not where all of the first stage is frozen
                torch.autograd.backward(list(roots), list(roots.values()))
        if self.step.gradients is not None:
            self.step.gradients.end_pass()
        if not chunk.first:
            self._given[done] = cast(Tensor, x.grad).contiguous()
        if not any(index == done.micro_batch for index, _ in self._open):
            self._packs.pop(done.micro_batch, None)
        planned = self._planned(done)
        if planned is not None and planned.number == 0:
            del self._sliced[planned.sequence, done.stage]

    def _take(self, needed: Pass) -> Tensor:
        """Output of a pass for this device, when it is there."""
        if needed in self._given:  # by another stage on this device
            return self._given.pop(needed)
        buffer, work = self._received.pop(needed)
        work.wait()
        return buffer

    def _chunk(self, stage: int) -> Stage:
        return self.chunks[stage // self.mesh.pipeline]

    def _group(self, batch: MicroBatch | None) -> Communicator:
        ranks = (self.mesh.hdp_rank,) if batch is None else batch.ranks
        return cast("Communicator", self.mesh.hdp_comm.subset(ranks))

    def _pack(self, index: int) -> PackedShard:
        found = self._packs.get(index)
        if found is None:
            found = self._packs[index] = self._packed(self._batches[index])
        return found

    def _planned(self, done: Pass) -> PlannedSlice | None:
        """The slice that this rank runs in a pass, if it is one."""
        batch = self._batches[done.micro_batch]
        return None if batch is None else self._slices.get(batch.index)

    def _kept(self, done: Pass) -> PackedShard:
        """The shard for one forward pass; of a slice, with what the stage has kept of those before it."""
        pack, planned = self._pack(done.micro_batch), self._planned(done)
        if planned is None:
            return pack
        key = planned.sequence, done.stage
        if key not in self._sliced:
            batch = self._batches[done.micro_batch]
            self._sliced[key] = self.step.sliced_sequence(planned, 0.0 if batch is None else batch.offload_ratio)
        return replace(pack, cu_seqlens=self._sliced[key].slice(planned.number))

    def _packed(self, batch: MicroBatch | None) -> PackedShard:
        if batch is None:
            return empty_shard(self._device)
        comm, ends = self._group(batch), any(chunk.first or chunk.last for chunk in self.chunks)
        trees = batch.index not in self._slices and holds_trees(batch, self.step.planned.lengths)
        if self._added_losses or ends or trees:
            return packed_shard(batch, self.step, comm, self._device, Sliced())
        lengths = (sequence.length for sequence in batch.sequences)
        pack: Tensor | BalancedPack | SequenceSlice = pack_of(lengths, comm.size, self.step.planned.plan.limit)
        if (planned := self._slices.get(batch.index)) is not None:
            pack = self.step.sliced_sequence(planned, 0.0).slice(planned.number)
        positions = positions_of(pack, rank=comm.rank, size=comm.size, device=self._device)
        return PackedShard(positions, positions, positions, pack)  # nothing in the middle reads tokens or labels


def _ended(work: Work) -> bool:
    """Raises: what the operation raised."""
    if not work.done():
        return False
    work.wait()
    return True

"""The forward and backward passes of a step, or of an evaluation: the program of this rank, action by action."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.attention import SequenceSlice, SlicedSequence
from hdpcomm.attention import positions as positions_of
from hdpcomm.comm import Communicator, Work
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import HostNumbers
from hdpcomm.models.compiled import refuse_compiled
from hdpcomm.models.media import MediaEncoder
from hdpcomm.models.mtp import MultiToken
from hdpcomm.models.recompute import WeightGradients
from hdpcomm.offload import ActivationOffload
from hdpcomm.parallel.program import KEEP, RECEIVE, RUN, SEND, WHOLE, StepProgram, pipeline_program, plan_program
from hdpcomm.parallel.stages import Stage
from hdpcomm.plan import MicroBatch, PlannedStep, Planner, StepPlan
from hdpcomm.plan.table import PlannedSlice
from hdpcomm.plan.waves import Pass, PipelineSchedule, PlannedWaves, plan_waves
from hdpcomm.train.losses.label_terms import LabelTerms
from hdpcomm.train.losses.shards import (
    Fetch,
    PackedShard,
    empty_shard,
    holds_trees,
    micro_batch_loss,
    pack_of,
    pack_shard,
    sequences_shard,
    tree_shard,
)
from hdpcomm.train.step.items import ENCODER, StepItems, text_alone
from hdpcomm.train.step.metrics import expert_loads, uncounted
from hdpcomm.train.step.queue import StepQueue
from hdpcomm.train.zero.gradients import Gradients

__all__ = ["Passes", "StepInputs"]

Loss = Callable[..., Tensor]
_Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the passes of a step.

    Attributes:
        planned: the plan, on which all ranks have agreed, and its lengths.
        fetch: reads sequences.
        scale: factor of the losses in backward passes.
        gradients: of the backward passes; ``None``: an evaluation, which has none.
        offload_context: context of the forward pass of a micro-batch, by its offload ratio and local tokens, and of a
            slice those of it and all before it.
        offload: takes what slices keep for later ones to host memory.
        on_pass: called after each pass, or pair of passes, with the index of its micro-batch; ``None``: one without
            tokens, which others needed; :data:`hdpcomm.train.step.items.ENCODER`: encoders of images.
        ends: no other passes of the step follow, so gradients may leave during the last one.
        terms: what the labels' losses are; ``None``: the model's own.
        not_finite: after the passes, the micro-batches on this rank whose loss is no finite number.
    """

    planned: PlannedStep
    fetch: Fetch
    scale: float = 1.0
    gradients: Gradients | None = None
    offload_context: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()
    offload: ActivationOffload | None = None
    on_pass: Callable[[int | None], object] = lambda _: None
    ends: bool = True
    terms: LabelTerms | None = None
    not_finite: list[int] = field(default_factory=list)


class Passes:
    """Runs this rank's part of steps: all layers of a model, or the stages of a pipeline that are here.

    What runs is the program of a step (:mod:`hdpcomm.parallel.program`). That of a pipeline follows the order that the
    planner's schedule has simulated (:meth:`hdpcomm.plan.Planner.schedule`), which is compared between the ranks
    before anything runs. Pipelines may have different numbers of micro-batches; inside a stage the ranks of a
    micro-batch run ring attention as without pipelines.

    Args:
        chunks: the model, cut for the tensor and expert ranks of ``mesh``; or this device's stages of it, in order.
        planner: of a pipeline, whose schedules it makes. With ``split_backward=True`` in its cluster, weight gradients
            of linear layers are computed where the device would wait
            (:class:`hdpcomm.models.recompute.WeightGradients`).
        loss: in place of the model's own, see :class:`hdpcomm.train.Trainer`.

    Attributes:
        bytes_sent: bytes of activations and gradients that this rank sent to other stages in the last step.
        bytes_elsewhere: bytes a step that this rank sends by other ways than the communicator.

    Source: ByteScale, arXiv 2502.21231, sections 5.3 and 6.2 (PP-Balance).
    """

    bytes_elsewhere = 0

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        planner: Planner | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.chunks, self.mesh, self.loss = list(chunks), mesh, loss
        self.device = next(chunks[0].parameters()).device
        self.alone = cast("Communicator", mesh.hdp_comm.subset([mesh.hdp_rank]))
        self.loads = [load for chunk in chunks for load in expert_loads(chunk)]
        self.bytes_sent = 0
        self.queue: StepQueue | None = None
        self.weights: WeightGradients | None = None
        """Weight gradients that split backward passes leave for later."""
        self.planner = planner
        if mesh.tensor * mesh.expert > 1:
            refuse_compiled(self.chunks, "tensor and expert ranks")
        if any(load.bias is not None for load in self.loads):
            refuse_compiled(self.chunks, "balance_routers()")
        self._scheduled: tuple[PipelineSchedule, PlannedWaves] | None = None
        if planner is not None and planner.cluster.split_backward:
            refuse_compiled(self.chunks, "split_backward=True")
            self.weights = WeightGradients()
            self.weights.watch(block for stage in cast("list[Stage]", self.chunks) for block in stage.blocks)

    def prepare(self, plan: StepPlan) -> bytes:
        """Makes the schedule of a pipeline; returns the bytes that all ranks must have alike beside the plan. Local."""
        if self.planner is None:
            return b""
        self.planner.validate(plan)
        waves = plan_waves(plan, self.mesh.expert, self.planner.memory.offloadable)
        schedule = self.planner.schedule(waves.plan)
        self._scheduled = schedule, waves
        return b"".join(each.tobytes() for each in (schedule.passes, schedule.handed, schedule.alone))

    def open(self, plan: StepPlan) -> AbstractContextManager[object]:
        """Context of a step from its passes to the agreement on its loss: the plan's queue, if it has one. Collective
        over the mesh."""
        mesh, self.queue = self.mesh, None
        if plan.queued and mesh.expert == 1 and self.planner is None:  # waves and pipelines run a plan as it is
            self.queue = StepQueue(plan, mesh.hdp_comm, mesh.tensor_comm)
        return self.queue or nullcontext()

    def executed_plan(self, plan: StepPlan) -> StepPlan:
        """The plan with the ranks that have run its micro-batches. Collective, inside of :meth:`open`."""
        queue, self.queue = self.queue, None
        return plan if queue is None else queue.plan_as_run()

    def waited_s(self) -> tuple[float, float]:
        """Seconds so far, of this rank: inside layers for ranks that share them; for ranks that share experts and for
        other stages of a pipeline."""
        mesh = self.mesh
        return mesh.tensor_comm.waited_s(), mesh.expert_comm.waited_s() + mesh.pipeline_comm.waited_s()

    def run(self, step: StepInputs) -> Tensor:
        """Runs this rank's passes; (summed loss, labels) of those whose last layers are here, fp64 ``[2]``. Collective
        over the mesh."""
        gradients = step.gradients
        program = self.program(step.planned.plan, training=gradients is not None)
        if self.weights is not None:
            self.weights.forget()
        context = nullcontext() if gradients is None else gradients.passes(lambda: self._backward_order(step, program))
        with torch.set_grad_enabled(gradients is not None), context:
            running = _Run(self, step, program)
            running.run()
            if running.items is not None and gradients is not None:
                gradients.begin_pass()
                running.items.backward()
                gradients.end_pass()
                step.on_pass(ENCODER)
        self.bytes_sent = running.bytes_sent
        # All tensor ranks have the total.
        return running.total if self.mesh.tensor_rank == 0 else torch.zeros_like(running.total)

    def _backward_order(self, step: StepInputs, program: StepProgram) -> Sequence[Sequence[int]]:
        """The HDP ranks in the order in which their backward passes end, with those of encoders at last."""
        order = program.backward_order()
        return order if step.planned.items is None else [[*own, *range(self.mesh.hdp)] for own in order]

    def take_ahead(self) -> Tensor:
        """(losses, labels) of multi-token prediction of this rank's passes since the last call, fp64 ``[2]``; all
        tensor ranks have the same, of which the first one counts."""
        mtp: MultiToken | None = getattr(self.chunks[0], "mtp", None)
        sums = torch.zeros(2, dtype=torch.float64) if mtp is None else mtp.take_sums()
        return sums if self.mesh.tensor_rank == 0 else torch.zeros_like(sums)

    def program(self, plan: StepPlan, *, training: bool) -> StepProgram:
        """This rank's program of a plan; of a pipeline, of the last that was prepared. Local."""
        mesh = self.mesh
        if self._scheduled is not None:
            schedule, waves = self._scheduled
            return pipeline_program(schedule, waves, mesh.hdp_rank, mesh.stage, training=training)
        return plan_program(
            plan, mesh.hdp_rank, expert=mesh.expert, training=training, queue=self.queue is not None
        )  # fmt: skip

    def shard_without_tokens(self) -> PackedShard:
        """For passes without tokens, which others need. Local."""
        return empty_shard(self.device)

    def run_whole(
        self,
        packed: PackedShard,
        comm: Communicator,
        step: StepInputs,
        context: AbstractContextManager[None],
        *,
        last: bool,  # noqa: ARG002 (of this rank; for subclasses)
    ) -> Tensor:
        """Forward and, in training, backward pass of a micro-batch through the model; (summed loss, labels) on the
        model's device, fp64 ``[2]``."""
        with context:
            loss = micro_batch_loss(self.chunks[0], packed, comm, self.loss)
        if step.gradients is not None:
            (loss * step.scale).backward()  # type: ignore[no-untyped-call]
            step.gradients.end_pass()
        return _loss_and_labels(loss, packed)


class _Run:
    """One step on one device.

    Between stages activations and their gradients go as they are, ``[local tokens, hidden]``, and beside them what
    routers add to the loss, by messages whose sizes both sides know from the plan. Sends do not wait; a receive is
    posted as soon as the order of the program allows it and is waited for by the pass that needs it.
    """

    def __init__(self, passes: Passes, step: StepInputs, program: StepProgram) -> None:
        self.passes, self.step, self.program = passes, step, program
        self.chunks, self.mesh = cast("list[Stage]", passes.chunks), passes.mesh
        self.total = torch.zeros(2, dtype=torch.float64)
        """Summed loss and labels of the micro-batches whose last layers are here, as far as they were read."""
        self._losses: deque[tuple[MicroBatch | None, HostNumbers]] = deque()
        """The losses that were not read yet."""
        self.bytes_sent = 0
        self._batches: Mapping[int, MicroBatch | None] = program.batches
        self._staged = passes.planner is not None
        self._added_losses = self._staged and passes.loss is None and self.chunks[0].has_added_losses
        mtp: MultiToken | None = None if step.gradients is None else getattr(self.chunks[0], "mtp", None)
        self._depths = 0 if mtp is None else mtp.depths
        if self._depths:  # now, on all ranks
            self._refuse_ahead()
        self.items: StepItems | None = None
        media: MediaEncoder | None = getattr(self.chunks[0], "media", None)
        self._fetch = step.fetch if media is None else text_alone(step.fetch)
        if step.planned.items is not None:
            assert media is not None  # checked
            self.items = StepItems(media, step.planned, step.fetch, self.mesh, passes.device)
            step.on_pass(ENCODER)
            self._fetch = self.items.fetch
        self._packs: dict[int, PackedShard] = {}
        """By number in the program, until the last pass of the micro-batch."""
        self._slices = step.planned.plan.slices
        self._sliced: dict[tuple[int, int], SlicedSequence] = {}
        """By sequence and stage: what the layers have kept of the slices that ran."""
        self._random: dict[int, list[Tensor]] = {}
        """By number: the states of torch's generators before a slice ran for the first time: dropout and noise of
        routers must be the same when it runs again."""
        self._open: dict[tuple[int, int], tuple[_Tensors, _Tensors]] = {}
        """By micro-batch and stage: inputs and outputs of the forward pass, until its backward pass has run."""
        self._given: dict[Pass, _Tensors] = {}
        """Outputs of passes for a stage on the same device."""
        self._received: dict[Pass, tuple[_Tensors, Work]] = {}
        self._sends: list[Work] = []

    def run(self) -> None:
        """Runs the program to its end; this device's sends have ended then."""
        pipeline = self.mesh.pipeline_comm
        count = len(self.program.actions)
        for place, action in enumerate(self.program.actions, 1):
            done = action.done
            if action.kind == WHOLE:
                self._run_whole(self._batches[done.micro_batch], done.micro_batch, last=place == count)
            elif action.kind == KEEP:
                self._keep(done.micro_batch)
            elif action.kind == RUN:
                self._run(done, last=place == count)
            elif action.kind == RECEIVE:
                pack, stage = self._pack(done.micro_batch), self.chunks[0]
                buffers: _Tensors = (stage.boundary(pack.positions.numel()),)
                if self._added_losses:
                    buffers += (stage.carried(pack.cu_seqlens),)
                work = pipeline.exchange(recvs=[(x, action.peer) for x in buffers], async_op=True)
                self._received[done] = buffers, work
            elif action.kind == SEND:
                self._sends = [work for work in self._sends if not _ended(work)]
                given = self._given.pop(done)
                self.bytes_sent += sum(x.nbytes for x in given)
                self._sends.append(pipeline.exchange([(x, action.peer) for x in given], async_op=True))
            else:
                queue = cast(StepQueue, self.passes.queue)
                for taken in queue:
                    self._run_whole(taken, -1, last=queue.ended and place == count)
                    self._read_losses()  # who takes the next one must have ended this one
                    self.step.on_pass(taken.index)
            if action.kind in (WHOLE, KEEP, RUN):
                batch = self._batches[done.micro_batch]
                self.step.on_pass(None if batch is None else batch.index)
        for work in self._sends:
            work.wait()
        self._read_losses()

    def _add(self, batch: MicroBatch | None, loss: Tensor) -> None:
        """Adds the (summed loss, labels) of a pass of a micro-batch, once the host has issued the next one."""
        self._losses.append((batch, HostNumbers(loss)))
        self._read_losses(but=1)

    def _read_losses(self, but: int = 0) -> None:
        while len(self._losses) > but:
            batch, numbers = self._losses.popleft()
            loss, labels = numbers.get()
            self.total += torch.tensor((loss, labels), dtype=torch.float64)
            if batch is not None and not math.isfinite(loss):
                self.step.not_finite.append(batch.index)

    # --- all layers at a time ----------------------------------------------------------------------------------------

    def _run_whole(self, batch: MicroBatch | None, number: int, *, last: bool) -> None:
        """``last``: of this rank's actions."""
        step = self.step
        if step.gradients is not None:
            self._begin_backward(step.gradients, 0, last=last, alone=self.program.alone or number < 0)
        packed, planned = self._shard(batch, number, 0), self._planned(batch)
        context: AbstractContextManager[None] = nullcontext()
        if batch is not None:
            until = 0 if planned is None else -(-planned.bounds[planned.number + 1] // len(batch.ranks))
            context = step.offload_context(batch.offload_ratio, packed.tokens.numel(), until)
        states = self._random.pop(number, None)
        if states is not None:
            context = _replaying(states, self.passes.device, context)
        self._add(batch, self.passes.run_whole(packed, self._group(batch), step, context, last=last))
        self._packs.pop(number, None)
        if planned is not None and (planned.last if step.gradients is None else planned.number == 0):
            del self._sliced[planned.sequence, 0]

    def _begin_backward(self, gradients: Gradients, chunk: int, *, last: bool, alone: bool) -> None:
        """``alone``: no other HDP rank takes part."""
        alone = alone and self.mesh.tensor == 1
        overlap = 0.0
        if last and self.step.ends and self.items is None:
            overlap = 1.0 if alone else self.program.overlap()
        gradients.begin_pass(chunk, overlap, alone)

    def _keep(self, number: int) -> None:
        """A forward pass of a slice for what later ones need of it: it runs again before its backward pass, so that
        the activations of one slice are there at a time. Without one: for others, without tokens."""
        batch, device = self._batches[number], self.passes.device
        planned = self._planned(batch)
        if planned is None or planned.last:
            batch = None
        packed = self._shard(batch, number, 0)
        if batch is not None:
            self._random[number] = _random_states(device)
        with torch.no_grad(), uncounted(self.passes.loads):
            micro_batch_loss(self.chunks[0], packed, self._group(batch), self.passes.loss)

    # --- a stage at a time -------------------------------------------------------------------------------------------

    def _run(self, done: Pass, *, last: bool) -> None:
        key, weights = (done.micro_batch, done.stage), self.passes.weights
        if done.backward and not done.weights and self.step.gradients is not None:
            chunk = done.stage // self.mesh.pipeline
            self._begin_backward(self.step.gradients, chunk, last=last, alone=False)
        if not done.backward:
            self._forward(done)
        elif weights is None:
            self._backward(done)
        elif done.weights:
            weights.compute(key)
        else:
            with weights.put_off(key):
                self._backward(done)

    def _forward(self, done: Pass) -> None:
        batch, chunk = self._batches[done.micro_batch], self._chunk(done.stage)
        pack, comm = self._shard(batch, done.micro_batch, done.stage), self._group(batch)
        inputs: _Tensors = (pack.tokens,)
        if not chunk.first:
            inputs = tuple(x.requires_grad_() for x in self._take(replace(done, stage=done.stage - 1)))
        x: Any = inputs if len(inputs) > 1 else inputs[0]
        pack = replace(pack, tokens=x)
        if pack.items is not None:
            x = replace(pack.items, tokens=x, embeddings=pack.items.embeddings if chunk.first else None)
            pack = replace(pack, items=x)
        y: Any
        with nullcontext() if batch is None else self.step.offload_context(batch.offload_ratio, pack.positions.numel()):
            if chunk.last or self._added_losses:
                y = micro_batch_loss(chunk, pack, comm, self.passes.loss)
            else:
                with pack.routing(chunk):
                    y = chunk(x, positions=pack.positions, cu_seqlens=pack.cu_seqlens, comm=comm)
        outputs = y if isinstance(y, tuple) else (y,)
        if torch.is_grad_enabled():
            self._open[done.micro_batch, done.stage] = inputs, outputs
        if chunk.last:
            self._add(batch, _loss_and_labels(y, pack))
        else:
            self._given[done] = tuple(x.detach().contiguous() for x in outputs)
        planned = self._planned(batch)
        if planned is not None and planned.last and not torch.is_grad_enabled():
            del self._sliced[planned.sequence, done.stage]  # no backward pass needs it

    def _backward(self, done: Pass) -> None:
        chunk = self._chunk(done.stage)
        inputs, outputs = self._open.pop((done.micro_batch, done.stage))
        if chunk.last:
            (outputs[0] * self.step.scale).backward()  # type: ignore[no-untyped-call]
        else:
            roots = dict(zip(outputs, self._take(replace(done, stage=done.stage + 1)), strict=True))
            roots = {root: upstream for root, upstream in roots.items() if root.requires_grad}
            if roots:  # not where all of the first stage is frozen
                torch.autograd.backward(list(roots), list(roots.values()))
        if self.step.gradients is not None:
            self.step.gradients.end_pass()
        if not chunk.first:
            self._given[done] = tuple(cast(Tensor, x.grad).contiguous() for x in inputs)
        if not any(index == done.micro_batch for index, _ in self._open):
            self._packs.pop(done.micro_batch, None)
        planned = self._planned(self._batches[done.micro_batch])
        if planned is not None and planned.number == 0:
            del self._sliced[planned.sequence, done.stage]

    def _take(self, needed: Pass) -> _Tensors:
        """Outputs of a pass for this device, when they are there."""
        if needed in self._given:  # by another stage on this device
            return self._given.pop(needed)
        buffers, work = self._received.pop(needed)
        work.wait()
        return buffers

    def _chunk(self, stage: int) -> Stage:
        return self.chunks[stage // self.mesh.pipeline]

    # --- shards ------------------------------------------------------------------------------------------------------

    def _group(self, batch: MicroBatch | None) -> Communicator:
        return self.passes.alone if batch is None else cast("Communicator", self.mesh.hdp_comm.subset(batch.ranks))

    def _planned(self, batch: MicroBatch | None) -> PlannedSlice | None:
        """The slice that a micro-batch is, if it is one."""
        return None if batch is None else self._slices.get(batch.index)

    def _slice(self, planned: PlannedSlice, batch: MicroBatch, stage: int) -> SequenceSlice:
        """A slice for one forward pass, with what the stage has kept of those before it."""
        key = planned.sequence, stage
        if key not in self._sliced:
            tree = self.step.planned.tree(planned.sequence)
            self._sliced[key] = SlicedSequence(
                planned.bounds, tree, offload=self.step.offload, ratio=batch.offload_ratio
            )
        return self._sliced[key].slice(planned.number)

    def _shard(self, batch: MicroBatch | None, number: int, stage: int) -> PackedShard:
        """The shard of a micro-batch for one forward pass."""
        if batch is None:
            return self.passes.shard_without_tokens().with_none_ahead(self._depths)
        if number < 0:  # of the queue: it runs once
            return self._packed(batch, None)
        pack, planned = self._pack(number), self._planned(batch)
        return pack if planned is None else replace(pack, cu_seqlens=self._slice(planned, batch, stage))

    def _pack(self, number: int) -> PackedShard:
        """The shard of a micro-batch for all of its passes."""
        found = self._packs.get(number)
        if found is None:
            batch = self._batches[number]
            if batch is None:
                return self.passes.shard_without_tokens().with_none_ahead(self._depths)
            planned = self._planned(batch)
            first = self.mesh.stage if self._staged else 0
            part = None if planned is None else self._slice(planned, batch, first)
            found = self._packs[number] = self._packed(batch, part)
        return found

    def _packed(self, batch: MicroBatch, part: SequenceSlice | None) -> PackedShard:
        """This rank's shard of a micro-batch; ``part``: the slice that it is. Local."""
        packed = self._packed_tokens(batch, part)
        return packed if self.items is None else self.items.add_to(packed, batch)

    def _packed_tokens(self, batch: MicroBatch, part: SequenceSlice | None) -> PackedShard:
        step, comm, device, plan = self.step, self._group(batch), self.passes.device, self.step.planned.plan
        where: dict[str, Any] = {"comm": comm, "device": device}
        lengths, planned = step.planned.lengths, self._planned(batch)
        places = [each.id for each in batch.sequences] if planned is None else [planned.sequence]
        trees = holds_trees(places, lengths)
        if self._staged and not (
            self._added_losses or (trees and part is None) or any(chunk.first or chunk.last for chunk in self.chunks)
        ):  # nothing in the middle reads tokens or labels
            pack = pack_of((each.length for each in batch.sequences), comm.size, plan.limit) if part is None else part
            positions = positions_of(pack, rank=comm.rank, size=comm.size, device=device)
            return PackedShard(positions, positions, positions, pack)
        if step.terms is not None:
            return step.terms.shard(places, part, plan, self._fetch, **where)
        if trees:
            return tree_shard(places, part, lengths, plan.fragments, self._fetch, **where)
        if planned is not None and part is not None:
            sequence = {planned.sequence: planned.bounds[-1]}
            return sequences_shard(part, sequence, self._fetch, depths=self._depths, **where)
        return pack_shard(batch, self._fetch, limit=plan.limit, depths=self._depths, **where)

    def _refuse_ahead(self) -> None:
        lengths = self.step.planned.lengths
        if holds_trees(range(len(lengths)), lengths) or self.step.terms is not None or self.passes.loss is not None:
            raise InvalidUsage(
                "the model has layers for multi-token prediction, which train by the model's own loss on sequences: a "
                "tree has several tokens at a place further ahead, and another loss= no labels; give neither, or a "
                "model without add_mtp()"
            )


def _loss_and_labels(loss: Tensor, packed: PackedShard) -> Tensor:
    return torch.stack((loss.detach().double(), packed.trained.double()))


def _ended(work: Work) -> bool:
    """Raises: what the operation raised."""
    if not work.done():
        return False
    work.wait()
    return True


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a model on the device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def _replaying(states: Sequence[Tensor], device: torch.device, context: AbstractContextManager[None]) -> Iterator[None]:
    """``context``, which draws as after :func:`_random_states`; afterwards the generators go on where they were."""
    with context, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield

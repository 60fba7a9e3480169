"""The forward and backward passes of a step, or of an evaluation: micro-batches in the plan's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from hdpcomm.attention import SlicedSequence
from hdpcomm.parallel.waves import Turn, waves_of
from hdpcomm.plan.queue import fixed_for_rank
from hdpcomm.plan.waves import Slices, in_turns, make_waves
from hdpcomm.train.expert_load import expert_loads, uncounted
from hdpcomm.train.label_terms import LabelTerms
from hdpcomm.train.micro_batch import micro_batch_loss
from hdpcomm.train.queue import StepQueue
from hdpcomm.train.shards import Fetch, PackedShard, empty_shard, no_tokens, pack_shard, pack_slice
from hdpcomm.train.tree_shards import holds_trees, pack_tree_slice, pack_trees

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.comm.mesh import Mesh
    from hdpcomm.offload import ActivationOffload
    from hdpcomm.plan import MicroBatch, PlannedStep, StepPlan
    from hdpcomm.plan.micro_batch import PlannedSlice

__all__ = ["MicroBatchPasses", "Passes", "ReducedGradients", "RunningSlices", "Sliced", "StepInputs", "packed_shard"]

Sliced = dict[int, SlicedSequence]
"""State that a model has kept of earlier slices, by sequence."""
Loss = Callable[..., Tensor]

_SHORTEST_S = 1e-9
"""Seconds of a micro-batch that a plan predicts no time for: its ranks end it after those before it."""


class ReducedGradients(Protocol):
    """Events of passes for the reduction of gradients: :class:`hdpcomm.train.Gradients`."""

    def passes(
        self, empty_pass: Callable[[], object], order: Callable[[], Sequence[Sequence[int]]], /
    ) -> AbstractContextManager[None]: ...
    def begin_pass(self, chunk: int = 0) -> None: ...
    def end_pass(self) -> None: ...
    def reduce_early(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the passes of a step.

    Attributes:
        planned: the plan, on which all ranks have agreed, and its lengths.
        fetch: reads sequences.
        scale: factor of the losses in backward passes.
        gradients: of the backward passes; ``None``: an evaluation, which has none.
        around: (offload ratio, local tokens) of a micro-batch, and of a slice those of it and all before it, to what
            surrounds its forward pass.
        offload: takes what slices keep for later ones to host memory.
        on_pass: called after each pass, or pair of passes, with the index of its micro-batch; ``None``: one without
            tokens, which others needed.
        ends: no other passes of the step follow, so gradients may leave during the last one.
        terms: what the labels' losses are; ``None``: the model's own.
        not_finite: after the passes, the micro-batches on this rank whose loss is no finite number.
    """

    planned: PlannedStep
    fetch: Fetch
    scale: float = 1.0
    gradients: ReducedGradients | None = None
    around: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()
    offload: ActivationOffload | None = None
    on_pass: Callable[[int | None], object] = lambda _: None
    ends: bool = True
    terms: LabelTerms | None = None
    not_finite: list[int] = field(default_factory=list)

    def sliced_sequence(self, planned: PlannedSlice, ratio: float) -> SlicedSequence:
        """For the slices of a sequence; ``ratio``: share of what they keep that goes to host memory."""
        tree = self.planned.tree(planned.sequence)
        return SlicedSequence(planned.bounds, tree, offload=self.offload, ratio=ratio)

    def checked(self, micro_batch: MicroBatch | None, loss: Tensor) -> Tensor:
        """The (summed loss, labels) of a micro-batch, which is noted if the loss is no finite number."""
        if micro_batch is not None and not math.isfinite(loss[0]):
            self.not_finite.append(micro_batch.index)
        return loss


class Passes(Protocol):
    """How the ranks of a mesh run a plan."""

    bytes_sent: int
    """Bytes of activations and gradients that this rank sent to other stages of its pipeline in the last step."""
    bytes_elsewhere: int
    """Bytes a step that this rank sends by other ways than the communicator."""

    def agree(self, plan: StepPlan, /) -> bytes:
        """Gets ready for a plan; gives what else its passes follow, which must be the same on all ranks. Local."""

    def open(self, plan: StepPlan) -> AbstractContextManager[object]:
        """Context of a step from its passes to the agreement on its loss. Collective."""

    def run(self, step: StepInputs) -> Tensor:
        """Runs this rank's passes; (summed loss, labels) of those whose last layers are here, fp64 ``[2]``."""

    def plan_as_run(self, plan: StepPlan) -> StepPlan:
        """The plan with the ranks that have run its micro-batches. Collective, inside of :meth:`open`."""

    def waited_s(self) -> tuple[float, float]:
        """Seconds so far, of this rank: inside layers for ranks that share them; for ranks that share experts and for
        other stages of a pipeline."""


@dataclass(frozen=True, slots=True)
class RunningSlices:
    """The sequences in slices of a step.

    Attributes:
        sliced: of those that run.
        packs: the shards of slices that will run again, by micro-batch.
        random: the states of torch's generators before these slices ran, by micro-batch: dropout and noise of routers
            must be the same when they run again.
    """

    planned: Slices
    sliced: Sliced = field(default_factory=Sliced)
    packs: dict[int, PackedShard] = field(default_factory=dict)
    random: dict[int, list[Tensor]] = field(default_factory=dict)


class MicroBatchPasses:
    """Forward and backward of one micro-batch after the other, on ranks that hold all layers.

    HDP ranks that share experts run their micro-batches in waves (:func:`hdpcomm.parallel.waves.waves_of`): who has
    none in one takes part in its passes with no tokens. With a queue (:class:`hdpcomm.train.queue.StepQueue`) a rank
    runs what the plan gives to it alone, then what it takes.

    Args:
        model: cut for the tensor and expert ranks of ``mesh``.
        loss: in place of the model's own, see :class:`hdpcomm.train.Trainer`.
    """

    bytes_sent = bytes_elsewhere = 0

    def __init__(self, model: nn.Module, mesh: Mesh, loss: Loss | None = None) -> None:
        self._model, self._mesh, self._loss = model, mesh, loss
        self._device = next(model.parameters()).device
        self._alone = cast("Communicator", mesh.hdp_comm.subset([mesh.hdp_rank]))
        self._queue: StepQueue | None = None
        self._loads = expert_loads(model)

    def agree(self, _: StepPlan) -> bytes:
        """Nothing but the plan tells what runs."""
        return b""

    def open(self, plan: StepPlan) -> AbstractContextManager[object]:
        """The queue of a plan, if it has one. Collective over the mesh."""
        mesh, self._queue = self._mesh, None
        if plan.queued and mesh.expert == 1:  # waves run a plan as it is
            self._queue = StepQueue(plan, mesh.hdp_comm, mesh.tensor_comm)
        return self._queue or nullcontext()

    def plan_as_run(self, plan: StepPlan) -> StepPlan:
        """See :meth:`hdpcomm.train.queue.StepQueue.plan_as_run`."""
        queue, self._queue = self._queue, None
        return plan if queue is None else queue.plan_as_run()

    def waited_s(self) -> tuple[float, float]:
        """See :class:`Passes`."""
        return self._mesh.tensor_comm.waited_s(), self._mesh.expert_comm.waited_s()

    def run(self, step: StepInputs) -> Tensor:
        """See :class:`Passes`."""
        total, gradients, plan = torch.zeros(2, dtype=torch.float64), step.gradients, step.planned.plan
        around = nullcontext() if gradients is None else gradients.passes(self._empty_pass, partial(self._order, plan))
        with torch.set_grad_enabled(gradients is not None), around:
            running = RunningSlices(plan.slices)
            for turn, last in self._turns(plan, training=gradients is not None):
                batch = turn.batch
                if turn.keeps:
                    self._keep(batch, step, running)
                else:
                    self._begin(step, early=last)
                    total += step.checked(batch, self._run(batch, step, running))
                step.on_pass(None if batch is None else batch.index)
        return total if self._mesh.tensor_rank == 0 else torch.zeros_like(total)  # all tensor ranks have it

    def _begin(self, step: StepInputs, *, early: bool) -> None:
        """Before a backward pass; ``early``: it is the last one, and communicates nothing."""
        if step.gradients is not None:
            step.gradients.reduce_early() if early and step.ends else step.gradients.begin_pass()

    def _comm(self, micro_batch: MicroBatch) -> Communicator:
        return cast("Communicator", self._mesh.hdp_comm.subset(micro_batch.ranks))

    def _packed(self, micro_batch: MicroBatch, step: StepInputs, running: RunningSlices) -> PackedShard:
        return packed_shard(micro_batch, step, self._comm(micro_batch), self._device, running.sliced)

    def _run(self, micro_batch: MicroBatch | None, step: StepInputs, running: RunningSlices) -> Tensor:
        """(summed loss, labels) of a micro-batch; of ``None``, which has no tokens, 0."""
        if micro_batch is None:
            return self._pass(empty_shard(self._device), self._alone, step, nullcontext())
        kept = running.packs.pop(micro_batch.index, None)
        packed = self._packed(micro_batch, step, running) if kept is None else kept.again()
        planned = running.planned.get(micro_batch.index)
        seen = 0 if planned is None else -(-planned.bounds[planned.number + 1] // len(micro_batch.ranks))
        around = step.around(micro_batch.offload_ratio, packed.tokens.numel(), seen)
        random = running.random.pop(micro_batch.index, None)
        done = self._pass(packed, self._comm(micro_batch), step, around, random)
        if planned is not None and (planned.last if step.gradients is None else planned.number == 0):
            del running.sliced[planned.sequence]
        return done

    def _keep(self, micro_batch: MicroBatch | None, step: StepInputs, running: RunningSlices) -> None:
        """A forward pass of a slice for what later ones need of it: it runs again before its backward pass, so that
        the activations of one slice are there at a time. ``None``: for others, without tokens."""
        packed, comm = empty_shard(self._device), self._alone
        if micro_batch is not None:
            packed = running.packs[micro_batch.index] = self._packed(micro_batch, step, running)
            running.random[micro_batch.index] = _random_states(self._device)
            comm = self._comm(micro_batch)
        with torch.no_grad(), uncounted(self._loads):
            micro_batch_loss(self._model, packed, comm, self._loss)

    def _pass(
        self,
        packed: PackedShard,
        comm: Communicator,
        step: StepInputs,
        around: AbstractContextManager[None],
        random: list[Tensor] | None = None,
    ) -> Tensor:
        with around, nullcontext() if random is None else _replaying(random, self._device):
            loss = micro_batch_loss(self._model, packed, comm, self._loss)
        if step.gradients is not None:
            (loss * step.scale).backward()  # type: ignore[no-untyped-call]
            step.gradients.end_pass()
        return torch.stack((loss.detach().double(), packed.trained.double())).cpu()

    def _turns(self, plan: StepPlan, *, training: bool) -> Iterator[tuple[Turn, bool]]:
        """Turns of this rank, and whether one is the last and communicates nothing: with a queue, nobody knows that
        before."""
        mesh, queue = self._mesh, self._queue
        if mesh.expert > 1:
            first = mesh.hdp_rank - mesh.expert_rank
            group = range(first, first + mesh.expert)
            yield from ((each, False) for each in waves_of(plan, mesh.hdp_rank, group, training=training))
            return
        own = plan.for_rank(mesh.hdp_rank) if queue is None else fixed_for_rank(plan, mesh.hdp_rank)
        turns = in_turns([[each] for each in own], plan.slices if training else {})
        for place, ((batch,), keeps) in enumerate(turns, 1):
            last = queue is None and place == len(turns) and len(batch.ranks) == mesh.tensor == 1
            yield Turn(batch, keeps), last
        yield from ((Turn(each), False) for each in queue or ())

    def _order(self, plan: StepPlan) -> list[list[int]]:
        """The HDP ranks in the order in which their backward passes are to end, each as often as it has some."""
        expert = self._mesh.expert
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

    def _empty_pass(self) -> None:
        """A forward and backward pass over a token without a loss, on this rank alone."""
        loss = micro_batch_loss(self._model, no_tokens(self._device), self._alone, self._loss)
        loss.backward()  # type: ignore[no-untyped-call]


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a model on the device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def _replaying(states: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Draws as after :func:`_random_states`; afterwards the generators go on where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


def packed_shard(
    micro_batch: MicroBatch, step: StepInputs, comm: Communicator, device: torch.device, sliced: Sliced
) -> PackedShard:
    """This rank's shard of a micro-batch. Local. ``sliced``: what its model has kept of the slices before it."""
    lengths = step.planned.lengths
    if (planned := step.planned.plan.slices.get(micro_batch.index)) is not None:
        tree = step.planned.tree(planned.sequence)
        if planned.sequence not in sliced:
            sliced[planned.sequence] = step.sliced_sequence(planned, micro_batch.offload_ratio)
        part, fragments = sliced[planned.sequence].slice(planned.number), step.planned.plan.fragments
        if step.terms is not None:
            return step.terms.pack_slice(planned, part, fragments, step.fetch, comm=comm, device=device)
        if tree is not None:
            return pack_tree_slice(
                planned.sequence, part, lengths, fragments, step.fetch, comm=comm, device=device
            )  # fmt: skip
        return pack_slice(planned, part, step.fetch, comm=comm, device=device)
    if step.terms is not None:
        return step.terms.pack(micro_batch, step.planned.plan, step.fetch, comm=comm, device=device)
    if holds_trees(micro_batch, lengths):
        return pack_trees(micro_batch, lengths, step.planned.plan.fragments, step.fetch, comm=comm, device=device)
    return pack_shard(micro_batch, step.fetch, comm=comm, device=device, limit=step.planned.plan.limit)

"""The training step of HDP beside pipeline parallelism."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hdpcomm.errors import InvalidUsage, Mismatch
from hdpcomm.parallel.gradients import StageGradients
from hdpcomm.parallel.mesh import Mesh
from hdpcomm.parallel.pipeline import OffloadContext, StageRunner
from hdpcomm.parallel.program import Action, make_program
from hdpcomm.parallel.stages import LlamaStage
from hdpcomm.parallel.state import load_whole_state, whole_state
from hdpcomm.train.fsdp import is_fully_sharded
from hdpcomm.train.plan_check import check_same_plan
from hdpcomm.train.trainer import Trainer

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.offload import ActivationOffload
    from hdpcomm.plan import PlannedStep, Planner, StepPlan, Tree
    from hdpcomm.plan.pipeline_schedule import Pass, PipelineSchedule
    from hdpcomm.train.activation_profile import OffloadedStep
    from hdpcomm.train.shards import Fetch

__all__ = ["PipelineTrainer"]


class PipelineTrainer(Trainer):
    """A :class:`hdpcomm.train.Trainer` whose ranks are pipelines: every rank of ``mesh.comm`` makes one with its stage
    of the model, and calls :meth:`step` alike.

    The planner plans for the HDP ranks, each of which is a pipeline. Its schedule (:meth:`Planner.schedule`, 1F1B) is
    the order in which all stages run their passes, as it was simulated; it is checked, and compared between the ranks,
    before anything runs. Pipelines may have different numbers of micro-batches, and inside a stage the ranks of a
    micro-batch run ring attention as without pipelines. The step's gradients are those of the whole batch on a single
    device.

    Args:
        stage: this rank's stage of the model (:func:`hdpcomm.parallel.split_llama`), number ``mesh.stage``.
        optimizer: any optimizer over the stage's parameters that updates each element by itself.
        planner: with ``ClusterSpec(ranks=mesh.hdp, pipeline=mesh.pipeline)``; its costs are those of one stage.
        mesh: the ranks; without tensor parallelism.
        max_grad_norm, loss: as of :class:`hdpcomm.train.Trainer`; the norm is that of the whole model.
        offload: :class:`hdpcomm.offload.ActivationOffload` over this rank's stage.

    Raises:
        InvalidUsage: the planner is for another mesh, the stage is another rank's, or the mesh is of another kind.
        Mismatch: the ranks have made different meshes.

    Source: ByteScale, arXiv 2502.21231, sections 5.3 and 6.2 (PP-Balance).
    """

    def __init__(
        self,
        stage: LlamaStage,
        optimizer: torch.optim.Optimizer,
        planner: Planner,
        mesh: Mesh,
        *,
        max_grad_norm: float | None = 1.0,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        offload: ActivationOffload | None = None,
    ) -> None:
        if mesh.tensor > 1:
            raise InvalidUsage(f"the mesh has tensor={mesh.tensor}, and pipelines run without tensor parallelism")
        if not isinstance(stage, LlamaStage):
            raise InvalidUsage(
                f"the model is a {type(stage).__name__}; give this rank's stage, split_llama(model, "
                f"{mesh.pipeline})[mesh.stage]"
            )
        self.mesh = mesh
        self.stage = stage
        self.boundary_bytes = 0
        """Of the last step: what this rank sent to the stages beside its own."""
        self._schedule: PipelineSchedule | None = None
        _check_stage(stage, mesh)
        if is_fully_sharded(stage.parameters()):
            raise InvalidUsage("the stage is sharded by fully_shard, which pipelines do not know; give it as it was")
        _check_same_mesh(stage, mesh)
        super().__init__(stage, optimizer, planner, mesh.comm, max_grad_norm=max_grad_norm, loss=loss, offload=offload)

    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once. Collective over this rank's pipeline."""
        own = sum(p.numel() for p in self.stage.parameters())
        if self.stage.tied is not None and self.stage.last:
            own -= self.stage.tied.numel()
        count = torch.tensor([own], dtype=torch.int64)
        self.mesh.pipeline_comm.all_reduce(count)
        return int(count)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and optimizer state of the whole model by their names there, equal on every rank: a trainer
        without pipelines, or with another number of stages, takes it over. Collective over the mesh.
        """
        return {**whole_state(self.stage, self.optimizer, self.mesh), "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of what :meth:`state_dict` gave, here or for the whole model. Local."""
        load_whole_state(self.stage, self.optimizer, state)
        self.num_steps = int(state["num_steps"])

    def evaluate(self, lengths: Sequence[int | Tree], fetch: Fetch) -> Tensor:
        """(summed loss, labels) of the sequences whose last stage is on this rank, fp64 ``[2]``; nothing is trained.

        Collective over the mesh; arguments and errors as of :meth:`step`. The sum over all ranks is that of the batch.
        """
        planned = self._plan_now(lengths)
        self._check_plan(planned.plan)
        with torch.no_grad():
            runner = self._runner(planned, fetch, 1.0, lambda *_: nullcontext(), lambda _: None)
            runner.run([action for action in self._program(planned.plan) if not action.done.backward])
        return runner.total

    def _check_cluster(self) -> None:
        mesh, cluster = self.mesh, self.planner.cluster
        if (cluster.ranks, cluster.pipeline) != (mesh.hdp, mesh.pipeline):
            raise InvalidUsage(
                f"the planner plans for {cluster.ranks} ranks of {cluster.pipeline} stages, and the mesh has "
                f"{mesh.hdp} of {mesh.pipeline}; give ClusterSpec(ranks={mesh.hdp}, pipeline={mesh.pipeline}, ...)"
            )

    def _check_plan(self, plan: StepPlan) -> None:
        self._schedule = schedule = self.planner.schedule(plan)
        schedule.validate(plan)
        order = schedule.passes.tobytes() + schedule.places_of_messages().tobytes()
        check_same_plan(plan, self.comm, more=order)

    def _gradient_buffer(self) -> StageGradients:
        return StageGradients(self.model.parameters(), self.mesh, self.stage.tied)

    def _same_start(self) -> None:
        """Gives all HDP ranks of a stage the parameters of the first, and tied ones those of the first stage."""
        mesh = self.mesh
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                _broadcast(mesh.hdp_comm, tensor, 0)
            if self.stage.tied is not None:
                ends = mesh.pipeline_comm.subset([0, mesh.pipeline - 1])
                _broadcast(cast("Communicator", ends), self.stage.tied, 0)

    def _run_all(self, planned: PlannedStep, fetch: Fetch, scale: float, offloading: OffloadedStep) -> Tensor:
        runner = self._runner(planned, fetch, scale, offloading.micro_batch, self._after_pass)
        runner.run(self._program(planned.plan))
        self.boundary_bytes = runner.bytes_sent
        return runner.total

    def _program(self, plan: StepPlan) -> tuple[Action, ...]:
        assert self._schedule is not None
        return make_program(self._schedule, plan, self.mesh.hdp_rank, self.mesh.stage)

    def _runner(
        self,
        planned: PlannedStep,
        fetch: Fetch,
        scale: float,
        offload: OffloadContext,
        on_pass: Callable[[Pass], None],
    ) -> StageRunner:
        return StageRunner(
            [self.stage], self.mesh, planned, fetch, scale=scale, loss=self._loss, offload=offload, on_pass=on_pass
        )

    def _after_pass(self, done: Pass) -> None:
        if done.backward:
            cast(StageGradients, self.gradients).collect()
        self.timeline.end("micro-batch", done.micro_batch)


def _broadcast(comm: Communicator, tensor: Tensor, root: int) -> None:
    whole = tensor.detach().contiguous()
    comm.broadcast(whole, root)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _check_same_mesh(stage: LlamaStage, mesh: Mesh) -> None:
    """Collective over the mesh: all ranks hold the same one, and the stages' layers follow each other."""
    facts = f"{mesh.pipeline} {mesh.tensor} {mesh.expert} {mesh.positions.tolist()} {stage.config}"
    digest = hashlib.sha256(facts.encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:7], "big"), stage.layers.start, stage.layers.stop], dtype=torch.int64)
    rows = own.new_empty(mesh.comm.size, 3)
    mesh.comm.all_gather(rows, own)
    others = [mesh.comm.ranks[at] for at in range(mesh.comm.size) if rows[at, 0] != own[0]]
    if others:
        raise Mismatch(
            f"rank {mesh.comm.global_rank} has another mesh or another model than the ranks {others}: {mesh}; give "
            "Mesh and split_llama the same arguments on all ranks",
            rank=mesh.comm.global_rank,
            op="mesh",
            ranks=mesh.comm.ranks,
        )
    bounds = [tuple(row[1:]) for row in rows[mesh.positions[:, :, 0]].flatten(0, 1).tolist()]
    wanted = [bounds[each * mesh.hdp] for each in range(mesh.pipeline)]
    joined = all(before[1] == after[0] for before, after in itertools.pairwise(wanted))
    if not joined or any(bounds[at] != wanted[at // mesh.hdp] for at in range(len(bounds))):
        raise Mismatch(
            f"the stages hold the layers (first, end) {bounds}, HDP rank by HDP rank, which do not follow each other; "
            "give split_llama the same arguments on all ranks",
            rank=mesh.comm.global_rank,
            op="mesh",
            ranks=mesh.comm.ranks,
        )


def _check_stage(stage: LlamaStage, mesh: Mesh) -> None:
    if stage.first != (mesh.stage == 0) or stage.last != (mesh.stage == mesh.pipeline - 1):
        raise InvalidUsage(
            f"this rank is stage {mesh.stage} of {mesh.pipeline}, and was given the layers {stage.layers.start} to "
            f"{stage.layers.stop - 1} of {stage.config.layers}; give split_llama(model, {mesh.pipeline})[mesh.stage]"
        )

"""The training step of HDP beside pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.weight_gradients import WeightGradients
from hdpcomm.parallel.agreement import check_same_stages, checked_stages
from hdpcomm.parallel.mesh import Mesh
from hdpcomm.parallel.mesh_trainer import MeshTrainer
from hdpcomm.parallel.pipeline import OffloadContext, StageRunner
from hdpcomm.parallel.program import Action, make_program
from hdpcomm.parallel.stages import LlamaStage
from hdpcomm.parallel.state import names_in_model, state_of_stages, whole_state
from hdpcomm.parallel.tensor_state import TensorParts
from hdpcomm.parallel.waves import PlannedWaves, plan_waves
from hdpcomm.train.plan_check import check_same_plan
from hdpcomm.train.replicas import settings_of, share_values
from hdpcomm.train.sharded import BUCKET_BYTES

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.offload import ActivationOffload
    from hdpcomm.parallel.checkpoint import NamesInModel
    from hdpcomm.plan import MicroBatch, PlannedStep, Planner, StepPlan, Tree
    from hdpcomm.plan.pipeline_schedule import Pass, PipelineSchedule
    from hdpcomm.train.activation_profile import OffloadedStep
    from hdpcomm.train.shards import Fetch

__all__ = ["PipelineTrainer"]


class PipelineTrainer(MeshTrainer):
    """A :class:`hdpcomm.train.Trainer` whose ranks are pipelines: every rank of ``mesh.comm`` makes one with its stage
    of the model, and calls :meth:`step` alike.

    The planner plans for the HDP ranks, each of which is a pipeline. Its schedule (:meth:`Planner.schedule`, 1F1B) is
    the order in which all stages run their passes, as it was simulated; it is checked, and compared between the ranks,
    before anything runs. Pipelines may have different numbers of micro-batches, and inside a stage the ranks of a
    micro-batch run ring attention as without pipelines. The step's gradients are those of the whole batch on a single
    device.

    Args:
        stage: this rank's stage of the model (:func:`hdpcomm.parallel.split_llama`), number ``mesh.stage``; or a list,
            the stages with the numbers ``mesh.stage``, ``mesh.stage + mesh.pipeline`` and so on, for interleaved
            1F1B (``ClusterSpec(chunks=)``). ``model`` is the stage, or a ``ModuleList`` of them.
        optimizer: any optimizer over the stage's parameters that updates each element by itself.
        planner: with ``ClusterSpec(ranks=mesh.hdp, pipeline=mesh.pipeline, tensor=mesh.tensor)``; its costs are
            those of one stage. With ``split_backward=True`` there, weight gradients of linear layers are computed
            where the device would wait (:class:`hdpcomm.models.weight_gradients.WeightGradients`).
        mesh: the ranks. With tensor ranks, each stage is cut by :func:`hdpcomm.parallel.tensor_parallel`.
        max_grad_norm, loss, zero, dtype, bucket_bytes, check_replicas: as of :class:`hdpcomm.parallel.MeshTrainer`.
        offload: :class:`hdpcomm.offload.ActivationOffload` over this rank's stage.

    Raises:
        InvalidUsage: the planner is for another mesh, the stage is another rank's, or the mesh is of another kind.
        Mismatch: the ranks have made different meshes.

    Source: ByteScale, arXiv 2502.21231, sections 5.3 and 6.2 (PP-Balance).
    """

    def __init__(
        self,
        stage: LlamaStage | Sequence[LlamaStage],
        optimizer: torch.optim.Optimizer,
        planner: Planner,
        mesh: Mesh,
        *,
        max_grad_norm: float | None = 1.0,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        offload: ActivationOffload | None = None,
        zero: int = 0,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        check_replicas: int = 0,
    ) -> None:
        self.stages = checked_stages(stage, mesh)
        model = self.stages[0] if len(self.stages) == 1 else nn.ModuleList(self.stages)
        self._schedule: PipelineSchedule | None = None
        self._planned: PlannedWaves | None = None
        """What the schedule is for."""
        self._weights: WeightGradients | None = None
        """What split backward passes leave for later."""
        if planner.cluster.split_backward:
            self._weights = WeightGradients()
            self._weights.watch(block for stage in self.stages for block in stage.blocks)
        super().__init__(
            model, optimizer, planner, mesh, max_grad_norm=max_grad_norm, loss=loss, offload=offload, zero=zero,
            dtype=dtype, bucket_bytes=bucket_bytes, check_replicas=check_replicas,
        )  # fmt: skip

    @property
    def parts(self) -> TensorParts:
        """What of the state is a part of a whole tensor."""
        return TensorParts.of_stages(self.stages)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and optimizer state of the whole model by their names there, equal on every rank: a trainer
        without pipelines, or with another number of stages, takes it over. Collective over the mesh.
        """
        whole = whole_state(self.parts.joined(self._own_state()), self.stages, self.mesh)
        return {**whole, "num_steps": self.num_steps}

    def _names(self, model: Mapping[str, Any]) -> NamesInModel:
        return names_in_model(self.stages, model)

    def _own_of_whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return state_of_stages(self.model, self.stages, self.optimizer, state)

    def evaluate(self, lengths: Sequence[int | Tree], fetch: Fetch) -> Tensor:
        """(summed loss, labels) of the sequences whose last stage is on this rank, fp64 ``[2]``; nothing is trained.

        Collective over the mesh; arguments and errors as of :meth:`step`. The sum over all ranks is that of the batch.
        """
        planned = self._plan_now(lengths)
        self._check_plan(planned.plan)
        with torch.no_grad():
            runner = self._runner(planned, fetch, 1.0, lambda *_: nullcontext(), lambda _: None)
            runner.run([action for action in self._program() if not action.done.backward])
        return self._once(runner.total)

    def _check_model(self, _: nn.Module) -> None:
        for stage in self.stages:
            self._check_cut(stage)
        check_same_stages(self.stages, self.mesh)

    def _check_cluster(self) -> None:
        mesh, cluster, chunks = self.mesh, self.planner.cluster, len(self.stages)
        found = (cluster.ranks, cluster.pipeline, cluster.tensor, cluster.chunks)
        if found != (mesh.hdp, mesh.pipeline, mesh.tensor, chunks):
            raise InvalidUsage(
                f"the planner plans for {cluster.ranks} ranks of {cluster.pipeline} x {cluster.tensor} devices "
                f"(pipeline x tensor) with {cluster.chunks} stages each, and the mesh has {mesh.hdp} of "
                f"{mesh.pipeline} x {mesh.tensor} with {chunks}; give ClusterSpec(ranks={mesh.hdp}, "
                f"pipeline={mesh.pipeline}, tensor={mesh.tensor}, chunks={chunks}, ...)"
            )

    def _check_plan(self, plan: StepPlan) -> None:
        self._planned = waves = plan_waves(plan, self.mesh.expert)
        self._schedule = schedule = self.planner.schedule(waves.plan)
        schedule.validate(waves.plan)
        order = schedule.passes.tobytes() + schedule.places_of_messages().tobytes()
        if schedule.alone is not None:
            order += schedule.alone.tobytes()
        settings = settings_of(self.optimizer, self.max_grad_norm)
        alike = self.mesh.positions.flatten(1).tolist()  # stages may have other groups of parameters
        check_same_plan(plan, self.comm, more=order, settings=settings, alike=alike)

    def _counted_parameters(self) -> list[nn.Parameter]:
        copies = [each.tied for each in self.stages if each.last]
        return [p for p in self.model.parameters() if not any(p is copy for copy in copies)]

    def _same_start(self) -> None:
        """Gives all HDP ranks of a stage the parameters of the first, and tied ones those of the first stage."""
        super()._same_start()
        if self._tied is not None:
            ends = cast("Communicator", self.mesh.pipeline_comm.subset([0, self.mesh.pipeline - 1]))
            share_values(ends, [self._tied])

    @property
    def _tied(self) -> nn.Parameter | None:
        return next((stage.tied for stage in self.stages if stage.tied is not None), None)

    def _run_all(self, planned: PlannedStep, fetch: Fetch, scale: float, offloading: OffloadedStep) -> Tensor:
        runner = self._runner(planned, fetch, scale, offloading.micro_batch, self._after_pass)
        if self._weights is not None:
            self._weights.forget()
        runner.run(self._program())
        self.boundary_bytes = runner.bytes_sent
        return self._once(runner.total)

    def _program(self) -> tuple[Action, ...]:
        assert self._schedule is not None
        assert self._planned is not None
        return make_program(self._schedule, self._planned.plan, self.mesh.hdp_rank, self.mesh.stage)

    @property
    def _batches(self) -> dict[int, MicroBatch | None]:
        """By number in the schedule, what this rank runs."""
        assert self._planned is not None
        return self._planned.of_rank(self.mesh.hdp_rank)

    def _runner(
        self,
        planned: PlannedStep,
        fetch: Fetch,
        scale: float,
        offload: OffloadContext,
        on_pass: Callable[[Pass], None],
    ) -> StageRunner:
        return StageRunner(
            self.stages, self.mesh, planned, self._batches, fetch,
            scale=scale, loss=self._loss, offload=offload, on_pass=on_pass, weights=self._weights,
        )  # fmt: skip

    def _seconds_waited(self) -> tuple[float, float]:
        shared, experts = super()._seconds_waited()
        return shared, experts + self.mesh.pipeline_comm.waited_s()

    def _after_pass(self, done: Pass) -> None:
        if done.backward:
            self._collect()
        if (batch := self._batches[done.micro_batch]) is None:
            self.timeline.end("wait for others")
        else:
            self.timeline.end("micro-batch", batch.index)

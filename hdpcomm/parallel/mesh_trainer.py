"""The training step of HDP beside tensor and expert parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.parallel.agreement import check_same_mesh
from hdpcomm.parallel.checkpoint import NamesInModel, mesh_parts, own_of_parts, take_what_is_no_tensor, whole_model
from hdpcomm.parallel.gradients import MeshGradients, ParameterCopies
from hdpcomm.parallel.mesh import Mesh
from hdpcomm.parallel.sharded import MeshShardedParameters
from hdpcomm.parallel.tensor_state import TensorParts
from hdpcomm.parallel.waves import waves_of
from hdpcomm.train.dtensor import is_fully_sharded
from hdpcomm.train.micro_batch import micro_batch_loss
from hdpcomm.train.optimizer_state import own_state
from hdpcomm.train.queue import StepQueue
from hdpcomm.train.replicas import check_replicas, share_values
from hdpcomm.train.sharded import BUCKET_BYTES, ShardedParameters
from hdpcomm.train.sharded_state import load_sharded_state, own_parts, sharded_state
from hdpcomm.train.shards import empty_shard
from hdpcomm.train.tensor_part import TensorPart
from hdpcomm.train.trainer import Trainer
from hdpcomm.train.trainer_check import check_elementwise

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.models.tensor_group import TensorGroup
    from hdpcomm.offload import ActivationOffload
    from hdpcomm.plan import MicroBatch, PlannedStep, Planner, StepPlan, Tree
    from hdpcomm.train.activation_profile import OffloadedStep
    from hdpcomm.train.shards import Fetch

__all__ = ["MeshTrainer"]


class MeshTrainer(Trainer):
    """A :class:`hdpcomm.train.Trainer` whose HDP ranks are groups of tensor ranks: every rank of ``mesh.comm`` makes
    one with its part of the model, and calls :meth:`step` alike.

    The tensor ranks of an HDP rank work on the same shards of the same sequences. The step's gradients are those of the
    whole batch and the whole model on a single device.

    HDP ranks that share experts run their micro-batches in waves (:func:`hdpcomm.parallel.waves.waves_of`): who has
    none in one takes part in its forward and backward pass with no tokens, so they may have any numbers of them.

    Args:
        model: as of :class:`hdpcomm.train.Trainer`, cut by :func:`hdpcomm.parallel.tensor_parallel` and
            :func:`hdpcomm.parallel.expert_parallel` on this mesh.
        optimizer: any optimizer over the model's parameters that updates each element by itself.
        planner: with ``ClusterSpec(ranks=mesh.hdp, tensor=mesh.tensor)``.
        mesh: the ranks, without pipelines (:class:`hdpcomm.parallel.PipelineTrainer` has them).
        max_grad_norm, loss, offload, zero, dtype, bucket_bytes, check_replicas: as of :class:`hdpcomm.train.Trainer`;
            the norm is that of the whole model. With ``zero=1`` a parameter is cut among the HDP ranks that hold
            it (:class:`hdpcomm.parallel.sharded.MeshShardedParameters`).

    Raises:
        InvalidUsage: the planner is for another mesh, the model is not cut for this one, or the mesh has pipelines.
        Mismatch: the ranks have made different meshes or models.
    """

    def __init__(
        self,
        model: nn.Module,
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
        self.mesh = mesh
        self.boundary_bytes = 0
        """Of the last step: what this rank sent to the stages beside its own."""
        self._check_model(model)
        if mesh.tensor * mesh.expert > 1:
            check_elementwise(optimizer, "on a mesh with tensor or expert ranks")
        super().__init__(
            model, optimizer, planner, mesh.comm, max_grad_norm=max_grad_norm, loss=loss, offload=offload, zero=zero,
            dtype=dtype, bucket_bytes=bucket_bytes, check_replicas=check_replicas,
        )  # fmt: skip

    @property
    def parts(self) -> TensorParts:
        """What of the state is a part of a whole tensor."""
        return TensorParts.of_stages([self.model])

    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once. Collective over the ranks that hold one copy of it."""
        by_parameter, size = self.parts.by_parameter, self.mesh.tensor
        own, experts = 0, self.parts.experts
        for parameter in self._counted_parameters():
            each = size // (by_parameter.get(id(parameter), 1) if size > 1 else 1)
            counted = self.mesh.tensor_rank % each == 0 and (id(parameter) in experts or self.mesh.expert_rank == 0)
            own += parameter.numel() if counted else 0
        count = torch.tensor([own], dtype=torch.int64)
        self.mesh.expert_comm.all_reduce(count)
        self.mesh.tensor_comm.all_reduce(count)
        self.mesh.pipeline_comm.all_reduce(count)
        return int(count)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and optimizer state of the whole model by their names there, equal on every rank: a trainer on any
        other mesh takes it over, or one without. Collective over the mesh.
        """
        return {**self.parts.joined(self._own_state()), "num_steps": self.num_steps}

    def whole_model(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model by their names there, in host memory, on the first rank of the
        mesh; the others get an empty dict. One tensor at a time is gathered. Collective over the mesh."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        model = get_model_state_dict(self.model)
        return whole_model(model, self.parts, self._names(model), self.mesh)

    def checkpoint_state(self) -> dict[str, Any]:
        """As :meth:`state_dict`, but of each tensor only what this rank holds of it, live, as a
        :class:`hdpcomm.train.tensor_part.TensorPart`: nothing is gathered. What checkpoints are written from by all
        ranks together, and read into; then give it to :meth:`load_state_dict`. Collective over the mesh.
        """
        own = self._own_live_state()
        return {**mesh_parts(own, self.parts, self._names(own["model"]), self.mesh), "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of what :meth:`state_dict` gave, here or for the whole model, or of
        :meth:`checkpoint_state` what is not in place already. Local."""
        if any(isinstance(each, TensorPart) for each in state["model"].values()):
            own = own_of_parts(state, self._names(self.model.state_dict()))
            if isinstance(self.gradients, ShardedParameters):
                load_sharded_state(self.gradients, self.optimizer, self.model, own)
            else:
                take_what_is_no_tensor(own, self.model, self.optimizer)
        else:
            self._load_own(self.parts.cut(self._own_of_whole(state)))
        self.num_steps = int(state["num_steps"])

    def _names(self, model: Mapping[str, Any]) -> NamesInModel:
        """Of this rank's module, whose state ``model`` is."""
        return NamesInModel({name: name for name in model}, {})

    def _own_of_whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a state of the whole model that this rank has a part of, by its own names. Local."""
        return {name: value for name, value in state.items() if name != "num_steps"}

    def _own_state(self) -> dict[str, Any]:
        """This rank's ``model`` and ``optimizer``, and ``masters`` if there are any, by its own names. Collective over
        the HDP ranks."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if isinstance(self.gradients, ShardedParameters):
            state = sharded_state(self.gradients, self.optimizer, self.model)
            return {"model": get_model_state_dict(self.model), **state}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _own_live_state(self) -> dict[str, Any]:
        """The same of what this rank holds itself. Local."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if not isinstance(self.gradients, ShardedParameters):
            return self._own_state()
        model = get_model_state_dict(self.model)
        return {"model": model, **own_parts(self.gradients, self.optimizer, self.model)}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`_own_state` gave. Local."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

        if isinstance(self.gradients, ShardedParameters):
            set_model_state_dict(self.model, state["model"])
            load_sharded_state(self.gradients, self.optimizer, self.model, state)
            return
        with own_state(self.optimizer):
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )

    def evaluate(self, lengths: Sequence[int | Tree], fetch: Fetch) -> Tensor:
        """(summed loss, labels) of the sequences whose last layers are on this rank, fp64 ``[2]``; nothing is trained.

        Collective over the mesh; arguments and errors as of :meth:`step`. The sum over all ranks is that of the batch.
        """
        planned = self._plan_now(lengths)
        self._check_plan(planned.plan)
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for micro_batch in self._waves(planned.plan):
                if micro_batch is None:
                    self._pass_without_tokens()
                    continue
                comm = cast("Communicator", self.mesh.hdp_comm.subset(micro_batch.ranks))
                packed = self._packed(micro_batch, planned, fetch, comm)
                loss = micro_batch_loss(self.model, packed, comm, self._loss)
                total += torch.stack((loss.double(), packed.trained.double())).cpu()
        return self._once(total)

    def _check_model(self, model: nn.Module) -> None:
        mesh = self.mesh
        if mesh.pipeline > 1:
            raise InvalidUsage(f"the mesh has pipelines of {mesh.pipeline} stages; give PipelineTrainer the stages")
        self._check_cut(model)
        check_same_mesh(mesh, str([(name, tuple(p.shape)) for name, p in model.named_parameters()]))

    def _check_cut(self, model: nn.Module) -> None:
        """Raises unless the model, or stage, is cut for the tensor ranks of the mesh."""
        group: TensorGroup | None = getattr(model, "tensor", None)
        ranks = () if group is None else tuple(group.comm.ranks)
        wanted = tuple(self.mesh.tensor_comm.ranks) if self.mesh.tensor > 1 else ()
        if ranks != wanted:
            raise InvalidUsage(
                f"the model is cut for the tensor ranks {list(ranks)}, and those of the mesh are {list(wanted)}; give "
                "tensor_parallel(model, mesh), with this mesh"
            )
        expert = getattr(model, "expert", None)
        ranks = tuple(expert.comm.ranks) if isinstance(expert, ExpertGroup) else ()
        wanted = tuple(self.mesh.expert_comm.ranks) if self.mesh.expert > 1 else ()
        if ranks != wanted:
            raise InvalidUsage(
                f"the experts of the model are on the ranks {list(ranks)}, and the expert ranks of the mesh are "
                f"{list(wanted)}; give expert_parallel(model, mesh), with this mesh"
            )
        if is_fully_sharded(model.parameters()):
            raise InvalidUsage("the model is sharded by fully_shard, which a mesh does not know; give it as it was")

    def _check_cluster(self) -> None:
        mesh, cluster = self.mesh, self.planner.cluster
        if (cluster.ranks, cluster.pipeline, cluster.tensor) != (mesh.hdp, 1, mesh.tensor):
            raise InvalidUsage(
                f"the planner plans for {cluster.ranks} ranks of {cluster.pipeline} x {cluster.tensor} devices "
                f"(pipeline x tensor), and the mesh has {mesh.hdp} of 1 x {mesh.tensor}; give "
                f"ClusterSpec(ranks={mesh.hdp}, tensor={mesh.tensor}, ...)"
            )

    @property
    def _copies(self) -> ParameterCopies:
        parts = self.parts
        return ParameterCopies(self.mesh, parts.by_parameter, self._tied, parts.experts)

    @property
    def _tied(self) -> nn.Parameter | None:
        """The parameter on this rank that is also on the other end of the pipeline."""
        return None

    def _gradient_buffer(self) -> MeshGradients:
        return MeshGradients(self.model.parameters(), self._copies)

    def _sharded_parameters(self, *, zero: int, dtype: torch.dtype | None, bucket_bytes: int) -> ShardedParameters:
        return MeshShardedParameters(
            self.model.parameters(), self.optimizer, self._copies, zero=zero, dtype=dtype, bucket_bytes=bucket_bytes
        )

    def _collect(self) -> None:
        """After a backward pass."""
        if isinstance(self.gradients, MeshGradients):
            self.gradients.collect()

    def _counted_parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def _same_start(self) -> None:
        """Gives all HDP ranks the parameters of the first, or of the first that holds the same experts. Collective."""
        experts = self.parts.experts
        tensors = (*self.model.parameters(), *self.model.buffers())
        share_values(self.mesh.hdp_comm, (each for each in tensors if id(each) not in experts))
        share_values(self.mesh.expert_replica_comm, (each for each in tensors if id(each) in experts))

    @property
    def _plan_comm(self) -> Communicator:
        return self.mesh.hdp_comm

    def _compare_replicas(self) -> None:
        experts = self.parts.experts
        names = {name for name, parameter in self.model.named_parameters() if id(parameter) in experts}
        check_replicas(self.model, self.optimizer, self.mesh.hdp_comm, settings=self.max_grad_norm, without=names)
        if experts:
            check_replicas(self.model, self.optimizer, self.mesh.expert_replica_comm, settings=self.max_grad_norm)

    @property
    def _token_comms(self) -> tuple[Communicator, ...]:
        return self.mesh.hdp_comm, self.mesh.tensor_comm

    def _open_queue(self, plan: StepPlan) -> contextlib.AbstractContextManager[StepQueue | None]:
        mesh = self.mesh
        if not plan.queued or mesh.expert > 1 or mesh.pipeline > 1:  # these run a plan as it is
            return contextlib.nullcontext()
        return StepQueue(plan, mesh.hdp_comm, mesh.tensor_comm)

    def _waves(self, plan: StepPlan) -> Sequence[MicroBatch | None]:
        """This rank's micro-batches in their order; ``None`` where others need it in their layers with experts."""
        mesh = self.mesh
        if mesh.expert == 1:
            return plan.for_rank(mesh.hdp_rank)
        first = mesh.hdp_rank - mesh.expert_rank
        return waves_of(plan, mesh.hdp_rank, range(first, first + mesh.expert))

    def _pass_without_tokens(self) -> Tensor:
        """A forward pass; what it gives can be differentiated, which the others need, too."""
        alone = cast("Communicator", self.mesh.hdp_comm.subset([self.mesh.hdp_rank]))
        return micro_batch_loss(self.model, empty_shard(self._device), alone, self._loss)

    def _seconds_waited(self) -> tuple[float, float]:
        return self.mesh.tensor_comm.waited_s(), self.mesh.expert_comm.waited_s()

    def _run_each(self, planned: PlannedStep, fetch: Fetch, scale: float, offloading: OffloadedStep) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64)
        plan = planned.plan
        waves: Iterable[MicroBatch | None] = self._waves(plan) if self._queue is None else self._micro_batches(plan)
        for micro_batch in waves:
            if micro_batch is None:
                self._pass_without_tokens().backward()  # type: ignore[no-untyped-call]
                self._collect()
                self.timeline.end("wait for others")
                continue
            total += self._run(micro_batch, planned, fetch, scale, offloading)
            self.timeline.end("micro-batch", micro_batch.index)
        return total

    def _run_all(self, planned: PlannedStep, fetch: Fetch, scale: float, offloading: OffloadedStep) -> Tensor:
        return self._once(super()._run_all(planned, fetch, scale, offloading))

    def _once(self, total: Tensor) -> Tensor:
        """Counted by one of the tensor ranks, which all have it."""
        return total if self.mesh.tensor_rank == 0 else torch.zeros_like(total)

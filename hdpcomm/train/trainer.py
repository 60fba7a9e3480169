"""The training step of Hybrid Data Parallelism."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_has
from hdpcomm.errors import Error, InvalidUsage
from hdpcomm.models.expert_group import ExpertGroup
from hdpcomm.plan import PlannedStep
from hdpcomm.plan.queue import fixed_for_rank
from hdpcomm.train.activation_profile import OffloadedStep
from hdpcomm.train.buckets import trained_parameters
from hdpcomm.train.dtensor import is_fully_sharded
from hdpcomm.train.expert_load import add_expert_load, expert_loads
from hdpcomm.train.fsdp import FullyShardedParameters
from hdpcomm.train.gradients import GradientBuffer
from hdpcomm.train.metrics import StepMetrics
from hdpcomm.train.micro_batch import micro_batch_loss
from hdpcomm.train.optimizer_state import own_state
from hdpcomm.train.plan_check import check_same_plan
from hdpcomm.train.queue import StepQueue
from hdpcomm.train.reading import declared
from hdpcomm.train.replicas import check_replicas, settings_of, share_values
from hdpcomm.train.sharded import BUCKET_BYTES, ShardedParameters
from hdpcomm.train.sharded_state import load_sharded_state, own_parts, sharded_state
from hdpcomm.train.shards import Fetch, PackedShard, no_tokens, pack_shard
from hdpcomm.train.timeline import Timeline
from hdpcomm.train.trainer_check import check_trained_names, check_trainer, trained_names
from hdpcomm.train.tree_shards import holds_trees, pack_trees

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator
    from hdpcomm.offload import ActivationOffload
    from hdpcomm.plan import MicroBatch, Planner, StepPlan, Tree

__all__ = ["Trainer"]


class Trainer:
    """Trains a model on global batches of sequences of any lengths; every rank of ``comm`` makes one and calls
    :meth:`step` alike.

    A step: every rank plans the same batch from its lengths and all compare the plan's hash; each runs its own
    micro-batches in the plan's one global order, over communicators that cost nothing to make; one reduction adds up
    the gradients of all ranks, which is exactly the gradient of the whole batch on a single device; then clipping by
    the global norm and the optimizer's step.

    Args:
        model: called as ``model(tokens, positions=, cu_seqlens=, comm=) -> logits [local tokens, vocabulary]``; one
            with ``takes_labels = True``, as :class:`hdpcomm.models.Llama`, gets ``labels=`` too and returns the sum of
            the labelled tokens' losses. :func:`hdpcomm.models.adapt` brings other models into this form. Rank 0's
            parameters and buffers are copied to all ranks at once, unless ``fully_shard`` has sharded it.
        optimizer: any optimizer over the model's parameters.
        planner: a :class:`hdpcomm.plan.Planner` for as many ranks as ``comm`` has.
        comm: the ranks that train together; the plan's ranks are positions in it.
        max_grad_norm: the global L2 norm above which gradients are scaled down; ``None`` leaves them.
        loss: ``loss(logits, labels) -> scalar``, the sum over the local tokens that have a label, in place of the
            model's own; of trees ``loss(logits, labels, weights)``, where the logits are those of the labels' tokens.
            The logits then exist as a whole. ``None``: the model's own, or cross-entropy.
        zero: 1 keeps the optimizer's state and the wide master weights of 1 / ranks of the parameters on each rank
            (:class:`hdpcomm.train.ShardedParameters`): the optimizer must be a new one of torch.optim that updates each
            element by itself. The loss is that of ``zero=0``.
        dtype: of the parameters, with master weights in fp32: ``torch.bfloat16`` halves parameters and activations.
            ``None``: the optimizer updates the parameters as they are.
        bucket_bytes: gradients that are reduced at a time, with ``zero=1`` or ``dtype``. Where a rank's last
            micro-batch is its own, the reductions run beside its backward pass.
        check_replicas: steps between two comparisons of all ranks' weights and optimizer settings
            (:func:`hdpcomm.train.replicas.check_replicas`), of which the first step ends with one; 0: never.
        offload: carries out the plan's offload ratios (:class:`hdpcomm.offload.ActivationOffload` over this model);
            needed if the planner uses any. With it, the device memory of each step is measured.

    Raises:
        InvalidUsage: the planner is for another number of ranks, or the model has nothing to train.

    Example:
        >>> import hdpcomm as hdp
        >>> from hdpcomm.models import Llama, LlamaConfig
        >>> from hdpcomm.plan import ClusterSpec, Planner
        >>> from hdpcomm.train import profile_cost_model
        >>> comm = hdp.init()
        >>> model = Llama(LlamaConfig(layers=1, hidden=16, ffn=32))
        >>> cost_model = profile_cost_model(model, comm, longest=64)
        >>> planner = Planner(None, ClusterSpec(ranks=comm.size, capacity=64), cost_model=cost_model)
        >>> trainer = Trainer(model, torch.optim.AdamW(model.parameters()), planner, comm)
        >>> trainer.step([5, 3], lambda i: torch.arange(5 if i == 0 else 3)).tokens
        8
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planner: Planner,
        comm: Communicator,
        *,
        max_grad_norm: float | None = 1.0,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        offload: ActivationOffload | None = None,
        zero: int = 0,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        check_replicas: int = 0,
    ) -> None:
        if check_replicas < 0:
            raise InvalidUsage(f"check_replicas is {check_replicas}; give the steps between two comparisons, or 0")
        check_trainer(
            model, optimizer, planner, comm,
            max_grad_norm=max_grad_norm, loss=loss, offload=offload, zero=zero, dtype=dtype, bucket_bytes=bucket_bytes,
        )  # fmt: skip
        self.model = model
        self._trained = trained_names(model)
        self._loads = expert_loads(model)
        self.optimizer = optimizer
        self.planner = planner
        self.comm = comm
        self._check_cluster()
        self.max_grad_norm = max_grad_norm
        self.check_replicas = check_replicas
        self.num_steps = 0
        self._compiled = False
        """Whether a step has made what kernels and compilers make at their first call."""
        self._bytes_elsewhere = 0
        """Bytes a step that this rank sends by other ways than ``comm``."""
        self._queue: StepQueue | None = None
        """Of the step that runs, if its plan has one."""
        self.ran: StepPlan | None = None
        """The plan of the last step as it ran: micro-batches of its queue with the ranks that have taken them."""
        if offload is None and planner.memory.offloadable:
            raise InvalidUsage(
                "the planner counts on host memory (offload) and the trainer has no way there; give "
                "offload=ActivationOffload(pool, model), or plan with ClusterSpec(offload=False)"
            )
        self.offload = offload
        waited = weakref.WeakMethod(
            self._seconds_waited
        )  # a trainer ends, and gives back its model, with its last user
        self.timeline = Timeline(
            comm,
            lambda: 0.0 if offload is None else offload.stats().host_wait_s,
            lambda: (0.0, 0.0) if (method := waited()) is None else method(),
        )
        self._memory = planner.memory
        self._loss = loss
        self._device = trained_parameters(model.parameters())[0].device
        self.gradients: GradientBuffer | ShardedParameters | FullyShardedParameters
        if is_fully_sharded(model.parameters()):
            if zero or dtype is not None:
                raise InvalidUsage(
                    "the model is sharded by fully_shard already, optimizer included; give zero=0 and dtype=None (its "
                    "MixedPrecisionPolicy has types)"
                )
            self.gradients = FullyShardedParameters(model, comm)
            return
        self._same_start()
        if zero or dtype is not None:
            self.gradients = self._sharded_parameters(zero=zero, dtype=dtype, bucket_bytes=bucket_bytes)
        else:
            self.gradients = self._gradient_buffer()

    def step(self, lengths: Sequence[int | Tree] | PlannedStep, fetch: Fetch) -> StepMetrics:
        """One optimizer step on a global batch. Collective over ``comm``: equal ``lengths`` on every rank.

        Args:
            lengths: tokens of each sequence of the global batch, or in its place a tree of trajectories; or a step that
                :class:`hdpcomm.plan.PlanAhead` has planned with this trainer's ``planner`` while the step before ran,
                so that this one waits for no plan.
            fetch: ``fetch(i)`` gives the tokens (int64 ``[lengths[i]]``) of sequence i, or (tokens, labels); it is
                called only for the sequences that this rank works on: with a queue (``Planner(queue=True)``) any of
                those in it may be among them. Without labels, every token is to predict the next one; label i is
                what token i is to predict, so labels as transformers' models take them, which equal the tokens, are
                to be shifted before (and are refused).
                Of a tree, (tokens, weights): each token is a label of the one before it on its way from the root, with
                a loss times its weight; by default the number of trajectories that contain it. The loss is the sum
                over all labels divided by the sum of all weights. :func:`hdpcomm.data.fold` makes these.

        Raises:
            InvalidUsage: a sequence does not fit the ranks' capacity, or no token of the batch has a label.
            Mismatch: ranks made different plans (their lengths, planner or cost model differ), or hold other weights
                where ``check_replicas`` looks; names them.
            PeerLost, CommTimeout: another rank died, or has not moved for ``comm.timeout`` seconds. Inside of a step
                deadlines go by liveness (:meth:`hdpcomm.comm.Communicator.liveness_deadlines`): a rank moves while
                ``fetch`` reads, for at most half an hour a call, and with every micro-batch and operation.
            Error: the loss is not finite; the parameters are as they were before the step.
        """
        check_has("step()", "fetch", fetch, "__call__", "a function of a sequence's number")
        with self.comm.liveness_deadlines():
            return self._step(lengths, declared(fetch, self.comm))

    def _step(self, lengths: Sequence[int | Tree] | PlannedStep, fetch: Fetch) -> StepMetrics:
        check_trained_names(self.model, self._trained)
        counts = self.comm.stats()
        planned = lengths if isinstance(lengths, PlannedStep) else self._plan_now(lengths)
        started, processor = time.perf_counter() - planned.waited_s, time.process_time()
        plan = planned.plan
        self._check_plan(plan)
        self.timeline.begin()
        self.gradients.zero()
        for load in self._loads:
            load.reset()
        scale = 1.0 / max(1, plan.tokens)
        offloading = OffloadedStep(self.offload, self._memory, self._device)
        sharded = self.gradients if isinstance(self.gradients, ShardedParameters) else None
        first = contextlib.nullcontext() if self._compiled else self.comm.busy("runs its first micro-batches")
        with self._open_queue(plan) as self._queue:
            with offloading, first:
                loss = self._run_all(planned, fetch, scale, offloading)
            self._compiled = True
            if sharded is not None:
                sharded.start()
            self._synchronize()
            self.comm.all_reduce(loss)  # also the point at which ranks that had less to do wait for the others
            self.timeline.end("wait for others")
            self.ran = plan if self._queue is None else self._queue.plan_as_run()
        self._queue = None
        total, labels = loss.tolist()
        mean = self._mean(total, labels)
        self.gradients.reduce(1.0 / (scale * labels))
        grad_norm = self._finite("gradient norm", self.gradients.clip_(self.max_grad_norm))
        self.gradients.finish()
        self.timeline.end("gradients")
        self.optimizer.step()
        if sharded is not None:
            sharded.publish()
        self._synchronize()
        self.timeline.end("optimizer")
        if self.check_replicas and self.num_steps % self.check_replicas == 0:
            self._compare_replicas()
        sent = self.comm.stats()["bytes_sent"] - counts["bytes_sent"] + self._bytes_elsewhere
        idle = sum(span.idle_s for span in self.timeline.spans)
        own = [time.perf_counter() - started, idle, sent, time.process_time() - processor]
        metrics = self._metrics(planned, own, loss=mean, grad_norm=grad_norm)
        metrics = add_expert_load(metrics, self._loads, self._token_comms, self.comm)
        return offloading.add_to(metrics, self.comm)

    def _open_queue(self, plan: StepPlan) -> contextlib.AbstractContextManager[StepQueue | None]:
        """The queue of a plan, if it has one. Collective over the ranks of the plan."""
        return StepQueue(plan, self._plan_comm) if plan.queued else contextlib.nullcontext()

    def _micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        """What this rank runs: what the plan gives to it alone, then what it takes from the queue."""
        rank = self._plan_comm.rank
        if self._queue is None:
            yield from plan.for_rank(rank)
        else:
            yield from fixed_for_rank(plan, rank)
            yield from self._queue

    def _seconds_waited(self) -> tuple[float, float]:
        """So far, of this rank: inside layers for ranks that share them; for ranks that share experts and for other
        stages of a pipeline."""
        return 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state by name, equal on every rank: what a checkpoint holds.

        With ``zero=1`` or ``dtype`` also the master weights; then it is collective, and the optimizer's tensors are
        whole copies, which fit a trainer of any number of ranks. All other tensors are the live ones.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if isinstance(self.gradients, ShardedParameters):
            state = sharded_state(self.gradients, self.optimizer, self.model)
            return {"model": get_model_state_dict(self.model), **state, "num_steps": self.num_steps}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "num_steps": self.num_steps}

    def checkpoint_state(self) -> dict[str, Any]:
        """As :meth:`state_dict`, but of a sharded optimizer this rank's part only: of each such tensor a
        :class:`hdpcomm.train.tensor_part.TensorPart` of the live one. What checkpoints are written from by all ranks
        together, and read into; then give it to :meth:`load_state_dict`. Local with ``zero=1`` or ``dtype``.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if not isinstance(self.gradients, ShardedParameters):
            return self.state_dict()
        parts = own_parts(self.gradients, self.optimizer, self.model)
        return {"model": get_model_state_dict(self.model), **parts, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, here or in another process. Local: give it to every rank.

        The trainer copies what it takes: two trainers may be given the same state.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

        if isinstance(self.gradients, ShardedParameters):
            set_model_state_dict(self.model, state["model"])
            load_sharded_state(self.gradients, self.optimizer, self.model, state)
        else:
            with own_state(self.optimizer):
                set_state_dict(
                    self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                )
        self.num_steps = int(state["num_steps"])

    def _check_cluster(self) -> None:
        planned, size = self.planner.cluster.ranks, self.comm.size
        if planned != size:
            raise InvalidUsage(
                f"the planner plans for {planned} ranks and the communicator has {size}; make it with "
                f"ClusterSpec(ranks={size}, ...)"
            )
        if isinstance(getattr(self.model, "expert", None), ExpertGroup):
            raise InvalidUsage(
                "the experts of the model are on several ranks (expert_parallel), which must run their passes "
                "together; give it to hdpcomm.parallel.MeshTrainer, with the mesh"
            )

    @property
    def _plan_comm(self) -> Communicator:
        """Whose ranks are those of the plan."""
        return self.comm

    def _check_plan(self, plan: StepPlan) -> None:
        """Raises unless all ranks are about to run the same step. Collective."""
        check_same_plan(plan, self.comm, settings=settings_of(self.optimizer, self.max_grad_norm))

    def _compare_replicas(self) -> None:
        """Raises unless all ranks that hold the same parameters have the same values. Collective."""
        check_replicas(self.model, self.optimizer, self.comm, settings=self.max_grad_norm)

    @property
    def _token_comms(self) -> tuple[Communicator, ...]:
        """Over all of which together the tokens of a batch lie."""
        return (self.comm,)

    def _gradient_buffer(self) -> GradientBuffer:
        return GradientBuffer(self.model.parameters(), self.comm)

    def _sharded_parameters(self, *, zero: int, dtype: torch.dtype | None, bucket_bytes: int) -> ShardedParameters:
        return ShardedParameters(
            self.model.parameters(), self.optimizer, self.comm, zero=zero, dtype=dtype, bucket_bytes=bucket_bytes
        )

    def _plan_now(self, lengths: Sequence[int | Tree]) -> PlannedStep:
        started = time.perf_counter()
        plan = self.planner.plan(lengths)
        return PlannedStep(tuple(lengths), plan, time.perf_counter() - started)

    def _run_all(self, planned: PlannedStep, fetch: Fetch, scale: float, offloading: OffloadedStep) -> Tensor:
        """This rank's micro-batches, in their order; the sum of what :meth:`_run` gives."""
        if isinstance(self.gradients, FullyShardedParameters):
            with self.gradients.passes(self._empty_pass):
                return self._run_each(planned, fetch, scale, offloading)
        return self._run_each(planned, fetch, scale, offloading)

    def _empty_pass(self) -> None:
        """A forward and backward pass over a token without a loss, on this rank alone."""
        alone = cast("Communicator", self.comm.subset([self.comm.rank]))
        loss = micro_batch_loss(self.model, no_tokens(self._device), alone, self._loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def _run_each(self, planned: PlannedStep, fetch: Fetch, scale: float, offloading: OffloadedStep) -> Tensor:
        plan = planned.plan
        bound = () if plan.queued else plan.for_rank(self._plan_comm.rank)
        last = bound[-1].index if bound else -1  # with a queue, nobody knows it before
        loss = torch.zeros(2, dtype=torch.float64)
        for micro_batch in self._micro_batches(plan):
            last_and_alone = micro_batch.index == last and len(micro_batch.ranks) == 1
            if last_and_alone and isinstance(self.gradients, ShardedParameters):
                self.gradients.reduce_early()
            loss += self._run(micro_batch, planned, fetch, scale, offloading)
            self.timeline.end("micro-batch", micro_batch.index)
        return loss

    def _run(
        self,
        micro_batch: MicroBatch,
        planned: PlannedStep,
        fetch: Fetch,
        scale: float,
        offloading: OffloadedStep,
    ) -> Tensor:
        """Forward and backward of one micro-batch; (summed loss, tokens with a label) of this rank, fp64."""
        comm = cast("Communicator", self._plan_comm.subset(micro_batch.ranks))
        packed = self._packed(micro_batch, planned, fetch, comm)
        with offloading.micro_batch(micro_batch.offload_ratio, packed.tokens.numel()):
            loss = micro_batch_loss(self.model, packed, comm, self._loss)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        if isinstance(self.gradients, GradientBuffer):
            self.gradients.collect()
        return torch.stack((loss.detach().double(), packed.trained.double())).cpu()

    def _packed(self, micro_batch: MicroBatch, planned: PlannedStep, fetch: Fetch, comm: Communicator) -> PackedShard:
        """This rank's shard of a micro-batch. Local."""
        if holds_trees(micro_batch, planned.lengths):
            fragments = planned.plan.fragments
            return pack_trees(micro_batch, planned.lengths, fragments, fetch, comm=comm, device=self._device)
        return pack_shard(micro_batch, fetch, comm=comm, device=self._device)

    def _mean(self, total: float, labels: float) -> float:
        if labels <= 0:
            raise InvalidUsage(
                "no token of this batch has a label (a sequence of one token has no next one), or the weights of trees "
                f"do not sum up to more than 0 (the sum of labels and weights is {labels}); give longer sequences, "
                "labels or other weights"
            )
        return self._finite("loss", total / labels)

    def _finite(self, name: str, value: float) -> float:
        if not math.isfinite(value):
            raise Error(
                f"step {self.num_steps}: the {name} is {value}; lower the learning rate or look at the data (no "
                "parameter was updated)",
                rank=self.comm.global_rank,
                op="step",
            )
        return value

    def _metrics(self, planned: PlannedStep, own: Sequence[float], *, loss: float, grad_norm: float) -> StepMetrics:
        """``own``: this rank's seconds, idle seconds, bytes sent and seconds of processor time. Collective."""
        plan = planned.plan
        longest, longest_ranks = plan.table.longest()
        row = torch.tensor([*own, planned.waited_s, plan.planning_s], dtype=torch.float64)
        rows = row.new_empty(self.comm.size, row.numel())
        self.comm.all_gather(rows, row)
        seconds, idle, bytes_sent, _, plan_wait, planning = rows.sum(0).tolist()
        self.num_steps += 1
        return StepMetrics(
            step=self.num_steps - 1,
            loss=loss,
            tokens=plan.tokens,
            seconds=seconds / self.comm.size,
            bytes_sent=int(bytes_sent),
            idle_share=min(1.0, idle / seconds),
            grad_norm=grad_norm,
            longest=longest,
            longest_ranks=longest_ranks,
            micro_batches=len(plan.table),
            predicted_s=plan.expected_s,
            planning_s=planning / self.comm.size,
            plan_wait_s=plan_wait / self.comm.size,
            processor_s=rows[:, 3].max().item(),
            sequences_on_ranks=plan.table.sequences_on_ranks(),
            queued=plan.queued,
            moved=_moved(plan, self.ran),
        )

    def _same_start(self) -> None:
        """Gives every rank the parameters and buffers of rank 0. Collective."""
        share_values(self.comm, (*self.model.parameters(), *self.model.buffers()))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _moved(plan: StepPlan, ran: StepPlan | None) -> int:
    """Micro-batches that ran on other ranks than planned."""
    return 0 if ran is None or ran is plan else int((ran.table.ranks != plan.table.ranks).sum())

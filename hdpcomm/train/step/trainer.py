"""The training step of Hybrid Data Parallelism."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.arguments import check_has, check_number, check_whole
from hdpcomm.comm import Communicator
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import Aborted, InvalidUsage
from hdpcomm.offload import ActivationOffload
from hdpcomm.parallel.stages import Stage
from hdpcomm.plan import Item, PlannedStep, Planner, StepPlan, TrajectoryTree, Tree
from hdpcomm.train.losses import GroupLoss, TokenLoss, name_of_loss
from hdpcomm.train.losses.label_terms import (
    Batch,
    KeptLogProbs,
    LabelTerms,
    checked_groups,
    given_terms,
    group_terms,
    kept_terms,
    shares_prefixes,
    shorter_plan,
    token_terms,
)
from hdpcomm.train.losses.shards import Fetch, declared, vocabulary_of
from hdpcomm.train.state.layout import num_parameters
from hdpcomm.train.step.items import ENCODER, with_items
from hdpcomm.train.step.metrics import OffloadedStep, StepMetrics, Timeline, add_expert_load
from hdpcomm.train.step.passes import Passes, StepInputs
from hdpcomm.train.step.replicas import check_replicas, settings_of
from hdpcomm.train.step.runner import Runner, StepSettings
from hdpcomm.train.step.trainer_check import (
    check_finite,
    check_log_prob_loss,
    check_model,
    check_trained_names,
    check_trainer,
    check_trees,
    mean_loss,
    refuse_prefixes,
    trained_names,
)
from hdpcomm.train.zero.buckets import BUCKET_BYTES
from hdpcomm.train.zero.gradients import trained_parameters

__all__ = ["Trainer"]


class Trainer:
    """Trains a model on global batches of sequences of any lengths; every rank of ``comm`` makes one and calls
    :meth:`step` alike.

    A step: every rank plans the same batch from its lengths and all compare the plan's hash; each runs its own
    micro-batches in the plan's one global order, over communicators that cost nothing to make; one reduction adds up
    the gradients of all ranks, which is exactly the gradient of the whole batch on a single device; then clipping by
    the global norm and the optimizer's step.

    It is made of passes (:class:`hdpcomm.train.step.passes.Passes`), which run micro-batches or the stages of a
    pipeline; of gradients (:class:`hdpcomm.train.Gradients`); and, with ``zero`` or ``dtype``, of the weights that the
    optimizer updates (:class:`hdpcomm.train.zero.masters.Masters`). On a mesh an HDP rank is a group of devices: tensor
    ranks work on the same shards of the same sequences, stages of a pipeline on their layers, and expert ranks run in
    waves.

    Args:
        model: called as ``model(tokens, positions=, cu_seqlens=, comm=) -> logits [local tokens, vocabulary]``; one
            with ``takes_labels = True``, as :class:`hdpcomm.models.Llama`, gets ``labels=`` too and returns the sum of
            the labelled tokens' losses. :func:`hdpcomm.models.adapt` brings other models into this form. On a mesh it
            is cut by :func:`hdpcomm.parallel.tensor_parallel` and :func:`hdpcomm.parallel.expert_parallel`; with
            pipelines it is this rank's stage (:func:`hdpcomm.parallel.split_model`), number ``mesh.stage``, or a list,
            the stages ``mesh.stage``, ``mesh.stage + mesh.pipeline`` and so on, for interleaved 1F1B
            (``ClusterSpec(chunks=)``). All ranks get the first one's parameters and buffers at once.
        optimizer: any optimizer over the model's parameters; on a mesh with tensor or expert ranks one that updates
            each element by itself.
        planner: a :class:`hdpcomm.plan.Planner` for as many ranks as ``comm`` has, or with
            ``ClusterSpec(ranks=mesh.hdp, pipeline=mesh.pipeline, tensor=mesh.tensor)``; then its costs are those of
            one stage.
        comm: the ranks that train together, or a :class:`hdpcomm.Mesh` of them; the plan's ranks are positions
            in it, or in ``mesh.hdp_comm``.
        max_grad_norm: the global L2 norm above which gradients are scaled down; ``None`` leaves them.
        loss: one of log-probabilities and what ``fetch`` gives beside tokens (:mod:`hdpcomm.train.losses`:
            :class:`~hdpcomm.train.TokenLoss`, :class:`~hdpcomm.train.GroupLoss`); or ``loss(logits, labels) ->
            scalar``, the sum over the local tokens that have a label, in place of the model's own; of trees
            ``loss(logits, labels, weights)``, where the logits are those of the labels' tokens. These logits then exist
            as a whole. ``None``: the model's own, or cross-entropy.
        zero: 1 keeps the optimizer's state and the wide master weights of 1 / ranks of the parameters on each rank of
            the HDP ranks that hold a parameter: the optimizer must be a new one of torch.optim that updates
            each element by itself. The loss is that of ``zero=0``. 2 cuts the gradients, too, and 3 the parameters,
            both among the HDP ranks of a host: docs/zero.md says how. Between its passes a parameter then has no values
            (NaN).
        dtype: of the parameters, with master weights in fp32: ``torch.bfloat16`` halves parameters and activations.
            ``None``: the optimizer updates the parameters as they are.
        optimizer_offload: master weights and the optimizer's state are in pinned host memory, and the optimizer
            computes on the CPU. AdamW then takes 12 bytes less on the device for each parameter that this rank updates
            (8 with ``dtype=None``), and 16 on the host. Updates are those of the same optimizer on CPU tensors;
            ``fused=True`` makes torch's faster.
        offload: carries out the plan's offload ratios (:class:`hdpcomm.offload.ActivationOffload` over this model);
            needed if the planner uses any. With it, the device memory of each step is measured.

    Attributes:
        bucket_bytes: of the class: gradients that are reduced at a time, beside the last backward pass where the plan
            allows it (docs/training.md). With ``zero=2`` and 3 gradients leave layer by layer.

    Raises:
        InvalidUsage: the planner is for another mesh, the model is not cut for this one, or has nothing to train.
        Mismatch: the ranks have made different meshes or models.

    Examples:
        >>> import hdpcomm as hdp
        >>> from hdpcomm.models import Llama, LlamaConfig
        >>> from hdpcomm.plan import ClusterSpec, Planner
        >>> from hdpcomm.measure import profile_cost_model
        >>> comm = hdp.init()
        >>> model = Llama(LlamaConfig(layers=1, hidden=16, ffn=32))
        >>> cost_model = profile_cost_model(model, comm, longest=64)
        >>> planner = Planner(None, ClusterSpec(ranks=comm.size, capacity=64), cost_model=cost_model)
        >>> trainer = Trainer(model, torch.optim.AdamW(model.parameters()), planner, comm)
        >>> trainer.step([5, 3], lambda i: torch.arange(5 if i == 0 else 3)).tokens
        8
    """

    bucket_bytes = BUCKET_BYTES

    def __init__(
        self,
        model: nn.Module | Sequence[Stage],
        optimizer: torch.optim.Optimizer,
        planner: Planner,
        comm: Communicator | Mesh,
        *,
        max_grad_norm: float | None = 1.0,
        loss: TokenLoss | GroupLoss | Callable[[Tensor, Tensor], Tensor] | None = None,
        offload: ActivationOffload | None = None,
        zero: int = 0,
        dtype: torch.dtype | None = None,
        optimizer_offload: bool = False,
    ) -> None:
        settings = StepSettings(zero, dtype, self.bucket_bytes, optimizer_offload)
        check_trainer(
            model, optimizer, planner, comm, max_grad_norm=max_grad_norm, loss=loss, offload=offload, settings=settings
        )
        self.mesh = mesh = comm if isinstance(comm, Mesh) else Mesh(comm, placement=range(comm.size))
        self.comm = mesh.comm
        self.model, self.stages = check_model(model, optimizer, planner, mesh, zero=zero)
        parameters = list(self.model.parameters())
        self._device = trained_parameters(parameters)[0].device
        self._trained = trained_names(self.model)
        self.planner = planner
        self.max_grad_norm = max_grad_norm
        self.num_steps = 0
        check_log_prob_loss(loss, self.model, self.stages)
        self.offload = offload
        self.loss = loss
        own = weakref.ref(self)  # a trainer ends, and gives back its model, with its last user
        self.timeline = Timeline(
            self.comm,
            lambda: 0.0 if offload is None else offload.stats().host_wait_s,
            lambda: (0.0, 0.0) if (trainer := own()) is None else trainer.runner.passes.waited_s(),
            self._device,
        )
        self._memory = planner.memory
        self.runner = self.make_runner(optimizer, settings)
        self.layout = self.runner.layout
        self._vocabulary = vocabulary_of(self.model, self.layout)

    def make_runner(self, optimizer: torch.optim.Optimizer, settings: StepSettings) -> Runner:
        """The runner of the steps, made once, when ``model``, ``mesh``, ``planner`` and ``loss`` are there; a subclass
        may give one of other passes. Collective."""
        of_logits = None if isinstance(self.loss, (TokenLoss, GroupLoss)) else self.loss
        planner = self.planner if self.stages else None
        return Runner(Passes(self.stages or [self.model], self.mesh, planner, of_logits), optimizer, settings)

    def step(
        self,
        lengths: Sequence[int | Tree] | PlannedStep,
        fetch: Fetch,
        *,
        groups: Sequence[Hashable] | None = None,
        trees: Sequence[TrajectoryTree] = (),
        items: Sequence[Sequence[Item]] = (),
    ) -> StepMetrics:
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
                For a tree it gives (tokens, weights): each token is a label of the one before it on its way from the
                root, with a loss times its weight; by default the number of trajectories that contain it. The loss is
                the sum over all labels divided by the sum of all weights. :func:`hdpcomm.data.fold` makes these.
                For a loss of log-probabilities it gives a dictionary (:mod:`hdpcomm.train.losses`), and with a
                :class:`~hdpcomm.train.GroupLoss` it is called for the sequences of this rank's groups, too.
            groups: of a :class:`~hdpcomm.train.GroupLoss`, the number or name of each sequence's group. Default: each
                sequence is one.
            trees: of a loss of log-probabilities, which sequences share prefixes
                (:func:`hdpcomm.plan.trees_of_prompts`, :func:`hdpcomm.data.fold`). Shared tokens are computed once
                where the plan is shorter so; the loss stays that of each sequence.
            items: of a model with images or videos, those of each sequence (:func:`hdpcomm.models.items_of`), the same
                on all ranks. ``fetch`` then gives a dictionary with what they are made of; each is encoded once, by the
                rank that is done with it first.

        Raises:
            InvalidUsage: a sequence does not fit the ranks' capacity, or no token of the batch has a label.
            Mismatch: ranks made different plans (their lengths, planner, cost model or optimizer's settings differ);
                names them.
            PeerLost, CommTimeout: another rank died, or has not moved for ``comm.timeout`` seconds. Inside of a step
                deadlines go by liveness (:meth:`hdpcomm.comm.Communicator.liveness_deadlines`): a rank moves while
                ``fetch`` reads, for at most half an hour a call, and with every micro-batch and operation.
            NotFinite: the loss or the gradient is not, on all ranks; names the sequences. Nothing was updated, and
                :meth:`step` may be called again.
        """
        check_has("step()", "fetch", fetch, "__call__", "a function of a sequence's number")
        with self.comm.liveness_deadlines():
            try:
                return self._step(lengths, self._declared(fetch), groups, trees, items)
            except Aborted:
                self.runner.drain()  # where it was a reduction that failed first, it has the reason
                raise

    def evaluate(
        self,
        lengths: Sequence[int | Tree],
        fetch: Fetch,
        *,
        groups: Sequence[Hashable] | None = None,
        trees: Sequence[TrajectoryTree] = (),
        items: Sequence[Sequence[Item]] = (),
    ) -> Tensor:
        """(summed loss, labels) of the sequences whose last layers are on this rank, fp64 ``[2]``; nothing is trained.

        Collective over ``comm``; arguments and errors as of :meth:`step`. The sum over all ranks is that of the batch;
        with a loss of log-probabilities the second number is what its losses are divided by.
        """
        check_has("evaluate()", "fetch", fetch, "__call__", "a function of a sequence's number")
        with self.comm.liveness_deadlines():
            planned, batch = self._plan_now(lengths, trees, items)
            fetch = self._declared(fetch)
            self._agree(planned, groups)
            if isinstance(self.loss, GroupLoss):
                assert batch is not None
                return self._group_terms(planned, batch, fetch, groups)[1]
            terms, _ = self._terms(planned, batch, fetch, groups)
            return self._forward(planned, fetch, terms)

    def log_probs(
        self,
        lengths: Sequence[int],
        fetch: Fetch,
        *,
        entropy: bool = False,
        temperature: float | None = None,
        root: int | None = None,
        trees: Sequence[TrajectoryTree] = (),
        routes: list[Tensor] | None = None,
        items: Sequence[Sequence[Item]] = (),
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The log-probability of each label of a batch under the model as it is; forward passes only, under a plan.

        Collective over ``comm``; ``lengths``, ``fetch``, ``trees`` and errors as of :meth:`step`. Columns of ``fetch``
        are not read, but "routes".

        Args:
            entropy: whether to give the entropy of each token's distribution, too.
            temperature: divides the logits. Default: that of the trainer's loss, or 1.
            root: the rank of ``comm`` that gets the results, the others get empty lists. Default: all ranks.
            items: as of :meth:`step`.
            routes: an empty list, of all ranks or none, that gets for each sequence the experts ``[length, layers with
                routers, top_k]`` of its tokens, for ``fetch`` of a later :meth:`step`; ``trees`` are left alone then.

        Returns: (log-probabilities, entropies or ``None``): for each sequence a tensor ``[length]``, fp32 (fp64 of an
            fp64 model) on the CPU, element t of label t; 0 where there is no label.
        """
        check_has("log_probs()", "fetch", fetch, "__call__", "a function of a sequence's number")
        own = self.loss.temperature if isinstance(self.loss, (TokenLoss, GroupLoss)) else 1.0
        given = (own or 1.0) if temperature is None else temperature
        given = check_number("log_probs()", "temperature", given, above=0)
        shared = trees if routes is None else ()
        found = self._results("log_probs()", lengths, fetch, shared, root, entropy, given, routes, items)
        return found[0], found[1] if entropy else None

    def values(
        self,
        lengths: Sequence[int],
        fetch: Fetch,
        *,
        root: int | None = None,
        trees: Sequence[TrajectoryTree] = (),
    ) -> list[Tensor]:
        """The output of a critic for each token of a batch; forward passes only, under a plan.

        A critic has one output: a classifier of tokens with ``num_labels=1``, by :func:`hdpcomm.models.adapt`. It is
        trained by a loss with ``temperature=None``, whose labels are 0 where a token has a loss. Collective; arguments,
        results and errors as of :meth:`log_probs`; labels are not read.
        """
        check_has("values()", "fetch", fetch, "__call__", "a function of a sequence's number")
        model: Any = self.model
        if not getattr(model, "gives_values", False) or model.causal_lm.config.num_labels != 1:
            raise InvalidUsage(
                "values() is of models with one output for each token, and the trainer's gives logits or several; give "
                "adapt() a classifier of tokens with num_labels=1, or call log_probs()"
            )

        def every_token(i: int) -> dict[str, Tensor]:
            fetched = fetch(i)
            given: Any = fetched.get("tokens") if isinstance(fetched, Mapping) else fetched
            tokens = given[0] if isinstance(given, tuple) else given
            return {"tokens": tokens, "labels": torch.zeros_like(tokens)}

        return self._results("values()", lengths, every_token, trees, root)[0]

    def _results(
        self,
        call: str,
        lengths: Sequence[int],
        fetch: Fetch,
        trees: Sequence[TrajectoryTree],
        root: int | None,
        entropy: bool = False,
        temperature: float | None = None,
        routes: list[Tensor] | None = None,
        items: Sequence[Sequence[Item]] = (),
    ) -> list[list[Tensor]]:
        """Log-probabilities and entropies, or outputs, of each label of each sequence. Collective."""
        if root is not None:
            check_whole(call, "root", root, least=0, most=self.comm.size - 1)
        with self.comm.liveness_deadlines():
            planned, batch = self._plan_shorter(lengths, trees)
            planned = self._with_items(planned, items, batch)
            self._agree(planned, more=(entropy, temperature, root, routes is not None))
            kept = self._log_probs(planned, batch, self._declared(fetch), entropy, temperature, routes is not None)
            found = kept.sum(self.mesh, root)
            if routes is not None:
                every = kept.sum_routes(self.mesh, root)
                routes += torch.split(every, batch.lengths) if root in (None, self.comm.rank) else ()
        if root not in (None, self.comm.rank):
            return [[], []]
        return [list(row.split(batch.lengths)) for row in found]

    def _step(
        self,
        lengths: Sequence[int | Tree] | PlannedStep,
        fetch: Fetch,
        groups: Sequence[Hashable] | None,
        trees: Sequence[TrajectoryTree],
        items: Sequence[Sequence[Item]],
    ) -> StepMetrics:
        check_trained_names(self.model, self._trained)
        counts = self.comm.stats()
        planned, batch = self._plan_now(lengths, trees, items)
        started, processor = time.perf_counter() - planned.waited_s, time.process_time()
        plan, runner = planned.plan, self.runner
        runner.zero()
        self._agree(planned, groups)
        terms, known = self._terms(planned, batch, fetch, groups)
        self.timeline.begin()
        scale = 1.0 / max(1, plan.tokens)
        offloading = OffloadedStep(self.offload, self._memory, self._device)
        inputs = StepInputs(
            planned, fetch, scale, runner.gradients, offloading.micro_batch, self.offload, self._ends_pass, terms=terms
        )
        total, labels = runner.train(inputs, known, offloading.meter)
        self.timeline.end("wait for others")
        mean = mean_loss(total, labels)
        runner.reduce(1.0 / (scale * labels))
        grad_norm = runner.clip(self.max_grad_norm)
        check_finite(mean, grad_norm, plan, inputs.not_finite, self.mesh, self.num_steps)
        self.timeline.end("gradients")
        runner.update()
        runner.synchronize()
        self.timeline.end("optimizer")
        sent = self.comm.stats()["bytes_sent"] - counts["bytes_sent"] + runner.passes.bytes_elsewhere
        idle = sum(span.idle_s for span in self.timeline.spans)
        own = [time.perf_counter() - started, idle, sent, time.process_time() - processor]
        metrics = self._metrics(planned, own, loss=mean, grad_norm=grad_norm)
        if runner.counts_rows:
            metrics = add_expert_load(metrics, runner.expert_rows(), runner.passes.loads, self.mesh)
        return offloading.add_to(metrics, self.comm)

    def _terms(
        self, planned: PlannedStep, batch: Batch | None, fetch: Fetch, groups: Sequence[Hashable] | None
    ) -> tuple[LabelTerms | None, Tensor]:
        """The labels' losses, and (loss, count) that this rank knows before the step's passes."""
        nothing = torch.zeros(2, dtype=torch.float64)
        if batch is None:
            return None, nothing
        if isinstance(self.loss, TokenLoss):
            return token_terms(self.loss, batch), nothing
        assert isinstance(self.loss, GroupLoss)
        slopes, told = self._group_terms(planned, batch, fetch, groups)
        return given_terms(slopes[None], self.loss.temperature, batch), told

    def _group_terms(
        self, planned: PlannedStep, batch: Batch, fetch: Fetch, groups: Sequence[Hashable] | None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`hdpcomm.train.losses.label_terms.group_terms`. Collective."""
        assert isinstance(self.loss, GroupLoss)
        numbers = checked_groups(groups, len(batch.lengths))
        kept = self._log_probs(planned, batch, fetch, False, self.loss.temperature)
        return group_terms(self.loss, kept.sum(self.mesh)[0], batch, numbers, fetch, self.comm)

    def _log_probs(
        self,
        planned: PlannedStep,
        batch: Batch,
        fetch: Fetch,
        entropy: bool,
        temperature: float | None,
        routes: bool = False,
    ) -> KeptLogProbs:
        """Log-probabilities of the labels whose last layers are on this rank, and routes of the layers that are here.
        Collective, after the agreement on the plan."""
        like = next(parameter for parameter in self.model.parameters() if parameter.is_floating_point())
        routed = self.runner.passes.chunks[0] if routes else None
        kept = KeptLogProbs(batch, like, entropy=entropy, temperature=temperature, routed=routed)
        self._forward(planned, fetch, kept_terms(kept, batch))
        return kept

    def _forward(self, planned: PlannedStep, fetch: Fetch, terms: LabelTerms | None) -> Tensor:
        """Forward passes of a plan that all ranks have agreed on; (summed loss, labels) of this rank. Collective."""
        return self.runner.forward(
            StepInputs(planned, fetch, offload=self.offload, on_pass=lambda _: self.comm.tick(), terms=terms)
        )

    def _declared(self, fetch: Fetch) -> Fetch:
        return declared(fetch, self.comm, self._vocabulary)

    def _ends_pass(self, index: int | None) -> None:
        phase = {None: "wait for others", ENCODER: "encoder"}.get(index, "micro-batch")
        self.timeline.end(phase, -1 if index is None else index)

    def check_replicas(self) -> None:
        """Compares the weights and the optimizer's settings of all ranks that hold the same parameters
        (:func:`hdpcomm.train.step.replicas.check_replicas`), which takes about as long as reading them. Collective.

        Raises: Mismatch: names the ranks, and a tensor that differs.
        """
        for comm, tensors in self.runner.replicated():
            check_replicas(tensors, self.optimizer, comm, settings=self.max_grad_norm)

    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once. Collective over the ranks that hold one copy of it."""
        return num_parameters(self.model, self.layout, self.mesh)

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer state and master weights, if there are any, of the whole model by their names
        there, equal on every rank: a trainer on any other mesh takes it over.

        Where this rank has no more than parts of them (a mesh, ``zero=1``) it is collective, and those tensors are
        copies. All others are the live ones.
        """
        return {**self.runner.state.whole(), "num_steps": self.num_steps}

    def checkpoint_state(self) -> dict[str, Any]:
        """As :meth:`state_dict`, but of each tensor only what this rank holds of it, live, as a
        :class:`hdpcomm.train.state.layout.TensorPart`: nothing is gathered but names and numbers. What checkpoints
        are written from by all ranks together, and read into; then give it to :meth:`load_state_dict`. Collective.
        """
        return {**self.runner.state.parts(), "num_steps": self.num_steps}

    def live_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's part of :meth:`checkpoint_state`: its live tensors by name, and the numbers beside them as
        JSON. Copies in other ranks' memory (:class:`hdpcomm.train.state.peer_copies.PeerCopies`) are made from it.
        Local."""
        tensors, numbers = self.runner.state.live()
        return tensors, {**numbers, "num_steps": self.num_steps}

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers of the whole model by their names there, gathered one at a time; copy what is to stay.
        Collective: every rank goes through all of them."""
        return self.runner.state.whole_tensors()

    def averaged(self) -> AbstractContextManager[None]:
        """While it is entered, the model has the averages of :func:`hdpcomm.train.average_weights` in place of its
        weights, for an evaluation, :meth:`whole_tensors` or :meth:`log_probs`; before the first step they are the
        weights. No step may be taken meanwhile. Entering and leaving are collective."""
        return self.runner.averaged()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of what :meth:`state_dict` gave, here or in another process, on any mesh; of
        :meth:`checkpoint_state` what is not in place already. Local: give it to every rank.

        The trainer copies what it takes: two trainers may be given the same state.
        """
        self.runner.state.load(state)
        self.num_steps = int(state["num_steps"])
        for load in self.runner.passes.loads:
            load.forget()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the steps."""
        assert self.runner.optimizer is not None
        return self.runner.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.runner.masters is not None:
            raise InvalidUsage(
                f"trainer.optimizer was set to {type(optimizer).__name__} over parameters, and with zero= or dtype= "
                "an optimizer updates this rank's master weights: give the new one to a new Trainer"
            )
        self.runner.optimizer = optimizer

    @property
    def ran(self) -> StepPlan | None:
        """The plan of the last step as it ran: micro-batches of its queue with the ranks that have taken them."""
        return self.runner.ran

    def _agree(self, planned: PlannedStep, groups: Sequence[Hashable] | None = None, more: object = None) -> None:
        """Raises unless all ranks are about to run the same step. Collective."""
        if groups is not None and not isinstance(self.loss, GroupLoss):
            raise InvalidUsage("groups are of a GroupLoss, and the trainer's loss is none; leave them out")
        told = (
            self.max_grad_norm,
            name_of_loss(self.loss),
            None if groups is None else checked_groups(groups, len(groups)),
            more if planned.items is None else (more, planned.items.digest()),
        )
        self.runner.agree(planned.plan, settings_of(self.optimizer, told))

    def _plan_now(
        self,
        lengths: Sequence[int | Tree] | PlannedStep,
        trees: Sequence[TrajectoryTree],
        items: Sequence[Sequence[Item]],
    ) -> tuple[PlannedStep, Batch | None]:
        """The plan of a step, and its sequences if the loss is one of log-probabilities."""
        batch = None
        if isinstance(self.loss, (TokenLoss, GroupLoss)):
            planned, batch = self._plan_shorter(lengths, trees)
        else:
            refuse_prefixes(trees)
            planned = lengths if isinstance(lengths, PlannedStep) else self._planned(lengths)
        return self._with_items(planned, items, batch), batch

    def _with_items(self, planned: PlannedStep, items: Sequence[Sequence[Item]], batch: Batch | None) -> PlannedStep:
        return with_items(planned, items, (*self.stages, self.model)[0], self.planner, self.mesh, batch)

    def _plan_shorter(
        self, lengths: Sequence[int | Tree] | PlannedStep, trees: Sequence[TrajectoryTree]
    ) -> tuple[PlannedStep, Batch]:
        """See :func:`hdpcomm.train.losses.label_terms.shorter_plan`."""
        return shorter_plan(self._planned, lengths, trees, shares=shares_prefixes((*self.stages, self.model)))

    def _planned(self, lengths: Sequence[int | Tree]) -> PlannedStep:
        check_trees(lengths, (*self.stages, self.model))
        started = time.perf_counter()
        plan = self.planner.plan(lengths)
        return PlannedStep(tuple(lengths), plan, time.perf_counter() - started)

    def _metrics(self, planned: PlannedStep, own: Sequence[float], *, loss: float, grad_norm: float) -> StepMetrics:
        """``own``: this rank's seconds, idle seconds, bytes sent and seconds of processor time. Collective."""
        plan, ran = planned.plan, self.runner.ran
        longest, longest_ranks = plan.longest()
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
            mtp_loss=self.runner.ahead[0] / max(1.0, self.runner.ahead[1]),
            longest=longest,
            longest_ranks=longest_ranks,
            micro_batches=len(plan.table),
            predicted_s=plan.makespan_s,
            planning_s=planning / self.comm.size,
            plan_wait_s=plan_wait / self.comm.size,
            processor_s=rows[:, 3].max().item(),
            sequences_on_ranks=plan.sequences_on_ranks(),
            queued=plan.queued,
            moved=0 if ran is None or ran is plan else int((ran.table.ranks != plan.table.ranks).sum()),
        )

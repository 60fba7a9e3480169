"""transformers.Trainer with Hybrid Data Parallelism: every step is planned, packed and sharded over all ranks.

    from hdpcomm.integrations.huggingface import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.train()

Data loading, accumulation, clipping, optimizer, schedule, logging, evaluation, checkpoints and resuming stay those of
transformers. Needs ``pip install hdpcomm[huggingface]``; importing this module imports transformers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from hdpcomm.arguments import check_type, check_whole
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_batch import ComputedLoss, LogProbModel, ScoreModel
from hdpcomm.integrations.huggingface_checkpoints import (
    FolderSource,
    PartsInFolders,
    least_zero,
    load_optimizer,
    without_fsdp,
)
from hdpcomm.integrations.huggingface_losses import ModelLabels, TokenMetrics, add_noise, token_loss
from hdpcomm.integrations.huggingface_options import (
    check_options,
    check_replay,
    compile_options,
    is_trainer_of,
    mesh_sizes,
    mesh_text,
    scores_old,
)
from hdpcomm.integrations.row_passes import PlanSettings, RowPasses, Sequences, gather_sequences
from hdpcomm.models import adapt, compile_layers, use_float8
from hdpcomm.models.heads import NEXT_TOKEN, SEQUENCE, head_of
from hdpcomm.models.self_check import is_random
from hdpcomm.plan import CostModel, PlannedStep
from hdpcomm.run.model import spec_of
from hdpcomm.train.step.passes import Passes
from hdpcomm.train.step.replicas import settings_of
from hdpcomm.train.step.runner import Runner, StepSettings
from hdpcomm.train.step.trainer_check import check_order
from hdpcomm.train.zero.masters import Masters

__all__ = ["HybridDataParallel", "Trainer"]


class HybridDataParallel(PartsInFolders):
    """Turns a subclass of ``transformers.Trainer`` into one that plans; name it first among the bases.

    A training step takes the batches of all ranks together as one global batch: padding is dropped, ranks tell each
    other their tokens, all make the same plan, and each runs its micro-batches over the ranks that the plan gives them.
    The loss is the mean over all labelled tokens of the step, its accumulation included (``num_items_in_batch``), and
    the gradient that of the whole batch on one device. The model is not wrapped in DDP.

    A batch is what a collator of transformers gives: rows with an ``attention_mask``, or flattened rows with
    ``cu_seq_lens_q`` or ``position_ids`` (as of ``DataCollatorWithFlattening``); what it does not carry, it refuses by
    name (:mod:`hdpcomm.integrations.huggingface_batch`). Evaluation and prediction run on each rank with the attention
    that the model came with; ``generate()`` does inside of :meth:`original_attention`.

    With ``transformers.Trainer`` and TRL's ``SFTTrainer``, training does not call ``compute_loss`` of the other base; a
    class of one's own whose loss is the mean of the labelled tokens and adds no more than logs may say so:
    ``computes_token_loss = True``. With TRL's ``GRPOTrainer``, ``DPOTrainer``, ``RLOOTrainer`` and ``KTOTrainer`` it
    calls it, with log-probabilities that planned forward passes have made in the place of the model, and planned passes
    carry the loss's derivatives into the model (:mod:`hdpcomm.integrations.huggingface_batch`): any of their
    losses, with their logs. Other losses are refused.

    A ``model`` given by its folder, or by a name on a hub, is made without memory, and read when it is first needed,
    each tensor by one rank of a host; with ``zero=3`` a rank keeps its part only. Adapters of LoRA are added to it as
    to any other.

    With ``zero`` or ``dtype``, checkpoints are those of one device still: ``optimizer.pt`` has the state of all
    parameters, and master weights beside them, so runs resume on other numbers of ranks, and transformers' own trainer
    reads them. With ``zero=3`` parameters have no values outside of passes: save them by :meth:`save_model`; evaluation
    and :meth:`original_attention` have them.

    Args (by keyword, besides those of the other base):
        capacity: most tokens of a rank in a micro-batch; ``None``: the even share of each global batch.
        cost_model: what plans go by; ``None``: measured at the first step.
        queue, slices: of :class:`hdpcomm.plan.Planner`. Sequences that do not fit the ranks run in slices, one after
            the other; with ``capacity``.
        offload: bytes of pinned host memory of a rank for activations that do not fit, with ``capacity``.
        zero, dtype: what ranks keep of the optimizer's state, gradients and weights, and the type of parameters beside
            fp32 masters: as of :class:`hdpcomm.train.Trainer`. ``fsdp`` of TrainingArguments says the same;
            ``zero="auto"``, with ``capacity``, is the least stage that the devices, or the hosts, have memory for.
        optimizer_offload: of :class:`hdpcomm.train.Trainer`, too.
        router_replay: of TRL's GRPOTrainer: tokens take the experts that they took in the pass for their old
            log-probabilities (``"R2"``), which is planned then, or those that ``rollout_func`` gives as
            ``routed_experts`` (``"R3"``), for each row ``[tokens, layers, top_k]`` (:mod:`hdpcomm.models.routes`).
        fp8: ``"rowwise"`` or ``"tensorwise"`` of :func:`hdpcomm.models.use_float8`; not with tensor ranks.
        mesh: ``{"tensor": 2, "expert": 2}``, or one of them: how many ranks share the layers, or their experts, once
            training begins, and ``expert_replicas`` (:class:`hdpcomm.Mesh`). Then evaluation gives the loss alone, and
            :meth:`save_model` saves the model.

    Raises:
        InvalidUsage: what would be wrong in silence (:mod:`hdpcomm.integrations.huggingface_options`); models as
            :func:`hdpcomm.models.adapt` says. All ranks must raise or go on alike.
    """

    computes_token_loss = False
    """``compute_loss`` of a subclass is the mean loss of the labelled tokens, though it is not transformers' own."""

    def __init__(
        self,
        *args: Any,
        capacity: int | None = None,
        cost_model: CostModel | None = None,
        queue: bool = False,
        slices: int = 1,
        offload: int = 0,
        zero: int | str = 0,
        dtype: torch.dtype | None = None,
        mesh: Mapping[str, int] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        optimizer_offload, self._fp8 = kwargs.pop("optimizer_offload", False), kwargs.pop("fp8", None)
        self._replay: str | None = kwargs.pop("router_replay", None)
        self._routes: list[Any] | None = None
        """Experts of the tokens of each row that was generated last."""
        self._scores_old = False
        """The next pass of the model is that of the old log-probabilities."""
        self._comm: Communicator | None = None
        auto = zero == "auto"
        check_whole("Trainer", "zero", 0 if auto else zero, least=0, most=3)
        self._cut = mesh_sizes(mesh)
        if dtype is not None:
            check_type("Trainer", "dtype", dtype, torch.dtype)
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        check_type("Trainer", "optimizer_offload", optimizer_offload, bool)
        self._kept = StepSettings(0 if auto else int(zero), dtype, optimizer_offload=optimizer_offload)
        for name, value in given.items():
            given[name], self._kept = without_fsdp(value, self._kept)
        model = "model" if "model" in given else 0
        if auto and not self._kept.zero:  # else fsdp has said it
            kept, where = self._kept, self._mesh()
            stage = least_zero(given.get(model), given.values(), where, capacity=capacity, kept=kept)
            self._kept = replace(kept, zero=stage)
        check_order(self._kept.zero, queue=queue)
        self._plans = PlanSettings(capacity, cost_model, queue, slices, offload)
        self._counts: Counter[str] = Counter()
        self._evaluates = False
        self._made: tuple[RowPasses, Runner] | None = None
        """Plans of rows, and what runs them; made when the model is prepared."""
        self._resumed: str | None = None
        """The checkpoint whose optimizer's state is read once the runner is made."""
        self._names: list[list[str]] = []
        """By group of the optimizer, the names of its parameters."""
        self._whole: dict[str, Any] | None = None
        """The model's weights while it is saved, where ranks have parts of them."""
        self._begins = True
        """No pass of this step has run: gradients of several batches are added up where transformers accumulates."""
        self._source = None if is_trainer_of(self, "reward") else FolderSource.of(given.get(model), given.values())
        """The folder of a model whose weights nobody has read yet."""
        if self._source is not None:
            given[model] = self._source.model()
        positional = [given.pop(place) for place in range(len(args))]
        super().__init__(*positional, **given)
        this = cast(Any, self)
        self._loss: ComputedLoss | None = None
        self._of_log_probs = check_options(this, self._kept, self._cut)
        """The loss is one of TRL's, made of log-probabilities."""
        if self._replay is not None:
            check_replay(this, self._replay)
        if self._source is not None:
            self._source.prepare(this.model, self._mesh(), this.args.seed)
        if getattr(this, "aux_loss_enabled", False):  # TRL weighs the routers' loss itself
            getattr(this.model, "get_base_model", lambda: this.model)().router_aux_loss_coef = this.router_aux_loss_coef
        self._adapted = adapt(this.model)
        self._labels = ModelLabels(self._adapted)
        self._keeps_metrics = is_trainer_of(self, "sft")
        """TRL's logs have the entropy of tokens, and how many are predicted."""
        self._set_loss()
        if self._is_cut and self._labels.of != NEXT_TOKEN:
            raise InvalidUsage(f"Trainer: {mesh_text(self._cut)} with a classifier is not supported; leave it out")
        if self._source is None:
            self._check_random()

    def _set_loss(self) -> None:
        """The loss of a label, where it is no plain cross-entropy."""
        this, labels = cast(Any, self), self._labels
        labels.dynamic = self._keeps_metrics and this.args.loss_type == "dft"
        if self._of_log_probs or (this.compute_loss_func is None and this.label_smoother is None):
            return
        name, function = "compute_loss_func", this.compute_loss_func
        if function is None:
            name = f"label_smoothing_factor={this.args.label_smoothing_factor}"
            function = partial(this.label_smoother, shift_labels=labels.of == NEXT_TOKEN)
        config = this.model.config.get_text_config()
        columns = config.vocab_size if labels.of == NEXT_TOKEN else config.num_labels
        labels.loss = token_loss(name, function, labels.of, columns)

    def _check_random(self) -> None:
        if self._of_log_probs and is_random(self._adapted):
            raise InvalidUsage(
                "Trainer: two forward passes of the model in training mode differ (dropout, or noise in its routers), "
                "and log-probabilities and gradients must see the same model; set the probabilities to 0"
            )

    # --- what transformers.Trainer calls -----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As in the base; the model is prepared without DDP, which would add up gradients once more, where it is (moved
        to ``cpu:0``, parameters without values would get memory), and not compiled: its layers are."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = cast(Any, self).accelerator
        prepare, plugin = accelerator.prepare_model, accelerator.state.dynamo_plugin

        def prepared(model: Any, **_: Any) -> Any:
            backend, plugin.backend = plugin.backend, type(plugin.backend).NO
            try:
                return prepare(model, device_placement=False, evaluation_mode=True)
            finally:
                plugin.backend = backend

        accelerator.prepare_model = prepared

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """As in the base; a model without memory stays where it is."""
        if self._source is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        read, mesh = self._source is not None, self._mesh()
        self._read_weights(self._kept.zero, mesh)
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        if self._made is not None:
            self._plans = replace(self._plans, cost_model=self._made[0].cost_model)
            self._made = None  # its host memory is free for the next one
        if self._fp8 is not None:
            use_float8(self._adapted, self._fp8)
            self._fp8 = None  # once, whenever train() is called again
        if options := compile_options(cast(Any, self).accelerator):
            compile_layers(self._adapted, **options)
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        runner = Runner(
            Passes([self._adapted], mesh),
            self._optimizer,
            self._kept,
            within=cast(Any, self._adapted).attention.planned,
        )
        if (alpha := cast(Any, self).neftune_noise_alpha) is not None:
            cast(Any, self).neftune_hook_handle.remove()  # its noise is by the tokens of a row, of any sequences
            cast(Any, self).neftune_hook_handle = add_noise(cast(Any, self._adapted).embedding, alpha)
        self._names = [[runner.layout.of(parameter).trained for parameter in group] for group in groups]
        runner.publish_after_steps()
        if self._resumed is not None:
            load_optimizer(runner.state, self._names, self._resumed)
            self._resumed = None
        passes = RowPasses(
            self._adapted, mesh, runner, self._settings, plans=self._plans,
            spec=None if self._plans.slices == 1 else spec_of(cast(Any, self).model.config.get_text_config()),
            around=lambda: cast(Any, self).compute_loss_context_manager(),
        )  # fmt: skip
        self._made, self._begins = (passes, runner), True
        if read:
            with runner.weights():
                self._check_random()
        return prepared

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base; ranks wait for those that read data or save, see
        :meth:`hdpcomm.comm.Communicator.liveness_deadlines`.

        Raises: InvalidUsage: it was called before, with ``zero`` or ``dtype``.
        """
        if self._masters is not None:
            raise InvalidUsage(
                "train() was called before, and with zero= or dtype= the optimizer has this rank's parts only; save "
                "the model, and make a new trainer of it"
            )
        with self.comm.liveness_deadlines():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base."""
        with self.comm.busy("reads data"):
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.comm.busy("saves a checkpoint"):
            return super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._clip(cast(Any, self).args.max_grad_norm) if self._shares else super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not self._shares or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        return self._clip(None)

    def _clip(self, max_norm: float | None) -> Tensor:
        assert self._made is not None
        return torch.tensor(self._made[1].clip(max_norm))

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor | None:
        """The labelled tokens of a step, over its accumulation and all ranks; ``None`` after the last step."""
        if self._evaluates:
            evaluated: Tensor | None = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
            return evaluated
        if not batch_samples:
            return None
        if self._of_log_probs:
            counted: Tensor | None = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
            return counted
        labelled = sum(int(self._labels.sequences(batch).num_labels) for batch in batch_samples)
        count = torch.tensor([labelled], dtype=torch.int64)
        self.comm.all_reduce(count)
        if not count.item():
            raise InvalidUsage(
                "no token of this step has a label: all labels are -100, or all sequences have one token; give longer "
                "sequences or labels"
            )
        return count[0].to(device)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Forward and backward over the global batch; the share of it in the step's loss. Collective."""
        if self._of_log_probs:
            told: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            self._carry_out()
            return told
        if num_items_in_batch is None:
            raise InvalidUsage("training_step() got no num_items_in_batch; take get_batch_samples() of this class")
        model.train()
        passes, ends = self._begin()
        batch, _ = gather_sequences(self._labels.sequences(inputs), self.comm)
        metrics = TokenMetrics() if self._keeps_metrics else None
        scale, terms = 1.0 / float(num_items_in_batch), self._labels.terms(batch, metrics)
        share = self._train(passes.plan(batch), batch, scale=scale, ends=ends, terms=terms)
        if metrics is not None:
            self._note(metrics, sum(batch.lengths))
        return share.to(cast(Any, self).args.device)

    def _note(self, metrics: TokenMetrics, tokens: int) -> None:
        """Adds a global batch to the metrics that TRL's trainer logs. Collective."""
        assert self._made is not None
        this = cast(Any, self)
        this._total_train_tokens += tokens
        entropy, accuracy = metrics.means(self._made[0].mesh)
        logged = this._metrics["train"]
        logged["entropy"].append(entropy)
        logged["mean_token_accuracy"].append(accuracy)
        logged["num_tokens"] = [this._total_train_tokens]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the base; in a training step of log-probabilities what it gives has no way back into the model, which
        :meth:`training_step` goes. Collective then."""
        if not self._of_log_probs or self._evaluates or not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        this = cast(Any, self)
        assert self._made is not None
        stand_in = (
            ScoreModel(self._made[0], self._labels.padding)
            if self._labels.of == SEQUENCE
            else self._log_prob_model(inputs.get(_ROUTES))
        )
        with self.original_attention():  # a reference may be the same model without its adapters
            loss: Tensor = super().compute_loss(stand_in, inputs, *args, **kwargs)  # type: ignore[misc]
        for name in _ONLY_LOGGED:
            this._metrics["train"].pop(name, None)
        self._loss = ComputedLoss(loss, loss.detach().clone().requires_grad_(), stand_in.calls)
        return self._loss.leaf

    def _log_prob_model(self, routes: list[Any] | None, *, keeps: bool = False) -> LogProbModel:
        assert self._made is not None
        temperature = float(getattr(self, "temperature", 1.0))
        return LogProbModel(self._made[0], temperature, routes=routes, keeps=keeps)

    # --- routes of TRL's GRPOTrainer ---------------------------------------------------------------------------------

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self._replay == "R3" and not self._evaluates:
            self._routes = next((x.pop(_ROUTES, None) for x in generated if isinstance(x, dict)), None)
            if self._routes is None or len(self._routes) != len(generated[1]):
                raise InvalidUsage(
                    f"router_replay='R3' and the rollout gave {_ROUTES} of {len(self._routes or ())} rows of "
                    f"{len(generated[1])}; let rollout_func give them for each (of vLLM: enable_return_routed_experts)"
                )
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._routes, self._scores_old = None, self._replay is not None and not self._evaluates and scores_old(self)
        scored = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return scored if self._routes is None else {**scored, _ROUTES: self._routes}

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        scores_old, self._scores_old = self._scores_old, False
        if scores_old:
            model = self._log_prob_model(self._routes, keeps=self._replay == "R2")
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]
        if scores_old and self._replay == "R2":
            self._routes = model.kept
        return found

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As in the base, with the attention that the model came with: some trainers generate here."""
        with self.original_attention() if self._of_log_probs else contextlib.nullcontext():
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in the base, with the tokens and micro-batches of a global batch, and the bytes that this rank offloads
        if it does, in the mean since the last log."""
        counts = self._counts
        if "loss" in logs and counts["batches"]:
            batches = counts.pop("batches")
            logs |= {f"hdp_{name}": count / batches for name, count in counts.items()}
            counts.clear()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base, with the attention that the model came with."""
        self._read_weights()
        self._evaluates = True
        planned = self._is_cut and self._made is not None
        try:
            with contextlib.nullcontext() if planned else self.original_attention():
                return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._evaluates = False

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """As in the base; where ranks have parts of layers, the loss of this rank's rows by planned forward passes over
        those of all. Collective then.

        Raises: InvalidUsage: logits are asked for (``compute_metrics``, :meth:`predict`) where no rank has them.
        """
        if not self._is_cut or self._made is None:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]
        if not prediction_loss_only:
            raise InvalidUsage(
                f"compute_metrics and predict() take logits, and with {mesh_text(self._cut)} no rank has those of a "
                "row; give prediction_loss_only=True, or save the model and predict with the saved one"
            )
        settings = cast(Any, self).args
        with torch.no_grad():
            own = self._made[0].score(self._labels.sequences(inputs), temperature=1.0, entropy=False).values
        count = self._get_num_items_in_batch([inputs], settings.device)  # of all ranks, if arguments say so
        share = own.numel() if count is None else count
        if count is not None and settings.average_tokens_across_devices:
            share = count / self.comm.size
        return (-own.sum() / share).to(settings.device), None, None

    # --- what it does with a step ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def original_attention(self) -> Iterator[None]:
        """Inside, the model runs as it came, for ``generate()`` and for calls with padding. Local; the first use of a
        model that was given by its folder is collective."""
        self._read_weights()
        if self._is_cut and self._made is not None:
            raise InvalidUsage(
                f"with {mesh_text(self._cut)} no rank runs the model alone; save it, and load it elsewhere"
            )
        weights = contextlib.nullcontext() if self._made is None else self._made[1].weights()
        with weights, cast(Any, self._adapted).attention.original():
            yield

    @property
    def _masters(self) -> Masters | None:
        return None if self._made is None else self._made[1].masters

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """torch's, inside of accelerate's."""
        optimizer = cast(Any, self).optimizer
        return cast("torch.optim.Optimizer", getattr(optimizer, "optimizer", optimizer))

    def _begin(self) -> tuple[RowPasses, bool]:
        """Before the passes of a batch: what runs them, and whether they end the step."""
        assert self._made is not None
        passes, runner = self._made
        if self._begins:
            runner.zero()
        self._begins = ends = bool(cast(Any, self).accelerator.sync_gradients)
        return passes, ends

    def _carry_out(self) -> None:
        """Carries the derivatives of the loss that :meth:`compute_loss` gave into the model. Collective."""
        computed, self._loss = self._loss, None
        if computed is None or not computed.calls:
            raise InvalidUsage(f"{type(self).__name__}.compute_loss() asked the model for no log-probabilities")
        _, ends = self._begin()
        for place, call in enumerate(computed.calls):
            last = place == len(computed.calls) - 1
            terms = computed.terms(call, self.comm, more=not last)
            self._train(call.planned, call.batch, terms=terms, ends=ends and last)

    def _train(self, planned: PlannedStep, batch: Sequences, *, ends: bool, **more: Any) -> Tensor:
        """See :meth:`.row_passes.RowPasses.train`; with ``ends``, parameters have their gradients then."""
        assert self._made is not None
        passes, runner = self._made
        before = passes.offloaded_bytes
        share = passes.train(planned, batch, ends=ends, **more)
        if ends and runner.masters is None:
            runner.finish()
        self._counts.update(tokens=sum(batch.lengths), micro_batches=len(planned.plan.micro_batches), batches=1)
        if offloaded := passes.offloaded_bytes - before:
            self._counts.update(offloaded_bytes=offloaded)
        return share

    def _settings(self) -> str:
        return settings_of(self._optimizer)


class Trainer(HybridDataParallel, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` that plans; see :class:`HybridDataParallel`.

    Examples:
        >>> trainer = Trainer(model=model, args=args, train_dataset=dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        head = head_of(model) if hasattr(model, "get_output_embeddings") else None
        flat = head is None or head[1] == NEXT_TOKEN
        if flat and kwargs.get("data_collator") is None and kwargs.get("processing_class") is None and len(args) < 3:
            kwargs["data_collator"] = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        super().__init__(*args, **kwargs)


_ROUTES = "routed_experts"
"""Name of rows' routes in rollouts and batches of TRL."""
_ONLY_LOGGED = ("logits/chosen", "logits/rejected", "mean_token_accuracy")
"""Metrics of TRL that need logits."""

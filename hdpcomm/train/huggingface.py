"""transformers.Trainer with Hybrid Data Parallelism: every step is planned, packed and sharded over all ranks.

    from hdpcomm.train.huggingface import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.train()

Data loading, accumulation, clipping, optimizer, schedule, logging, evaluation, checkpoints and resuming stay those of
transformers. Needs ``pip install hdpcomm[huggingface]``; importing this module imports transformers.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from hdpcomm.arguments import check_whole
from hdpcomm.comm import init
from hdpcomm.comm.mesh import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.parallel.agreement import share_values
from hdpcomm.plan import ClusterSpec, CostModel, PlannedStep, Planner
from hdpcomm.plan.planner import LONGEST_MEASURED
from hdpcomm.torch_backend import HdpProcessGroup, communicator
from hdpcomm.train.gradients import Gradients
from hdpcomm.train.huggingface_batch import gather_sequences, sequences_of
from hdpcomm.train.layout import layout_of
from hdpcomm.train.passes import MicroBatchPasses, StepInputs
from hdpcomm.train.plan_check import check_same_plan
from hdpcomm.train.profile import profile_cost_model
from hdpcomm.train.replicas import ChangedBuffers, settings_of

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["HybridDataParallel", "Trainer"]


class HybridDataParallel:
    """What turns a subclass of ``transformers.Trainer`` into one that plans; name it first among the bases.

    A training step takes the batches of all ranks together as one global batch: padding is dropped, ranks tell each
    other their tokens, all make the same plan, and each runs its micro-batches over the ranks that the plan gives them.
    The loss is the mean over all labelled tokens of the step, its accumulation included (``num_items_in_batch``), and
    the gradient that of the whole batch on one device. The model is not wrapped in DDP.

    A batch is what a collator of transformers gives: rows with an ``attention_mask``, or flattened rows with
    ``cu_seq_lens_q`` or ``position_ids`` (as of ``DataCollatorWithFlattening``). Evaluation and prediction run on each
    rank with the attention that the model came with; ``generate()`` does inside of :meth:`original_attention`.

    Training does not call ``compute_loss`` of the other base, so one that is not the mean loss of the labelled tokens
    is refused. ``transformers.Trainer`` and TRL's ``SFTTrainer`` are known; a class whose ``compute_loss`` adds no more
    than logs may say so: ``computes_token_loss = True``.

    Args (by keyword, besides those of the other base):
        capacity: most tokens of a rank in a micro-batch; ``None``: the even share of each global batch.
        cost_model: what plans go by; ``None``: measured at the first step.

    Raises:
        InvalidUsage: what would be wrong in silence: label smoothing, a loss of one's own, NEFTune, fp16, DeepSpeed,
            FSDP, SFTTrainer's ``loss_type="dft"`` and ``activation_offloading``; models as :func:`hdpcomm.models.adapt`
            says. All ranks must raise or go on alike.
    """

    computes_token_loss = False
    """``compute_loss`` of a subclass is the mean loss of the labelled tokens, though it is not transformers' own."""

    def __init__(
        self,
        *args: Any,
        capacity: int | None = None,
        cost_model: CostModel | None = None,
        **kwargs: Any,
    ) -> None:
        if capacity is not None:
            check_whole("Trainer", "capacity", capacity, least=1)
        self._capacity = capacity
        self._costs = cost_model
        self._counts: Counter[str] = Counter()
        self._comm: Communicator | None = None
        self._evaluates = False
        self._compiled = False
        self._step: tuple[MicroBatchPasses, Gradients, ChangedBuffers] | None = None
        """What runs the passes of a step, their gradients and the buffers that they may not change; made when the model
        is prepared."""
        self._cluster: ClusterSpec | None = None
        self._planner: Planner | None = None
        self._begins = True
        """No pass of this step has run: gradients of several batches are added up where transformers accumulates."""
        super().__init__(*args, **kwargs)
        this = cast(Any, self)
        _refuse(this)
        self._attention = this.model.config._attn_implementation
        self._adapted = adapt(this.model)

    # --- what transformers.Trainer calls -----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As in the base; the model is prepared without DDP, which would add up gradients once more."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = cast(Any, self).accelerator
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        model = cast(Any, self).model
        share_values(self.comm, (*model.parameters(), *model.buffers()))
        mesh = Mesh(self.comm, placement=range(self.comm.size))
        gradients = Gradients.whole(model.parameters(), layout_of(model, mesh), mesh)
        self._cluster, self._planner = mesh.cluster(), None
        self._step, self._begins = (MicroBatchPasses(self._adapted, mesh), gradients, ChangedBuffers(model)), True
        return prepared

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base; ranks wait for those that read data or save, see
        :meth:`hdpcomm.comm.Communicator.liveness_deadlines`."""
        with self.comm.liveness_deadlines():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base."""
        with self.comm.busy("reads data"):
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.comm.busy("saves a checkpoint"):
            return super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor | None:
        """The labelled tokens of a step, over its accumulation and all ranks; ``None`` after the last step."""
        if self._evaluates:
            evaluated: Tensor | None = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
            return evaluated
        if not batch_samples:
            return None
        labelled = sum(int(sequences_of(batch).num_labels) for batch in batch_samples)
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
        this = cast(Any, self)
        if num_items_in_batch is None:
            raise InvalidUsage("training_step() got no num_items_in_batch; take get_batch_samples() of this class")
        model.train()
        assert self._step is not None
        passes, gradients, buffers = self._step
        batch = gather_sequences(sequences_of(inputs), self.comm)
        planned = self._plan(batch.lengths)
        if self._begins:
            gradients.zero()
            buffers.begin()
        self._begins = ends = this.accelerator.sync_gradients
        scale = 1.0 / float(num_items_in_batch)
        inputs_of_step = StepInputs(
            planned, batch.fetch, scale, gradients, ends=ends,
            around=lambda *_: this.compute_loss_context_manager(), on_pass=lambda _: self.comm.tick(),
        )  # fmt: skip
        with contextlib.nullcontext() if self._compiled else self.comm.busy("runs its first micro-batches"):
            loss, _ = passes.run(inputs_of_step)
        self._compiled = True
        if ends:
            gradients.start()
        told = torch.stack((loss, torch.tensor(len(buffers.changed()))))
        self.comm.all_reduce(told)
        total, changed = told
        if changed and self.comm.size > 1:
            buffers.refuse(self.comm)
        if ends:
            gradients.reduce(1.0)
            gradients.finish()
        self._counts.update(tokens=sum(batch.lengths), micro_batches=len(planned.plan.micro_batches), batches=1)
        share: Tensor = total * scale
        return share.float().to(this.args.device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in the base, with the tokens and micro-batches of a global batch, in the mean since the last log."""
        counts = self._counts
        if "loss" in logs and counts["batches"]:
            logs |= {f"hdp_{name}": counts[name] / counts["batches"] for name in ("tokens", "micro_batches")}
            counts.clear()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base, with the attention that the model came with."""
        self._evaluates = True
        try:
            with self.original_attention():
                return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._evaluates = False

    # --- what it does with a step ------------------------------------------------------------------------------------

    @property
    def comm(self) -> Communicator:
        """All ranks that train: the one under torch.distributed's default group, or of :func:`hdpcomm.init`."""
        if self._comm is None:
            ours = dist.is_initialized() and isinstance(dist.group.WORLD, HdpProcessGroup)
            self._comm = communicator() if ours else init()
        return self._comm

    @contextlib.contextmanager
    def original_attention(self) -> Iterator[None]:
        """Inside, the model runs as it came, for ``generate()`` and for calls with padding. Local."""
        causal_lm = cast(Any, self._adapted).causal_lm
        ours = causal_lm.config._attn_implementation
        causal_lm.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            causal_lm.set_attn_implementation(ours)

    def _plan(self, lengths: list[int]) -> PlannedStep:
        ranks, optimizer = self.comm.size, cast(Any, self).optimizer
        if self._costs is None:
            self._costs = profile_cost_model(self._adapted, self.comm, longest=min(LONGEST_MEASURED, max(lengths)))
        capacity = self._capacity
        if capacity is None:
            capacity = max(-(-sum(lengths) // ranks), max(-(-length // ranks) for length in lengths))
        if self._planner is None or self._planner.cluster.capacity != capacity:
            assert self._cluster is not None
            self._planner = Planner(None, replace(self._cluster, capacity=capacity), cost_model=self._costs)
        plan = self._planner.plan(lengths)
        check_same_plan(plan, self.comm, settings=settings_of(getattr(optimizer, "optimizer", optimizer)))
        return PlannedStep(tuple(lengths), plan, 0.0)


class Trainer(HybridDataParallel, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` that plans; see :class:`HybridDataParallel`.

    Example:
        >>> trainer = Trainer(model=model, args=args, train_dataset=dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("data_collator") is None and kwargs.get("processing_class") is None and len(args) < 3:
            kwargs["data_collator"] = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        super().__init__(*args, **kwargs)


def _refuse(trainer: Any) -> None:
    args = trainer.args
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    known = owner is transformers.Trainer or owner.__module__ == "trl.trainer.sft_trainer"
    if not known and not trainer.computes_token_loss:
        raise InvalidUsage(
            f"{owner.__name__}.compute_loss is not called with plans; if its loss is the mean of the labelled tokens' "
            "cross-entropy, set computes_token_loss = True in your class, else use it without HybridDataParallel"
        )
    wrong = {
        f"label_smoothing_factor={args.label_smoothing_factor}": args.label_smoothing_factor,
        f"neftune_noise_alpha={args.neftune_noise_alpha}": args.neftune_noise_alpha,
        "fp16=True (use bf16)": args.fp16,
        "deepspeed": args.deepspeed,
        f"fsdp={args.fsdp!r}": args.fsdp,
        f"{args.n_gpu} GPUs in one process (start a process for each)": args.n_gpu > 1,
        "compute_loss_func": trainer.compute_loss_func,
        f"loss_type={getattr(args, 'loss_type', '')!r}": getattr(args, "loss_type", "nll") != "nll",
        "activation_offloading": getattr(args, "activation_offloading", False),
    }
    for name, given in wrong.items():
        if given:
            raise InvalidUsage(
                f"Trainer: {name} is not supported with plans; leave it out, or use transformers.Trainer"
            )

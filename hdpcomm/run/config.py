"""Configuration of a training run: the model, the batches, the policy of its plans, and the optimizer's schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hdpcomm.arguments import size_text
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import LlamaConfig
from hdpcomm.options import LoraOptions, TrainingOptions, parse_ramp
from hdpcomm.parallel.tensor_plans import check_sizes
from hdpcomm.plan import POLICIES, Calibration, ModelSpec
from hdpcomm.plan.stage_cut import check_cut, parse_cut, stage_work
from hdpcomm.run.model import FolderModel, cut_model, model_spec
from hdpcomm.run.optimizers import check_optimizer
from hdpcomm.train.step.trainer_check import check_order

__all__ = ["BASELINES", "RunConfig", "SCHEDULES", "Schedule", "learning_rate"]

SCHEDULES = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of each step, as a share of the highest one.

    Attributes:
        kind: after the rise: ``constant``; ``cosine`` or ``linear`` down to ``floor`` at the last step; ``wsd``
            (warm-up - stable - decay; MiniCPM, arXiv 2404.06395, section 4): constant, and linear down over the last
            share ``decay`` of the steps.
        warmup: steps over which the rate rises; ``None``: a tenth of all, at least one.
        floor: share of the highest rate at the end, 0 to 1.
    """

    kind: str = "cosine"
    warmup: int | None = None
    floor: float = 0.1
    decay: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise InvalidUsage(f"schedule is {self.kind!r}; choose from {', '.join(SCHEDULES)}")
        if self.warmup is not None and self.warmup < 0:
            raise InvalidUsage(f"warmup is {self.warmup}; give a number of steps, or 0 for none")
        if not (0 <= self.floor <= 1 and 0 <= self.decay <= 1):
            raise InvalidUsage(f"floor is {self.floor} and decay {self.decay}; give shares from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """The share of the highest rate at ``step`` (from 0) of ``steps``."""
        rise = max(1, steps // 10) if self.warmup is None else self.warmup
        if step < rise:
            return (step + 1) / rise
        if self.kind == "constant":
            return 1.0
        first = steps - round(self.decay * steps) if self.kind == "wsd" else rise
        done = min(1.0, max(0.0, (step - max(first, rise)) / max(1, steps - max(first, rise))))
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * falling


BASELINES = ("ddp",)
"""Baselines that are no policies: torch's DistributedDataParallel over gloo."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RunConfig(TrainingOptions):
    """The model of a run, and how it is trained.

    Attributes:
        policies: of plans; or ``ddp``, torch's DistributedDataParallel over gloo on packs of whole sequences. Each
            trains a model of its own, all from the same weights on the same batches.
        capacity: tokens that a rank holds at once.
        schedule: the share of the learning rate at each step.
        calibration: costs that were measured before (:func:`hdpcomm.run.calibrate`), in place of a short profile when
            the run starts.
    """

    model: LlamaConfig | FolderModel = field(default_factory=LlamaConfig)
    policies: tuple[str, ...] = ("balanced",)
    capacity: int = 4096
    schedule: Schedule = field(default_factory=Schedule)
    calibration: Calibration | None = None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Element type of the parameters."""
        return _DTYPES[self.dtype]

    @property
    def dtype_with_masters(self) -> torch.dtype | None:
        """``dtype`` of the trainer: ``None`` where the parameters are updated as they are."""
        return None if self.dtype == "fp32" else _DTYPES[self.dtype]

    @property
    def spec(self) -> ModelSpec | None:
        """The planner's description of the model in this element type; ``None`` for one that is no plain decoder."""
        spec = model_spec(self.model)
        return None if spec is None else replace(spec, dtype_bytes=self.parameter_dtype.itemsize)

    @property
    def offload_ratio(self) -> float:
        """The share of activations that may leave the device."""
        return 1.0 if self.offload else 0.0

    @property
    def mesh_sizes(self) -> dict[str, Any]:
        """Arguments of :class:`hdpcomm.Mesh` that say how ranks share a model."""
        return {name: getattr(self, name) for name in ("pipeline", "tensor", "expert", "expert_replicas")}

    @property
    def on_mesh(self) -> bool:
        """Whether ranks share a model: pipelines, tensor or expert ranks."""
        return self.pipeline * self.tensor * self.expert > 1

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage of the model; all of them where there is no pipeline."""
        if self.pipeline == 1:
            return (self.model.layers,)
        if self.layers_per_stage is not None:
            return parse_cut(self.layers_per_stage, self.model.layers, self.pipeline * self.chunks)
        return cut_model(self.model, self.pipeline, self.chunks)

    @property
    def device_layers(self) -> list[int]:
        """Layers on each device of a pipeline."""
        return [sum(self.stage_layers[device :: self.pipeline]) for device in range(self.pipeline)]

    @property
    def stage_work(self) -> tuple[tuple[float, float, float], ...] | None:
        """:attr:`ClusterSpec.stage_work` of the stages."""
        return None if self.pipeline == 1 else stage_work(model_spec(self.model), self.stage_layers)

    @property
    def stage_model(self) -> LlamaConfig | FolderModel:
        """As large as what is on the device of a pipeline that has most layers, with embedding and head; not cut for
        tensor ranks."""
        return replace(self.model, layers=max(self.device_layers))

    @property
    def highest_lr(self) -> float:
        """The learning rate: ``lr``, or one for what is trained.

        That of a model from nothing is 1.28 / width, as Llama 1 had it (3e-4 at 4,096, 1.5e-4 at 8,192; Touvron et al.,
        arXiv 2302.13971, table 2), and at most 0.01.
        """
        if self.lr is not None:
            return self.lr
        if isinstance(self.model, FolderModel) and self.model.lora is not None:
            return 2e-4
        if isinstance(self.model, FolderModel) and self.model.weights:
            return 2e-5
        spec = model_spec(self.model)
        return 3e-4 if spec is None else min(0.01, 1.28 / spec.hidden)

    def __post_init__(self) -> None:
        for name in ("steps", "capacity", "tokens_per_step"):
            if getattr(self, name) < 1:
                raise InvalidUsage(f"{name} is {getattr(self, name)}; at least 1 was expected")
        if self.ramp is not None and parse_ramp(self.ramp)[0] >= self.tokens_per_step:
            told = f"ramp is {self.ramp} and tokens_per_step {self.tokens_per_step}"
            raise InvalidUsage(f"{told}; a ramp begins with fewer tokens")
        known = (*POLICIES, *BASELINES)
        if not self.policies or any(policy not in known for policy in self.policies):
            raise InvalidUsage(f"policies is {self.policies}; choose from {', '.join(known)}")
        if "ddp" in self.policies and (self.dtype != "fp32" or self.zero or self.offload or self.optimizer_offload):
            raise InvalidUsage(
                "DDP keeps the whole optimizer in fp32 on the device: compare with it without dtype, zero, offload and "
                "optimizer_offload"
            )
        if self.skip_bad_steps < 0:
            raise InvalidUsage(f"skip_bad_steps is {self.skip_bad_steps}; give a number of steps, or 0 for none")
        if self.check_replicas < 0:
            raise InvalidUsage(f"check_replicas is {self.check_replicas}; give a number of steps, or 0 for never")
        if self.offload < 0:
            raise InvalidUsage(f"offload is {self.offload}; it must be 0 (no offload) or more")
        self._add_lora()
        self._check_mesh()
        check_optimizer(self)
        if self.keep_optimizer and self.init_from is None:
            raise InvalidUsage("keep_optimizer was given without init_from; name the run whose optimizer it is")
        if "ddp" in self.policies and self.keep_optimizer:
            raise InvalidUsage("keep_optimizer does not go together with ddp; leave out either")
        if self.offload and self.model.layers <= 2:
            raise InvalidUsage(
                f"offload was asked for and the model has {self.model.layers} layers, of which the last two always "
                "stay on the device; give at least 3 layers (--layers)"
            )
        if self.dtype not in _DTYPES or self.zero not in (0, 1, 2, 3, "auto"):
            raise InvalidUsage(
                f"dtype is {self.dtype!r} and zero {self.zero!r}; give fp32 or bf16, and 0, 1, 2, 3 or auto"
            )
        if isinstance(self.zero, int):
            check_order(self.zero, queue=self.queue, split_backward=self.split_backward)
        layers = self.model.layers
        if "auto" in (self.recompute, self.zero) and not self.memory:
            name, other = ("recompute", "number of layers") if self.recompute == "auto" else ("zero", "stage")
            raise InvalidUsage(
                f"{name} is 'auto' and no limit was given; give what a rank's step may take, as --memory 4G, or the "
                f"{other}"
            )
        if self.memory and "auto" not in (self.recompute, self.zero):
            raise InvalidUsage(
                f"a limit of {size_text(self.memory)} was given and recompute is {self.recompute!r}, which keeps "
                "to none; give recompute 'auto' (--recompute auto), or leave out the limit (--memory)"
            )
        if isinstance(self.recompute, tuple):
            self._check_recompute_of_stages(self.recompute)
        elif self.recompute not in ("none", "full", "auto", *range(layers + 1)):
            raise InvalidUsage(
                f"recompute is {self.recompute!r}; give 'none', 'full' or a number of layers from 0 to {layers}"
            )
        if self.highest_lr <= 0 or self.weight_decay < 0 or self.eval_every < 0:
            raise InvalidUsage(
                f"lr is {self.lr}, weight_decay {self.weight_decay} and eval_every "
                f"{self.eval_every}; give a rate above 0, and the others not below 0"
            )

    def _add_lora(self) -> None:
        """The model gets its adapters, its routers the rate of their biases, and its losses further ahead a weight."""
        lora = None if self.lora is None else LoraOptions.parse(self.lora)
        if isinstance(self.model, FolderModel):
            object.__setattr__(self, "model", replace(self.model, lora=lora))
        elif lora is not None:
            raise InvalidUsage("lora was given for the built-in Llama; give the folder of a model (--model), too")
        if self.router_bias_rate:
            if not isinstance(self.model, FolderModel) or self.compile:
                raise InvalidUsage(
                    "router_bias_rate is for the folder of a model (--model), and for layers that are not compiled, "
                    "which count tokens; leave out either"
                )
            object.__setattr__(self, "model", replace(self.model, router_bias_rate=self.router_bias_rate))
        if self.mtp_weight:
            if not isinstance(self.model, FolderModel) or lora is not None or self.compile:
                raise InvalidUsage(
                    "mtp_weight is for the folder of a model (--model) whose weights are all trained, without --lora "
                    "and --compile; leave out either"
                )
            object.__setattr__(self, "model", replace(self.model, mtp_weight=self.mtp_weight))

    def _check_mesh(self) -> None:
        for name in ("pipeline", "chunks", "tensor", "expert"):
            if getattr(self, name) < 1:
                raise InvalidUsage(f"{name} is {getattr(self, name)}; at least 1 was expected")
        if self.expert_replicas and (self.expert == 1 or self.expert_replicas < 0):
            raise InvalidUsage(
                f"expert_replicas is {self.expert_replicas} and expert {self.expert}: give --expert, too"
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise InvalidUsage(f"chunks is {self.chunks} and pipeline 1: give --pipeline 2 or more, or no --chunks")
        if self.layers_per_stage is not None and self.pipeline == 1:
            raise InvalidUsage("layers_per_stage was given and pipeline is 1: give --pipeline, too, or leave it out")
        if self.split_backward and self.pipeline == 1:
            raise InvalidUsage(
                "split_backward was given and pipeline is 1, where no stage waits for another: give --pipeline 2 or "
                "more, or no --split-backward"
            )
        if self.split_backward and self.recompute in ("full", self.model.layers):
            raise InvalidUsage(
                "split_backward was given and all layers are recomputed, whose gradients of weights cannot be put off: "
                "it would change nothing; recompute fewer layers, or leave out --split-backward"
            )
        if self.compile and (self.tensor * self.expert > 1 or self.split_backward):
            raise InvalidUsage(
                "compile was given with tensor or expert ranks, or split_backward, whose layers communicate or keep "
                "their inputs themselves; leave out either"
            )
        if self.fp8 != "none" and (self.tensor > 1 or self.split_backward):
            raise InvalidUsage(
                "fp8 was given with tensor ranks or split_backward, which it does not know; leave out either"
            )
        if self.fp8_exclude and (self.fp8 == "none" or self.pipeline > 1):
            raise InvalidUsage("fp8_exclude is for fp8 without pipelines, whose stages have other layers; leave it out")
        if self.tensor > 1 and isinstance(self.model, LlamaConfig):
            check_sizes(self.model, self.tensor)
        if self.pipeline > 1:
            self._check_pipeline()
        if self.expert > 1:
            self._check_expert()
        what, option = ("pipelines", "--pipeline") if self.pipeline > 1 else ("tensor ranks", "--tensor")
        if self.pipeline * self.tensor == 1:
            what = "expert ranks"
        if self.calibration is not None and self.pipeline * self.tensor > 1:
            raise InvalidUsage(f"a calibration is that of ranks without {what}; leave out --calibration or {option}")
        if self.queue and ("balanced" not in self.policies or self.pipeline * self.expert > 1):
            why = f"policies is {self.policies}" if "balanced" not in self.policies else f"the ranks have {what}"
            raise InvalidUsage(
                f"queue was given and {why}: only the policy balanced has one, without pipelines and expert ranks; "
                "leave out --queue"
            )
        if self.slices > 1 and "balanced" not in self.policies:
            raise InvalidUsage(
                f"slices is {self.slices} and policies is {self.policies}, of which only balanced has them: leave out "
                "--slices"
            )
        if "ddp" in self.policies and self.on_mesh:
            raise InvalidUsage(f"{what} do not go together with ddp yet: leave out either")

    def _check_recompute_of_stages(self, counts: tuple[int, ...]) -> None:
        stages = self.stage_layers
        few = len(counts) == len(stages) and all(0 <= a <= b for a, b in zip(counts, stages, strict=True))
        if self.pipeline == 1 or not few:
            raise InvalidUsage(
                f"recompute is {counts} for stages of {', '.join(map(str, stages))} layers; give a number of layers, "
                "or one for each stage, at most its layers, where there is more than one stage"
            )

    def _check_expert(self) -> None:
        if isinstance(self.model, LlamaConfig) and (not self.model.experts or self.model.experts % self.expert):
            raise InvalidUsage(
                f"{self.model.experts} experts cannot be shared evenly by {self.expert} ranks; give --experts as a "
                f"multiple of {self.expert}"
            )

    def _check_pipeline(self) -> None:
        check_cut(self.stage_layers, self.model.layers, self.pipeline * self.chunks)
        if self.offload and self.stage_model.layers <= 2:
            raise InvalidUsage(
                f"offload was asked for and no device has more than {self.stage_model.layers} layers, of which the "
                f"last two always stay there; give at least {3 * self.pipeline} layers (--layers)"
            )


def learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a step."""
    return config.highest_lr * config.schedule.factor(step, config.steps)

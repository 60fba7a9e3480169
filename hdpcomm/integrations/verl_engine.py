"""verl's training engine with Hybrid Data Parallelism: ``strategy=hdpcomm`` in the place of FSDP.

Importing this module registers it, so verl is told to: ``actor_rollout_ref.model.external_lib=`` this module, and
``actor_rollout_ref.actor.strategy=hdpcomm``; ``critic`` has both, too. Actor, reference and critic then run here, with
verl's own losses, metrics, optimizer, schedule and workers. Written for verl 0.9.1; importing this module imports verl.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from verl.utils import tensordict_utils
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import convert_weight_keys, get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.engine import EngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.utils import (
    detach_tree,
    enable_full_determinism,
    postprocess_batch_func,
    prepare_micro_batches,
)

from hdpcomm.comm import Communicator, init
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.topology import nodes_of
from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_checkpoints import FolderSource, read_plain_values
from hdpcomm.integrations.row_passes import RowPasses
from hdpcomm.integrations.verl_batch import check_batch, sequences_of, temperature_of
from hdpcomm.integrations.verl_lora import adapter_weights, merged_weights, with_adapters
from hdpcomm.integrations.verl_options import check_options, unsupported
from hdpcomm.log import LOG
from hdpcomm.models import adapt
from hdpcomm.models.lora_names import base_name, is_adapter
from hdpcomm.models.self_check import is_random
from hdpcomm.run.checkpoints import CheckpointFolder
from hdpcomm.torch_backend import HdpProcessGroup, communicator
from hdpcomm.train.losses.functions import IGNORE
from hdpcomm.train.step.passes import Passes
from hdpcomm.train.step.replicas import settings_of
from hdpcomm.train.step.runner import Runner, StepSettings

__all__ = ["HdpEngine", "HdpEngineConfig"]


@dataclass
class HdpEngineConfig(FSDPEngineConfig):  # type: ignore[misc]
    """For callers that give an engine's configuration themselves, as verl's SFT trainer: ``engine._target_=`` this
    class. That of an actor stays verl's."""

    strategy: str = "hdpcomm"

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # FSDPEngineConfig takes verl's own strategies only


@EngineRegistry.register(model_type="language_model", backend="hdpcomm", device=["cuda", "cpu"])
@EngineRegistry.register(model_type="value_model", backend="hdpcomm", device=["cuda", "cpu"])
class HdpEngine(BaseEngine):  # type: ignore[misc]
    """verl's engine for language models and critics: the rows of all ranks are one global batch, under one plan.

    What verl computes on each rank of its rows, it computes here, micro-batch by micro-batch, of log-probabilities, or
    a critic's values, that planned forward passes have made; their derivatives go into the model by a second run of the
    plan (:mod:`hdpcomm.integrations.row_passes`). So losses, metrics and gradients are those of verl's FSDP engine. The
    ranks of a host share parameters, in ``mixed_precision.param_dtype`` (bf16, as in verl), sums of gradients, master
    weights and the optimizer's state in fp32, as ZeRO-3 does, but wait for nobody's passes;
    ``reshard_after_forward=False`` leaves parameters whole. Where hosts have one rank or other numbers of them, or
    ranks send through other memory than the model's, all ranks share masters and state only. A rank holds as many
    tokens at a time as verl's micro-batches would have (``max_token_len_per_gpu``, or rows of
    ``micro_batch_size_per_gpu``).

    Options that are refused: :mod:`hdpcomm.integrations.verl_options`; the reference of the docs has all others.

    All ranks must raise or go on alike. Raises InvalidUsage for what is not supported, by the name of its option.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **_: Any
    ) -> None:
        super().__init__()
        check_options(model_config, engine_config, checkpoint_config, ranks=dist.get_world_size())
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.rank = dist.get_rank()
        self._device_name = name = get_device_name()
        self._device = torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
        self._critic = model_config.model_type == "value_model"
        """It gives values of tokens."""
        self._replay = engine_config.router_replay.get("mode", "disabled")
        self._lora = model_config.lora_rank > 0 or bool(model_config.lora_adapter_path)
        self._asked: tuple[float | None, bool] = (1.0, False)
        """Temperature (``None``: of values), and whether entropies are computed, of the batch that runs."""
        self._ends = False
        """The batch that runs is all of its step."""
        self._saved: list[str] = []
        self.comm: Communicator
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self._rows: RowPasses
        self._runner: Runner
        self._adapted: nn.Module
        self._mesh: Mesh

    # --- what it is made of ------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Reads the model, and makes optimizer and schedule. Collective over all ranks."""
        if self.engine_config.full_determinism:
            enable_full_determinism(seed=self.engine_config.seed)
        self.comm = _world()
        self._mesh = mesh = Mesh(self.comm, placement=range(self.comm.size))
        given = self.engine_config.mixed_precision or {}
        dtype = PrecisionType.to_dtype(given.get("param_dtype", "bf16"))
        trains = not self.engine_config.forward_only
        wide = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32") if trains else dtype
        zero = _zero_stage(self.engine_config, self.comm, self._device)
        self._make_model(wide, in_parts=trains and zero == 3)
        if trains:
            self.optimizer = build_optimizer(
                [p for p in self.module.parameters() if p.requires_grad], self.optimizer_config
            )
            self.lr_scheduler = _schedule(self.optimizer, self.optimizer_config)
        settings = StepSettings(zero, None if dtype == wide else dtype)
        self._runner = Runner(Passes([self._adapted], mesh), self.optimizer, settings)
        with self._runner.weights():
            random = is_random(self._adapted)
        if random:
            raise unsupported(
                "dropout or noise (two forward passes in training mode differ)",
                "log-probabilities and gradients must see the same model: set the probabilities to 0",
            )
        self._rows = RowPasses(self._adapted, mesh, self._runner, self._settings)
        self._offload()

    def _make_model(self, dtype: torch.dtype, *, in_parts: bool) -> None:
        """Reads the model, or this rank's part of it. Collective."""
        model = self.model_config
        config = copy.deepcopy(model.hf_config)  # the attention of this one is changed
        attention = {"attn_implementation": model.override_config.get("attn_implementation", "sdpa")}
        source = None
        if self._critic:
            config.num_labels, config.classifier_dropout = 1, 0.0
        if in_parts and not self._critic and not getattr(config, "auto_map", None):  # else its code is in the folder
            source = FolderSource(Path(model.local_path), config)
            self.module = source.model(dtype, **attention)
        else:
            kind = AutoModelForTokenClassification if self._critic else get_hf_auto_model_class(hf_config=config)
            made = kind.from_pretrained(
                model.local_path, dtype=dtype, config=config, trust_remote_code=model.trust_remote_code, **attention
            )
            self.module = made.to(self._device, dtype)
        if self._lora:
            self.module = with_adapters(self.module, model).to(dtype)
        if source is not None:
            source.prepare(self.module, self._mesh, self.engine_config.seed)
        if model.enable_gradient_checkpointing:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        self._adapted = adapt(self.module)
        if source is not None:
            source.fill(self._adapted, self._mesh, zero=3)

    def _settings(self) -> str:
        return str(self._asked) if self.optimizer is None else settings_of(self.optimizer, self._asked)

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether the model is in host memory between verl's contexts."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether what the optimizer has is in host memory between verl's contexts of training."""
        return bool(self.engine_config.optimizer_offload)

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Every rank has the outputs of the rows that verl gave it, whichever ranks have computed them."""
        return True

    def get_data_parallel_size(self) -> int:
        """All ranks."""
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        """Local."""
        return self.rank

    def get_data_parallel_group(self) -> Any:
        """Group of all ranks."""
        return dist.group.WORLD

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """See :class:`verl.workers.engine.base.BaseEngine`."""
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """See :class:`verl.workers.engine.base.BaseEngine`."""
        return _Mode(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves the model, with its sums of gradients, and master weights and the optimizer's state to pinned host
        memory (``"cpu"``), or back to the device. On CPUs they are there anyway. Collective.

        Raises: InvalidUsage: to another device.
        """
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if device not in (self._device_name, "cpu"):
            raise unsupported(
                f"to({device!r}) of an engine on {self._device_name}", f"give {self._device_name!r} or 'cpu'"
            )
        move = self._runner.bring_back if device == self._device_name else self._runner.store
        move(model=model, optimizer=optimizer)

    def _offload(self) -> None:
        """Moves to host memory, by the options, all that is to be there between verl's contexts. Collective."""
        parameters = self.is_param_offload_enabled
        self.to("cpu", model=parameters, optimizer=self.is_optimizer_offload_enabled, grad=parameters)

    # --- a batch -----------------------------------------------------------------------------------------------------

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """One update of one batch, see :class:`verl.workers.engine.base.BaseEngine`. Collective."""
        self._ends = True
        try:
            return super().train_batch(data, loss_function)
        finally:
            self._ends = False

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """The losses of this rank's rows as verl's FSDP engine computes them; adds to the gradients unless
        ``forward_only``. Collective."""
        check_batch(data, self._rows.media)
        dp_group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(self._device)
        dist.all_reduce(tokens, group=dp_group)
        more = {"batch_num_tokens": tokens.item(), "dp_size": self.get_data_parallel_size()}
        tensordict_utils.assign_non_tensor(data, **more)
        keeps = forward_only or tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        entropy = bool(tensordict_utils.get_non_tensor_data(data, "calculate_entropy", False))
        self._asked = (None, False) if self._critic else (temperature_of(data), entropy)
        with self.comm.liveness_deadlines():
            limit = self._limit(data)
            micro_batches, indices = prepare_micro_batches(data=data, dp_group=dp_group, same_micro_num_in_dp=True)
            own = sequences_of(micro_batches, self._rows.media, values=self._critic, routes=self._takes_routes(data))
            keeps_routes = self._replay == "R2" and own.routes is None and forward_only
            self._rows.capacity = limit or self._most(int(each["input_ids"].offsets()[-1]) for each in micro_batches)
            with torch.set_grad_enabled(not forward_only):
                scored = self._rows.score(own, temperature=self._asked[0], entropy=self._asked[1], routes=keeps_routes)
            labelled = own.labels != IGNORE
            every = torch.zeros(len(scored.values), len(own.tokens), dtype=scored.values.dtype)
            every[:, labelled] = scored.values.detach()
            every = every.to(self._device)
            every.requires_grad_(not forward_only)
            with torch.set_grad_enabled(not forward_only):
                found = self._losses(micro_batches, every, scored.routes, loss_function, keeps=keeps)
            if not forward_only:
                slopes = None if every.grad is None else every.grad.cpu()[:, labelled] / self.comm.size
                self._rows.train(scored.planned, scored.batch, terms=scored.terms(slopes, self.comm), ends=self._ends)
        return postprocess_batch_func(output_lst=found, indices=indices, data=data)

    def _losses(
        self,
        micro_batches: list[Any],
        every: Tensor,
        routes: Tensor | None,
        loss_function: Callable[..., Any] | None,
        *,
        keeps: bool,
    ) -> list[dict[str, Any]]:
        """Outputs for each micro-batch, as of verl's FSDP engine, with ``routes`` as of that for VeOmni; leaves the
        derivatives in ``every``."""
        found, first = [], 0
        for each in micro_batches:
            each = each.to(self._device)
            offsets = each["input_ids"].offsets()
            stop = first + int(offsets[-1])
            rows = [torch.nested.nested_tensor_from_jagged(row[first:stop], offsets) for row in every]
            output = {"values": rows[0]} if self._critic else dict(zip(("log_probs", "entropy"), rows, strict=False))
            if routes is not None:
                taken = routes[first:stop].to(torch.int16)
                output["routed_experts"] = torch.nested.nested_tensor_from_jagged(taken, offsets.cpu())
            first = stop
            loss, metrics = torch.tensor(1.0), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=each, dp_group=self.get_data_parallel_group())
                if loss.requires_grad:
                    loss.backward()
            told = {"loss": loss.detach().item(), "metrics": metrics}
            found.append({"model_output": detach_tree(output), **told} if keeps else told)
        return found

    def _takes_routes(self, data: Any) -> bool:
        """Whether tokens take the experts that the batch names, as verl's engines for Megatron and VeOmni do."""
        given = data.get("routed_experts", None) is not None
        if self._replay == "R3" and not given:
            raise unsupported(
                "router_replay.mode=R3 with a batch without routed_experts",
                "let rollouts give them (rollout.enable_rollout_routing_replay=True), or take mode R2",
            )
        return given and self._replay != "disabled"

    def _limit(self, data: Any) -> int | None:
        """The most tokens that a rank is to hold at a time; ``None``: what verl's micro-batches have. Collective.

        verl refuses rows that are longer, but for those that several ranks share, whose number it is told here.
        """
        if not tensordict_utils.get_non_tensor_data(data, "use_dynamic_bsz", True):
            return None
        limit = int(data["max_token_len_per_gpu"])
        longest = self._most(data["input_ids"].offsets().diff().tolist())
        tensordict_utils.assign_non_tensor(data, sp_size=-(-longest // limit))
        return limit

    def _most(self, counts: Iterable[int]) -> int:
        """The largest of all ranks'. Collective."""
        most = torch.tensor([max(counts)])
        self.comm.all_reduce(most, "max")
        return int(most)

    # --- an update ---------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        """Local."""
        self._runner.zero()

    def optimizer_step(self) -> float:
        """Reduces and clips the gradients and updates the weights, unless their norm, which it returns, is not finite.
        Collective."""
        runner = self._runner
        assert self.optimizer is not None
        with self.comm.liveness_deadlines():
            runner.reduce()
            norm = runner.clip(self.optimizer_config.clip_grad)
            if norm < float("inf"):
                runner.update()
            else:
                LOG.warning(f"grad_norm is {norm}: no parameter was updated")
        return norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step. Local."""
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    # --- weights -----------------------------------------------------------------------------------------------------

    def get_per_tensor_param(
        self, base_sync_done: bool = False, **_: Any
    ) -> tuple[Iterable[tuple[str, Tensor]], dict[str, Any] | None]:
        """The names and tensors that inference engines load, whole, one at a time; with LoRA the adapters once
        ``base_sync_done``, or, by ``lora.merge``, weights with adapters in them. Collective: every rank goes through
        all of them. Weights in host memory come back to the device, for :meth:`to` to be called when they are sent."""
        self._runner.bring_back(optimizer=False)
        kind = self.model_config.hf_config.model_type
        if not self._lora:
            return unfuse_moe_params(self._whole_weights(self._named_weights()), kind), None
        named = self.module.state_dict(keep_vars=True)
        adapters = {name: each for name, each in named.items() if is_adapter(name)}
        base = {name: each for name, each in named.items() if name not in adapters}
        if self.model_config.lora.get("merge", False):
            whole = self._runner.copied_weights(adapters, keep=True)
            return merged_weights(self.module, self._whole_weights(base), whole), None
        config: Any = cast(Any, self.module).peft_config["default"]
        if base_sync_done:
            return adapter_weights(self.module, self._runner.copied_weights(adapters, keep=True)), config.to_dict()
        names = {name: replace_lora_wrapper(base_name(name), config) for name in base}
        weights = ((names[name], tensor) for name, tensor in self._whole_weights(base))
        return unfuse_moe_params(weights, kind), config.to_dict()

    def _named_weights(self) -> Mapping[str, Tensor]:
        trains = self.optimizer is not None
        found: Mapping[str, Tensor] = convert_weight_keys(self.module.state_dict(keep_vars=trains), self.module)
        return found

    def _whole_weights(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self.optimizer is None:
            return iter(named.items())
        return ((name, tensor) for names, tensor in self._runner.whole_weights(named) for name in names)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Context in which the model is the one without adapters: verl's reference."""
        return self.module.disable_adapter() if self._lora else nullcontext()  # type: ignore[operator]

    def get_per_tensor_param_shard(self, **_: Any) -> Any:
        """Raises InvalidUsage."""
        raise unsupported(
            'rollout.checkpoint_engine.backend="delta_sharded"', "parameters are not cut as verl's are: use another one"
        )

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,  # noqa: ARG002 (verl's signature, and verl's own engine copies nothing either)
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Writes what ``checkpoint.save_contents`` names into a folder that all ranks share, each rank its part of the
        optimizer's state; returns when it is on the disk. Collective."""
        contents = set(self.checkpoint_config.get("save_contents", None) or ("model", "optimizer", "extra"))
        self._runner.bring_back()
        folder = Path(local_path)
        weights: dict[str, Tensor] = {}
        if "hf_model" in contents:
            named = self.module.state_dict(keep_vars=True)
            if self._lora:  # peft saves these only
                named = {name: each for name, each in named.items() if is_adapter(name)}
            weights = self._runner.copied_weights(named, keep=self.rank == 0)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            processor = self.model_config.get_processor()
            for each in (self.module.config, *([] if processor is None else [processor])):
                each.save_pretrained(folder / "huggingface")
            if "hf_model" in contents:
                self.module.save_pretrained(folder / "huggingface", state_dict=weights)  # type: ignore[operator]
        self.comm.barrier()
        if "extra" in contents:
            rng = BaseCheckpointManager.get_rng_state()
            kind, keys, *rest = rng["numpy"]
            rng["numpy"] = (kind, keys.tolist(), *rest)  # weights_only reads no arrays
            torch.save({"lr_scheduler": self.lr_scheduler.state_dict(), "rng": rng}, self._extra(folder))
        if wanted := contents & {"model", "optimizer"}:
            files = CheckpointFolder(
                folder, keep=1, rank=self.rank, writers=self.comm.size, session=f"step{global_step}"
            )
            self.comm.barrier()
            with self.comm.liveness_deadlines(), self.comm.busy("saves a checkpoint"):
                files.save(global_step, self._parts(wanted), {}, copy=False)
                files.wait()
        self.comm.barrier()
        self._offload()
        self._forget(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,  # noqa: ARG002
        del_local_after_load: bool = False,  # noqa: ARG002 (the folder is the one that was saved, no copy)
        **_: Any,
    ) -> None:
        """Reads what ``checkpoint.load_contents`` names, on any number of ranks. Collective.

        Raises: InvalidUsage: there is no whole checkpoint, or that of another model.
        """
        if local_path is None:
            return
        contents = set(self.checkpoint_config.get("load_contents", None) or ("model", "optimizer", "extra"))
        self._runner.bring_back()
        folder = Path(local_path)
        if wanted := contents & {"model", "optimizer"}:
            found, damaged = CheckpointFolder(folder, keep=1, rank=self.rank).newest()
            if found is None:
                raise InvalidUsage(damaged[0] if damaged else f"{folder}: no checkpoint of strategy=hdpcomm")
            state = self._parts(wanted)
            found.load_into(state)
            parts = self._runner.state.parts()
            state["model"] = {**parts["model"], **state.get("model", {})}
            self._runner.state.load({**parts, **state})
        if "extra" in contents:
            own = self._extra(folder)
            path = own if own.exists() else folder / "extra_rank_0.pt"
            extra = read_plain_values(
                path,
                f"on rank {self.rank} what strategy=hdpcomm has saved: take another checkpoint, or leave 'extra' out "
                "of checkpoint.load_contents",
            )
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
            if own.exists():
                BaseCheckpointManager.load_rng_state(extra["rng"])
        self.comm.barrier()
        self._offload()

    def _extra(self, folder: Path) -> Path:
        return folder / f"extra_rank_{self.rank}.pt"

    def _parts(self, wanted: set[str]) -> dict[str, Any]:
        """Collective."""
        parts = self._runner.state.parts()
        if self._lora and self.checkpoint_config.get("save_lora_only", False):
            parts["model"] = {name: each for name, each in parts["model"].items() if is_adapter(name)}
        kept = wanted | ({"masters"} if "model" in wanted else set())
        return {name: value for name, value in parts.items() if name in kept}

    def _forget(self, path: str, keep: int | None) -> None:
        """Removes the oldest of the checkpoints that this engine has saved."""
        self._saved.append(path)
        if keep and self.rank == 0:
            for old in self._saved[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        self._saved = self._saved[-keep:] if keep else self._saved


def _zero_stage(engine: Any, comm: Communicator, device: torch.device) -> int:
    """ZeRO's stage: 3 where FSDP would not keep the weights of a layer after its pass, 2 where it would; 1 where ranks
    of a host cannot share them. Local."""
    on_hosts = set(Counter(nodes_of(comm)).values())
    if len(on_hosts) > 1 or 1 in on_hosts or comm.device != device:
        return 1
    return 3 if engine.reshard_after_forward else 2


_worlds: list[tuple[Any, Communicator]] = []
"""torch's default group, and the communicator of its ranks, which the engines of a process share."""


def _world() -> Communicator:
    """The communicator of all ranks. Collective, where it is not there yet."""
    group = dist.group.WORLD
    if isinstance(group, HdpProcessGroup):
        return communicator()
    if not _worlds or _worlds[0][0] is not group:
        _worlds[:] = [(group, init())]
    return _worlds[0][1]


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    """Context of an engine's batches."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_val, exc_tb)


def _schedule(optimizer: torch.optim.Optimizer, config: Any) -> Any:
    """As verl's FSDP engine makes it."""
    warmup = config.lr_warmup_steps
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * config.total_training_steps)
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=warmup)
    return get_cosine_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=warmup, num_training_steps=config.total_training_steps,
        min_lr_ratio=config.min_lr_ratio, num_cycles=config.num_cycles, zero_indexed_step=config.zero_indexed_step,
    )  # fmt: skip

"""Parts of a model on the ranks of transformers', TRL's and verl's trainers: stages of ZeRO, by the ``fsdp`` of
TrainingArguments, where it means the same, or the least that fits a model into the memory that there is; models that
are made without memory, and read in parts; and checkpoints where ranks have parts of the weights or of the optimizer's
state.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from hdpcomm.comm import Communicator, init
from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage, first_line
from hdpcomm.models import AdaptedCausalLM, FolderWeights, from_pretrained
from hdpcomm.models.causal_lm import seed_of
from hdpcomm.models.lora_names import first_value, is_adapter
from hdpcomm.models.media import auto_class
from hdpcomm.models.weights import making, weight_files
from hdpcomm.options import LoraOptions
from hdpcomm.parallel import expert_parallel, tensor_parallel
from hdpcomm.run import RunConfig
from hdpcomm.run.memory import fit_zero
from hdpcomm.run.model import check_model, folder_model, model_path, read_config
from hdpcomm.torch_backend import HdpProcessGroup, communicator
from hdpcomm.train import materialize
from hdpcomm.train.step.runner import Runner, StepSettings
from hdpcomm.train.step.state import State

__all__ = [
    "FolderSource",
    "PartsInFolders",
    "file_copy",
    "least_zero",
    "load_optimizer",
    "load_weights",
    "read_plain_values",
    "without_fsdp",
]

_STAGES = {"true": 3, "full_shard": 3, "hybrid_shard": 3, "false": 2, "shard_grad_op": 2, "no_shard": 0}
"""ZeRO's stage for each value of ``reshard_after_forward``, of FSDP2 and 1."""
_REFUSED = {
    "cpu_offload": "leave it out: zero=3 keeps a rank's parts on its device",
    "activation_checkpointing": "give gradient_checkpointing=True in its place",
}
_NO_EFFECT = {"version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "forward_prefetch"}
_NO_EFFECT |= {"backward_prefetch", "use_orig_params", "limit_all_gathers", "sync_module_states"}
_NO_EFFECT |= {"cpu_ram_efficient_loading", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"}
"""Options for how FSDP goes about it: layers are pulled by themselves, and a model's folder is read once a host."""


def without_fsdp(given: Any, settings: StepSettings) -> tuple[Any, StepSettings]:
    """An argument of a trainer, and what ranks keep: TrainingArguments with ``fsdp`` become a copy without, beside the
    settings that mean the same. Local.

    Raises: InvalidUsage: options that mean something else here, or settings that say otherwise.
    """
    if not isinstance(given, transformers.TrainingArguments):
        return given, settings
    if getattr(given, "parallelism_config", None) is not None:
        raise InvalidUsage(
            "Trainer: parallelism_config is not supported with plans, which choose the ranks of each sequence; leave "
            "it out: mesh={'tensor': N} cuts layers, and zero=3 weights"
        )
    if given.fsdp is not True:
        return given, settings  # lists, of older releases, are refused later
    plugin = given.fsdp_plugin_args or {}  # none of XLA's
    stage = _STAGES.get(str(plugin.get("reshard_after_forward")).lower())
    known = {*_NO_EFFECT, *_REFUSED, "reshard_after_forward", "state_dict_type"}
    for name, value in given.fsdp_config.items():
        if value and name not in known:
            raise _unsupported(name, value, "it is not known here: leave it out")
        if name in _REFUSED and plugin.get(name):
            raise _unsupported(name, value, _REFUSED[name])
    if stage is None:
        value = plugin["reshard_after_forward"]
        raise _unsupported("reshard_after_forward", value, f"give one of {[*_STAGES]}")
    if (kind := plugin["state_dict_type"]) != "FULL_STATE_DICT":
        raise _unsupported("state_dict_type", kind, "checkpoints are those of one device: FULL_STATE_DICT")
    if settings.zero not in (0, stage):
        raise InvalidUsage(f"Trainer: zero={settings.zero} is given, and fsdp means zero={stage}; give one of them")
    made = copy.copy(given)
    made.fsdp, made.fsdp_plugin_args = False, None
    return made, replace(settings, zero=stage, dtype=settings.dtype or (torch.bfloat16 if given.bf16 else None))


def _unsupported(name: str, value: Any, advice: str) -> InvalidUsage:
    return InvalidUsage(f"Trainer: fsdp_config[{name!r}]={value!r} is not supported with plans; {advice}")


_ROOM = 0.9
"""Share of the memory for a step; the rest is for fragments and for what else lives there."""


def least_zero(
    model: Any,
    given: Iterable[Any],
    mesh: Mesh,
    *,
    capacity: int | None,
    kept: StepSettings,
) -> int:
    """The least stage with which a step fits, as ``hdpcomm train --zero auto`` finds it. Collective; the first rank
    predicts, which takes some seconds.

    Args:
        model: the trainer's, or its folder.
        mesh: on which it will be trained.
        kept: the trainer's settings, but for the stage.
        given: arguments of the trainer; adapters, and whether layers are computed again, are looked for in them.

    Raises: InvalidUsage: no capacity, or no stage fits. On all ranks alike.
    """
    if capacity is None:
        raise InvalidUsage(
            "Trainer: zero='auto' without capacity=; give the most tokens of a rank at once, with which memory grows"
        )
    comm = mesh.comm
    found: list[Any] = [None, None]
    with comm.liveness_deadlines():
        if comm.rank == 0:
            with comm.busy("predicts the memory of a step"):
                try:
                    found = [_least_zero(model, list(given), mesh, capacity, kept), None]
                except InvalidUsage as error:
                    found = [None, str(error)]
        (zero, problem), *_ = gather_json(comm, found)
    if problem is not None:
        raise InvalidUsage(problem)
    return int(zero)


def _least_zero(model: Any, given: list[Any], mesh: Mesh, capacity: int, kept: StepSettings) -> int:
    comm, nodes = mesh.comm, nodes_of(mesh.comm)
    on_host = nodes.count(nodes[0])
    arguments = [each for each in given if isinstance(each, transformers.TrainingArguments)]
    again = any(each.gradient_checkpointing for each in arguments)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        if isinstance(model, torch.nn.Module):
            model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        else:
            where = model_path(Path(model))
        kind, adapters = folder_model(where), [*given, *getattr(model, "peft_config", {}).values()]
        config = RunConfig(
            model=kind, lora=_adapters(adapters), capacity=capacity, zero="auto",
            dtype="bf16" if kept.dtype == torch.bfloat16 else "fp32", recompute="full" if again else "none",
            memory=int(_ROOM * _memory_bytes(comm.device, on_host)), tensor=mesh.tensor, expert=mesh.expert,
            expert_replicas=mesh.expert_replicas, optimizer_offload=kept.optimizer_offload,
        )  # fmt: skip
        return fit_zero(None, config, comm.size, max(1, on_host // mesh.tensor))


def _adapters(given: list[Any]) -> str | None:
    """Adapters of LoRA among the arguments, as far as they take memory."""
    for each in given:
        if type(each).__name__ == "LoraConfig":
            targets = each.target_modules
            names = (targets,) if isinstance(targets, str) else tuple(sorted(targets or ("q_proj", "v_proj")))
            return str(LoraOptions(rank=each.r, alpha=int(each.lora_alpha), targets=names))
    return None


def _memory_bytes(device: torch.device, ranks_on_host: int) -> float:
    """Memory for one rank: of its device, or its share of what the host has available."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(rows["MemAvailable"].split()[0]) / ranks_on_host


class FolderSource:
    """The folder of a model whose weights nobody has read yet.

    Args:
        folder: of a causal LM as ``save_pretrained`` writes it.
        config: of the model, which keeps and changes it.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self._folder = self._weights = folder
        self._config = config

    @classmethod
    def of(cls, model: Any, others: Iterable[Any]) -> FolderSource | None:
        """The source of a trainer's ``model`` that is a folder, or a name on a hub. Local.

        Args:
            others: arguments of the trainer; with ``model_init_kwargs`` or ``precompute_ref_log_probs`` in them TRL
                loads the model itself.

        Raises: InvalidUsage: there is no model of this name.
        """
        names = ("model_init_kwargs", "precompute_ref_log_probs")
        whole = any(getattr(each, name, None) for each in others for name in names)
        if whole or not isinstance(model, (str, os.PathLike)):
            return None
        folder = model_path(Path(model))
        if (folder / "adapter_config.json").is_file():  # TRL loads these, and their model
            return None
        config = read_config(folder)
        if any("Classification" in name for name in config.architectures or ()):
            raise InvalidUsage(
                f"{folder} holds a {config.architectures[0]}, and models given by their folder are read as causal LMs; "
                "give the model itself: AutoModelForSequenceClassification.from_pretrained(folder)"
            )
        return cls(folder, config)

    def model(self, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """The model of transformers on the meta device. Local. Raises InvalidUsage: the folder holds none."""
        weight_files(self._folder)
        with making, torch.device("meta"):
            made = auto_class(self._config.model_type).from_config(self._config, dtype=dtype, **options)
        if (self._folder / "generation_config.json").is_file():
            made.generation_config = transformers.GenerationConfig.from_pretrained(self._folder, local_files_only=True)
        return made.train()

    def prepare(self, model: Any, mesh: Mesh, seed: int) -> None:
        """Gives adapters of peft their first values, and compares a few layers of such a model with what transformers
        computes. Collective.

        Raises: InvalidUsage: adapters that begin otherwise than LoRA's, or what :func:`hdpcomm.models.adapt` says.
        """
        for name, config in getattr(model, "peft_config", {}).items():
            _check_adapters(name, config)
        for path, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and is_adapter(name := f"{path}.{leaf}"):
                    value = first_value(name, parameter.shape, seed_of(name, seed)).to(parameter.dtype)
                    module._parameters[leaf] = nn.Parameter(value, parameter.requires_grad)
        check_model(folder_model(self._folder), mesh, seed=seed)

    def go_on(self, checkpoint: Path) -> None:
        """Weights are read from a checkpoint that has them all. Local."""
        self._weights = checkpoint

    def fill(self, adapted: nn.Module, mesh: Mesh, *, zero: int) -> None:
        """Cuts the model for the mesh, and reads what this rank keeps of the weights: with ``zero=3`` its part of each.
        Collective.

        Raises: InvalidUsage: of :class:`hdpcomm.models.FolderWeights`.
        """
        weights = FolderWeights(self._weights, cast(AdaptedCausalLM, adapted))
        tensor_parallel(expert_parallel(adapted, mesh), mesh)
        materialize(adapted, mesh, weights, zero=zero)


def has_weights(checkpoint: Path) -> bool:
    """Whether a checkpoint has all weights of a model, and not those of its adapters alone. Local."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return any((checkpoint / name).is_file() for name in names)


def weights_for(config: Any, checkpoint: Path) -> FolderWeights:
    """The weights of a checkpoint, for a model of this configuration that is cut, or has no values. Local."""
    with torch.device("meta"):
        model = from_pretrained(copy.deepcopy(config), dtype=torch.float32, device="meta", check=False)
    return FolderWeights(checkpoint, model)


@torch.no_grad()
def load_weights(adapted: nn.Module, checkpoint: Path) -> None:
    """Gives a whole model the parameters and buffers that a checkpoint has, where transformers' trainer keeps the first
    values of experts that are stored one by one. Local.

    Raises: InvalidUsage: of :class:`hdpcomm.models.FolderWeights`.
    """
    weights = FolderWeights(checkpoint, cast(AdaptedCausalLM, adapted))
    for name, tensor in adapted.state_dict().items():
        tensor.copy_(weights.whole(name))


def _check_adapters(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    usual = {"peft_type": (kind, "LORA"), "init_lora_weights": (getattr(config, "init_lora_weights", True), True)}
    for option in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias"):
        usual[option] = getattr(config, option, None) or None, None
    for option, (given, expected) in usual.items():
        if given != expected:
            raise InvalidUsage(
                f"adapters {name!r} with {option}={given!r} begin with values of the model, which is read in parts "
                "after them; give the model itself in place of its folder, or LoRA without"
            )


_MASTERS = "hdpcomm_masters"
"""In the file of the optimizer's state, which torch's optimizers leave alone: wide weights by name."""
_INSTEAD = "resume from another checkpoint"
_IN_MEMORY = 1 << 20
"""Bytes up to which a tensor is copied into memory."""


def file_copy(folder: str) -> Callable[[Tensor], Tensor]:
    """A function that copies a tensor into a file of the folder that has no name and is gone with the copy: of what is
    whole nowhere, a rank that saves keeps no more in memory than the system likes to. Local.

    Raises (the function): OSError: the disk has no room.
    """

    def copy(tensor: Tensor) -> Tensor:
        if tensor.nbytes < _IN_MEMORY:
            return tensor.to("cpu", copy=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hdpcomm-") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a page without room would be a SIGBUS later
            made = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return made.view(tensor.shape).copy_(tensor)

    return copy


def save_optimizer(state: State, names: Sequence[Sequence[str]], scheduler: Any, folder: str, *, writes: bool) -> None:
    """Writes the state of the whole optimizer as torch's ``state_dict()`` numbers it, and that of the schedule.
    Collective.

    Args:
        names: of the parameters of each group, in the order in which the optimizer was made.
        writes: this rank does.
    """
    whole = state.whole(("optimizer", "masters"), keep=file_copy(folder) if writes else None)
    if not writes:
        return
    optimizer = whole["optimizer"]
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    options = {name: group for group in optimizer["param_groups"] for name in group["params"]}
    groups = [
        {**options[group[0]], "params": [numbers[name] for name in group]} if group else {"params": []}
        for group in names
    ]
    numbered = {numbers[name]: value for name, value in optimizer["state"].items()}
    saved = {"state": numbered, "param_groups": groups, _MASTERS: whole.get("masters", {})}
    torch.save(saved, Path(folder) / OPTIMIZER_NAME)
    torch.save(scheduler.state_dict(), Path(folder) / SCHEDULER_NAME)


def load_scheduler(scheduler: Any, folder: str) -> None:
    """Reads the state of the schedule, if the checkpoint has one. Local."""
    if (path := Path(folder) / SCHEDULER_NAME).exists():
        scheduler.load_state_dict(read_plain_values(path, f"the state of a schedule: {_INSTEAD}"))


def load_optimizer(state: State, names: Sequence[Sequence[str]], folder: str) -> None:
    """Takes this rank's parts of what :func:`save_optimizer`, or transformers' own trainer, has written, if the
    checkpoint has it. Collective.

    Raises: InvalidUsage: it is damaged, or of an optimizer of other groups.
    """
    path = Path(folder) / OPTIMIZER_NAME
    if not path.exists():
        return
    saved = read_plain_values(path, f"the state of an optimizer: {_INSTEAD}")
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise InvalidUsage(f"{path}: no state and param_groups; expected the state of an optimizer: {_INSTEAD}")
    found, expected = ([len(group) for group in each] for each in ((g["params"] for g in saved["param_groups"]), names))
    if found != expected:
        raise InvalidUsage(
            f"{path}: groups of {found} parameters, and the trainer's optimizer has {expected}; resume with the model "
            "and the optimizer that were saved"
        )
    by_number = {
        number: name
        for group, own in zip(saved["param_groups"], names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    optimizer = {
        "state": {by_number[number]: value for number, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(saved["param_groups"], names, strict=True)
        ],
    }
    given = {"optimizer": optimizer}
    if masters := saved.get(_MASTERS):
        given["masters"] = masters
    state.load({**state.parts(), **given})


def read_plain_values(path: Path, expected: str) -> Any:
    """Reads a file of ``torch.save`` without running code of it; tensors stay in the file until they are used. Local.

    Args:
        expected: the content, and what to do without it, for the error.

    Raises: InvalidUsage: it is damaged, cannot be read, or holds more than plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        # torch's own text says how to let such a file run code.
        told = "no plain values" if isinstance(error, pickle.UnpicklingError) else first_line(error)
        raise InvalidUsage(f"{path}: {told}; expected {expected}") from None


class PartsInFolders:
    """The part of :class:`hdpcomm.integrations.huggingface.HybridDataParallel` that loads and saves, where ranks may
    have parts of the model and of what the optimizer has."""

    _adapted: nn.Module
    _comm: Communicator | None
    _cut: dict[str, int]
    _kept: StepSettings
    _made: tuple[Any, Runner] | None
    _names: list[list[str]]
    _resumed: str | None
    _source: FolderSource | None
    _whole: dict[str, Tensor] | None

    @property
    def comm(self) -> Communicator:
        """All ranks that train: the one under torch.distributed's default group, or of :func:`hdpcomm.init`."""
        if self._comm is None:
            ours = dist.is_initialized() and isinstance(dist.group.WORLD, HdpProcessGroup)
            self._comm = communicator() if ours else init()
        return self._comm

    def _read_weights(self, zero: int = 0, mesh: Mesh | None = None) -> None:
        """Reads the weights of a model that was given by its folder, once; with a mesh, this rank keeps its parts of
        layers from then on. Collective."""
        source, self._source = self._source, None
        whole = mesh or Mesh(self.comm, placement=range(self.comm.size))
        if source is not None:
            source.fill(self._adapted, whole, zero=zero)
        elif self._made is None:
            tensor_parallel(expert_parallel(self._adapted, whole), whole)

    def _mesh(self) -> Mesh:
        return Mesh(self.comm, **self._cut, placement=None if self._is_cut else range(self.comm.size))

    @property
    def _is_cut(self) -> bool:
        """Ranks hold parts of layers, once the model is prepared."""
        return max(self._cut.values()) > 1

    @property
    def _shares(self) -> bool:
        """Ranks hold parts of what the optimizer updates, or of its state."""
        return self._is_cut or self._kept.masters

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As in the base, but of experts too, whose tensors have other names in files; weights that nobody has read yet
        are read from the checkpoint later."""
        folder = Path(resume_from_checkpoint)
        if model is not None or not has_weights(folder):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        elif self._source is not None:
            self._source.go_on(folder)
        else:
            load_weights(self._adapted, folder)

    def _load_best_model(self) -> None:
        """As in the base, but of experts too."""
        best = cast(Any, self).state.best_model_checkpoint
        if best is None or not has_weights(Path(best)):
            super()._load_best_model()  # type: ignore[misc]
        elif self._made is not None and self._shares:
            self._made[1].state.load_weights(weights_for(cast(Any, self._adapted).causal_lm.config, Path(best)))
            self.comm.barrier()
        else:
            load_weights(self._adapted, Path(best))

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As in the base; collective where ranks have parts of the model."""
        self._read_weights()
        runner, this = None if self._made is None else self._made[1], cast(Any, self)
        if runner is None or not (self._is_cut or (runner.masters is not None and runner.masters.pulled)):
            super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]
            return
        folder = output_dir or this.args.output_dir
        try:
            if this.args.should_save:
                Path(folder).mkdir(parents=True, exist_ok=True)
            named = this.model.state_dict(keep_vars=True)
            self._whole = runner.copied_weights(named, keep=this.args.should_save, copy=file_copy(folder))
            super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict if self._whole is None else self._whole)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._shares:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        assert self._made is not None
        this, state = cast(Any, self), self._made[1].state
        save_optimizer(state, self._names, this.lr_scheduler, output_dir, writes=this.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._shares:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._resumed = checkpoint  # the optimizer's state has its place once ranks have their parts
        load_scheduler(cast(Any, self).lr_scheduler, checkpoint)

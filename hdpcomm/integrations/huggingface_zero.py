"""Stages of ZeRO for transformers' trainers: by the ``fsdp`` of TrainingArguments, where it means the same, or the
least that fits a model into the memory that there is.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from hdpcomm.comm.mesh import Mesh
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import LoraOptions
from hdpcomm.run import RunConfig
from hdpcomm.run.memory import fit_zero
from hdpcomm.run.model import folder_model, model_path
from hdpcomm.train.step.runner import StepSettings

__all__ = ["least_zero", "without_fsdp"]

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

"""The ``fsdp`` of transformers' TrainingArguments as this library's settings, where they mean the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.train.runner import StepSettings

__all__ = ["without_fsdp"]

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

"""Options of verl's actors, engines and models that are refused; tools/trainer_options.py has all others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hdpcomm.errors import InvalidUsage

__all__ = ["REFUSED", "check_options", "unsupported"]

Reasons = Mapping[str, Mapping[str, str]]

_FSDP = "leave it out, or use strategy=fsdp2"
_LONG_ROWS = "set it to 1: plans give long sequences several ranks"
REFUSED: Reasons = {
    "FSDPActorConfig": {
        "ulysses_sequence_parallel_size": _LONG_ROWS,
        "pad_to_length": "set it to False: plans have no padding",
        "calculate_sum_pi_squared": "a loss gets log-probabilities and entropies only: set it to False",
    },
    "FSDPEngineConfig": {
        "ulysses_sequence_parallel_size": _LONG_ROWS,
        "pad_to_length": "set it to False: plans have no padding",
        "offload_policy": "give param_offload=True and optimizer_offload=True, which move them between passes",
        "fsdp_size": "set it to -1: weights are shared by the ranks of each host",
        "qat": _FSDP,
    },
    "HFModelConfig": {
        "target_parameters": "name layers in target_modules, or use strategy=fsdp2",
        "use_liger": _FSDP,
        "tiled_mlp": _FSDP,
        "enable_activation_offload": _FSDP,
        "mtp": _FSDP,
    },
    "CheckpointConfig": {"async_save": "set it to False: saving ends when all is on the disk"},
}
"""Advice beside each option that is refused where it is given."""

_ADVICE = {name: text for group in REFUSED.values() for name, text in group.items()} | {
    "lora_rank": "train all of it: its last layer is new",
    "lora": "give lora_rank",
    "mixed_precision": "give bf16 or fp32",
}


def check_options(model: Any, engine: Any, checkpoint: Any, *, ranks: int) -> None:
    """Refuses options of verl's configurations that would be wrong, or without effect, in silence. Local.

    Args:
        ranks: of the job.

    Raises: InvalidUsage: such an option, with what takes its place.
    """
    for name in _given(model, engine, checkpoint, ranks):
        raise unsupported(name, _ADVICE[re.split(r"[.= ]", name)[0]])


def unsupported(what: str, instead: str) -> InvalidUsage:
    """The error for what the engine cannot do."""
    return InvalidUsage(f"strategy=hdpcomm does not support {what}; {instead}")


def _given(model: Any, engine: Any, checkpoint: Any, ranks: int) -> Iterator[str]:
    """Options that are given and refused, with their values."""
    precision = (engine.mixed_precision or {}).get("param_dtype", "bf16")
    lora = model.lora_rank > 0 or model.lora_adapter_path
    ulysses, size = engine.ulysses_sequence_parallel_size, engine.fsdp_size
    wrong = {
        "lora_rank of a critic": lora and model.model_type == "value_model",
        f"target_parameters={model.target_parameters}": lora and model.target_parameters,
        f"lora.rank={model.lora.get('rank', 0)}": model.lora.get("rank", 0) > 0,
        "use_liger=True": model.use_liger,
        "tiled_mlp.enabled=True": model.tiled_mlp.get("enabled", False),
        "enable_activation_offload=True": model.enable_activation_offload,
        "mtp.enable=True": model.mtp.enable,
        "offload_policy=True": engine.offload_policy,
        f"ulysses_sequence_parallel_size={ulysses}": ulysses > 1,
        f"fsdp_size={size}": 0 < size < ranks,
        "pad_to_length=True": engine.pad_to_length,
        "qat.enable=True": engine.qat.enable,
        f"mixed_precision.param_dtype={precision}": str(precision).rpartition(".")[2] in ("fp16", "float16", "16"),
        "async_save=True": checkpoint.get("async_save", False),
    }
    return (name for name, given in wrong.items() if given)

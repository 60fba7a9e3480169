"""Options of verl's actors, engines, optimizers and models: which work, have no effect, or are refused.

The reference of the docs shows the table, and ``make clients`` compares it with verl's. ``check_options`` refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hdpcomm.errors import InvalidUsage

__all__ = ["NO_EFFECT", "REFUSED", "WORKS", "check_options", "unsupported"]

Reasons = Mapping[str, Mapping[str, str]]

_BY_VERL = "as with fsdp2: read by verl's workers, losses and trainer"
WORKS: Reasons = {
    "FSDPActorConfig": {
        "strategy": "hdpcomm, with model.external_lib=hdpcomm.integrations.verl_engine",
        "ppo_mini_batch_size ppo_epochs shuffle data_loader_seed rollout_n policy_loss loss_agg_mode loss_scale_factor "
        "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg entropy_coeff calculate_entropy "
        "use_kl_loss kl_loss_coef kl_loss_type use_rollout_log_probs global_batch_info profiler": _BY_VERL,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_infer_micro_batch_size_per_gpu": (
            "rows of the micro-batches of verl's losses; a rank holds as many tokens as the fullest of them has"
        ),
        "use_dynamic_bsz ppo_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu": (
            "a rank holds so many tokens; longer rows take several ranks"
        ),
        "grad_clip optim": "see FSDPOptimizerConfig",
        "checkpoint": "see CheckpointConfig",
        "fsdp_config engine": "see FSDPEngineConfig",
        "model_config": "see HFModelConfig",
    },
    "FSDPEngineConfig": {
        "strategy use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu infer_max_token_len_per_gpu "
        "infer_micro_batch_size_per_gpu": "see FSDPActorConfig",
        "param_offload optimizer_offload": (
            "weights and sums of gradients, and master weights and the optimizer's state, are in pinned host memory "
            "between passes"
        ),
        "forward_only": "of references and reward models: their weights are whole on each rank",
        "reshard_after_forward": "True: ZeRO-3; False: ZeRO-2, parameters stay whole",
        "model_dtype": "type in which weights are read; master weights are fp32 at least",
        "mixed_precision": (
            "param_dtype is bf16 or fp32 (fp16 is refused); gradients are summed in fp32 whatever reduce_dtype says, "
            "and buffers stay as they are"
        ),
        "seed full_determinism": "as with fsdp2",
    },
    "FSDPOptimizerConfig": {
        "optimizer optimizer_impl override_optimizer_config": "any that updates each element by itself",
        "lr betas weight_decay clip_grad grad_clip lr_scheduler_type warmup_style lr_warmup_steps "
        "lr_warmup_steps_ratio total_training_steps min_lr_ratio num_cycles zero_indexed_step": "as with fsdp2",
    },
    "HFModelConfig": {
        "path local_path hf_config_path local_hf_config_path tokenizer_path local_tokenizer_path model_type "
        "load_tokenizer hf_config generation_config tokenizer processor use_shm trust_remote_code custom_chat_template "
        "external_lib architectures": "as with fsdp2; models of text",
        "override_config": "as with fsdp2; attn_implementation is that of the check against transformers",
        "enable_gradient_checkpointing": "layers are computed again in the backward pass",
        "lora_rank lora_alpha target_modules exclude_modules lora_adapter_path": (
            "LoRA of peft, as with fsdp2; not of critics"
        ),
        "lora": "merge=True sends weights with adapters in them; a rank above 0, of Megatron's LoRA, is refused",
    },
    "CheckpointConfig": {
        "save_contents load_contents": "model, optimizer, extra and hf_model; with LoRA hf_model is the adapters",
        "save_lora_only": "model has the adapters only",
    },
}

_NO_FSDP = "FSDP wraps nothing here"
_NO_LOGITS = "logits never exist as a whole"
_NO_PADDING = "there is no padding"
NO_EFFECT: Reasons = {
    "FSDPActorConfig": {
        "use_torch_compile use_fused_kernels entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
        "entropy_checkpointing": _NO_LOGITS,
        "use_remove_padding": _NO_PADDING,
        "use_prefix_grouper": "prompts that rows share are computed once in any case",
        "freeze_vision_tower": "models are of text",
        "qat": "verl's engines read that of FSDPEngineConfig",
    },
    "FSDPEngineConfig": {
        "wrap_policy forward_prefetch use_orig_params use_no_sync_for_gradient_accumulation turbo_config": _NO_FSDP,
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing use_torch_compile "
        "use_fused_kernels": _NO_LOGITS,
        "use_remove_padding pad_to_length_bucket": _NO_PADDING,
        "dtype": "mixed_precision says it, as with fsdp2",
    },
    "HFModelConfig": {"use_fused_kernels fused_kernel_options": _NO_LOGITS, "use_remove_padding": _NO_PADDING},
    "CheckpointConfig": {"strict": "of Megatron's exports"},
}

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
        "router_replay": _FSDP,
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
    replay = engine.router_replay.get("mode", "disabled")  # a dictionary, unless the user names its class
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
        f"router_replay.mode={replay}": replay != "disabled",
        f"mixed_precision.param_dtype={precision}": str(precision).rpartition(".")[2] in ("fp16", "float16", "16"),
        "async_save=True": checkpoint.get("async_save", False),
    }
    return (name for name, given in wrong.items() if given)

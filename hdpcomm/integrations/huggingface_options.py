"""Options of transformers' and TRL's trainers: which work with plans, have no effect, or are refused.

The reference of the docs shows the table, and tests compare it with the installed packages. ``check_options`` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hdpcomm.arguments import check_whole
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.train.runner import StepSettings

__all__ = ["NO_EFFECT", "REFUSED", "WORKS", "check_options", "is_trainer_of", "mesh_sizes", "mesh_text"]

Reasons = Mapping[str, Mapping[str, str]]

WORKS: Reasons = {
    "TrainingArguments": {
        "output_dir num_train_epochs max_steps seed data_seed full_determinism use_cpu use_cache tf32 bf16 debug "
        "local_rank": (
            "as without plans; with bf16 passes run under autocast, or in bf16 beside fp32 masters by dtype="
        ),
        "per_device_train_batch_size gradient_accumulation_steps train_sampling_strategy length_column_name "
        "remove_unused_columns label_names ignore_data_skip include_num_input_tokens_seen dataloader_drop_last "
        "dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
        "dataloader_pin_memory dataloader_prefetch_factor accelerator_config": (
            "batches are read as without plans; those of all ranks are one global batch"
        ),
        "optim optim_args optim_target_modules learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "max_grad_norm lr_scheduler_type lr_scheduler_kwargs warmup_steps": (
            "with zero or dtype optimizers that treat each element by itself; those that update in the backward pass "
            "(lomo, layerwise) are refused"
        ),
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
        "activation_checkpointing_kwargs": "layers are computed again in the backward pass",
        "do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics prediction_loss_only "
        "include_for_metrics bf16_full_eval fp16_full_eval": "as without plans; with mesh= the loss only",
        "save_strategy save_steps save_total_limit save_on_each_node save_only_model resume_from_checkpoint "
        "load_best_model_at_end metric_for_best_model greater_is_better restore_callback_states_from_checkpoint "
        "enable_jit_checkpoint": (
            "checkpoints of one device; load_best_model_at_end not of adapters with zero=3 or mesh="
        ),
        "logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_level log_level_replica "
        "log_on_each_node disable_tqdm report_to run_name project trackio_bucket_id trackio_space_id "
        "trackio_static_space_id skip_memory_metrics push_to_hub hub_always_push hub_model_id hub_private_repo "
        "hub_revision hub_strategy hub_token": "as without plans",
        "label_smoothing_factor": "of chunks of logits; not with mesh=, nor of log-probabilities",
        "neftune_noise_alpha": (
            "noise by the length of each sequence, where transformers takes that of the padded row; not with tensor "
            "ranks, nor of log-probabilities"
        ),
        "fsdp fsdp_config": "True is zero=3, or 2 with reshard_after_forward=False; other meanings are refused",
        "ddp_backend ddp_timeout": "of torch.distributed, where transformers begins it",
    },
    "SFTConfig": {
        "assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc "
        "dataset_text_field eos_token pad_token max_length truncation_mode pad_to_multiple_of shuffle_dataset "
        "model_init_kwargs trust_remote_code": "as without plans",
        "packing packing_strategy eval_packing padding_free": "packs are taken apart into sequences, and planned",
        "loss_type": "nll and dft, of chunks of logits; dft not with mesh=",
        "router_aux_loss_coef": "the mean of each sequence, whatever the plan; transformers takes that of a batch",
    },
    "DPOConfig": {
        "beta discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_type loss_weights "
        "disable_dropout max_length truncation_mode pad_to_multiple_of pad_token dataset_num_proc model_init_kwargs "
        "trust_remote_code precompute_ref_batch_size precompute_ref_log_probs": (
            "TRL's own loss, of log-probabilities that planned passes make"
        ),
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": "not with zero=3",
    },
    "GRPOConfig": {
        "beta delta epsilon epsilon_high importance_sampling_level loss_type mask_truncated_completions "
        "multi_objective_aggregation num_iterations off_policy_mask_threshold reward_weights scale_rewards "
        "sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos "
        "top_entropy_quantile entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target "
        "use_adaptive_entropy use_bias_correction_kl disable_dropout model_init_kwargs trust_remote_code": (
            "TRL's own loss, of log-probabilities and entropies that planned passes make"
        ),
        "num_generations num_generations_eval generation_batch_size steps_per_generation max_completion_length "
        "temperature top_p top_k min_p repetition_penalty generation_kwargs cache_implementation chat_template_kwargs "
        "max_tool_calling_iterations shuffle_dataset pad_to_multiple_of use_transformers_continuous_batching "
        "use_transformers_paged transformers_continuous_batching_config log_completions log_completions_hub_repo "
        "log_multimodal log_unique_prompts num_completions_to_print": "as without plans",
        "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length "
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex "
        "vllm_tensor_parallel_size": "not with zero=3",
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": "not with zero=3",
    },
}

NO_EFFECT: Reasons = {
    "TrainingArguments": {
        "average_tokens_across_devices": "the loss is the mean over the labelled tokens of all ranks in any case",
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph": (
            "gradients are added up without DDP"
        ),
    },
    "GRPOConfig": {"ds3_gather_for_generation": "of DeepSpeed, which is refused"},
}

_SHARDED = "leave it out, and give zero=3: ranks share weights, gradients and the optimizer's state"
_NO_LOGITS = "leave it out: planned passes make no whole logits"
_LEAVE = "leave it out, or use transformers.Trainer"
REFUSED: Reasons = {
    "TrainingArguments": {
        "fp16": "give bf16=True",
        "deepspeed": _SHARDED,
        "parallelism_config": "leave it out: mesh={'tensor': N} cuts layers, and zero=3 weights",
        "torch_compile torch_compile_backend torch_compile_mode": (
            "leave it out: planned passes call the layers, and what is compiled is the model around them"
        ),
        "auto_find_batch_size": "leave it out, and give capacity=, the most tokens of a rank at once",
        "torch_empty_cache_steps": "leave it out, and call torch.cuda.empty_cache() in a callback",
        "use_liger_kernel liger_kernel_config": _NO_LOGITS,
    },
    "SFTConfig": {"activation_offloading": "leave it out, and give offload= and capacity="},
    "DPOConfig": {
        "activation_offloading": "leave it out, and give offload= and capacity=",
        "padding_free": "leave it out: planned passes drop padding",
        "use_weighting": _LEAVE,
        "router_aux_loss_coef": "leave it out where the model has routers, or give 0",
    },
    "GRPOConfig": {
        "cast_lm_head_to_fp32": _LEAVE,
        "router_aux_loss_coef": "leave it out where the model has routers, or give 0",
    },
}
"""Advice beside each option that is refused where it is given."""

_LOG_PROB_TRAINERS = {f"trl.trainer.{name}_trainer" for name in ("dpo", "grpo", "kto", "reward", "rloo")}
_ADVICE = {name: text for group in REFUSED.values() for names, text in group.items() for name in names.split()} | {
    "fsdp": _SHARDED,
    "a model that was loaded with tp_plan": "load it without, and give mesh={'tensor': N}",
}


def check_options(trainer: Any, kept: StepSettings, cut: Mapping[str, int]) -> bool:
    """Whether the loss is one of log-probabilities. Local.

    Raises: InvalidUsage for what would be wrong in silence, with what takes its place.
    """
    import transformers

    kinds = [kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind) and not _plans(kind)]
    owner = kinds[0]
    of_log_probs = not trainer.computes_token_loss and any(kind.__module__ in _LOG_PROB_TRAINERS for kind in kinds)
    known = owner is transformers.Trainer or owner.__module__ == "trl.trainer.sft_trainer" or of_log_probs
    if not known and not trainer.computes_token_loss:
        raise InvalidUsage(
            f"{owner.__name__}.compute_loss is not called with plans; if its loss is the mean of the labelled tokens' "
            "cross-entropy, set computes_token_loss = True in your class, else use it without HybridDataParallel"
        )
    for name in _given(trainer, kept, cut, owner.__name__ if of_log_probs else None):
        advice = _ADVICE.get(name.partition("=")[0], _LEAVE)
        raise InvalidUsage(f"Trainer: {name} is not supported with plans; {advice}")
    return of_log_probs


def _plans(kind: type) -> bool:
    return kind.__module__ == "hdpcomm.integrations.huggingface"


def _given(trainer: Any, kept: StepSettings, cut: Mapping[str, int], log_probs: str | None) -> Iterator[str]:
    """Options that are given and refused, with their values.

    Args:
        log_probs: the trainer's name, where its loss is one of log-probabilities.
    """
    import transformers

    args = trainer.args
    mesh, accelerator = mesh_text(cut), trainer.accelerator
    parts = mesh or ("zero=3" if kept.zero == 3 else "")
    precision, loss_type = accelerator.mixed_precision, getattr(args, "loss_type", "nll")
    compiles = str(accelerator.state.dynamo_plugin.backend.value).upper() != "NO"
    updates = any(word in str(getattr(args.optim, "value", args.optim)) for word in ("lomo", "layerwise"))
    of_log_probs, clips_itself = log_probs is not None, not hasattr(transformers.Trainer, "_clip_grad_norm")
    wrong = {
        f"label_smoothing_factor={args.label_smoothing_factor} with {parts or log_probs}": (
            args.label_smoothing_factor and (mesh or of_log_probs)
        ),
        f"compute_loss_func with {parts or log_probs}": trainer.compute_loss_func and (mesh or of_log_probs),
        f"neftune_noise_alpha={args.neftune_noise_alpha} with {mesh or log_probs}": (
            args.neftune_noise_alpha and (cut["tensor"] > 1 or of_log_probs)
        ),
        "fp16=True": args.fp16 or precision == "fp16",
        f"mixed precision {precision}": precision == "fp8",
        "deepspeed": args.deepspeed,
        f"fsdp={args.fsdp or 'of accelerate'!r}": args.fsdp or trainer.is_fsdp_enabled,
        f"{args.n_gpu} GPUs in one process (start a process for each)": args.n_gpu > 1,
        "torch_compile=True": compiles,
        "auto_find_batch_size=True": args.auto_find_batch_size,
        f"torch_empty_cache_steps={args.torch_empty_cache_steps}": args.torch_empty_cache_steps,
        "use_liger_kernel=True": args.use_liger_kernel,
        f"optim={args.optim!s} (updates in the backward pass)": updates,
        f"loss_type={loss_type!r}": not of_log_probs and loss_type not in ("nll", "dft"),
        f"loss_type={loss_type!r} with {mesh}": not of_log_probs and loss_type == "dft" and mesh,
        "activation_offloading": getattr(args, "activation_offloading", False),
        f"{parts or 'zero= or dtype='} with transformers {transformers.__version__} (it clips by itself)": (
            kept.masters or parts
        )
        and clips_itself,
        f"load_best_model_at_end=True of adapters with {parts}": (
            parts and args.load_best_model_at_end and hasattr(trainer.model, "peft_config")
        ),
        f"{mesh} with {log_probs}": of_log_probs and mesh,
        f"queue=True with {mesh}": cut["expert"] > 1 and trainer._plans.queue,
        "use_vllm=True with zero=3": kept.zero == 3 and getattr(args, "use_vllm", False),
        "sync_ref_model=True with zero=3": kept.zero == 3 and getattr(args, "sync_ref_model", False),
        "a model that was loaded with tp_plan": (getattr(trainer.model, "_tp_size", None) or 1) > 1,
        "the auxiliary loss of routers": of_log_probs and getattr(trainer, "aux_loss_enabled", False),
        "padding_free=True": of_log_probs and getattr(args, "padding_free", False),
        "use_weighting=True": of_log_probs and getattr(trainer, "use_weighting", False),
        "cast_lm_head_to_fp32=True": of_log_probs and getattr(args, "cast_lm_head_to_fp32", False),
    }
    return (name for name, given in wrong.items() if given)


def is_trainer_of(trainer: object, name: str) -> bool:
    """Whether it is TRL's trainer of that name, as "sft" or "reward"."""
    return any(kind.__module__ == f"trl.trainer.{name}_trainer" for kind in type(trainer).__mro__)


def mesh_sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a mesh as a trainer is given it, 1 for those left out. Raises: InvalidUsage."""
    cut = {"tensor": 1, "expert": 1}
    if not isinstance(mesh, Mapping) or not mesh.keys() <= cut.keys():
        raise InvalidUsage(
            f"Trainer: mesh={mesh!r}; expected sizes by name, as {{'tensor': 2, 'expert': 2}} (pipelines need stages, "
            "which transformers' trainers do not run: hdpcomm.Trainer)"
        )
    for name, size in mesh.items():
        check_whole("Trainer", f"mesh[{name!r}]", size, least=1)
    return {**cut, **mesh}


def mesh_text(cut: Mapping[str, int]) -> str:
    """The argument that says so; empty where nothing is cut."""
    sizes = {name: size for name, size in cut.items() if size > 1}
    return f"mesh={sizes}" if sizes else ""

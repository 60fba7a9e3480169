"""Options of transformers', TRL's and verl's trainers: which work with plans, have no effect, or are refused.

The reference of the docs shows the tables (tools/docs_pages.py); tests compare them with the installed transformers and
TRL, and ``make clients`` with verl.
"""

from __future__ import annotations

from collections.abc import Mapping

from hdpcomm.integrations import huggingface_options, verl_options

Reasons = Mapping[str, Mapping[str, str]]

HUGGINGFACE_WORKS: Reasons = {
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
        "torch_compile torch_compile_backend torch_compile_mode": (
            "layers are compiled one by one, once for all lengths; evaluation runs them as they came; not with mesh="
        ),
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

HUGGINGFACE_NO_EFFECT: Reasons = {
    "TrainingArguments": {
        "average_tokens_across_devices": "the loss is the mean over the labelled tokens of all ranks in any case",
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph": (
            "gradients are added up without DDP"
        ),
    },
    "GRPOConfig": {"ds3_gather_for_generation": "of DeepSpeed, which is refused"},
}

_BY_VERL = "as with fsdp2: read by verl's workers, losses and trainer"
VERL_WORKS: Reasons = {
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
        "router_replay": "R2: experts of the pass for old log-probabilities; R3: routed_experts of the rollouts",
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
VERL_NO_EFFECT: Reasons = {
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

HUGGINGFACE = {"works": HUGGINGFACE_WORKS, "no effect": HUGGINGFACE_NO_EFFECT, "refused": huggingface_options.REFUSED}
VERL = {"works": VERL_WORKS, "no effect": VERL_NO_EFFECT, "refused": verl_options.REFUSED}
"""Verdict -> class of options -> names -> reason."""

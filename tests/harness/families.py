"""Tiny models of many families, and the oracle: transformers' own model on one process, sequence by sequence."""

import torch
import transformers

LENGTHS = (37, 1, 90, 12, 5, 3)
"""A batch for ranks that hold 40 tokens: one sequence needs three of them, and one has a single token."""
VOCABULARY = 97
SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
MAMBA = {
    "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_chunk_size": 16,
}  # fmt: skip
LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3Text", {"sliding_window": 16, "final_logit_softcapping": 2.0, **LAYERS}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 16, **LAYERS, **EXPERTS}),
    "phi4": ("Phi3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None, **EXPERTS}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0], **EXPERTS}),
    "llama4": ("Llama4Text", {
        "num_hidden_layers": 4, "intermediate_size_mlp": 40, "num_local_experts": 4, "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2, "floor_scale": 8,
    }),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "gpt-neox": ("GPTNeoX", {}),
    "deepseek-v3": ("DeepseekV3", {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "head_dim": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    }),
    "glm4-moe": ("Glm4Moe", {
        "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    }),
    # Many index heads, as in real models: with few of them scores of 0 are common, of which torch.topk takes any.
    "deepseek-v32": ("DeepseekV32", {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "index_n_heads": 32,
        "index_head_dim": 16, "index_topk": 7,
    }),
    "qwen3-next": ("Qwen3Next", {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6, "num_experts": 4, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, **EXPERTS,
    }),
    "kimi-linear": ("KimiLinear", {
        "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
        "linear_num_heads": 2, "linear_head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 10,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    }),
    "mamba2": ("Mamba2", {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16}),
    "qwen3.5": ("Qwen3_5Text", {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    }),
    "bamba": ("Bamba", {**MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1", {
        **MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "ssm_multipliers": [1.0, 0.5, 2.0, 1.5, 0.75],
    }),
    "granite-hybrid": ("GraniteMoeHybrid", {
        **MAMBA, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 24, "residual_multiplier": 0.5,
    }),
    "nemotron-h": ("NemotronH", {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 4, "ssm_state_size": 8, "chunk_size": 16, "n_routed_experts": 4,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "num_experts_per_tok": 2,
    }),
    "olmo-hybrid": ("OlmoHybrid", {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    }),
    "glm4": ("Glm4", {}),
    "olmo2": ("Olmo2", {}),
}  # fmt: skip
"""Families of transformers; from DeepSeek-V3 to OLMo Hybrid with latent attention or linear layers."""


def config_of(family, **changes):
    name, extra = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**{**SIZE, **extra, **changes})


def model_of(family, **changes):
    config = config_of(family, **changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def unsharded(model):
    """Mean loss of the trained tokens and its gradients, by transformers' own forward; a router's loss counts once for
    each of them, as in a batch of its sequence alone."""
    total = sum(len(tokens) - 1 for tokens in sequences())
    loss = 0.0
    for tokens in sequences():
        if len(tokens) > 1:
            own = model(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss * (len(tokens) - 1) / total
            own.backward()
            loss += own.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

"""Models from configurations of Hugging Face: their shapes, their mix of layers, and what that does to plans."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hdpcomm.cli.main import main
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import MODELS, ClusterSpec, CostModel, ModelSpec, Planner, load_model, model_from_config
from hdpcomm.plan.token_mixing import (
    TokenMixing,
    delta_mixing,
    indexed_mixing,
    latent_mixing,
    softmax_mixing,
    ssd_mixing,
)

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "mlp_only_layers": [],
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 9216, "vocab_size": 163840, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip


def mix(model: ModelSpec) -> dict[tuple[str, int | None], int]:
    found: Counter[tuple[str, int | None]] = Counter()
    for each in model.mixing:
        found[each.kind, each.window] += each.layers
    return dict(found)


def test_published_configurations() -> None:
    """As they are on the hub, which do not list the type of each layer."""
    assert replace(model_from_config(LLAMA), mixing=(), name="llama-7b") == MODELS["llama-7b"]
    next_ = model_from_config(QWEN3_NEXT)
    assert mix(next_) == {("linear", None): 36, ("full", None): 12}
    assert next_.params == pytest.approx(79.7e9, rel=0.002)
    kimi = model_from_config(KIMI_LINEAR)
    assert mix(kimi) == {("linear", None): 20, ("latent", None): 7}
    assert kimi.params == pytest.approx(49.1e9, rel=0.01)
    assert mix(model_from_config(GEMMA3)) == {("window", 1024): 29, ("full", None): 5}
    assert mix(model_from_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096})) == {("window", 4096): 32}
    assert mix(model_from_config({**LLAMA, "model_type": "mistral", "sliding_window": None})) == {("full", None): 32}
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False, "max_window_layers": 8}
    assert mix(model_from_config(qwen)) == {("full", None): 32}
    assert mix(model_from_config({**qwen, "use_sliding_window": True})) == {("full", None): 8, ("window", 512): 24}


FAMILIES = {
    "Llama": {("full", None): 32},
    "Gemma2": {("window", 4096): 13, ("full", None): 13},
    "GptOss": {("window", 128): 18, ("full", None): 18},
    "Llama4Text": {("window", 4096): 36, ("full", None): 12},
    "Olmo3": {("window", 4096): 24, ("full", None): 8},
    "Qwen2Moe": {("full", None): 24},
    "Glm4Moe": {("full", None): 46},
    "DeepseekV3": {("latent", None): 61},
    "Glm4MoeLite": {("latent", None): 47},
    "DeepseekV32": {("indexed", None): 61},
    "GlmMoeDsa": {("indexed", None): 78},
    "Qwen3Next": {("linear", None): 36, ("full", None): 12},
    "Qwen3_5Text": {("linear", None): 24, ("full", None): 8},
    "KimiLinear": {("linear", None): 21, ("latent", None): 6},
    "Mamba2": {("linear", None): 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str) -> None:
    """Within 0.1%: norms, convolutions and biases are left out."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    torch = pytest.importorskip("torch")
    config = getattr(transformers, f"{family}Config")()
    spec = model_from_config(config.to_dict())
    assert mix(spec) == FAMILIES[family]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    params = sum(p.numel() for p in model.parameters())
    params += config.vocab_size * config.hidden_size * bool(config.tie_word_embeddings)
    assert spec.params == pytest.approx(params, rel=1e-3)


def test_only_full_attention_has_a_square_term() -> None:
    window = softmax_mixing(4096, 32, 8, 128, window=1024)
    full = softmax_mixing(4096, 32, 8, 128)
    delta = delta_mixing(4096, key_heads=16, key_dim=128, heads=32, value_dim=128, gates=4096)
    mamba = ssd_mixing(4096, inner=8192, heads=128, groups=8, state_dim=128)
    assert full.squares_flops == 2 * 4096
    assert full.linear_flops == 0
    assert window.squares_flops == delta.squares_flops == mamba.squares_flops == 0
    assert window.linear_flops == 4 * 4096 * 1024  # Q K^T and P V with as many keys
    assert min(delta.linear_flops, mamba.linear_flops) > 0
    # Scores of 192 and values of 128 for each head; the latent is what goes from rank to rank.
    latent = latent_mixing(7168, 128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert latent.squares_flops == 128 * (192 + 128)
    assert latent.sent == 576
    # 64 index heads of 128 score all tokens, forward only; attention is over 2,048 of them.
    sizes = {"heads": 64, "dim": 128, "q_rank": 1536, "kv_rank": 512, "top_k": 2048}
    indexed = indexed_mixing(7168, latent, width=128 * 320, **sizes)
    assert (indexed.squares_flops, indexed.index_squares_flops) == (0.0, 64 * 129)
    assert indexed.linear_flops == 2048 * 2 * 128 * (576 + 512)  # over latents
    assert indexed.sent == 576 + 128
    expanded = indexed_mixing(7168, latent, width=500, **sizes)  # few heads, whose keys and values are less
    assert expanded.linear_flops == 2048 * 2 * 128 * (192 + 128)
    assert expanded.sent == 500 + 128
    model = replace(MODELS["llama-7b"], mixing=(indexed.over(32),))
    linear, squares = model.linear_flops_per_token, 32 * 64 * 129.0
    assert model.training_flops(1000.0, 5e5) == 3 * linear * 1000 + squares * 5e5
    device = ClusterSpec(ranks=64, device="h100").hardware
    # Sequences of up to 2,048 tokens cost what full attention does; of longer ones each token has 2,048 keys more.
    pairs = 3.5 * 32 * 128 * (576 + 512)
    cost = cost_of(indexed)
    assert cost.attention == pytest.approx((squares + pairs) / device.attention_flops)
    assert cost.limit == (2048.0, pytest.approx(pairs / (squares + pairs)))
    assert cost.squares(2048.0) == 2048.0**2
    more = cost.attention * (cost.squares(20_001.0) - cost.squares(20_000.0))
    assert more == pytest.approx((40_001 * squares + 2 * 2048 * pairs) / device.attention_flops)
    without = cost_of(replace(indexed, pair_flops=0.0))
    assert without.linear == pytest.approx(cost.linear)
    assert without.limit == (0.0, 0.0)
    assert cost_of(indexed).kv_inter > 0


def cost_of(mixing: TokenMixing) -> CostModel:
    model = replace(MODELS["llama-7b"], mixing=(mixing.over(32),))
    return CostModel.analytic(model, ClusterSpec(ranks=64, device="h100", ranks_per_node=8))


def test_what_goes_between_ranks() -> None:
    full = cost_of(softmax_mixing(4096, 32, 32, 128))
    latent = cost_of(latent_mixing(4096, 32, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128))
    delta = cost_of(delta_mixing(4096, key_heads=16, key_dim=128, heads=32, value_dim=128, gates=4096))
    window = cost_of(softmax_mixing(4096, 32, 32, 128, window=1024))
    assert latent.kv_inter / full.kv_inter == pytest.approx(576 / 8192)
    assert latent.piece > full.piece  # each rank makes K and V of the latents that arrive
    assert delta.kv_inter == window.kv_inter == window.ring_step == 0
    states = 4 * 32 * (32 * 128 * 128) * 4 / ClusterSpec(ranks=64, device="h100").hardware.inter_bandwidth
    assert delta.latency_inter > states  # there and back, forward and backward, whatever the length
    assert cost_of(softmax_mixing(4096, 32, 8, 128)) == CostModel.analytic(
        MODELS["llama-7b"], ClusterSpec(ranks=64, device="h100", ranks_per_node=8)
    )


def test_plans_use_fewer_ranks_where_nothing_grows_with_the_square() -> None:
    """One long sequence among short ones: with a square term it takes more ranks than its memory needs."""
    softmax, window = softmax_mixing(4096, 32, 8, 128), softmax_mixing(4096, 32, 8, 128, window=4096)
    delta = delta_mixing(4096, key_heads=16, key_dim=128, heads=32, value_dim=128, gates=4096 * (64 + 4096))
    latent = latent_mixing(4096, 32, q_rank=512, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    indexed = indexed_mixing(4096, latent, heads=8, dim=32, q_rank=512, width=32 * 320, kv_rank=512, top_k=1024)
    mixes = {
        "indexed": (indexed.over(32),),
        "full": (softmax.over(32),),
        "hybrid": (delta.over(24), softmax.over(8)),
        "windows": (window.over(32),),
        "linear": (delta.over(32),),
    }
    ranks = {}
    for name, mixing in mixes.items():
        model = replace(MODELS["llama-7b"], mixing=mixing)
        planner = Planner(model, ClusterSpec(ranks=64, capacity=32768, device="h100"))
        lengths = [524288, *[4096] * 2000]
        plan = planner.plan(lengths)
        planner.validate(plan, lengths)
        ranks[name] = next(len(b.ranks) for b in plan.micro_batches if any(s.id == 0 for s in b.sequences))
    assert ranks["full"] > 24
    assert ranks["indexed"] < ranks["full"]
    assert ranks["hybrid"] == ranks["windows"] == ranks["linear"] == 524288 // 32768  # as few as hold it


def test_bad_specs_are_refused() -> None:
    mixing = (softmax_mixing(64, 4, 2, 16).over(3),)
    with pytest.raises(InvalidUsage, match="mixing is of 3 layers, expected the 2 layers of the model"):
        ModelSpec(2, 64, 4, 2, 128, 100, mixing=mixing)
    with pytest.raises(InvalidUsage, match="3 dense layers of width 9"):
        ModelSpec(2, 64, 4, 2, 128, 100, dense_layers=3, dense_ffn=9)
    with pytest.raises(InvalidUsage, match="a window of 0"):
        softmax_mixing(64, 4, 2, 16, window=0)
    with pytest.raises(InvalidUsage, match="ffn is 0"):
        ModelSpec(2, 64, 4, 2, 0, 100)


BAD = {
    "architecture": ({**LLAMA, "model_type": "rwkv"}, "'rwkv' is unknown.*known are cohere, .*qwen3_next"),
    "no architecture": ({}, "the model_type None is unknown"),
    "missing": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "of llama: hidden_size is missing"),
    "text": ({**LLAMA, "vocab_size": "many"}, "vocab_size is 'many', expected a positive number"),
    "layer types": ({**LLAMA, "layer_types": ["full_attention"]}, "expected a list of 32 names"),
    "layer type": (
        {**LLAMA, "layer_types": ["chunked_attention"] * 32},
        "a layer is of the type 'chunked_attention', expected one of full_attention, sliding_attention",
    ),
    "window": ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
    "heads": ({**LLAMA, "num_key_value_heads": 5}, "expected kv_heads to divide heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations_are_refused(name: str, tmp_path: Path) -> None:
    config, message = BAD[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(InvalidUsage, match=message) as info:
        load_model(tmp_path)
    assert str(file) in str(info.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="cannot read the model"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidUsage, match="holds a list; expected a configuration"):
        load_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidUsage, match="cannot read the model"):
        load_model(tmp_path / "config.json")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_commands_take_a_configuration(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    options = ["--ranks", "16", "--capacity", "8K", "--tokens", "512K", "--context", "64K"]
    for given in (tmp_path, tmp_path / "config.json"):
        found = tmp_path / "found.json"
        assert main([command, "--model", str(given), *options, "--json", str(found)]) == 0
        assert json.loads(found.read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    assert main([command, "--model", str(tmp_path), *options]) != 0
    assert "the model_type 'rwkv' is unknown to the planner; known are" in capsys.readouterr().err

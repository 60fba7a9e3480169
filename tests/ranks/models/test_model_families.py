"""tools/model_families.py on families that were wrong in silence once, and what adapt() refuses."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from hdpcomm.attention import packing
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import adapt
from hdpcomm.models.self_check import check_same_logits, is_random

transformers = pytest.importorskip("transformers", minversion="5.23")

from tests.harness.families import SIZE, config_of, model_of  # noqa: E402


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[3] / "tools/model_families.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    module.DTYPES, module.RANKS = ("float32",), (1, 2)
    yield module
    del sys.modules[path.stem]


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("qwen2_moe", "sliding_window"),
        ("phimoe", "sliding_window"),
        ("falcon_h1", None),
        ("nemotron_h", None),
        ("llama4_text", "attention_chunk_size"),
    ],
)
def test_families_that_are_exact(tool, family, window):
    """The first two tell their window by their mask only; the next have layers beside attention and Mamba-2; Llama 4
    has chunks, and layers that sharpen scores with the position."""
    found = tool.examine(family)
    assert window is None or window in found["windows"]
    assert tool.verdict(found) == "exact", found


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("jamba", "layers of the type linear_attention"),
        ("mamba", "layers of the type linear_attention"),
        ("minimax", "layers of the type linear_attention"),
        ("lfm3", "layers of the type conv"),
        ("zaya", "layers of the type hybrid"),
        ("xlstm", "gives other logits on a pack"),
        ("roberta", "gives other logits on a pack.*it counts positions in a way of its own"),
        ("doge", "does something of its own with its mask"),
    ],
)
def test_families_that_are_refused(tool, family, reason):
    config, _ = tool.first_that_runs(list(tool.small_configs(transformers.CONFIG_MAPPING[family])))
    model = tool.new_model(config, "float32")
    with pytest.raises(InvalidUsage, match=reason):
        adapt(model)
    assert model.config._attn_implementation == "eager"  # as it was given


def test_mamba2_in_bfloat16(tool):
    """Its hidden states are float32 before a head of bfloat16."""
    config, wanted = tool.first_that_runs(list(tool.small_configs(transformers.CONFIG_MAPPING["mamba2"])))
    own = tool.difference(tool.as_it_came(config, "bfloat16"), wanted)
    for ranks in (1, 2):
        assert tool.difference(tool.by_adapt(config, "bfloat16", ranks), wanted) <= 2 * own


def test_a_decoder_with_more_than_a_head_is_refused(tool):
    config, _ = tool.first_that_runs(list(tool.small_configs(transformers.CONFIG_MAPPING["bert"])))
    with pytest.raises(InvalidUsage, match="more between its decoder and its logits"):
        adapt(tool.new_model(config, "float32"))


def test_the_tool_tells_what_is_wrong(tool):
    wrong = {"kinds": [], "windows": [], "float32 1": 0.5, "bfloat16 1": 1.0}
    assert tool.verdict(wrong) == "WRONG: 5.0e-01 in float32, 1.0 times the own error in bfloat16"
    assert tool.verdict({**wrong, "float32 1": 1e-7}) == "exact"
    assert tool.verdict({"float32 1": "KeyError: 3"}) == "WRONG: KeyError: 3"
    half = {"float32 1": 1e-7, "bfloat16 1": "InvalidUsage: no bfloat16"}
    assert tool.verdict(half) == "refused in part: no bfloat16"
    page = tool.markdown({"one": wrong, "two": {"skipped": "encoder and decoder"}})
    assert "0 of 2 families are exact, 1 are refused, 1 were not tried." in " ".join(page.split())
    assert "- WRONG: 5.0e-01 in float32, 1.0 times the own error in bfloat16: one\n" in page
    assert "- encoder and decoder: two" in page


def test_models_whose_images_are_not_known_are_refused():
    text = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32,
        "image_size": [8, 8], "patch_size": [4, 4],
    }  # fmt: skip
    model = transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(text_config=text, vision_config=vision)
    )
    told = (
        r"takes more than text \(pixel_values.*\); known are images, videos or sound of qwen2_vl, .*causal LM of its "
    )
    with pytest.raises(InvalidUsage, match=told):
        adapt(model)


def test_scores_of_indexers_that_tie_are_told():
    with pytest.raises(InvalidUsage, match=r"only where its indexers choose some of the keys .*torch\.topk"):
        adapt(model_of("deepseek-v32", index_n_heads=2))


def test_a_model_of_float64_may_have_layers_of_float32():
    """The gated delta rule of Qwen3-Next: its logits are off by 1e-7 to 1.1e-5."""
    model, logits = model_of("llama").double(), torch.linspace(1.0, 2.0, 97, dtype=torch.float64)
    check_same_logits(model, logits * (1 + 1.1e-5), logits, "a model")
    with pytest.raises(InvalidUsage, match="a model gives other logits than whole"):
        check_same_logits(model, logits * (1 + 1.1e-3), logits, "a model")


OPT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48}


@pytest.mark.parametrize(
    ("config", "random"),
    [
        (config_of("llama"), False),
        (config_of("mixtral"), False),
        (config_of("mixtral", router_jitter_noise=0.01), True),
        (transformers.SeedOssConfig(**SIZE, residual_dropout=0.1), True),
        (transformers.OPTConfig(**OPT, word_embed_proj_dim=32, attention_dropout=0.0, dropout=0.1), True),
        # draws a number in each layer, for nothing
        (transformers.OPTConfig(**OPT, word_embed_proj_dim=32, attention_dropout=0.0, dropout=0.0), False),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_forward_passes_that_differ(config, random):
    """None of them has an nn.Dropout."""
    model = adapt(transformers.AutoModelForCausalLM.from_config(config))
    model.causal_lm.model.eval()
    before = torch.get_rng_state()
    assert is_random(model) is random
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.training, model.causal_lm.model.training) == (True, False)


def test_a_window_that_no_call_passes():
    model = model_of("llama")
    model.config.sliding_window = 16
    with pytest.raises(InvalidUsage, match="has sliding_window=16 in its configuration, but no call of"):
        adapt(model)
    adapt(model, check=False)


def test_windows_are_as_long_as_before():
    model = model_of("gemma3")
    adapt(model)
    assert model.config.sliding_window == 16
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, 16]


def test_compiled_chunks_are_refused(monkeypatch):
    model = model_of("llama")
    adapt(model, check=False)
    from transformers.masking_utils import create_chunked_causal_mask

    model.config.attention_chunk_size = 4
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with packing(None, [0, 9]), pytest.raises(InvalidUsage, match="chunked attention, which compiled code"):
        create_chunked_causal_mask(model.config, torch.zeros(1, 9, 32), None, None)


def test_the_length_of_a_growing_rope():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=16)
    adapt(model)
    with packing(None, [0, 16]):
        assert model(torch.arange(16)[None]).logits.shape == (1, 16, 97)
    with packing(None, [0, 17]), pytest.raises(InvalidUsage, match=r"17 tokens was given.*\(dynamic\)"):
        model(torch.arange(17)[None])


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("layerdrop", "each rank would skip other layers"), ("z_loss_coefficient", "does not add up over ranks")],
)
def test_settings_that_do_not_add_up_over_ranks(setting, reason):
    model = model_of("llama")
    setattr(model.config, setting, 0.1)
    with pytest.raises(InvalidUsage, match=rf"the model has {setting}=0\.1: .*{reason}"):
        adapt(model)

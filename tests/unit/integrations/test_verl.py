"""LoRA of verl's actors."""

from __future__ import annotations

import pytest
import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations import verl_lora
from hdpcomm.models.lora_names import is_adapter


def test_weights_with_adapters_in_them_are_those_of_peft() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    named = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = {name: tensor for name, tensor in named.items() if is_adapter(name)}
    base = [(name, tensor) for name, tensor in named.items() if name not in adapters]
    found = dict(verl_lora.merged_weights(model, base, adapters))
    assert len(adapters) == 8
    del adapters["base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"]
    with pytest.raises(InvalidUsage, match=r"lora.merge=True with adapters of .*layers\.1\.mlp\.down_proj"):
        dict(verl_lora.merged_weights(model, base, adapters))
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.bfloat16(), rtol=0.01, atol=1e-6)  # one rounding may differ


def test_adapters_of_another_model() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    saved = {name.replace(".default", ""): torch.rand(tensor.shape) for name, tensor in model.state_dict().items()}
    verl_lora._load(model, saved, "folder")
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(parameter, saved[name.replace(".default", "")])
            assert parameter.requires_grad
    saved[next(name for name in saved if ".lora_B." in name)] = torch.rand(16, 3)
    with pytest.raises(InvalidUsage, match=r"lora_adapter_path=folder has no adapters .*lora_B.*of shape \[16, 2\]"):
        verl_lora._load(model, saved, "folder")

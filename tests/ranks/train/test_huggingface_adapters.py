"""Adapters of peft in ``transformers.Trainer`` with plans, of every kind: the weights that transformers alone gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from hdpcomm.integrations.huggingface import Trainer  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, padded, tiny, tiny_experts  # noqa: E402

LINEAR = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": LINEAR},
    "rsLoRA": {"target_modules": LINEAR, "use_rslora": True},
    "DoRA": {"target_modules": LINEAR, "use_dora": True},
    "PiSSA": {"target_modules": LINEAR, "init_lora_weights": "pissa"},
    "biases": {"target_modules": LINEAR, "bias": "lora_only"},
    "ranks by layer": {"target_modules": LINEAR, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 8}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "whole modules": {"target_modules": LINEAR, "modules_to_save": ["embed_tokens", "norm", "lm_head"]},
    "tokens": {"target_modules": LINEAR, "trainable_token_indices": [1, 2]},
    "second of two": {"target_modules": LINEAR},
}


def trained(kind: str, out: str, alone: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole trained weights after three steps of four rows."""
    torch.set_num_threads(1)
    model: Any = tiny_experts() if kind == "experts" else tiny()
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **KINDS[kind]))
    if kind.startswith("second"):
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
        model.set_adapter("other")
    rows = 4 if alone else 2
    args = arguments(Path(out), rows, 1, max_steps=3, optim="adamw_torch", learning_rate=1e-2)
    more = {} if alone else {"cost_model": CostModel(1e-9, 1e-6, 1e-4), **options}
    make = transformers.Trainer if alone else Trainer
    try:
        trainer = make(model=model, args=args, train_dataset=documents(), data_collator=padded, **more)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        trainer.train()
        state = model.state_dict(keep_vars=True)
        whole: dict[str, Any] = state if alone else trainer._made[1].copied_weights(state, keep=True)
        return {name: whole[name].detach() for name in names}
    finally:
        leave()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_peft_alone(ranks: Any, tmp_path: Path, kind: str) -> None:
    wanted = trained(kind, str(tmp_path), True, {})
    assert len(wanted) >= 2
    for options in ({}, {"zero": 3}):
        for found in ranks(2, trained, kind, str(tmp_path), False, options):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=f"{name} {options}")

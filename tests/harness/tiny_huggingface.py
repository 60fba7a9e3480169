"""A tiny Llama of transformers, its data and arguments, for tests of trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm

__all__ = [
    "arguments",
    "documents",
    "in_float64",
    "leave",
    "padded",
    "padded_rows",
    "run",
    "tiny",
    "tiny_experts",
    "weights",
]

LENGTHS = [3, 17, 1, 9, 30, 2, 5, 8, 40, 4, 7, 6]  # documents; 12 = 3 steps of 2 x 2, 2 ranks of 2 x 3, ...


def tiny(kind: str = "CausalLM", **changed: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        **changed,
    )
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config, attn_implementation="eager")


def in_float64(model: Any) -> Any:
    """The model, all of whose layers compute in float64: its own norms and eager attention go through float32."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    model.set_attn_implementation("sdpa")
    return model.double()


def tiny_experts() -> Any:
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (n,), generator=generator).tolist()} for n in LENGTHS]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows with padding, as tokenizers give them; every third label of a row is left out."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    return padded_rows(tokens, [torch.where(torch.arange(len(row)) % 3 == 2, -100, row) for row in tokens])


def padded_rows(tokens: list[torch.Tensor], labels: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of any lengths, behind which there is padding."""
    pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
    mask = [torch.ones_like(row) for row in tokens]
    return {"input_ids": pad(tokens, 0), "attention_mask": pad(mask, 0), "labels": pad(labels, -100)}


def arguments(out: Path, batch: int, accumulate: int, **changed: Any) -> Any:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(out),
            "use_cpu": True,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": accumulate,
            "max_steps": 4,
            "learning_rate": 0.1,
            "optim": "sgd",
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "train_sampling_strategy": "sequential",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        | changed
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def leave() -> None:
    from accelerate.state import AcceleratorState

    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def run(kind: Any, out: Path, batch: int, accumulate: int, collator: Any = None, **changed: Any) -> Any:
    """(weights after 4 steps, what was logged, the loss of an evaluation)."""
    dataset = documents()
    trainer = kind(
        model=tiny(),
        args=arguments(out, batch, accumulate, **changed),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=collator,
    )
    trainer.train()
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    return weights(trainer.model), losses, trainer.evaluate()["eval_loss"]

"""transformers.Trainer with plans: its weights are those of transformers' own Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LENGTHS = [3, 17, 1, 9, 30, 2, 5, 8, 40, 4, 7, 6]  # documents; 12 = 3 steps of 2 x 2, 2 ranks of 2 x 3, ...


def tiny() -> Any:
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
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (n,), generator=generator).tolist()} for n in LENGTHS]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows with padding, as tokenizers give them; every third label of a row is left out."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {name: torch.zeros(len(rows), longest, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        tokens = torch.tensor(row["input_ids"])
        batch["input_ids"][i, : len(tokens)] = tokens
        batch["attention_mask"][i, : len(tokens)] = 1
        batch["labels"][i, : len(tokens)] = torch.where(torch.arange(len(tokens)) % 3 == 2, -100, tokens)
    return batch


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


def planned(out: str, batch: int, accumulate: int, with_padding: bool) -> Any:
    from hdpcomm.train.huggingface import Trainer

    try:
        collator = padded if with_padding else None
        return run(Trainer, Path(out), batch, accumulate, collator)
    finally:
        leave()


def reference(out: Path, batch: int, accumulate: int, with_padding: bool) -> Any:
    """transformers' own Trainer, in this process, on the batches of all ranks."""
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=False)
    try:
        return run(transformers.Trainer, out, batch, accumulate, padded if with_padding else flatten)
    finally:
        leave()


@pytest.mark.parametrize(
    ("size", "accumulate", "with_padding"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 1, True)]
)
def test_weights_and_losses_are_those_of_transformers(
    ranks: Any, tmp_path: Path, size: int, accumulate: int, with_padding: bool
) -> None:
    batch = 12 // size // accumulate // (1 if size == 3 else 2)
    all_ranks = ranks(size, planned, str(tmp_path / "a"), batch, accumulate, with_padding)
    # Ranks take turns batch by batch, so that one process with all their rows sees the same batches.
    expected, logged, evaluated = reference(tmp_path / "b", batch * size, accumulate, with_padding)
    for found, losses, loss in all_ranks:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
        assert [entry["loss"] for entry in losses] == pytest.approx([entry["loss"] for entry in logged], abs=2e-4)
        assert [e["grad_norm"] for e in losses] == pytest.approx([e["grad_norm"] for e in logged], rel=1e-4)
        assert all(entry["hdp_tokens"] > 0 and entry["hdp_micro_batches"] >= 1 for entry in losses)
        if size == 1:
            assert loss == pytest.approx(evaluated, abs=1e-5)

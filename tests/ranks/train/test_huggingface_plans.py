"""``transformers.Trainer`` with sequences that do not fit the ranks, and with a queue: the weights of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, weights  # noqa: E402

COST = CostModel(1e-9, 1e-6, 1e-4)
SLOW = CostModel(1e-9, 1.0)
"""Passes behind which copies hide, however slow they are while others use this machine."""


def model() -> Any:
    """Four layers, of which two may be offloaded, so wide that tensors of a few tokens are worth a copy."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def trains(kind: Any, folder: str, batch: int, options: dict[str, Any], **changed: Any) -> Any:
    """(weights after three steps of four documents, the first of 40 tokens, logs)."""
    torch.set_num_threads(1)
    args = arguments(Path(folder), batch, 1, max_steps=3, **changed)
    rows = sorted(documents(), key=lambda row: -len(row["input_ids"]))
    collator = transformers.DataCollatorWithFlattening()
    trainer = kind(model=model(), args=args, train_dataset=rows, data_collator=collator, **options)
    trainer.train()
    trainer.save_model(folder)
    return weights(trainer.model), [row for row in trainer.state.log_history if "loss" in row]


def planned(folder: str, options: dict[str, Any], changed: dict[str, Any]) -> Any:
    from hdpcomm.integrations.huggingface import Trainer

    try:
        return trains(Trainer, folder, 2, options, **changed)
    finally:
        leave()


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"capacity": 12, "slices": 8}, {}),
        ({"capacity": 15, "slices": 8, "zero": 3}, {"gradient_checkpointing": True}),
        ({"capacity": 18, "offload": 1 << 22, "zero": 3, "cost_model": SLOW}, {}),
        ({"capacity": 64, "queue": True, "zero": 1}, {}),
    ],
    ids=["slices", "slices, zero 3, recomputed", "offload, zero 3", "queue, zero 1"],
)
def test_same_weights_as_transformers(ranks: Any, tmp_path: Path, options: Any, changed: Any) -> None:
    expected, logs = trains(transformers.Trainer, str(tmp_path / "plain"), 4, {}, **changed)
    leave()
    out = str(tmp_path / "planned")
    for _, found in ranks(2, planned, out, {"cost_model": COST, **options}, changed):
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in logs], rel=1e-5)
        assert all(("hdp_offloaded_bytes" in row) == ("offload" in options) for row in found[:1])
    saved = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, value in saved.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": True, "zero": 2}, "zero=2 adds gradients .* queue=True"),
        ({"queue": 1}, "queue"),
        ({"slices": 0}, "slices"),
        ({"offload": -1}, "offload"),
    ],
)
def test_what_would_not_work_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    from hdpcomm.integrations.huggingface import Trainer

    with pytest.raises(InvalidUsage, match=message):
        trains(Trainer, str(tmp_path), 1, options)
    leave()

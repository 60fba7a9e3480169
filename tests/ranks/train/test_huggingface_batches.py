"""Batches of many kinds in the planning Trainer: the updates of weights are those of transformers' own Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hdpcomm.errors import InvalidUsage  # noqa: E402
from hdpcomm.plan import CostModel  # noqa: E402
from tests.harness.tiny_huggingface import arguments, documents, leave, padded, tiny, weights  # noqa: E402

COSTS = CostModel(attention=1e-9, linear=1e-6)
Rows = list[dict[str, list[int]]]
Batch = dict[str, torch.Tensor]


def tiny_gpt2() -> Any:
    """Its positions are learned."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def padded_left(rows: Rows) -> Batch:
    """The first token of a row has no label: transformers has the padding before it predict it."""
    batch = padded(rows)
    for i, row in enumerate(rows):
        shift = batch["labels"].shape[1] - len(row["input_ids"])
        batch["labels"][i, 0] = -100
        for name in batch:
            batch[name][i] = batch[name][i].roll(shift)
    return batch


def with_positions(rows: Rows) -> Batch:
    batch = padded(rows)
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)}


def halved(rows: Rows) -> Batch:
    """Each row has two sequences, with a label over the end of the first, which transformers trains."""
    batch = padded(rows) | {"labels": padded(rows)["input_ids"]}
    seen = batch.pop("attention_mask").bool()
    batch["labels"][~seen] = -100
    batch["position_ids"] = torch.zeros_like(batch["input_ids"])
    for i, row in enumerate(rows):
        half = len(row["input_ids"]) // 2
        batch["position_ids"][i, seen[i]] = torch.cat([torch.arange(half), torch.arange(len(row["input_ids"]) - half)])
    return batch


def flattened(rows: Rows) -> Batch:
    made: Batch = transformers.DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)(rows)
    return made


def with_other_labels(rows: Rows) -> Batch:
    batch = padded(rows)
    shifted = (batch["input_ids"] * 5 + 1) % 64
    return batch | {"shift_labels": shifted.masked_fill(batch["attention_mask"] == 0, -100)}


CASES: list[tuple[Callable[[], Any], Callable[[Rows], Batch]]] = [
    (tiny, padded_left), (tiny, with_positions), (tiny_gpt2, with_positions), (tiny, halved),
    (tiny_gpt2, halved), (tiny_gpt2, flattened), (tiny, with_other_labels),
]  # fmt: skip


def train(kind: Any, out: Path, batch: int, cases: Any) -> list[dict[str, torch.Tensor]]:
    found = []
    try:
        for make, collate in cases:
            model = make().double()
            model.set_attn_implementation("sdpa")  # eager gives NaN for padding on the left in float64
            args = arguments(out, batch, 1, max_steps=3, remove_unused_columns=False)
            kind(model=model, args=args, train_dataset=documents(), data_collator=collate).train()
            found.append(weights(model))
        return found
    finally:
        leave()


def planned(out: str, batch: int, cases: Any) -> list[dict[str, torch.Tensor]]:
    from hdpcomm.integrations.huggingface import Trainer

    return train(functools.partial(Trainer, cost_model=COSTS), Path(out), batch, cases)


def test_updates_are_those_of_transformers(ranks: Any, tmp_path: Path) -> None:
    all_found = ranks(2, planned, str(tmp_path / "a"), 2, CASES)
    all_wanted = train(transformers.Trainer, tmp_path / "b", 4, CASES)
    for place, (make, collate) in enumerate(CASES):
        first, wanted = weights(make().double()), all_wanted[place]
        for found in (each[place] for each in all_found):
            for name, value in wanted.items():
                update, mine = value - first[name], found[name] - first[name]
                # transformers computes losses in float32
                assert float((mine - update).norm() / update.norm()) < 1e-5, (collate.__name__, name)


def with_types(rows: Rows) -> Batch:
    batch = padded(rows)
    return batch | {"token_type_ids": batch["attention_mask"]}


def test_nothing_is_dropped_in_silence(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="'token_type_ids': more than one number"):
        planned(str(tmp_path), 2, [(tiny_gpt2, with_types)])

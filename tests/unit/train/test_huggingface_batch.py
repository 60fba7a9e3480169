"""Batches of transformers' collators as sequences without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.train.huggingface_batch import sequences_of

ROW = torch.tensor([[5, 6, 7, 8, 9]])


def test_padding_is_dropped_on_either_side() -> None:
    tokens = torch.tensor([[1, 2, 3, 0], [0, 0, 4, 5], [0, 0, 0, 0]])
    found = sequences_of({"input_ids": tokens, "labels": tokens, "attention_mask": (tokens > 0).long()})
    assert found.lengths == [3, 2]
    assert found.tokens.tolist() == [1, 2, 3, 4, 5]
    assert found.labels.tolist() == [2, 3, -100, 5, -100]
    assert int(found.num_labels) == 3
    assert [part.tolist() for part in found.fetch(1)] == [[4, 5], [5, -100]]


@pytest.mark.parametrize(
    "places",
    [{"cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32)}, {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}],
)
def test_a_flattened_row_is_cut_where_its_sequences_begin(places: dict[str, Any]) -> None:
    found = sequences_of({"input_ids": ROW, "labels": torch.tensor([[-100, 6, -100, 8, -100]]), **places})
    assert found.lengths == [2, 3]
    assert found.labels.tolist() == [6, -100, 8, -100, -100]


def test_rows_without_a_mask_are_whole_sequences() -> None:
    found = sequences_of({"input_ids": ROW.view(5, 1), "labels": ROW.view(5, 1)})
    assert found.lengths == [1] * 5
    assert int(found.num_labels) == 0


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": ROW}, "a batch has input_ids"),
        ({"pixel_values": ROW, "labels": ROW}, "a batch has pixel_values, labels"),
        ({"input_ids": ROW[0], "labels": ROW[0]}, "a batch has"),
        ({"input_ids": ROW, "labels": ROW[:, :3]}, r"\(1, 3\)"),
        ({"input_ids": ROW, "labels": ROW, "attention_mask": torch.ones(1, 1, 5, 5)}, r"\(1, 1, 5, 5\)"),
        ({"input_ids": ROW, "labels": ROW, "attention_mask": torch.zeros(1, 5)}, "no token"),
        ({"input_ids": ROW, "labels": ROW, "cu_seq_lens_q": torch.tensor([0, 4])}, "ends with 4"),
        ({"input_ids": ROW, "labels": ROW, "cu_seq_lens_q": torch.tensor([1, 5])}, "cu_seq_lens_q must be"),
        ({"input_ids": ROW.repeat(2, 1), "labels": ROW.repeat(2, 1), "cu_seq_lens_q": [0, 5]}, "2 rows"),
    ],
)
def test_other_batches_are_refused(batch: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidUsage, match=told):
        sequences_of(batch)

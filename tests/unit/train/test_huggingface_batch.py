"""Batches of transformers' collators as sequences without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.huggingface_batch import sequences_of

ROW = torch.tensor([[5, 6, 7, 8, 9]])


def test_padding_is_dropped_on_either_side() -> None:
    tokens = torch.tensor([[1, 2, 3, 0], [0, 0, 4, 5], [0, 0, 0, 0]])
    labels = tokens.masked_fill(tokens == 0, -100)
    places = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 1], [0, 0, 0, 0]])
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": (tokens > 0).long()}
    for given in (batch, batch | {"position_ids": places}):
        found = sequences_of(given)
        assert found.lengths == [3, 2]
        assert found.tokens.tolist() == [1, 2, 3, 4, 5]
        assert found.labels.tolist() == [2, 3, -100, 5, -100]
        assert int(found.num_labels) == 3
        assert [part.tolist() for part in found.fetch(1)] == [[4, 5], [5, -100]]


FLAT = {
    "cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 2, 5], dtype=torch.int32),
    "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
    "seq_idx": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
}


@pytest.mark.parametrize("names", [["cu_seq_lens_q"], ["position_ids"], ["seq_idx"], list(FLAT)], ids=len)
def test_a_flattened_row_is_cut_where_its_sequences_begin(names: list[str]) -> None:
    places = {name: FLAT[name] for name in names} | {"max_length_q": 3, "use_cache": False, "token_type_ids": None}
    found = sequences_of({"input_ids": ROW, "labels": torch.tensor([[-100, 6, -100, 8, -100]]), **places})
    assert found.lengths == [2, 3]
    assert found.labels.tolist() == [6, -100, 8, -100, -100]


def test_each_of_several_rows_is_cut() -> None:
    places = torch.cat([FLAT["position_ids"], torch.arange(5)[None]])
    found = sequences_of({"input_ids": ROW.repeat(2, 1), "labels": ROW.repeat(2, 1), "position_ids": places})
    assert found.lengths == [2, 3, 5]
    # shifted along the row, as transformers does: the first token of the second sequence has a label, too
    assert found.labels.tolist() == [6, 7, 8, 9, -100, 6, 7, 8, 9, -100]


def test_shifted_labels_are_taken_as_they_are() -> None:
    found = sequences_of({"input_ids": ROW, "labels": ROW, "shift_labels": ROW + 1})
    assert found.labels.tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": ROW}, "a batch has input_ids"),
        ({"x": None, "labels": ROW}, "a batch has x, labels"),
        ({"input_ids": ROW[0], "labels": ROW[0]}, "a batch has"),
        ({"input_ids": ROW, "labels": ROW[:, :3]}, r"labels has shape \(1, 3\)"),
        ({"input_ids": ROW, "labels": ROW, "attention_mask": torch.ones(1, 1, 5, 5)}, r"\(1, 1, 5, 5\)"),
        ({"input_ids": ROW, "labels": ROW * 0 - 100, "attention_mask": torch.zeros(1, 5)}, "no token"),
        ({"input_ids": ROW, "labels": ROW, "cu_seq_lens_q": torch.tensor([0, 4])}, "ends with 4"),
        ({"input_ids": ROW, "labels": ROW, "cu_seq_lens_q": torch.tensor([1, 5])}, "cu_seq_lens_q must be"),
        ({"input_ids": ROW.repeat(2, 1), "labels": ROW.repeat(2, 1), "cu_seq_lens_q": [0, 5]}, "2 rows"),
    ],
)
def test_other_batches_are_refused(batch: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidUsage, match=told):
        sequences_of(batch)


def mask(*values: int) -> dict[str, Any]:
    return {"attention_mask": torch.tensor([values])}


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (mask(1, 0, 1, 1, 1), "hides tokens between others"),
        (mask(1, 1, 2, 2, 2), "other values than 0 and 1"),
        (mask(1, 1, 1, 0, 0), "labels of padding to -100"),
        (mask(1, 1, 1, 1, 1) | {"position_ids": FLAT["position_ids"]}, "leave the mask out"),
        (mask(1, 1, 1, 1, 1) | {"position_ids": torch.arange(5)[None] + 2}, "from 0 on"),
        (FLAT | {"position_ids": torch.arange(5)[None]}, "cut the rows into different sequences"),
        (FLAT | {"cu_seq_lens_k": torch.tensor([0, 5])}, "cu_seq_lens_k differs"),
        ({"position_ids": torch.arange(5).expand(3, 1, 5)}, r"position_ids has shape \(3, 1, 5\)"),
        ({"token_type_ids": ROW}, "'token_type_ids': more than one number"),
        ({"pixel_values": ROW}, "'pixel_values': images"),
        ({"length": 5}, "'length': no key that planned training knows"),
    ],
)
def test_what_would_be_dropped_is_refused(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidUsage, match=told):
        sequences_of({"input_ids": ROW, "labels": ROW} | entries)


def test_a_sequence_is_classified_by_its_last_token_that_is_no_padding() -> None:
    tokens = torch.tensor([[1, 2, 0, 0], [0, 0, 4, 5], [7, 0, 8, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([2, 0, 1])}
    found = sequences_of(batch, "sequence", padding=0)
    assert found.lengths == [3, 2, 4]
    assert found.labels.tolist() == [-100, 2, -100, -100, 0, -100, -100, 1, -100]
    found = sequences_of(batch, "sequence")
    assert found.labels.tolist() == [-100, -100, 2, -100, 0, -100, -100, -100, 1]
    found = sequences_of(batch | {"labels": torch.tensor([[0.5], [1.0], [2.0]])}, "sequence", targets=1)
    assert found.labels.tolist() == [-100, -100, 0, -100, 0, -100, -100, -100, 0]
    assert found.fetch(2)["0"] == 2.0


def test_labels_of_tokens_are_not_shifted() -> None:
    tokens, labels = torch.tensor([[1, 2, 0], [4, 5, 6]]), torch.tensor([[1, 0, -100], [2, -100, 1]])
    batch = {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}
    assert sequences_of(batch, "token").labels.tolist() == [1, 0, 2, -100, 1]
    with pytest.raises(InvalidUsage, match="tokens that attention_mask hides have labels"):
        sequences_of(batch | {"labels": labels.abs()}, "token")


@pytest.mark.parametrize(
    ("labels", "places", "told"),
    [
        (torch.tensor([1]), FLAT["position_ids"], "a batch 1 rows with 2 sequences"),
        (ROW, None, "one in each row, with 1 numbers"),
        (torch.tensor([0.5]), None, "expected numbers of classes"),
    ],
)
def test_other_labels_of_sequences_are_refused(labels: torch.Tensor, places: Any, told: str) -> None:
    with pytest.raises(InvalidUsage, match=told):
        sequences_of({"input_ids": ROW, "labels": labels, "position_ids": places}, "sequence")

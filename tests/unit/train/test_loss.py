"""The token-level loss and its labels."""

from __future__ import annotations

import pytest
import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.train import IGNORE, next_token_labels, summed_loss


def test_labels_are_the_next_tokens():
    assert next_token_labels(torch.tensor([5, 6, 7])).tolist() == [6, 7, IGNORE]
    assert next_token_labels(torch.tensor([5])).tolist() == [IGNORE]


def test_loss_is_the_sum_of_the_labelled_tokens():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 11, dtype=torch.float64), torch.tensor([1, IGNORE, 3, 10, 0, IGNORE])
    by_hand = sum(
        float(row.exp().sum().log() - row[label]) for row, label in zip(logits, labels, strict=True) if label != IGNORE
    )
    assert summed_loss(logits, labels).item() == pytest.approx(by_hand, rel=1e-14)


def test_no_tokens_give_a_zero_with_a_graph():
    logits = torch.zeros(0, 4, requires_grad=True)
    loss = summed_loss(logits, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None


def test_low_precision_is_summed_in_fp32():
    logits = torch.zeros(70000, 2, dtype=torch.bfloat16)
    loss = summed_loss(logits, torch.zeros(70000, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(70000 * 0.693147, rel=1e-5)


def test_shapes_are_checked():
    with pytest.raises(InvalidUsage, match=r"logits \(3, 4\) and labels \(2,\)"):
        summed_loss(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))

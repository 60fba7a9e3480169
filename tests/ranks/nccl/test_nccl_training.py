"""Attention and training by the nccl transport on a fake NCCL: the results of the shm transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.attention_oracle import GRADS, Case
from tests.harness.fakes import run_threads
from tests.ranks.device.test_device_training import MASKS, attention, training


@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_forward_and_backward(variant: str, mask: str) -> None:
    options: dict[str, Any] = {"variant": variant}
    case = Case(4, [150, 7, 1, 61], heads=4, kv_heads=4, dtype=torch.float32, **MASKS[mask], options=options)
    by_nccl = run_threads(attention, 4, case, transport="nccl")
    for (got, messages), (want, _) in zip(by_nccl, run_threads(attention, 4, case), strict=True):
        assert messages > 0
        for name in GRADS:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
            assert variant != "ring" or torch.equal(got[name], want[name]), name  # messages only: the same bits


@pytest.mark.parametrize("hosts", [(), (0, 0, 1)])
def test_trainer(hosts: tuple[int, ...]) -> None:
    by_nccl = run_threads(training, 3, transport="nccl", hosts=hosts)
    for (losses, weights), (want_losses, want_weights) in zip(by_nccl, run_threads(training, 3), strict=True):
        assert losses == pytest.approx(want_losses, rel=1e-5)
        torch.testing.assert_close(weights, want_weights, rtol=1e-4, atol=1e-5)

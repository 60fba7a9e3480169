"""Copies between host and device. Without a device pinned memory is the host's, and the rest is as with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdpcomm.kernels.transfers import HostNumbers, to_device


def test_numbers_of_any_shape_and_type() -> None:
    assert HostNumbers(torch.tensor([[1, 2], [3, 4]])).get() == [1, 2, 3, 4]
    numbers = HostNumbers(torch.tensor([0.5, torch.inf], dtype=torch.float64))
    assert numbers.get() == [0.5, torch.inf]
    assert numbers.get() is numbers.get()
    assert HostNumbers(torch.empty(2, device="meta"), [7, 8]).get() == [7, 8]


def test_tensors_go_to_a_gpu_by_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pin_memory(self: Tensor) -> Tensor:
        calls.append("pinned")
        return self.clone()

    def to(self: Tensor, device: torch.device, **options: bool) -> Tensor:
        calls.append((device.type, options))
        return self.clone()

    x = torch.arange(5)
    assert to_device(x, torch.device("cpu")) is x
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    assert torch.equal(to_device(x, torch.device("cuda")), x)
    assert calls == ["pinned", ("cuda", {"non_blocking": True})]

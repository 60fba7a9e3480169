"""On a GPU: the host waits for nothing but the counts of a layer with experts."""

from __future__ import annotations

import pytest
import torch

from hdpcomm.kernels.transfers import HostNumbers
from hdpcomm.models import moe
from hdpcomm.models.moe import MixtureOfExperts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_numbers_come_to_the_host():
    numbers = torch.arange(1000, device="cuda") * 3
    found = HostNumbers(numbers)
    numbers.zero_()
    assert list(found.get()) == list(range(0, 3000, 3))
    assert list(HostNumbers(numbers[:0]).get()) == []


def test_counts_are_read_once_a_layer_in_forward_passes_only():
    layer = MixtureOfExperts(32, 24, 4, 2, dtype=torch.float32, device=torch.device("cuda"))
    with torch.no_grad():
        for each in (layer.gate_up, layer.out):
            each.normal_(std=0.1)
    x = torch.randn(50, 32, device="cuda", requires_grad=True)
    layer(x)[0].sum().backward()  # makes what later passes use again
    torch.cuda.set_sync_debug_mode("error")  # of all but events
    try:
        layer(x)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(x.grad.isfinite().all())


def test_grouped_products_wait_for_nothing_and_give_the_gradients_of_the_loop(monkeypatch):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch has no grouped kernel for this GPU")
    layer = MixtureOfExperts(64, 48, 4, 2, dtype=torch.bfloat16, device=torch.device("cuda"))
    with torch.no_grad():
        for each in layer.parameters():
            each.normal_(std=0.1)
    x = torch.randn(50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def gradients():
        for each in (x, *layer.parameters()):
            each.grad = None
        layer(x)[0].square().sum().backward()
        return [each.grad.float() for each in (x, *layer.parameters())]

    gradients()  # makes what later passes use again
    with monkeypatch.context() as patch:
        patch.setattr(HostNumbers, "get", None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            grouped = gradients()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(moe, "_has_grouped_product", lambda *_: False)
    for one, other in zip(grouped, gradients(), strict=True):
        assert float((one - other).norm() / other.norm()) <= 2e-2

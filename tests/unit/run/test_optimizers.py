"""Optimizers of runs: which of them step by one kernel for many parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdpcomm.run import RunConfig
from hdpcomm.run.optimizers import elementwise_optimizer


class OnGpu(nn.Parameter):
    """Says that it is on a GPU; torch's fused kernels for the CPU step it."""

    is_cuda = True  # type: ignore[assignment]


class Own(torch.optim.SGD):
    """An optimizer of a program."""


def optimizer_of(kind: type[nn.Parameter], **options: object) -> torch.optim.Optimizer:
    parameters = [kind(torch.ones(3, 2)), kind(torch.ones(2))]
    return elementwise_optimizer(RunConfig(**options), parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "torch.optim:AdamW"])
def test_fused_on_a_gpu(name: str) -> None:
    for kind, fused in ((OnGpu, True), (nn.Parameter, None)):
        optimizer = optimizer_of(kind, optimizer=name)
        assert [group["fused"] for group in optimizer.param_groups] == [fused, fused]


def test_the_step_is_the_same() -> None:
    values = []
    for kind in (OnGpu, nn.Parameter):
        optimizer = optimizer_of(kind, lr=0.1)
        for step in (1.0, -2.0, 3.0):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.full_like(parameter, step).as_subclass(torch.Tensor)
            optimizer.step()
        values.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other)


@pytest.mark.parametrize("option", ["foreach=True", "fused=False", "differentiable=False"])
def test_what_the_user_says_stays(option: str) -> None:
    optimizer = optimizer_of(OnGpu, optimizer_options=(option,))
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("name", ["RMSprop", f"{__name__}:Own"])
def test_an_optimizer_without_one_or_of_the_program_is_left(name: str) -> None:
    assert not optimizer_of(OnGpu, optimizer=name).param_groups[0].get("fused")

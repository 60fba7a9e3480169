"""Checks what a :class:`hdpcomm.train.Trainer` is made of before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hdpcomm.arguments import check_has, check_number, check_type, check_whole

__all__ = ["check_trainer"]


def check_trainer(
    model: Any,
    optimizer: Any,
    planner: Any,
    comm: Any,
    *,
    max_grad_norm: Any,
    loss: Any,
    offload: Any,
    zero: Any,
    dtype: Any,
    bucket_bytes: Any,
) -> None:
    """Raises InvalidUsage for an argument of another kind, or a number out of range."""
    check_type("Trainer", "model", model, nn.Module)
    check_has("Trainer", "optimizer", optimizer, "param_groups", "an optimizer of torch")
    check_has("Trainer", "planner", planner, "cluster", "a hdpcomm.plan.Planner")
    check_has("Trainer", "comm", comm, "all_reduce", "the communicator of init()")
    if max_grad_norm is not None:
        check_number("Trainer", "max_grad_norm", max_grad_norm, above=0)
    if loss is not None:
        check_has("Trainer", "loss", loss, "__call__", "a function of (logits, labels)")
    if offload is not None:
        check_has("Trainer", "offload", offload, "micro_batch", "an ActivationOffload")
    if dtype is not None:
        check_type("Trainer", "dtype", dtype, torch.dtype)
    check_whole("Trainer", "zero", zero, least=0, most=1)
    check_whole("Trainer", "bucket_bytes", bucket_bytes, least=1)

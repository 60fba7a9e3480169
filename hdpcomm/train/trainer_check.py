"""Checks what a :class:`hdpcomm.train.Trainer` is made of before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hdpcomm.arguments import check_has, check_number, check_type, check_whole
from hdpcomm.errors import InvalidUsage

__all__ = ["check_elementwise", "check_trained_names", "check_trainer", "trained_names"]

_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def check_elementwise(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises InvalidUsage unless the optimizer is known to update each element of a parameter by itself: ranks that
    hold parts of a tensor would otherwise make other updates than one that holds the whole, without a word.

    Args:
        where: how parameters came to be cut, for the message.
    """
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in _ELEMENTWISE:
        raise InvalidUsage(
            f"{kind.__name__} may look at more than one element of a parameter, and a part of it is all that a rank "
            f"has; {where} use one of torch.optim's {', '.join(_ELEMENTWISE)}"
        )


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
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidUsage("LBFGS computes the loss several times a step, which a planned step does once; give another")
    own = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if strange and any(p.requires_grad for p in model.parameters()):  # else there is nothing to train, which is told
        raise InvalidUsage(
            f"{strange} parameters of the optimizer are none of the model's; make the optimizer from the parameters of "
            "the model that is given to the trainer, after it was cut or adapted"
        )
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


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that have a gradient."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def check_trained_names(model: nn.Module, before: frozenset[str]) -> None:
    """Raises InvalidUsage where a parameter was frozen or unfrozen since ``before``: gradients are reduced, and master
    weights kept, of those that were trained when the trainer was made."""
    now = trained_names(model)
    if now == before:
        return
    told = [
        f"{len(names)} {what} (as {min(names)})"
        for what, names in (("unfrozen", now - before), ("frozen", before - now))
        if names
    ]
    raise InvalidUsage(
        f"parameters were {' and '.join(told)} after the trainer was made, which goes on with those of then; make a "
        "new optimizer and a new trainer after each change of requires_grad"
    )

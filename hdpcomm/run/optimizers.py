"""The optimizer of a run, by its name."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.options import TrainingOptions
from hdpcomm.train import average_weights
from hdpcomm.train.zero.matrix_owners import MatrixOwners

__all__ = ["check_optimizer", "elementwise_optimizer", "is_for_matrices", "matrix_optimizer", "new_optimizer"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.95)},
    "Muon": {"adjust_lr_fn": "match_rms_adamw"},  # one learning rate for both
}
"""Defaults of language models, where torch has others."""
_OURS = ("params", "lr", "weight_decay")


def new_optimizer(config: TrainingOptions, model: nn.Module, mesh: Mesh) -> torch.optim.Optimizer:
    """The optimizer of a model, or of its part on this rank, which does not pull the norms' weights towards zero.
    One that looks at whole matrices (Muon) gets those, AdamW the rest. Local.

    Raises: InvalidUsage: it does not take these parameters.
    """
    if not is_for_matrices(config):
        return elementwise_optimizer(config, model.parameters())
    others = partial(elementwise_optimizer, config)
    return MatrixOwners(model, mesh, matrices=partial(matrix_optimizer, config), others=others)


def matrix_optimizer(config: TrainingOptions, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Optimizer of whole matrices, if the run has one. Local; raises as :func:`new_optimizer`."""
    made, options = _resolved(config)
    return _made(config, made, [{"params": matrices}], options)


def elementwise_optimizer(config: TrainingOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Optimizer of all parameters which are no matrices for Muon. Local; raises as :func:`new_optimizer`."""
    made, options = _resolved(config)
    if _is_for_matrices(made):
        made, options = torch.optim.AdamW, dict(_DEFAULTS["AdamW"])
    trained = [p for p in parameters if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() <= 1]}]
    if "weight_decay" in inspect.signature(made).parameters:
        for group, decay in zip(groups, (config.weight_decay, 0.0), strict=True):
            group["weight_decay"] = decay  # type: ignore[assignment]
    optimizer = _made(config, made, groups, options)
    if config.ema is not None:
        average_weights(optimizer, config.ema)
    return optimizer


def is_for_matrices(config: TrainingOptions) -> bool:
    """Whether the run's optimizer looks at whole matrices, of which each rank has some. Local."""
    return _is_for_matrices(_resolved(config)[0])


def _is_for_matrices(made: Any) -> bool:
    return issubclass(made, getattr(torch.optim, "Muon", ()))


def _made(
    config: TrainingOptions, made: Any, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    if _is_for_matrices(made):
        options = {"weight_decay": config.weight_decay, **options}
    if _has_fused_step(made, groups) and not {"fused", "foreach", "differentiable"} & set(options):
        options = {"fused": True, **options}
    try:
        lr = 0.01 if config.lr is None else config.lr  # a run sets it before each step
        optimizer: torch.optim.Optimizer = made(groups, lr=lr, **options)
    except (TypeError, ValueError) as error:
        raise InvalidUsage(
            f"--optimizer {config.optimizer} cannot be made over this model with {options}: {error}"
        ) from None
    return optimizer


def _has_fused_step(made: Any, groups: list[dict[str, Any]]) -> bool:
    """Whether torch steps such an optimizer of these parameters by one kernel for many of them."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    known = "fused" in inspect.signature(made).parameters and made.__module__.startswith("torch.")
    return known and bool(parameters) and all(p.is_cuda and p.is_floating_point() for p in parameters)


def check_optimizer(config: TrainingOptions) -> None:
    """Raises InvalidUsage unless the optimizer is one, and takes its options. Local."""
    made, options = _resolved(config)
    names = inspect.signature(made).parameters
    if _is_for_matrices(made) and (config.zero or config.dtype != "fp32" or config.optimizer_offload):
        given = f"--zero {config.zero}" if config.zero else f"--dtype {config.dtype}"
        given = "--optimizer-offload" if config.optimizer_offload else given
        raise InvalidUsage(
            f"--optimizer {config.optimizer} shares the matrices and their state among all ranks by itself, in fp32; "
            f"leave out {given}"
        )
    if config.ema is not None and _is_for_matrices(made):
        raise InvalidUsage(f"--ema does not go together with --optimizer {config.optimizer}; leave out either")
    if config.ema is not None and not 0 < config.ema < 1:
        raise InvalidUsage(f"--ema is {config.ema}; give a decay between 0 and 1, like 0.999")
    if "lr" not in names:
        raise InvalidUsage(f"--optimizer {config.optimizer} has no lr, which every step of a run sets; give another")
    if "weight_decay" not in names and config.weight_decay != TrainingOptions().weight_decay:
        raise InvalidUsage(f"--optimizer {config.optimizer} has no weight decay; leave out --weight-decay")
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
    for name in options:
        if name in _OURS:
            raise InvalidUsage(f"--optimizer-options has {name}; give --{name.replace('_', '-')}")
        if name not in names and not open_ended:
            known = ", ".join(each for each in names if each not in _OURS)
            raise InvalidUsage(f"--optimizer-options has {name}, which {made.__name__} does not take; it takes {known}")


def _resolved(config: TrainingOptions) -> tuple[Any, dict[str, Any]]:
    """The class, and its options."""
    name = config.optimizer
    module, _, kind = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module) if module else torch.optim, kind)
    except (ImportError, AttributeError) as error:
        raise InvalidUsage(
            f"--optimizer {name} cannot be found ({error}); give the name of one of torch.optim, as AdamW or SGD, or "
            "module:Class"
        ) from None
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        raise InvalidUsage(f"--optimizer {name} is no class of optimizers (torch.optim.Optimizer); give one")
    if issubclass(found, torch.optim.LBFGS):
        raise InvalidUsage(
            "--optimizer LBFGS computes the loss several times a step, which a planned step does once; give another"
        )
    options = dict(_DEFAULTS.get(name, {}))
    for text in config.optimizer_options:
        option, equals, value = text.partition("=")
        if not equals or not option.isidentifier():
            raise InvalidUsage(f"--optimizer-options has {text!r}; NAME=VALUE was expected, as momentum=0.9")
        options[option] = _value(value)
    return found, options


def _value(text: str) -> Any:
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return ast.literal_eval(text)  # 0.9,0.95 is a tuple
    except (ValueError, SyntaxError):
        return text

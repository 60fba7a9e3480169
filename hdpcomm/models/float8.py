"""Linear layers whose products are in FP8 (:func:`use_float8`), by torchao: weights and optimizer stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.moe import MixtureOfExperts, expert_blocks
from hdpcomm.offload.layers import find_layers

__all__ = ["RECIPES", "use_float8"]

RECIPES = {"rowwise": (9, 0), "tensorwise": (8, 9)}
"""Compute capability that torch's products need, by the name of torchao's recipe."""
_WIDTHS = 16
"""Multiple of the widths of a matrix, for these products."""


def use_float8(model: nn.Module, recipe: str = "rowwise", *, exclude: Sequence[str] = ()) -> list[str]:
    """Lets the linear layers inside of a model's layers multiply in FP8; returns their names. Local.

    Embedding, head, routers, adapters of LoRA, experts that are one tensor, and matrices whose widths are no multiples
    of 16 compute as before. Parameters stay the same objects, with their types and names. Call it after
    :func:`hdpcomm.models.adapt`, before or after :func:`hdpcomm.models.compile_layers`. On CPUs products are emulated.

    Args:
        recipe: ``rowwise``: a scale for each token and each row of a matrix; ``tensorwise``: one for all tokens of a
            pack, so that results depend on the plan.
        exclude: parts of names of linear layers that stay as they are, as ``o_proj`` or ``layers.0.``

    Raises:
        InvalidUsage: another recipe, no torchao, an older device, layers that are cut for tensor ranks, a name that
            fits no layer, or no layer that is left.
    """
    if recipe not in RECIPES:
        raise InvalidUsage(f"fp8 is {recipe!r}; choose from {', '.join(RECIPES)}")
    if getattr(model, "tensor", None) is not None:
        raise InvalidUsage("the model is cut for tensor ranks, which FP8 does not know yet; leave out either")
    if isinstance(exclude, str):
        raise InvalidUsage(f"exclude is {exclude!r}; give a list of parts of names")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise InvalidUsage("FP8 needs torchao; install it with pip install torchao==0.18.0") from error
    device = next(p.device for p in model.parameters())
    if device.type == "cuda":
        check_capability(recipe, torch.cuda.get_device_capability(device))
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=device.type != "cuda")
    chosen = _linear_layers(model)
    for part in exclude:
        if not any(part in name for name in chosen):
            raise InvalidUsage(f"exclude has {part!r}, which is in the name of no linear layer, as {_some(chosen)}")
    wanted = {name for name in chosen if not any(part in name for part in exclude)}
    if not wanted:
        raise InvalidUsage(
            f"{type(model).__name__} has no linear layer for FP8 inside of its layers, with widths of multiples of "
            f"{_WIDTHS}, that is not excluded"
        )
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in wanted, config=config)
    for name in wanted:
        model.get_submodule(name).__class__ = _linear_class()
    return sorted(wanted)


def check_capability(recipe: str, found: tuple[int, int]) -> None:
    """Raises InvalidUsage for a device without the products of the recipe."""
    if found < RECIPES[recipe]:
        needed = ".".join(map(str, RECIPES[recipe]))
        raise InvalidUsage(
            f"fp8={recipe!r} needs a device of compute capability {needed} or more, and this one has "
            f"{'.'.join(map(str, found))}; train in bf16 on it"
        )


@cache
def _linear_class() -> Any:
    from torchao.float8.float8_linear import Float8Linear

    class Linear(Float8Linear):  # type: ignore[misc]
        """torchao's layer, also for no tokens, which have no scale."""

        def forward(self, input: Tensor) -> Tensor:
            if not input.numel():
                return nn.functional.linear(input, self.weight, self.bias)
            made: Tensor = super().forward(input)
            return made

    return Linear


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers that may be in FP8."""
    inside = {id(module) for layer in find_layers(model) for module in layer.modules()}
    blocks = expert_blocks(model)
    blocks |= {name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and "forward" not in vars(module)
        and name.rpartition(".")[0] not in blocks  # a router
        and ".lora_" not in name
        and not (module.in_features % _WIDTHS or module.out_features % _WIDTHS)
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) or "(there is none)"

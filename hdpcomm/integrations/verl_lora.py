"""LoRA of verl's actors: adapters of peft as verl's FSDP engine makes them, and weights for rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.lora_names import base_name, is_adapter

__all__ = ["adapter_weights", "merged_weights", "with_adapters"]


def with_adapters(module: nn.Module, config: Any) -> nn.Module:
    """A model, on any device, with adapters that alone are trained: those of ``lora_adapter_path``, or new ones. Local.

    Args:
        config: verl's of the model.

    Raises: InvalidUsage: no peft, or the model has no such layers.
    """
    try:
        import peft
    except ImportError as error:
        raise InvalidUsage("lora_rank needs peft: pip install 'hdpcomm[lora]'") from error
    from verl.utils.fs import copy_to_local
    from verl.utils.py_functional import convert_to_regular_types

    saved: dict[str, Tensor] = {}
    if config.lora_adapter_path:
        folder = copy_to_local(config.lora_adapter_path, use_shm=config.use_shm)
        lora = peft.PeftConfig.from_pretrained(folder)
        lora.inference_mode = False
        saved = peft.load_peft_weights(folder, device="cpu")
    else:
        names = ("target_modules", "exclude_modules")
        options = {name: convert_to_regular_types(getattr(config, name)) for name in names}
        lora = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM, r=config.lora_rank, lora_alpha=config.lora_alpha, bias="none", **options
        )
    try:
        made: nn.Module = peft.get_peft_model(module, lora)
    except ValueError as error:
        raise InvalidUsage(f"LoRA of target_modules={lora.target_modules}: {error}") from None
    if config.lora_adapter_path:
        _load(made, saved, config.lora_adapter_path)
    return made


def _load(model: nn.Module, saved: Mapping[str, Tensor], source: str) -> None:
    """Gives adapters their values, of peft's names; those of a model without memory get host memory."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            name = f"{path}.{leaf}"
            if parameter is None or not is_adapter(name):
                continue
            value = saved.get(name.replace(".default", "", 1))
            if value is None or value.shape != parameter.shape:
                raise InvalidUsage(
                    f"lora_adapter_path={source} has no adapters {name} of shape {list(parameter.shape)}; give a "
                    "folder of this model's"
                )
            place = "cpu" if parameter.is_meta else parameter.device
            module._parameters[leaf] = nn.Parameter(value.to(place), parameter.requires_grad)


def adapter_weights(module: nn.Module, adapters: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Whole adapters by peft's own names. Local.

    Args:
        adapters: by the names of the model with them.
    """
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(module, state_dict=dict(adapters))
    return found.items()


def merged_weights(
    module: nn.Module, base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Weights of the model without adapters, and what those add in them, in bf16, as verl sends them. Local.

    Args:
        base: whole weights by the names of the model with adapters, one at a time.
        adapters: whole, as of :func:`adapter_weights`.
    """
    layers: dict[str, Any] = dict(module.named_modules())
    for name, tensor in base:
        path, _, leaf = name.partition(".base_layer.")
        if leaf == "weight":
            tensor = tensor.float() + _product(layers[path], path, adapters, tensor.device)
        yield base_name(name), tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _product(layer: Any, path: str, adapters: Mapping[str, Tensor], place: torch.device) -> Tensor:
    """Both matrices of an adapter, multiplied and scaled, in fp32."""
    names = [f"{path}.{each}.default.weight" for each in ("lora_A", "lora_B")]
    if not adapters.keys() >= set(names) or getattr(layer, "lora_variant", None):
        raise InvalidUsage(
            f"lora.merge=True with adapters of {path}, which do not add a product of two matrices; set it to False"
        )
    first, second = (adapters[name].to(place, torch.float32) for name in names)
    product: Tensor = second @ first * layer.scaling["default"]
    return product.T if layer.fan_in_fan_out else product

"""LoRA (Hu et al., arXiv 2106.09685) by peft: small matrices beside those of a causal LM are all that is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.adapt import adapt
from hdpcomm.models.causal_lm import AdaptedCausalLM
from hdpcomm.models.export import new_folder
from hdpcomm.options import LoraOptions

__all__ = ["AdaptedLinear", "adapted_linear", "add_lora", "write_adapters"]


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear layer, with adapters or without.

    Attributes:
        module: it, as the model calls it.
        linear: the matrix beneath the adapters; without any the same.
        adapters: (A, B) of each: ``B(A(x))`` is added.
    """

    module: nn.Module
    linear: nn.Linear
    adapters: tuple[tuple[nn.Linear, nn.Linear], ...] = ()


def adapted_linear(module: nn.Module) -> AdaptedLinear | None:
    """The parts of a linear layer, of peft or plain; ``None`` for another layer, or adapters that do more than add a
    product of two matrices (dropout, DoRA). Local."""
    if type(module) is nn.Linear:
        return AdaptedLinear(module, module)
    base, firsts, seconds = (getattr(module, name, None) for name in ("base_layer", "lora_A", "lora_B"))
    if type(base) is not nn.Linear or not isinstance(firsts, nn.ModuleDict) or not isinstance(seconds, nn.ModuleDict):
        return None
    dropped = any(getattr(each, "p", 0.0) for each in getattr(module, "lora_dropout", nn.ModuleDict()).values())
    pairs = [(firsts[name], seconds[name]) for name in firsts]
    if (
        dropped
        or getattr(module, "lora_variant", None)
        or any(type(x) is not nn.Linear for pair in pairs for x in pair)
    ):
        return None
    return AdaptedLinear(module, base, tuple(pairs))  # type: ignore[arg-type]


def add_lora(adapted: AdaptedCausalLM, lora: LoraOptions, *, check: bool = True) -> AdaptedCausalLM:
    """Adds adapters to the model, which alone are trained. Local.

    Args:
        adapted: is changed, and not used any more.
        check: as of :func:`hdpcomm.models.adapt`.

    Raises: InvalidUsage: no peft, or the model has no layers of these names.
    """
    try:
        import peft
    except ImportError as error:
        raise InvalidUsage("--lora needs peft; install it with pip install 'hdpcomm[lora]'") from error
    targets: Any = lora.targets[0] if lora.targets == ("all-linear",) else list(lora.targets)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
    try:
        changed = peft.get_peft_model(adapted.model, config)
    except ValueError as error:
        raise InvalidUsage(f"--lora {lora} does not fit {type(adapted.causal_lm).__name__}: {error}") from None
    options: Any = {"lean": adapted.lean, "router_losses": adapted.router_losses}
    made = adapt(changed, chunk_tokens=adapted.chunk_tokens, check=check, **options)
    assert isinstance(made, AdaptedCausalLM)
    return made


def write_adapters(
    adapted: AdaptedCausalLM, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, base: Path
) -> None:
    """Writes a model's adapters as peft's ``save_pretrained`` does; ``PeftModel.from_pretrained`` opens them. Local.

    Args:
        adapted: of :func:`add_lora`, on any device (``meta`` is enough).
        tensors: the trained model's by name; those that are no adapters are passed over.
        folder: there whole or not at all; must not exist, or be empty.
        base: the folder of the model without adapters.

    Raises: InvalidUsage: an adapter is missing.
    """
    from safetensors.torch import save_file

    model: Any = adapted.model
    wanted = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors if name in wanted}
    if missing := sorted(wanted - found.keys()):
        raise InvalidUsage(f"the weights have no {missing[0]}; give those of the model with these adapters")
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = str(base), True
    with new_folder(folder) as partial:
        named = {name.removeprefix("model.").replace(".default", ""): tensor for name, tensor in found.items()}
        save_file(named, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(partial)

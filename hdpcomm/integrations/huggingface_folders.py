"""Models that transformers', TRL's and verl's trainers are given by their folder: made without memory, and read in
parts."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import AdaptedCausalLM, FolderWeights, from_pretrained
from hdpcomm.models.llama import seed_of
from hdpcomm.models.lora_names import first_value, is_adapter
from hdpcomm.models.weights import making, weight_files
from hdpcomm.parallel import expert_parallel, tensor_parallel
from hdpcomm.run.model import check_model, folder_model, model_path, read_config
from hdpcomm.train import materialize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hdpcomm.comm.mesh import Mesh

__all__ = ["FolderSource", "has_weights", "load_weights", "weights_for"]


class FolderSource:
    """The folder of a model whose weights nobody has read yet.

    Args:
        folder: of a causal LM as ``save_pretrained`` writes it.
        config: of the model, which keeps and changes it.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self._folder = self._weights = folder
        self._config = config

    @classmethod
    def of(cls, model: Any, others: Iterable[Any]) -> FolderSource | None:
        """The source of a trainer's ``model`` that is a folder, or a name on a hub. Local.

        Args:
            others: arguments of the trainer; with ``model_init_kwargs`` or ``precompute_ref_log_probs`` in them TRL
                loads the model itself.

        Raises: InvalidUsage: there is no model of this name.
        """
        names = ("model_init_kwargs", "precompute_ref_log_probs")
        whole = any(getattr(each, name, None) for each in others for name in names)
        if whole or not isinstance(model, (str, os.PathLike)):
            return None
        folder = model_path(Path(model))
        if (folder / "adapter_config.json").is_file():  # TRL loads these, and their model
            return None
        config = read_config(folder)
        if any("Classification" in name for name in config.architectures or ()):
            raise InvalidUsage(
                f"{folder} holds a {config.architectures[0]}, and models given by their folder are read as causal LMs; "
                "give the model itself: AutoModelForSequenceClassification.from_pretrained(folder)"
            )
        return cls(folder, config)

    def model(self, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """The model of transformers on the meta device. Local. Raises InvalidUsage: the folder holds none."""
        weight_files(self._folder)
        with making, torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(self._config, dtype=dtype, **options)
        if (self._folder / "generation_config.json").is_file():
            made.generation_config = transformers.GenerationConfig.from_pretrained(self._folder, local_files_only=True)
        return made.train()

    def prepare(self, model: Any, mesh: Mesh, seed: int) -> None:
        """Gives adapters of peft their first values, and compares a few layers of such a model with what transformers
        computes. Collective.

        Raises: InvalidUsage: adapters that begin otherwise than LoRA's, or what :func:`hdpcomm.models.adapt` says.
        """
        for name, config in getattr(model, "peft_config", {}).items():
            _check_adapters(name, config)
        for path, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and is_adapter(name := f"{path}.{leaf}"):
                    value = first_value(name, parameter.shape, seed_of(name, seed)).to(parameter.dtype)
                    module._parameters[leaf] = nn.Parameter(value, parameter.requires_grad)
        check_model(folder_model(self._folder), mesh, seed=seed)

    def go_on(self, checkpoint: Path) -> None:
        """Weights are read from a checkpoint that has them all. Local."""
        self._weights = checkpoint

    def fill(self, adapted: nn.Module, mesh: Mesh, *, zero: int) -> None:
        """Cuts the model for the mesh, and reads what this rank keeps of the weights: with ``zero=3`` its part of each.
        Collective.

        Raises: InvalidUsage: of :class:`hdpcomm.models.FolderWeights`.
        """
        weights = FolderWeights(self._weights, cast(AdaptedCausalLM, adapted))
        tensor_parallel(expert_parallel(adapted, mesh), mesh)
        materialize(adapted, mesh, weights, zero=zero)


def has_weights(checkpoint: Path) -> bool:
    """Whether a checkpoint has all weights of a model, and not those of its adapters alone. Local."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return any((checkpoint / name).is_file() for name in names)


def weights_for(config: Any, checkpoint: Path) -> FolderWeights:
    """The weights of a checkpoint, for a model of this configuration that is cut, or has no values. Local."""
    with torch.device("meta"):
        model = from_pretrained(copy.deepcopy(config), dtype=torch.float32, device="meta", check=False)
    return FolderWeights(checkpoint, model)


@torch.no_grad()
def load_weights(adapted: nn.Module, checkpoint: Path) -> None:
    """Gives a whole model the parameters and buffers that a checkpoint has, where transformers' trainer keeps the first
    values of experts that are stored one by one. Local.

    Raises: InvalidUsage: of :class:`hdpcomm.models.FolderWeights`.
    """
    weights = FolderWeights(checkpoint, cast(AdaptedCausalLM, adapted))
    for name, tensor in adapted.state_dict().items():
        tensor.copy_(weights.whole(name))


def _check_adapters(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    usual = {"peft_type": (kind, "LORA"), "init_lora_weights": (getattr(config, "init_lora_weights", True), True)}
    for option in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias"):
        usual[option] = getattr(config, option, None) or None, None
    for option, (given, expected) in usual.items():
        if given != expected:
            raise InvalidUsage(
                f"adapters {name!r} with {option}={given!r} begin with values of the model, which is read in parts "
                "after them; give the model itself in place of its folder, or LoRA without"
            )

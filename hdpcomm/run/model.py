"""The model of a run: a Llama of given sizes, or that of a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdpcomm.errors import InvalidUsage
from hdpcomm.models import Llama, LlamaConfig, adapt, from_pretrained
from hdpcomm.plan import ModelSpec
from hdpcomm.run.flops import spec_of

__all__ = ["FolderModel", "folder_model", "model_facts", "model_spec", "new_model", "read_config"]

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A causal LM of transformers in a folder; made by :func:`folder_model`.

    Attributes:
        weights: whether the folder has some; else they are drawn from the run's seed.
        digest: of the folder's ``config.json``, as far as it shapes the model.
    """

    folder: Path
    architecture: str
    layers: int
    vocabulary: int
    weights: bool
    digest: str


def folder_model(folder: Path) -> FolderModel:
    """Looks at a model's folder, without its weights. Local. Raises: InvalidUsage if it holds no model."""
    config = read_config(folder)
    text = config.get_text_config()
    shape = {name: value for name, value in config.to_dict().items() if name not in _NOT_SHAPE}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return FolderModel(
        folder=folder,
        architecture=(config.architectures or [type(config).__name__])[0],
        layers=int(text.num_hidden_layers),
        vocabulary=int(text.vocab_size),
        weights=any(any(folder.glob(name)) for name in _WEIGHTS),
        digest=digest,
    )


_NOT_SHAPE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def read_config(folder: Path) -> Any:
    """The configuration of transformers in a model folder. Raises: InvalidUsage if there is none that it knows."""
    if not (folder / "config.json").is_file():
        raise InvalidUsage(
            f"{folder} is no folder with a config.json; give the folder of a model, as save_pretrained writes it"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InvalidUsage("--model needs transformers; install it with pip install 'hdpcomm[huggingface]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        if text.num_hidden_layers < 1 or text.vocab_size < 1:
            raise ValueError("it has no layers or no vocabulary")
    except Exception as error:  # transformers raises many kinds for what a config.json may hold
        reason = " ".join(str(error).split())[:300]
        raise InvalidUsage(f"{folder}/config.json is no model that transformers knows: {reason}") from None
    return config


def model_spec(model: LlamaConfig | FolderModel) -> ModelSpec | None:
    """The planner's description of the model; ``None`` for one that is no plain decoder."""
    return spec_of(read_config(model.folder).get_text_config() if isinstance(model, FolderModel) else model)


def model_facts(model: LlamaConfig | FolderModel) -> dict[str, Any]:
    """What a checkpoint notes of the model, and compares when a run goes on."""
    if isinstance(model, FolderModel):
        return {"architecture": model.architecture, "config": model.digest}
    facts = asdict(model)
    if not model.experts:  # as before there were any
        for name in ("experts", "top_k", "router_aux_loss", "router_z_loss"):
            del facts[name]
    return facts


def new_model(
    model: LlamaConfig | FolderModel, *, device: torch.device, seed: int, recompute: str | int, check: bool = True
) -> nn.Module:
    """The model in fp32 on ``device``, the same on every rank, in the form of the trainer. Local.

    Args:
        check: of :func:`hdpcomm.models.adapt`, for models of a folder.

    Raises: InvalidUsage: the folder's weights do not fit its configuration, or the model cannot be trained right.
    """
    if isinstance(model, LlamaConfig):
        return adapt(Llama(model, seed=seed).to(device), recompute=recompute)
    source = model.folder if model.weights else read_config(model.folder)
    try:
        return from_pretrained(source, dtype=torch.float32, device=device, seed=seed, recompute=recompute, check=check)
    except InvalidUsage:
        raise
    except Exception as error:  # safetensors and torch raise kinds of their own for damaged weights
        reason = " ".join(str(error).split())[:300]
        raise InvalidUsage(f"{model.folder} does not hold a model that transformers can load: {reason}") from None

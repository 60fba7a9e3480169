"""The model of a run: a Llama of given sizes, or that of a Hugging Face folder."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.models import (
    AdaptedCausalLM,
    Llama,
    LlamaConfig,
    RouterLosses,
    Weights,
    balance_routers,
    from_pretrained,
    set_recompute,
)  # fmt: skip
from hdpcomm.models.adapt import check_config
from hdpcomm.models.export import check_export, export_llama, write_folder
from hdpcomm.models.lora import add_lora, write_adapters
from hdpcomm.models.mtp import depths_of_config
from hdpcomm.offload.layers import find_layers, layer_kind
from hdpcomm.options import LoraOptions
from hdpcomm.parallel import expert_parallel, split_model, tensor_parallel
from hdpcomm.parallel.expert import layers_with_experts
from hdpcomm.plan import DEVICES, DeviceSpec, ModelSpec, model_from_config, stage_layers
from hdpcomm.train import materialize

__all__ = [
    "FolderModel",
    "check_export",
    "check_model",
    "cut_model",
    "export_model",
    "fewest_layers",
    "folder_model",
    "known_device",
    "model_path",
    "model_facts",
    "model_on_meta",
    "spec_of",
    "model_spec",
    "new_part",
    "read_config",
]

_BESIDE = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("spiece.model", "sentencepiece*", "generation_config.json", "*processor_config.json"),
)

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A causal LM of transformers in a folder; made by :func:`folder_model`.

    Attributes:
        layers: with ``dataclasses.replace`` fewer than the folder's model has: a model of its first ones.
        weights: whether the folder has some; else they are drawn from the run's seed.
        digest: of the folder's ``config.json``, as far as it shapes the model.
        lora: adapters that are trained in place of the model, which stays as it is; ``None``: the model is trained.
        router_bias_rate: see :func:`hdpcomm.models.balance_routers`; 0: biases stay as they are.
        mtp_weight: see :func:`hdpcomm.models.add_mtp`; 0: no multi-token prediction.
        depths: of multi-token prediction, with a weight.
        router_losses: see :func:`hdpcomm.models.adapt`; ``None``: as the model's configuration says.
    """

    folder: Path
    architecture: str
    layers: int
    vocabulary: int
    weights: bool
    digest: str
    lora: LoraOptions | None = None
    router_bias_rate: float = 0.0
    mtp_weight: float = 0.0
    depths: int = 1
    router_losses: RouterLosses | None = None


_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_NOT_FETCHED = ["*.h5", "*.msgpack", "*.onnx", "*.ot", "*.gguf", "*.pth", "original/*", "onnx/*"]
"""Files of a hub's repository that are other forms of the weights."""


def model_path(given: Path) -> Path:
    """A model's folder as it was given; of a name on the Hugging Face hub (``Qwen/Qwen3-0.6B``), where there is no such
    folder, the one that huggingface_hub has fetched it into, or fetches it into now. Local.

    Raises: InvalidUsage: it is a name, and huggingface_hub is missing or does not reach it.
    """
    name = str(given)
    if given.exists() or not _HUB_NAME.fullmatch(name):
        return given
    folder = given.name
    advice = f"`hf download {name} --local-dir {folder}` fetches it where a network is; then give {folder}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InvalidUsage(
            f"model {name} is no folder here, and a name on a hub needs huggingface_hub: pip install "
            f"'hdpcomm[huggingface]'; {advice}"
        ) from error
    try:
        return Path(snapshot_download(name, ignore_patterns=_NOT_FETCHED))
    except Exception as error:  # of the network, of the hub, of the cache
        reason = " ".join(str(error).split())[:200]
        raise InvalidUsage(
            f"model {name} is no folder here, and huggingface_hub does not reach it ({type(error).__name__}: "
            f"{reason}); {advice}"
        ) from None


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
        depths=depths_of_config(config),
    )


_MOST_LAYERS = 10_000
_NOT_SHAPE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def read_config(folder: Path) -> Any:
    """The configuration of transformers in a model folder. Raises: InvalidUsage if there is none that it knows."""
    check_config(folder)
    try:
        from transformers import AutoConfig
        from transformers.activations import ACT2FN
    except ImportError as error:
        raise InvalidUsage("--model needs transformers; install it with pip install 'hdpcomm[huggingface]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        if text.num_hidden_layers < 1 or text.vocab_size < 1:
            raise ValueError("it has no layers or no vocabulary")
        if text.num_hidden_layers > _MOST_LAYERS:
            raise ValueError(f"it has {text.num_hidden_layers:,} layers, and at most {_MOST_LAYERS:,} are made")
        if (getattr(text, "head_dim", None) or 1) < 1:
            raise ValueError(f"head_dim is {text.head_dim}")
        if text.to_dict().get("hidden_act") not in (None, *ACT2FN):
            raise ValueError(f"hidden_act {text.hidden_act!a} is unknown")
    except Exception as error:  # transformers raises many kinds for what a config.json may hold
        reason = " ".join(str(error).split())[:300]
        raise InvalidUsage(f"{folder}/config.json is no model that transformers knows: {reason}") from None
    return config


def model_spec(model: LlamaConfig | FolderModel) -> ModelSpec | None:
    """The planner's description of the model; ``None`` for one that is no plain decoder."""
    return spec_of(read_config(model.folder).get_text_config() if isinstance(model, FolderModel) else model)


@lru_cache(maxsize=64)
def cut_model(model: LlamaConfig | FolderModel, pipeline: int, chunks: int) -> tuple[int, ...]:
    """Layers of each stage of a pipeline (:func:`hdpcomm.plan.stage_layers`); of a model that is no plain decoder about
    as many each, the later ones more."""
    if (spec := model_spec(model)) is not None and spec.layers == model.layers:
        return stage_layers(spec, pipeline, chunks)
    stages = pipeline * chunks
    return tuple(model.layers * (place + 1) // stages - model.layers * place // stages for place in range(stages))


def model_facts(model: LlamaConfig | FolderModel) -> dict[str, Any]:
    """Facts of the model for checkpoints, compared when a run goes on."""
    if isinstance(model, FolderModel):
        lora = {} if model.lora is None else {"lora": str(model.lora)}
        ahead = {"mtp_depths": model.depths} if model.mtp_weight else {}
        routers = {} if model.router_losses is None else {"router_losses": asdict(model.router_losses)}
        return {"architecture": model.architecture, "config": model.digest, **lora, **ahead, **routers}
    facts = asdict(model)
    if not model.experts:  # as before there were any
        for name in ("experts", "top_k", "router_aux_loss", "router_z_loss"):
            del facts[name]
    return facts


def new_part(
    model: LlamaConfig | FolderModel,
    mesh: Mesh,
    *,
    weights: Callable[[nn.Module], Weights] | None,
    recompute: Sequence[str | int],
    layers: Sequence[int] = (),
    zero: int = 0,
) -> list[nn.Module]:
    """This rank's part of the model in fp32, in the form of the trainer: one module, or its stages of a pipeline. It is
    made without memory, cut, and filled then, so that no rank needs more than its part. Collective over the mesh.

    Args:
        recompute: of each stage, for :func:`hdpcomm.models.set_recompute`; one value without pipelines.
        layers: of each stage of a pipeline.
        zero: of the trainer that gets it: with 3 a parameter has this rank's part of its values only.
        weights: makes those of the whole model, which it is given on the meta device. ``None``: the part stays there.

    Raises: InvalidUsage: the folder's weights do not fit its configuration, or the model cannot be trained right.
    """
    whole = model_on_meta(model)
    values = None if weights is None else weights(whole)
    if mesh.expert > 1:
        layers_with_experts(whole, mesh.expert)  # a stage may have none
    if mesh.pipeline > 1:
        own = slice(mesh.stage, None, mesh.pipeline)
        parts: list[nn.Module] = list(split_model(whole, len(layers), layers=layers)[own])
        recompute = recompute[own]
    else:
        parts = [whole]
    for part, recomputed in zip(parts, recompute, strict=True):
        tensor_parallel(expert_parallel(part, mesh), mesh)
        set_recompute(part, recomputed)
    if values is not None:
        materialize(nn.ModuleList(parts) if mesh.pipeline > 1 else whole, mesh, values, zero=zero)
    return parts


def model_on_meta(model: LlamaConfig | FolderModel) -> nn.Module:
    """The whole model without memory, in the form of the trainer. Local."""
    if isinstance(model, LlamaConfig):
        return Llama(model, device="meta")
    config = read_config(model.folder)
    cut = model.layers < config.get_text_config().num_hidden_layers  # to be measured; maybe without routers
    config = _first_layers(config, model.layers) if cut else config
    with torch.device("meta"):
        weight = 0.0 if cut else model.mtp_weight
        made = from_pretrained(
            config, dtype=torch.float32, device="meta", check=False, mtp_weight=weight,
            router_losses=None if cut else model.router_losses,
        )  # fmt: skip
        if model.router_bias_rate and not cut:
            balance_routers(made, model.router_bias_rate)
        return made if model.lora is None else add_lora(made, model.lora, check=False)


def fewest_layers(model: LlamaConfig | FolderModel) -> int:
    """How many first layers there have to be so that one of each kind is among them. Local."""
    if isinstance(model, LlamaConfig):
        return 1
    whole = model_on_meta(replace(model, mtp_weight=0.0))
    return int(_few_layers(read_config(model.folder), whole).get_text_config().num_hidden_layers)


def check_model(model: LlamaConfig | FolderModel, mesh: Mesh, *, seed: int, stages: bool = False) -> None:
    """Compares a model of a folder, cut for the mesh's tensor ranks, with what transformers computes, on as many layers
    as there are kinds of them. Collective over the mesh's tensor and expert ranks.

    Args:
        stages: it is compared cut between each two layers, too.

    Raises: InvalidUsage: it cannot be trained right.
    """
    if isinstance(model, LlamaConfig):
        return
    if stages:  # for what is refused by its configuration
        split_model(model_on_meta(model), model.layers)
    whole = model_on_meta(replace(model, mtp_weight=0.0))
    config = _few_layers(read_config(model.folder), whole, more=int(stages))
    few = from_pretrained(config, dtype=torch.float32, device=mesh.comm.device, seed=seed)
    if model.lora is not None:
        few = add_lora(few, model.lora)
    if stages:
        split_model(few, len(find_layers(few)))
    tensor_parallel(expert_parallel(few, mesh, check=False), mesh)


def _few_layers(config: Any, whole: nn.Module, *, more: int = 0) -> Any:
    """The configuration with the fewest first layers among which there is one of each kind, and so many more."""
    kinds = [layer_kind(layer) for layer in find_layers(whole)]
    text = config.get_text_config()
    listed = [value for value in vars(text).values() if isinstance(value, list) and len(value) == len(kinds)]
    if len(kinds) != text.num_hidden_layers:  # it counts in a way of its own
        return config
    kinds = [f"{kind} {[value[place] for value in listed]}" for place, kind in enumerate(kinds)]
    return _first_layers(config, min(len(kinds), max(kinds.index(kind) for kind in kinds) + 1 + more))


def _first_layers(config: Any, layers: int) -> Any:
    """The configuration of a model that has so many of the first layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def known_device(device: torch.device) -> DeviceSpec | None:
    """The data sheet of a GPU that the planner has a preset of; ``None`` for others and for CPUs. Local."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((spec for preset, spec in DEVICES.items() if preset in name), None)


def spec_of(config: Any) -> ModelSpec | None:
    """The planner's description of a model; ``None`` for an architecture that it does not know.

    Args:
        config: a :class:`hdpcomm.models.LlamaConfig`, or a text configuration of transformers.
    """
    if isinstance(config, LlamaConfig):
        sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.ffn, config.vocabulary)
        top_k = config.top_k if config.experts else 1
        return ModelSpec(*sizes, experts=max(1, config.experts), top_k=top_k, name="llama")
    try:
        return model_from_config(config.to_dict())
    except InvalidUsage:
        return None


def export_model(
    model: LlamaConfig | FolderModel,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    folder: Path,
) -> None:
    """Writes a folder that transformers' ``from_pretrained`` opens. Local.

    A model of a folder keeps that folder's configuration, tokenizer, processor and chat template. One with LoRA gives
    its adapters, which ``peft.PeftModel.from_pretrained`` opens.

    Args:
        tensors: of the trained model by name, all at once or one by one: :meth:`hdpcomm.train.Trainer.whole_tensors`.
        folder: there whole or not at all; must not exist, or be empty.

    Raises: InvalidUsage: of :func:`hdpcomm.models.export.check_export`, or weights that do not fit.
    """
    if isinstance(model, LlamaConfig):
        export_llama(model, tensors, folder)
        return
    check_export(folder)
    given = tensors.items() if isinstance(tensors, Mapping) else tensors
    if model.lora is not None:
        whole = model_on_meta(model)
        assert isinstance(whole, AdaptedCausalLM)
        write_adapters(whole, given, folder, base=model.folder)
        return
    renamed = ((name.removeprefix("model."), tensor) for name, tensor in given)
    depths = model.depths if model.mtp_weight else 0
    write_folder(read_config(model.folder), renamed, folder, beside=partial(_copy_beside, model.folder), depths=depths)


def _copy_beside(source: Path, folder: Path) -> None:
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern) if path.is_file()}):
        shutil.copy(path, folder / path.name)

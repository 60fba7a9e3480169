"""The reference Llama as a Hugging Face folder, with experts a Mixtral: config, safetensors, a tokenizer of bytes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.causal_lm import LlamaConfig
from hdpcomm.models.media import auto_class
from hdpcomm.models.mtp import add_mtp, as_saved_ahead
from hdpcomm.models.weights import by_tensor, making

__all__ = ["as_saved", "by_layer", "check_export", "export_llama", "new_folder", "write_folder"]

_FILE_BYTES = 1 << 30

T = TypeVar("T")

_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_FFN = {
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.out.weight": "mlp.down_proj.weight",
}
_EXPERTS = {
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.gate_up": "mlp.experts.gate_up_proj",
    "ffn.out": "mlp.experts.down_proj",
}


def check_export(folder: Path) -> None:
    """Raises InvalidUsage now if :func:`export_llama` would fail later. Local."""
    if importlib.util.find_spec("transformers") is None:
        raise InvalidUsage("exporting needs transformers; install it with pip install 'hdpcomm[huggingface]'")
    if folder.exists() and not folder.is_dir():
        raise InvalidUsage(f"{folder}: this is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise InvalidUsage(f"{folder}: this folder is not empty; give a new one")
    parent = next(path for path in folder.resolve().parents if path.exists())
    if not os.access(parent, os.W_OK):
        raise InvalidUsage(f"{folder}: {parent} may not be written by this user; give another folder")


def export_llama(
    config: LlamaConfig, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], folder: Path
) -> None:
    """Writes a folder that ``transformers.AutoModelForCausalLM`` and ``AutoTokenizer`` open. Local.

    Args:
        tensors: the ``state_dict()`` of a :class:`hdpcomm.models.Llama` of this config, or its tensors one by one.
        folder: there whole or not at all; must not exist, or be empty.

    Raises: InvalidUsage: of :func:`check_export`, or weights that are missing.
    """
    check_export(folder)
    import transformers

    kind = transformers.MixtralConfig if config.experts else transformers.LlamaConfig
    experts: dict[str, Any] = {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.router_aux_loss,
    }
    hf_config = kind(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **(experts if config.experts else {}),
    )
    names = _names(config)
    if isinstance(tensors, Mapping) and (missing := sorted(set(names) - set(tensors))):
        raise InvalidUsage(f"the weights have no {missing[0]}; give the state_dict() of a Llama of this config")
    given = tensors.items() if isinstance(tensors, Mapping) else tensors
    renamed = ((names[name], tensor) for name, tensor in given if name in names)
    write_folder(hf_config, renamed, folder, beside=_byte_tokenizer if config.vocabulary == 256 else None)


def write_folder(
    config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    beside: Callable[[Path], None] | None = None,
    depths: int = 0,
) -> None:
    """Writes a causal LM of transformers as its ``save_pretrained`` does, a layer in memory at a time. Local.

    Args:
        config: its configuration.
        tensors: by the names of its ``state_dict()``, in the order of its layers. Each is read before the next is
            asked for.
        folder: there whole or not at all; must not exist, or be empty.
        beside: writes what else is to be in the folder.
        depths: of multi-token prediction (:func:`hdpcomm.models.add_mtp`).

    Raises: InvalidUsage: a tensor is missing, or has another shape.
    """
    with making, torch.device("meta"):
        model = auto_class(config.model_type).from_config(config)
        if depths:
            add_mtp(model, depths)
            model.config.get_text_config().num_nextn_predict_layers = depths
    missing = model.state_dict()
    first_name = {name: names[0] for names, _ in by_tensor(model) for name in names}
    with new_folder(folder) as partial:
        files = _Files(partial)
        dtype = None
        for layer in by_layer(tensors):
            for name, tensor in layer.items():
                wanted = missing.get(name)
                if wanted is not None and wanted.shape != tensor.shape:
                    raise InvalidUsage(
                        f"{name} has the shape {list(tensor.shape)}, and the configuration asks for "
                        f"{list(wanted.shape)}; give the weights of a model of this configuration"
                    )
                dtype = dtype or (tensor.dtype if tensor.is_floating_point() else None)
            saved = {name: tensor for name, tensor in layer.items() if first_name.get(name) == name and name in missing}
            for name in layer:
                missing.pop(name, None)
            files.add(as_saved_ahead(model, as_saved(model, saved)))
        left = sorted(name for name in missing if first_name[name] in missing)
        if left:
            raise InvalidUsage(f"the weights have no {left[0]}; give those of a model of this configuration")
        files.close()
        model.config.architectures, model.config.dtype = [type(model).__name__], dtype
        model.config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        if beside is not None:
            beside(partial)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder beside it to write into, which has that name after the block, unless it raises. Local."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        partial = Path(name) / "model"
        partial.mkdir()
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)


def by_layer(tensors: Iterable[tuple[str, T]]) -> Iterator[dict[str, T]]:
    """Tensors, or what there is of them, by name, those of a layer together: transformers may store several of them as
    one, or one as several. Local."""
    layer: dict[str, T] = {}
    before: str | None = None
    for name, tensor in tensors:
        found = re.match(r"(.*?\.\d+)\.", name)
        place = found[1] if found else ""
        if layer and place != before:
            yield layer
            layer = {}
        layer[name], before = tensor, place
    if layer:
        yield layer


def as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors of a layer of a model of transformers, by the names of its files. Local."""
    try:
        revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):  # before release 5, where names are the same on both sides
        return tensors
    made: dict[str, torch.Tensor] = revert(model, tensors)
    return made


class _Files:
    """The safetensors of a folder, written as they get full, with an index if there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._open[name] = tensor.detach().to("cpu").contiguous()
            self._bytes += tensor.nbytes
            self._total += tensor.nbytes
            if self._bytes >= _FILE_BYTES:
                self._write()

    def close(self) -> None:
        if self._open or not self._written:
            self._write()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        names = [f"model-{place + 1:05d}-of-{count:05d}.safetensors" for place in range(count)]
        for place, name in enumerate(names):
            self._path(place).rename(self._folder / name)
        weight_map = {key: name for name, keys in zip(names, self._written, strict=True) for key in keys}
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._open, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._open))
        self._open, self._bytes = {}, 0

    def _path(self, place: int) -> Path:
        return self._folder / f"part-{place}"


def _names(config: LlamaConfig) -> dict[str, str]:
    """The names that transformers has for ours."""
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    block = _BLOCK | (_EXPERTS if config.experts else _FFN)
    for layer in range(config.layers):
        names |= {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in block.items()}
    return names


def _byte_tokenizer(folder: Path) -> None:
    """Writes one of a token a byte, whose number is the byte's value."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    # The printable character that byte-level tokenizers write for each byte, by the byte's value.
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    made.save_pretrained(folder)

"""The reference Llama as a Hugging Face folder, with experts a Mixtral: config, safetensors, a tokenizer of bytes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.models.llama import LlamaConfig

__all__ = ["check_export", "export_llama"]

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


def export_llama(config: LlamaConfig, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes a folder that ``transformers.AutoModelForCausalLM`` and ``AutoTokenizer`` open. Local.

    Args:
        state: the ``state_dict()`` of a :class:`hdpcomm.models.Llama` of this config.
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
    model = transformers.AutoModelForCausalLM.from_config(hf_config)
    model.to(state["embedding.weight"].dtype).load_state_dict(_renamed(config, state))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        partial = Path(name) / "model"
        model.save_pretrained(partial)
        if config.vocabulary == 256:
            _byte_tokenizer().save_pretrained(partial)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)


def _renamed(config: LlamaConfig, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    block = _BLOCK | (_EXPERTS if config.experts else _FFN)
    for layer in range(config.layers):
        names |= {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in block.items()}
    if missing := sorted(set(names) - set(state)):
        raise InvalidUsage(f"the weights have no {missing[0]}; give the state_dict() of a Llama of this config")
    return {theirs: state[ours] for ours, theirs in names.items()}


def _byte_tokenizer() -> Any:
    """A token a byte, and its number is the byte's value."""
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
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)

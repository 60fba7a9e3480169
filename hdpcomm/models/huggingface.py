"""Hugging Face models over dynamic ranks: attention through transformers' AttentionInterface, nothing patched.

:func:`hdpcomm.models.adapt` uses it. Needs ``pip install hdpcomm[huggingface]``; importing this module does not import
transformers.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hdpcomm.attention import PackContext, current_pack, packed_attention, positions
from hdpcomm.attention.pack_context import find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.indexers import (
    attend_chosen,
    latent_attention,
    own_keys_values,
    sends_latent,
    set_indexers,
    set_latent,
)
from hdpcomm.models.media import FAMILIES
from hdpcomm.models.mixers import MIXER_TYPES, PACK_ARGUMENT, mixers_of, set_mixers
from hdpcomm.models.recompute import carry_into_checkpoints

__all__ = ["PACK_ARGUMENT", "AttentionSwitch", "decoder_of", "set_attention"]

NAME = "hdpcomm"
"""Under which the attention is registered with transformers."""
_UNSUPPORTED = ("position_bias", "head_mask")
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
_LOCAL_LAYER_TYPES = ("mlp", "moe")
"""Layers that look at one token at a time."""
_GROWING_ROPES = ("dynamic", "longrope")
"""Rotary frequencies that depend on the longest position of the call, which a shard does not see."""
_REFUSED_SETTINGS = {
    "layerdrop": "each rank would skip other layers, and the rest of its group would wait for them",
    "z_loss_coefficient": "its loss has a term over all tokens, labelled or not, that does not add up over ranks",
}
_MEDIA = re.compile(r"pixel|image|video|audio|speech|input_features|input_values")
"""Names of arguments of forward passes that are no text."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    hdpcomm_pack: PackContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: query [batch, heads, tokens, dim] -> (out [batch, tokens, heads, dim],
    None)."""
    if attention_mask is not None and not isinstance(attention_mask, _Mask):
        raise InvalidUsage(
            "an attention mask was given; packs have none: pass attention_mask=None (a model that makes masks of its "
            "own is not supported)"
        )
    if dropout:
        raise InvalidUsage(f"attention dropout {dropout} is not supported; set config.attention_dropout = 0")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise InvalidUsage(f"this model passes {name} to its attention, which packs do not support")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window: int | tuple[int, int] | None = sliding_window
    chunk = 0
    if attention_mask is not None:  # what eager attention goes by, whatever else the layer says
        causal, window, chunk = attention_mask.causal, attention_mask.window, attention_mask.chunk
    if (chosen := kwargs.get("indices")) is not None:
        if not causal or window is not None or chunk or softcap or s_aux is not None:
            raise InvalidUsage(
                "a layer that chooses its keys has a window, chunks, a soft cap or sinks, too; packs know none of them"
            )
        pack = find_pack() if hdpcomm_pack is None else hdpcomm_pack
        return attend_chosen(module, query, key, value, chosen, scale=scaling, pack=pack), None
    if sends_latent(module):
        if causal and query.shape[0] == 1 and window is None and not chunk and not softcap and s_aux is None:
            pack = current_pack() if hdpcomm_pack is None else hdpcomm_pack
            return latent_attention(module, query, key, value, scale=scaling, pack=pack), None
        key, value = own_keys_values(module, key, value)
    if getattr(module, _TEMPERED, False):
        query = _tempered(module, query, current_pack() if hdpcomm_pack is None else hdpcomm_pack)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    one = q.shape[0] == 1
    if one:
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    out = packed_attention(
        q, k, v, causal=causal, window=window, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
        chunk=chunk, pack=hdpcomm_pack,
    )  # fmt: skip
    return out.unsqueeze(0) if one else out, None


_TEMPERED = "hdpcomm_tempered"


class _KeepTemperature:
    """Hooks round a layer that sharpens its scores with a token's position, which it takes for the row (Llama 4's
    layers without RoPE): inside of a pack it leaves that to the attention, which knows positions."""

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args
        ours = module.config._attn_implementation == NAME
        if ours and (kwargs.get(PACK_ARGUMENT) or find_pack()):
            module.attn_temperature_tuning = False
            setattr(module, _TEMPERED, True)

    def after(self, module: Any, *_: Any) -> None:
        if getattr(module, _TEMPERED, False):
            module.attn_temperature_tuning = True
            setattr(module, _TEMPERED, False)


def _keep_temperatures(model: Any) -> None:
    for module in model.modules():
        tempered = getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
        if tempered and not getattr(module, "use_rope", False) and not hasattr(module, _TEMPERED):
            hooks = _KeepTemperature()
            setattr(module, _TEMPERED, False)
            module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            module.register_forward_hook(hooks.after, always_call=True)


def _tempered(module: Any, query: torch.Tensor, pack: PackContext) -> torch.Tensor:
    """``query``: [batch, heads, tokens, dim]."""
    if pack.padded:
        return query
    rank, size = (0, 1) if pack.comm is None else (pack.comm.rank, pack.comm.size)
    places = positions(pack.cu_seqlens, rank=rank, size=size, device=query.device)
    scales = torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    tempered: torch.Tensor = query * scales[:, None]
    return tempered.to(query.dtype)


def decoder_of(causal_lm: Any) -> Any:
    """The part below the last layer, without the encoders of images and videos; the model itself where it does not
    tell. Local."""
    inner = getattr(causal_lm, "model", None)
    if causal_lm.config.model_type in FAMILIES:
        return causal_lm.base_model.language_model
    named = causal_lm.base_model is causal_lm and callable(getattr(inner, "get_input_embeddings", None))
    return inner if named else causal_lm.base_model


@dataclass(frozen=True, slots=True)
class _Mask:
    """The window of a layer, in place of a mask: many layers tell their window by it only."""

    causal: bool
    window: int | tuple[int, int] | None
    chunk: int = 0

    def __getitem__(self, index: tuple[slice | int, ...]) -> _Mask:
        """All rows and columns, which Gemma 4 asks for where layers share keys, and layers with an indexer (of the one
        head that there is); else raises InvalidUsage."""
        if any(each != 0 and (not isinstance(each, slice) or each.start or each.stop is not None) for each in index):
            raise InvalidUsage(
                "the model wants a part of its mask (logits_to_keep?); packs need the outputs of all tokens"
            )
        return self


_OF_THE_PACK = ("packed_sequence_mask_function", "padding_mask_function")
"""Masks that keep the sequences of a pack apart, which the pack does, or hide padding, of which there is none."""
_WRAPPERS = ("and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function")


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name in transformers.masking_utils, its settings) of each mask whose intersection a mask function is."""
    name = mask_function.__qualname__.partition(".")[0]
    cells = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    settings = dict(zip(mask_function.__code__.co_freevars, cells, strict=True))
    if name not in _WRAPPERS:
        yield name, settings
        return
    for inner in settings.get("mask_functions") or (settings["mask_function"],):
        yield from _parts(inner)


def _seen_by(mask_function: Callable[..., Any]) -> _Mask:
    causal = False
    window: int | tuple[int, int] | None = None
    chunk = 0
    for name, settings in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = int(settings["sliding_window"])
        elif name == "sliding_window_bidirectional_overlay":
            window = (int(settings["sliding_window"]),) * 2
        elif name == "chunked_overlay":
            chunk = int(settings["chunk_size"])
        elif name not in (*_OF_THE_PACK, "bidirectional_mask_function"):
            current_pack()  # else raises, with what to do
            raise InvalidUsage(
                f"the model adds a mask of its own to its attention ({mask_function.__qualname__}), which packs do not "
                "know; give a causal model with full, sliding or chunked attention"
            )
    return _Mask(causal, window, chunk)


def _mask(
    *_: Any,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    local_size: int | None = None,
    config: Any = None,
    **__: Any,
) -> _Mask | None:
    """Mask function for transformers: padding would be lost in silence, windows go along to the attention."""
    if attention_mask is not None and not attention_mask.is_meta and not bool(attention_mask.all()):
        raise InvalidUsage(
            "attention_mask hides tokens (padding?); pack the sequences without padding and pass cu_seqlens instead"
        )
    if torch.compiler.is_compiling():  # the mask functions were looked at when the model was adapted
        if getattr(config, "attention_chunk_size", None):
            raise InvalidUsage(
                "the model has chunked attention, which compiled code cannot tell from windows: run it eagerly"
            )
        return None if local_size is None else _Mask(True, local_size)
    seen = None if mask_function is None else _seen_by(mask_function)
    if seen is not None and getattr(config, "index_topk", None):
        return seen  # its indexer looks at the mask
    # A layer that no mask limits knows best whether it is causal.
    return None if seen is None or (seen.causal and seen.window is None and not seen.chunk) else seen


class _PassPack:
    """Forward pre-hook: the pack of the enclosing block goes along with the call, if its sequences are not too long."""

    def __init__(self, part: torch.nn.Module, longest: tuple[str, int] | None) -> None:
        self._longest = longest
        # Whether its forward hands keyword arguments that it does not know on to its layers.
        kinds = {parameter.kind for parameter in inspect.signature(part.forward).parameters.values()}
        self._passes = inspect.Parameter.VAR_KEYWORD in kinds

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            return args, kwargs
        pack = kwargs.get(PACK_ARGUMENT) or find_pack()
        if pack is not None:
            if self._passes:
                kwargs[PACK_ARGUMENT] = pack
            if self._longest is not None:
                _check_length(pack.cu_seqlens.longest, *self._longest)
        return args, kwargs


def set_attention(model: Any) -> AttentionSwitch:
    """Lets all attention layers of a transformers model use the pack of the enclosing ``packing(comm, cu_seqlens)``;
    returns what undoes it, for a time or for good. Local.

    Activation checkpoints (``gradient_checkpointing_enable()``, reentrant or not, before or after this call) compute
    again with the pack of their forward pass, after the block has ended and on any thread. The pack also goes with the
    call into each layer, for checkpoints that others put around layers.

    Raises: InvalidUsage where transformers is missing or too old, or the model does not take attention functions, takes
    images, video or sound, has dropout in its attention, or has layers that packs do not know.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise InvalidUsage(
            "transformers with AttentionMaskInterface (4.54 or later) is needed; pip install 'hdpcomm[huggingface]'"
        ) from error
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise InvalidUsage(f"{type(model).__name__} is not a transformers model with selectable attention")
    _refuse_media(model)
    config = model.config.get_text_config()
    for name in _DROPOUTS:
        if dropout := getattr(model.config, name, 0.0) or getattr(config, name, 0.0):
            raise InvalidUsage(f"the model has {name}={dropout}; set model.config.{name} = 0 before")
    for name, what in _REFUSED_SETTINGS.items():
        if value := getattr(model.config, name, 0) or getattr(config, name, 0):
            raise InvalidUsage(f"the model has {name}={value}: {what}; set model.config.{name} = 0 before it is made")
    _refuse_layers(config, model)
    _own_configuration(model)
    text = decoder_of(model) if model.config.model_type in FAMILIES else model  # an encoder keeps its attention
    before = text.config._attn_implementation
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    text.set_attn_implementation(NAME)
    set_mixers(model)
    set_latent(model, NAME)
    set_indexers(model, _Mask)
    _keep_temperatures(model)
    carry_into_checkpoints(model)
    only_mixers = set(getattr(model.config, "layer_types", None) or ()) == {"linear_attention"}
    if text.config._attn_implementation != NAME and not only_mixers:
        raise InvalidUsage(f"{type(model).__name__} does not let its attention be replaced (AttentionInterface)")
    longest = _longest_length(config)
    for part in {model, decoder_of(model)}:  # some causal LMs do not hand on to their decoder what they do not know
        if not any(isinstance(hook, _PassPack) for hook in part._forward_pre_hooks.values()):
            part.register_forward_pre_hook(_PassPack(part, longest), with_kwargs=True)

    return AttentionSwitch(text, before)


class AttentionSwitch:
    """Which attention a model runs: that of packs, after :func:`set_attention`, or the one that it came with.

    Args:
        decoder: the part that has it.
        before: the name of its own.
    """

    def __init__(self, decoder: Any, before: str) -> None:
        self._decoder, self._before = decoder, before

    def undo(self) -> None:
        """The model has its own attention again. Local."""
        if self._before != NAME:
            self._decoder.set_attn_implementation(self._before)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Inside, the model runs as it came: for ``generate()``, and for calls with padding. Local."""
        with self._named("sdpa" if self._before == NAME else self._before):
            yield

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Inside, the model runs on packs, as outside of :meth:`original`. Local."""
        with self._named(NAME):
            yield

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        now = self._decoder.config._attn_implementation
        if name == now:
            yield
            return
        self._decoder.set_attn_implementation(name)
        try:
            yield
        finally:
            self._decoder.set_attn_implementation(now)


def _own_configuration(model: Any) -> None:
    """Gives a model a configuration of its own, so that others made of the same object keep their attention."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if type(value).__module__.startswith("transformers") and hasattr(value, "get_text_config"):
                setattr(module, name, copies.get(id(value), value))


def _refuse_media(model: Any) -> None:
    media = [name for name in inspect.signature(model.forward).parameters if _MEDIA.search(name)]
    if media and model.config.model_type not in FAMILIES:
        raise InvalidUsage(
            f"{type(model).__name__} takes more than text ({', '.join(media)}); known are images, videos or sound of "
            f"{', '.join(FAMILIES)}: give the causal LM of its text alone, if it has one"
        )


def _refuse_layers(config: Any, model: Any) -> None:
    name, known = type(model).__name__, (*_LAYER_TYPES, *((*MIXER_TYPES, "hybrid") if mixers_of(model) else ()))
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(known) - set(_LOCAL_LAYER_TYPES))
    if others:
        raise InvalidUsage(
            f"{name} has layers of the type {', '.join(others)}, which look at other tokens of the shard without "
            f"communicating; supported are {', '.join(_LAYER_TYPES)}, and from linear layers gated delta rule, KDA and "
            "Mamba-2, where transformers names their functions as in release 5.23"
        )


def _longest_length(config: Any) -> tuple[str, int] | None:
    """(kind of rotary embedding, length) above which the frequencies depend on the sequence."""
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [ropes] if any(name in ropes for name in ("rope_type", "type")) else list(ropes.values())
    limits = []
    for rope in kinds:
        kind = (rope or {}).get("rope_type", (rope or {}).get("type"))
        if kind in _GROWING_ROPES:
            limit = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            limit = limit or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            limits.append((int(limit), str(kind)))
    return (min(limits)[1], min(limits)[0]) if limits else None


def _check_length(longest: int, kind: str, limit: int) -> None:
    if longest > limit:
        raise InvalidUsage(
            f"a sequence of {longest:,} tokens was given, and the rotary embedding of this model ({kind}) changes its "
            f"frequencies above {limit:,} by the longest position at hand, which differs between shards; cut the "
            "sequences to that, or give the model another rope_type"
        )

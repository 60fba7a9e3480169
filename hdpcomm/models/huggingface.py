"""Hugging Face models over dynamic ranks: attention through transformers' AttentionInterface, nothing patched.

    enable(model)                                     # once
    total = sum(count_labels(ids, cu, labels) for every micro-batch of the step, on all ranks)
    batch = shard_batch(input_ids, cu_seqlens, labels=labels, comm=comm, num_items_in_batch=total)
    with packing(comm, cu_seqlens):                   # hdpcomm.attention.packing
        loss = model(**batch).loss                    # this rank's share; over ranks and micro-batches they add up
    loss.backward()

:func:`hdpcomm.models.adapt` does all of this for a :class:`hdpcomm.train.Trainer`. Positions and shifted labels are
made before sharding, so that RoPE and the loss see the tokens where they are in their own sequences. Needs
``pip install hdpcomm[huggingface]``; importing this module does not import transformers.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention import Pack, current_pack, packed_attention, shard, shard_with_positions
from hdpcomm.attention.layout import CuSeqlens, as_cu_seqlens
from hdpcomm.attention.pack_context import find_pack
from hdpcomm.errors import InvalidUsage
from hdpcomm.models.latent import latent_attention, own_keys_values, sends_latent, set_latent
from hdpcomm.models.mixers import PACK_ARGUMENT, set_mixers

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["PACK_ARGUMENT", "count_labels", "enable", "shard_batch"]

NAME = "hdpcomm"
"""Under which the attention is registered with transformers."""
_IGNORED = -100
"""Label that the loss skips."""
_UNSUPPORTED = ("position_bias", "head_mask")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    hdpcomm_pack: Pack | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [batch, heads, tokens, dim] -> (out [batch, tokens, heads, dim], None)."""
    if attention_mask is not None:
        raise InvalidUsage("an attention mask was given; packs have none: pass attention_mask=None")
    if dropout:
        raise InvalidUsage(f"attention dropout {dropout} is not supported; set config.attention_dropout = 0")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise InvalidUsage(f"this model passes {name} to its attention, which packs do not support")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sends_latent(module):
        if causal and query.shape[0] == 1 and sliding_window is None and not softcap and s_aux is None:
            pack = current_pack() if hdpcomm_pack is None else hdpcomm_pack
            return latent_attention(module, query, key, value, scale=scaling, pack=pack), None
        key, value = own_keys_values(module, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    one = q.shape[0] == 1
    if one:
        q, k, v = q[0], k[0], v[0]
    out = packed_attention(
        q, k, v, causal=causal, window=sliding_window, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
        pack=hdpcomm_pack,
    )  # fmt: skip
    return out.unsqueeze(0) if one else out, None


def _mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """What transformers calls for a mask: there is none, but padding would be lost in silence."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InvalidUsage(
            "attention_mask hides tokens (padding?); pack the sequences without padding and pass cu_seqlens instead"
        )


def _pass_pack(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: the pack of the enclosing block goes along with the call."""
    if not torch.compiler.is_compiling():
        if model.config._attn_implementation == NAME:
            kwargs.setdefault(PACK_ARGUMENT, current_pack())
        elif (pack := find_pack()) is not None:  # a model of linear layers only
            kwargs.setdefault(PACK_ARGUMENT, pack)
    return args, kwargs


def passes_arguments(module: torch.nn.Module) -> bool:
    """Does its forward hand keyword arguments that it does not know on to its layers?"""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def enable(model: Any) -> None:
    """Lets all attention layers of a transformers model use the pack of the enclosing ``packing(comm, cu_seqlens)``.

    The pack goes with the call into each layer, so that activation checkpoints (``gradient_checkpointing_enable()``)
    compute again with the pack of their forward pass, after the block has ended and on any thread.
    ``model.set_attn_implementation("sdpa")`` undoes it. Local. Raises InvalidUsage where transformers is missing or
    too old, or the model does not take attention functions or has dropout in its attention.
    """
    set_attention(model)
    if getattr(model.config, "output_router_logits", False):
        raise InvalidUsage(
            f"{type(model).__name__} adds the auxiliary loss of its router to each shard's loss (config."
            "output_router_logits), which does not add up over ranks; use hdpcomm.models.adapt(model), or set it to "
            "False"
        )
    for part in (model, model.base_model):  # some causal LMs do not hand on to their decoder what they do not know
        if passes_arguments(part) and _pass_pack not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_pass_pack, with_kwargs=True)


def set_attention(model: Any) -> None:
    """Registers the attention with transformers and chooses it for the model; raises as :func:`enable`."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise InvalidUsage(
            "transformers with AttentionMaskInterface (4.54 or later) is needed; pip install 'hdpcomm[huggingface]'"
        ) from error
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise InvalidUsage(f"{type(model).__name__} is not a transformers model with selectable attention")
    for name in _DROPOUTS:
        if dropout := getattr(model.config, name, 0.0):
            raise InvalidUsage(f"the model has {name}={dropout}; set model.config.{name} = 0 before")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    mixers = set_mixers(model)
    set_latent(model, NAME)
    only_mixers = mixers and set(getattr(model.config, "layer_types", None) or ()) == {"linear_attention"}
    if model.config._attn_implementation != NAME and not only_mixers:
        raise InvalidUsage(f"{type(model).__name__} does not let its attention be replaced (AttentionInterface)")


def _shifted(labels: torch.Tensor, cu: Any) -> torch.Tensor:
    """The label of each token: the next token of its own sequence; the last one of a sequence has none."""
    shifted = torch.full_like(labels, _IGNORED)
    shifted[:-1] = labels[1:]
    last = torch.from_numpy(cu[1:][cu[1:] > cu[:-1]] - 1).to(labels.device)
    shifted[last] = _IGNORED
    return shifted


def _checked_labels(input_ids: torch.Tensor, cu: Any, labels: torch.Tensor | None) -> torch.Tensor:
    if input_ids.ndim != 1 or input_ids.shape[0] != cu[-1]:
        raise InvalidUsage(f"input_ids has shape {tuple(input_ids.shape)}; cu_seqlens asks for ({int(cu[-1])},)")
    wanted = input_ids if labels is None else labels
    if wanted.shape != input_ids.shape:
        raise InvalidUsage(
            f"labels has shape {tuple(wanted.shape)}; expected that of input_ids, {tuple(input_ids.shape)}"
        )
    return wanted


def count_labels(input_ids: torch.Tensor, cu_seqlens: CuSeqlens, labels: torch.Tensor | None = None) -> int:
    """The trained tokens of a whole pack, as :func:`shard_batch` labels them. Local."""
    cu = as_cu_seqlens(cu_seqlens)
    return int((_shifted(_checked_labels(input_ids, cu, labels), cu) != _IGNORED).sum())


def shard_batch(
    input_ids: torch.Tensor,
    cu_seqlens: CuSeqlens,
    *,
    comm: Communicator | None,
    num_items_in_batch: int,
    labels: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The keyword arguments of the model's forward on this rank.

    ``input_ids``: int64 [T], the pack; ``labels``: [T], not shifted, -100 to skip a token (default: ``input_ids``,
    each token predicts the next one of its own sequence). ``num_items_in_batch``: the trained tokens of the step, in
    all its micro-batches on all ranks (the sum of their :func:`count_labels`), the same for each of them. The model's
    loss is then this rank's sum over the pack's labelled tokens divided by that number: the step's loss and gradients
    are the sums over its micro-batches and ranks. Local.
    """
    cu = as_cu_seqlens(cu_seqlens)
    wanted = _checked_labels(input_ids, cu, labels)
    if num_items_in_batch < 1:
        raise InvalidUsage(
            f"num_items_in_batch is {num_items_in_batch}; give the number of trained tokens of the whole step, at "
            "least 1"
        )
    place = {"rank": 0 if comm is None else comm.rank, "size": 1 if comm is None else comm.size}
    mine = shard(_shifted(wanted, cu), cu, **place).unsqueeze(0)
    tokens, places = shard_with_positions(input_ids, cu, **place)
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": places.unsqueeze(0),
        "labels": mine,
        "shift_labels": mine,
        "num_items_in_batch": num_items_in_batch,
        "use_cache": False,
    }

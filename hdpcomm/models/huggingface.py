"""Hugging Face models over dynamic ranks: attention through transformers' AttentionInterface, nothing patched.

    enable(model)                                     # once
    batch = shard_batch(input_ids, cu_seqlens, labels=labels, comm=comm)
    with packing(comm, cu_seqlens):                   # hdpcomm.attention.packing
        loss = model(**batch).loss                    # this rank's share; the sum over the ranks is the loss per token

Positions and shifted labels are made before sharding, so that RoPE and the loss see the tokens where they are in
their own sequences. Needs ``pip install hdpcomm[huggingface]``; importing this module does not import transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.attention import packed_attention, shard, shard_with_positions
from hdpcomm.attention.layout import CuSeqlens, as_cu_seqlens
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["enable", "shard_batch"]

_NAME = "hdpcomm"
_IGNORED = -100
"""Label that the loss skips."""
_UNSUPPORTED = ("position_bias", "head_mask")


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
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    one = q.shape[0] == 1
    if one:
        q, k, v = q[0], k[0], v[0]
    out = packed_attention(
        q, k, v, causal=causal, window=sliding_window, scale=scaling, softcap=softcap or 0.0, sinks=s_aux
    )
    return out.unsqueeze(0) if one else out, None


def _mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """What transformers calls for a mask: there is none, but padding would be lost in silence."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InvalidUsage(
            "attention_mask hides tokens (padding?); pack the sequences without padding and pass cu_seqlens instead"
        )


def enable(model: Any) -> None:
    """Lets all attention layers of a transformers model use the pack of the enclosing ``packing(comm, cu_seqlens)``.

    ``model.set_attn_implementation("sdpa")`` undoes it. Local. Raises InvalidUsage where transformers is missing or
    too old, or the model does not take attention functions or has dropout in its attention.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise InvalidUsage(
            "transformers with AttentionMaskInterface (4.54 or later) is needed; pip install 'hdpcomm[huggingface]'"
        ) from error
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise InvalidUsage(f"{type(model).__name__} is not a transformers model with selectable attention")
    dropout = getattr(model.config, "attention_dropout", 0.0)
    if dropout:
        raise InvalidUsage(f"the model has attention_dropout={dropout}; set model.config.attention_dropout = 0 before")
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        raise InvalidUsage(f"{type(model).__name__} does not let its attention be replaced (AttentionInterface)")


def shard_batch(
    input_ids: torch.Tensor,
    cu_seqlens: CuSeqlens,
    *,
    comm: Communicator | None,
    labels: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The keyword arguments of the model's forward on this rank.

    ``input_ids``: int64 [T], the pack; ``labels``: [T], not shifted, -100 to skip a token (default: ``input_ids``,
    each token predicts the next one of its own sequence). The model's loss is then this rank's sum over the pack's
    labelled tokens divided by their number in the whole pack: add it, and the gradients, over the ranks. Local.
    """
    cu = as_cu_seqlens(cu_seqlens)
    if input_ids.ndim != 1 or input_ids.shape[0] != cu[-1]:
        raise InvalidUsage(f"input_ids has shape {tuple(input_ids.shape)}; cu_seqlens asks for ({int(cu[-1])},)")
    wanted = input_ids if labels is None else labels
    if wanted.shape != input_ids.shape:
        raise InvalidUsage(
            f"labels has shape {tuple(wanted.shape)}; expected that of input_ids, {tuple(input_ids.shape)}"
        )
    place = {"rank": 0 if comm is None else comm.rank, "size": 1 if comm is None else comm.size}
    shifted = torch.full_like(wanted, _IGNORED)
    shifted[:-1] = wanted[1:]
    last = torch.from_numpy(cu[1:][cu[1:] > cu[:-1]] - 1).to(wanted.device)
    shifted[last] = _IGNORED
    mine = shard(shifted, cu, **place).unsqueeze(0)
    tokens, places = shard_with_positions(input_ids, cu, **place)
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": places.unsqueeze(0),
        "labels": mine,
        "shift_labels": mine,
        "num_items_in_batch": int((shifted != _IGNORED).sum()),
        "use_cache": False,
    }

"""Layers of transformers that choose their keys by an indexer (DeepSeek-V3.2, GLM-5), over whole sequences.

Such a layer asks its indexer for the keys of each query and hands them to the attention function as ``indices``. The
indexer's own projections, norm and rotary embedding are used as they are; what replaces its forward scores over all
ranks of the pack (:func:`hdpcomm.attention.index_top_k`) while attention is hdpcomm's. Its results are numbers of
tokens in the pack, in place of positions in the shard.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import Pack, index_top_k, selected_attention
from hdpcomm.attention.pack_context import find_pack
from hdpcomm.errors import InvalidUsage

__all__ = ["attend_chosen", "set_indexers"]

_PARTS = ("wq_b", "wk", "k_norm", "weights_proj", "index_topk", "n_heads", "head_dim", "qk_rope_head_dim")
_ROTARY = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")


class _Indexer:
    """The forward of one: over the ranks of the pack, if the mask that it gets is of type ``mask``; else its own."""

    def __init__(self, layer: Any, mask: type) -> None:
        self.layer, self.mask = layer, mask
        source = inspect.getsource(type(layer).forward)
        name = next(each for each in _ROTARY if each in source)
        self.rotary: Callable[..., tuple[Tensor, Tensor]] = getattr(sys.modules[type(layer).__module__], name)

    @torch.no_grad()
    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Tensor:
        layer = self.layer
        if not isinstance(attention_mask, self.mask):
            own: Tensor = type(layer).forward(
                layer, hidden_states, q_resid, position_embeddings, attention_mask, position_ids,
                past_key_values=past_key_values, **more,
            )  # fmt: skip
            return own
        if past_key_values is not None:
            raise InvalidUsage(
                "a cache was given to a model that chooses its keys; packs have none: generate with "
                'model.set_attn_implementation("sdpa")'
            )
        q = layer.wq_b(q_resid).unflatten(-1, (layer.n_heads, layer.head_dim))
        k = layer.k_norm(layer.wk(hidden_states)).unsqueeze(2)
        sizes = [layer.qk_rope_head_dim, layer.head_dim - layer.qk_rope_head_dim]
        (q_rot, q_pass), (k_rot, k_pass) = (torch.split(x, sizes, dim=-1) for x in (q, k))
        q_rot, k_rot = self.rotary(q_rot, k_rot, *position_embeddings, unsqueeze_dim=2)
        q, k = torch.cat((q_rot, q_pass), dim=-1).float(), torch.cat((k_rot, k_pass), dim=-1).squeeze(2).float()
        weights = layer.weights_proj(hidden_states.to(layer.weights_proj.weight.dtype)).float()
        weights = weights * layer.n_heads**-0.5 * layer.head_dim**-0.5
        pack, top_k = find_pack(), int(layer.index_topk)
        if pack is not None:
            chosen = index_top_k(q[0], k[0], weights[0], top_k=top_k, comm=pack.comm, cu_seqlens=pack.cu_seqlens)
            return chosen[None]
        rows = [
            index_top_k(*each, top_k=top_k, comm=None, cu_seqlens=[0, q.shape[1]])
            for each in zip(q, k, weights, strict=True)
        ]
        return torch.stack(rows)


def set_indexers(model: nn.Module, mask: type) -> None:
    """Lets all indexers of a model choose from whole sequences. Local.

    Raises: InvalidUsage: one of another make.
    """
    for layer in model.modules():
        if not type(layer).__name__.endswith("Indexer"):
            continue
        own: Any = layer
        known = all(hasattr(own, part) for part in _PARTS) and "position_embeddings" in str(
            inspect.signature(type(layer).forward)
        )
        if not known:
            raise InvalidUsage(
                f"{type(model).__name__} chooses its keys by a {type(layer).__name__}, which packs do not know; "
                "supported are those of DeepSeek-V3.2 and GLM-5 (wq_b, wk, k_norm, weights_proj)"
            )
        own.forward = _Indexer(layer, mask)


def attend_chosen(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, *, scale: float | None, pack: Pack | None
) -> Tensor:
    """[batch, heads, tokens, dim] over the keys chosen for each query, [batch, tokens, k]; returns [batch, tokens,
    heads, v_dim]. Collective over the pack's ranks."""
    comm, cu = (None, [0, query.shape[2]]) if pack is None else (pack.comm, pack.cu_seqlens)
    rows = []
    for each in zip(query, key, value, chosen, strict=True):
        q, k, v = (x.transpose(0, 1).contiguous() for x in each[:3])
        rows.append(selected_attention(q, k, v, each[3].long(), comm=comm, cu_seqlens=cu, scale=scale))
    return torch.stack(rows)

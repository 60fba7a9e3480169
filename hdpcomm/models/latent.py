"""Multi-head latent attention in models of transformers: the latent goes to the attention function in place of K and V.

Their attention layers make K and V by ``expand_kv(compressed, rope_key)``. On such a layer that method is replaced, so
that it hands the two through while attention is hdpcomm's, and the attention function sends whichever costs less. The
layer's class is left as it is; with another attention, the layer's own method is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import PackContext, mla_attention
from hdpcomm.attention.pack_context import on_local_tokens

__all__ = ["absorbed", "latent_attention", "own_keys_values", "sends_latent", "set_latent"]

_EXPAND = "expand_kv"


class _Latent:
    """A layer's ``expand_kv``: the latent as it is while ``name`` is the model's attention, else K and V."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self.layer, self.name = layer, name

    def own(self, compressed: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, by the method of the layer's class."""
        made: tuple[Tensor, Tensor] = getattr(type(self.layer), _EXPAND)(self.layer, compressed, rope_key)
        return made

    def __call__(self, compressed: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        return (compressed, rope_key) if sends_latent(self.layer) else self.own(compressed, rope_key)


def set_latent(model: nn.Module, name: str) -> int:
    """Lets the attention function ``name`` have the latent of all layers that have one; returns how many. Local."""
    count = 0
    for layer in model.modules():
        if callable(getattr(type(layer), _EXPAND, None)) and hasattr(layer, "kv_b_proj") and hasattr(layer, "config"):
            layer.expand_kv = _Latent(layer, name)  # type: ignore[assignment]
            count += 1
    return count


def sends_latent(layer: Any) -> bool:
    """Does the attention function get the latent of this layer? Not where the weight is more than a matrix (LoRA), nor
    under torch.compile, whose operator takes K and V."""
    expand: Any = vars(layer).get(_EXPAND)
    if not isinstance(expand, _Latent) or torch.compiler.is_compiling():
        return False
    projection: Any = layer.kv_b_proj
    plain = type(projection) is nn.Linear and projection.bias is None
    return plain and bool(layer.config._attn_implementation == expand.name)


def latent_attention(
    layer: Any, query: Tensor, compressed: Tensor, rope_key: Tensor, *, scale: float | None, pack: PackContext
) -> Tensor:
    """[1, heads, tokens, dim] queries on the latent [1, 1, tokens, rank] and [1, 1, tokens, rope_dim]; returns [1,
    tokens, heads, v_dim]. Collective over the pack's ranks."""

    def attend(q: Tensor, c_kv: Tensor, k_rope: Tensor) -> Tensor:
        out = mla_attention(
            q, c_kv, k_rope, layer.kv_b_proj.weight.to(q.dtype), comm=pack.comm, cu_seqlens=pack.cu_seqlens,
            scale=scale, backend=pack.backend, options=pack.options,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    q = query[0].transpose(0, 1)
    rows = (q, compressed[0, 0].to(q.dtype), rope_key[0, 0].to(q.dtype))
    return on_local_tokens(pack, attend, rows).unsqueeze(0)


def own_keys_values(layer: Any, compressed: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a layer whose latent was handed through."""
    expand: _Latent = vars(layer)[_EXPAND]
    return expand.own(compressed, rope_key)


def absorbed(layer: Any, query: Tensor, compressed: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The layer's attention as one over its latents: (queries ``[1, heads, tokens, rank + rope_dim]``, keys ``[1, 1,
    tokens, rank + rope_dim]`` whose first ``rank`` elements are the values, weights ``[heads, v_dim, rank]`` of the
    results). ``None`` where keys and values are no more than the latents. Local."""
    rank, rope = compressed.shape[-1], rope_key.shape[-1]
    weight = layer.kv_b_proj.weight.view(query.shape[1], -1, rank).to(query.dtype)
    nope = query.shape[3] - rope
    if rank + rope >= weight.shape[0] * (weight.shape[1] + rope):
        return None
    keys, values = weight[:, :nope], weight[:, nope:]
    q = torch.cat((torch.einsum("bhtn,hnr->bhtr", query[..., :nope], keys), query[..., nope:]), dim=-1)
    return q, torch.cat((compressed, rope_key), dim=-1).to(q.dtype), values

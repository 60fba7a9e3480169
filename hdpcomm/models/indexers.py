"""Multi-head latent attention in models of transformers: the latent goes to the attention function in place of K and V.

Their attention layers make K and V by ``expand_kv(compressed, rope_key)``. On such a layer that method is replaced, so
that it hands the two through while attention is hdpcomm's, and the attention function sends whichever costs less. The
layer's class is left as it is; with another attention, the layer's own method is used.

Layers that choose their keys by an indexer (DeepSeek-V3.2, GLM-5), over whole sequences: such a layer asks its indexer
for the keys of each query and hands them to the attention function as ``indices``. The indexer's own projections, norm
and rotary embedding are used as they are; what replaces its forward scores over all ranks of the pack
(:func:`hdpcomm.attention.index_top_k`) while attention is hdpcomm's. Its results are numbers of tokens in the pack, in
place of positions in the shard.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import PackContext, index_top_k, mla_attention, selected_attention
from hdpcomm.attention.pack_context import find_pack, on_local_tokens
from hdpcomm.errors import InvalidUsage
from hdpcomm.plan import model_from_config
from hdpcomm.plan.cost import limit_of

__all__ = [
    "attend_chosen",
    "key_limit",
    "latent_attention",
    "own_keys_values",
    "sends_latent",
    "set_indexers",
    "set_latent",
]

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
            place: dict[str, Any] = {"comm": pack.comm, "cu_seqlens": pack.cu_seqlens, "top_k": top_k}
            return on_local_tokens(pack, lambda *own: index_top_k(*own, **place), (q[0], k[0], weights[0]))[None]
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


def key_limit(model: nn.Module) -> tuple[float, float]:
    """:attr:`hdpcomm.plan.CostModel.limit` of a model by its sizes: (0, 0) where attention is over all keys. Local."""
    for layer in model.modules():
        indexer: Any = getattr(layer, "indexer", None)
        if indexer is not None and isinstance(indexer.forward, _Indexer):
            config: Any = layer.config
            with contextlib.suppress(InvalidUsage):  # of a model whose sizes are not known
                return limit_of(model_from_config(config.to_dict()))
    return 0.0, 0.0


def attend_chosen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    *,
    scale: float | None,
    pack: PackContext | None,
) -> Tensor:
    """[batch, heads, tokens, dim] over the keys chosen for each query, [batch, tokens, k]; returns [batch, tokens,
    heads, v_dim]. Collective over the pack's ranks. ``key`` and ``value`` may be the latent and the rotary keys of a
    layer that sends them: then latents travel, where they are less."""
    latents = None
    if sends_latent(module):
        latents = absorbed(module, query, key, value)
        if latents is None:
            key, value = own_keys_values(module, key, value)
        else:
            scale = query.shape[3] ** -0.5 if scale is None else scale
            query, key, weights = latents
    v_dim = None if latents is None else weights.shape[2]

    def attend(q: Tensor, k: Tensor, numbers: Tensor, v: Tensor | None = None, **where: Any) -> Tensor:
        out = selected_attention(q, k, v, numbers, scale=scale, v_dim=v_dim, **where)
        return out if latents is None else torch.einsum("thr,hvr->thv", out, weights)

    given = (query, key) if latents is not None else (query, key, value)
    if pack is None:
        rows = []
        for i, numbers in enumerate(chosen.long()):
            q, k, *v = (x[i].transpose(0, 1).contiguous() for x in given)
            rows.append(attend(q, k, numbers, *v, comm=None, cu_seqlens=[0, query.shape[2]]))
        return torch.stack(rows)
    where: dict[str, Any] = {"comm": pack.comm, "cu_seqlens": pack.cu_seqlens}
    q, k, *v = (x[0].transpose(0, 1).contiguous() for x in given)
    numbers = chosen[0].long()
    return on_local_tokens(pack, lambda *own: attend(*own, **where), (q, k, numbers, *v))[None]

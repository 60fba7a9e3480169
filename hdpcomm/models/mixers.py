"""Linear and state-space layers of transformers over dynamic ranks: gated delta rule, KDA, Mamba-2.

The forward of such a layer is transformers' own, with other functions under the names of its token mixing functions:
the short convolution and the chunked recurrence go through :mod:`hdpcomm.attention` while a pack is in use. Outside of
a pack the layer computes as it came. Nothing of transformers is changed: each layer gets a forward of its own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hdpcomm.attention import AttentionOptions, PackContext, delta_rule, short_conv, ssd
from hdpcomm.attention.pack_context import find_pack, on_local_tokens
from hdpcomm.errors import InvalidUsage

__all__ = ["MIXER_TYPES", "PACK_ARGUMENT", "mixers_of", "set_mixers", "with_globals"]

MIXER_TYPES = ("linear_attention",)
"""Names of these layers in a configuration's ``layer_types``."""
PACK_ARGUMENT = "hdpcomm_pack"
"""Keyword argument by which transformers' layers hand the pack on to the functions that mix tokens; an activation
checkpoint keeps it with the layer's other arguments."""
_EPSILON = 1e-6
"""Added to the squared norm of keys and queries, as in flash-linear-attention."""


def _pack_of(kwargs: dict[str, Any]) -> PackContext:
    pack = kwargs.get(PACK_ARGUMENT) or find_pack()
    assert pack is not None  # _Mixer calls these functions only then
    return pack


def _options_of(pack: PackContext) -> AttentionOptions:
    """Options of a recurrence in a pack: a pack's ``variant`` is for softmax attention."""
    return replace(pack.options, variant="auto")


def _one_row(x: Tensor, what: str) -> Tensor:
    if x.shape[0] != 1:
        raise InvalidUsage(f"{what} has a batch of {x.shape[0]}; give one pack of sequences, a batch of 1")
    return x[0]


def _refuse_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise InvalidUsage("a cache of states was given or asked for; packs are for training: pass use_cache=False")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """In the type of ``like`` on CUDA, whose kernels take 16 bits; else at least float32."""
    return x.to(like.dtype) if x.device.type == "cuda" else _wide(x)


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """``causal_conv1d_fn``: hidden_states [1, channels, tokens]."""
    from transformers.activations import ACT2FN

    pack = _pack_of(kwargs)

    def convolve(x: Tensor) -> Tensor:
        options = AttentionOptions(check=pack.options.check)
        return short_conv(x, weight, bias=bias, comm=pack.comm, cu_seqlens=pack.cu_seqlens, options=options)

    rows = _one_row(hidden_states, "the convolution").transpose(0, 1).to(weight.dtype)
    out = on_local_tokens(pack, convolve, (rows,)).transpose(0, 1).unsqueeze(0)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def _delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention``: [1, tokens, heads, ...]."""
    _refuse_states(initial_state, output_final_state)
    pack = _pack_of(kwargs)
    q, k, v, decay, write = (_wide(_one_row(x, "the delta rule")) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (q, k))

    def recur(*rows: Tensor) -> Tensor:
        q, k, v, decay, write = rows
        return delta_rule(
            q, k, v, decay, write, comm=pack.comm, cu_seqlens=pack.cu_seqlens, options=_options_of(pack)
        )  # fmt: skip

    q, k, v = (_rounded(x, query) for x in (q * q.shape[-1] ** -0.5, k, v))
    out = on_local_tokens(pack, recur, (q, k, v, decay, write))
    return out.unsqueeze(0).to(query.dtype), None


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``mamba2_chunk_scan``: hidden_states [1, tokens, heads, head_dim], B and C [1, tokens, groups, state_dim]."""
    _refuse_states(initial_states, return_final_states)
    pack = _pack_of(kwargs)
    x, step, b, c = (_one_row(each, "the state-space layer") for each in (hidden_states, dt, B, C))
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    step = step.clamp(*dt_limit)

    def recur(*rows: Tensor) -> Tensor:
        x, step, b, c = rows
        return ssd(
            x, step, _wide(A), b, c, d=None if D is None else _wide(D), comm=pack.comm, cu_seqlens=pack.cu_seqlens,
            options=_options_of(pack),
        )  # fmt: skip

    return on_local_tokens(pack, recur, (_rounded(x, x), _wide(step), _rounded(b, x), _rounded(c, x))).unsqueeze(0)


_CONV = "causal_conv1d_fn"
_MIXING: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _scan,
}
# The last one is fused, and returns None where it has no kernel.
_OTHERS: dict[str, Callable[..., Any]] = {_CONV: _conv, "mamba2_split_conv1d_scan_combined": lambda *_, **__: None}


def _own_forward(layer: nn.Module) -> Any:
    """The function that a layer's class defines, without transformers' wrappers."""
    return inspect.unwrap(type(layer).forward)


def with_globals(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with other values under global names. Local."""
    known = {**function.__globals__, **names}
    ours = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    ours.__kwdefaults__ = function.__kwdefaults__
    return ours


class _Mixer:
    """A layer's forward: with a pack, that of its class with our functions under the names of its own."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(PACK_ARGUMENT) is None and find_pack() is None:
            return type(self.layer).forward(self.layer, *args, **kwargs)
        return with_globals(_own_forward(self.layer), {**_MIXING, **_OTHERS})(self.layer, *args, **kwargs)


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model whose token mixing is known: a short convolution and one of the recurrences."""
    found = []
    for layer in model.modules():
        code = getattr(_own_forward(layer), "__code__", None)
        if code is not None and _CONV in code.co_names and any(name in code.co_names for name in _MIXING):
            found.append(layer)
    return found


def set_mixers(model: nn.Module) -> int:
    """Lets all linear and state-space layers of a transformers model use packs; returns how many there are. Local."""
    layers = mixers_of(model)
    for layer in layers:
        layer.forward = _Mixer(layer)
    return len(layers)

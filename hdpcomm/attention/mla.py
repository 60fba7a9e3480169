"""``mla_attention``: multi-head latent attention, where the compressed keys and values may travel in place of K and V.

Each rank keeps the latent of its own tokens; what arrives is expanded by the weight that every rank holds. A token of
DeepSeek-V3 has 576 values as a latent, and 128 x (192 + 128) as K and V. Source: DeepSeek-V2 (arXiv 2405.04434)
section 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention.api import (
    Arguments,
    RingAttention,
    check_arguments,
    check_lse,
    make_call,
    positive_scale,
)
from hdpcomm.attention.backends import Problem
from hdpcomm.attention.call_check import agree_on_call, agree_on_result, check_alike, check_finite, keep_rows
from hdpcomm.attention.engine import Call, LatentDims
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import CuSeqlens, Kept, as_pack
from hdpcomm.attention.tiles import Band
from hdpcomm.attention.variants import (
    AttentionCosts,
    AttentionOptions,
    careful_of,
    choose_variant,
    estimate,
    options_of,
)
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["SENDS", "choose_send", "mla_attention"]

SENDS = ("auto", "latent", "kv")


@lru_cache(maxsize=256)
def choose_send(
    variant: str, problem: Problem, layouts: tuple[Layout, Layout], band: Band, costs: AttentionCosts | None
) -> str:
    """ "latent" or "kv", whichever has the lower estimate; ``problem`` is that of the latent. Pure and local."""
    if layouts[0].size == 1:
        return "kv"
    known = AttentionCosts.default(problem.device) if costs is None else costs
    seconds = {}
    for send, wanted in (("latent", problem), ("kv", replace(problem, latent_dim=0))):
        chosen = choose_variant(variant, wanted, layouts, band, costs)
        seconds[send] = estimate(chosen, wanted, layouts, band, known)
    return min(seconds, key=lambda send: seconds[send])


def _v_dim(q: Tensor, c_kv: Tensor, k_rope: Tensor, w_kv: Tensor) -> int:
    """Checks the shapes and returns the head_dim of V. Raises InvalidUsage."""
    tensors = {"q": q, "c_kv": c_kv, "k_rope": k_rope, "w_kv": w_kv}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if [x.ndim for x in tensors.values()] != [3, 2, 2, 2]:
        raise InvalidUsage(
            "expected q [tokens, heads, nope_dim + rope_dim], c_kv [tokens, rank], k_rope [tokens, rope_dim] and w_kv "
            f"[heads * (nope_dim + v_dim), rank]; got {shapes}"
        )
    heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
    v_dim = w_kv.shape[0] // heads - nope if heads else 0
    if 0 in (heads, c_kv.shape[1]) or nope < 0 or w_kv.shape != (heads * (nope + v_dim), c_kv.shape[1]) or v_dim < 1:
        raise InvalidUsage(
            f"these shapes do not belong together: {shapes}; w_kv must have heads * (nope_dim + v_dim) rows of the "
            "length of c_kv, where nope_dim is the last dimension of q without that of k_rope, and v_dim is at least 1"
        )
    if q.shape[2] == 0 or not q.shape[0] == c_kv.shape[0] == k_rope.shape[0]:
        raise InvalidUsage(f"q, c_kv and k_rope must have the same tokens, and q a last dimension; got {shapes}")
    check_alike(tensors)
    return v_dim


def _keys_values(c_kv: Tensor, k_rope: Tensor, w_kv: Tensor, heads: int, v_dim: int) -> tuple[Tensor, Tensor]:
    """K [tokens, heads, nope_dim + rope_dim] and V [tokens, heads, v_dim], differentiable."""
    both = torch.nn.functional.linear(c_kv, w_kv).view(c_kv.shape[0], heads, w_kv.shape[0] // heads)
    k = torch.cat((both[..., :-v_dim], k_rope[:, None].expand(-1, heads, -1)), dim=-1)
    return k.contiguous(), both[..., -v_dim:].contiguous()


@untraced
def mla_attention(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    w_kv: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    scale: float | None = None,
    backend: str = "auto",
    options: AttentionOptions | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact multi-head latent attention, causal, over packed sequences (or a tree) that several ranks share.

    ``q``: [T_local, heads, nope_dim + rope_dim], its rotary part last. ``c_kv``: [T_local, rank], the compressed keys
    and values after their norm. ``k_rope``: [T_local, rope_dim], the rotary key that all heads share, already rotated.
    ``w_kv``: [heads * (nope_dim + v_dim), rank], the weight of ``kv_b_proj``: for each head the rows of K, then those
    of V; the same on all ranks. The shard of this rank, as in :func:`hdpcomm.attention.ring_attention`, from which
    ``comm``, ``cu_seqlens``, ``backend`` and ``return_lse`` come. ``scale``: default (nope_dim + rope_dim) ** -0.5.

    ``options``: ``variant``, ``send``, ``costs`` and ``check`` of :class:`hdpcomm.attention.AttentionOptions`. With
    ``send="latent"``, c_kv and k_rope travel, rank + rope_dim values a token, expanded by each rank that needs them,
    forward and again in backward; with ``kv``, K and V, heads * (nope_dim + rope_dim + v_dim) values; ``auto`` takes
    the lower estimate by ``costs``. Both are exact.

    Returns [T_local, heads, v_dim] in the type of ``q``. Differentiable in q, c_kv, k_rope and w_kv; the gradient of
    w_kv is this rank's share, to be summed over the ranks like that of any parameter. Collective over ``comm``, in
    forward and in backward.

    Raises: InvalidUsage for bad arguments, Mismatch where ranks disagree, and what the communicator raises.
    """
    careful = careful_of(q, options)
    q, scale = positive_scale(q, scale)

    def prepare() -> tuple[tuple[tuple[Tensor, ...], Call, Kept | None], str, str]:
        known = options_of("mla_attention", options, "variant", "send", "costs", "check")
        if known.send not in SENDS:
            raise InvalidUsage(f"send={known.send!r}; expected one of {', '.join(SENDS)}")
        v_dim = _v_dim(q, c_kv, k_rope, w_kv)
        arguments = Arguments(True, None, scale, backend, known)
        check_arguments(arguments)
        pack = as_pack(cu_seqlens)
        layouts = pack.layouts(1 if comm is None else comm.size)
        layouts[0].check_attended()
        heads, rope_dim = q.shape[1], k_rope.shape[1]
        latent_problem = Problem(
            device="cpu" if q.is_meta else q.device.type, dtype=q.dtype, heads=heads, kv_heads=heads,
            head_dim=q.shape[2], v_head_dim=v_dim, masked=layouts[0].masked, latent_dim=c_kv.shape[1] + rope_dim,
        )  # fmt: skip
        chosen = known.send
        if chosen == "auto" and pack.continues:
            chosen = "latent"  # K and V of all slices before would be held for each of them
        if chosen == "auto":
            band = layouts[0].band(True, None)
            chosen = choose_send(known.variant, latent_problem, layouts, band, known.costs)
        if careful:
            for name, x in (("q", q), ("c_kv", c_kv[:, None]), ("k_rope", k_rope[:, None])):
                check_finite(name, x)
        kept: Kept | None = None
        if chosen == "kv":
            (c_all, rope_all), _ = keep_rows(pack, comm, c_kv, k_rope)
            problem = replace(latent_problem, latent_dim=0)
            call = make_call((q.shape[0], c_all.shape[0]), problem, comm, layouts, arguments)
            tensors = (q.contiguous(), *_keys_values(c_all, rope_all, w_kv, heads, v_dim))
        else:
            (latent,), again = keep_rows(pack, comm, torch.cat((c_kv, k_rope), dim=1).unsqueeze(1))
            weight = w_kv.contiguous().view(heads, -1, w_kv.shape[1])
            call = make_call(
                (q.shape[0], latent.shape[0]), latent_problem, comm, layouts, arguments, LatentDims(rope_dim, v_dim)
            )
            tensors = (q.contiguous(), latent, weight)
            if again is not None:
                kept = lambda: (*again(), weight.detach())
        settings = (
            f"q {tuple(q.shape[1:])} c_kv {c_kv.shape[1]} k_rope {rope_dim} v {v_dim} {q.dtype} {q.device.type} "
            f"{call.score} send={chosen} gather={call.gather} head_group={call.head_group}"
        )
        facts, summary = call.q_layout.facts
        return (tensors, call, kept), f"{facts} {settings}", f"{summary}, {settings}"

    tensors, call, kept = agree_on_call(comm, "mla_attention", careful=careful, device=q.device, prepare=prepare)
    out, lse = RingAttention.apply(*tensors, None, call, kept)  # type: ignore[no-untyped-call]
    if careful:
        agree_on_result(comm, "mla_attention", device=q.device, error=check_lse(lse))
    return (out, lse) if return_lse else out

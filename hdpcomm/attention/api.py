"""Exact attention over packed sequences that several ranks share: ``ring_attention``, and ``mla_attention``, multi-head
latent attention, where the compressed keys and values may travel in place of K and V.

In the latter each rank keeps the latent of its own tokens; what arrives is expanded by the weight that every rank
holds. A token of DeepSeek-V3 has 576 values as a latent, and 128 x (192 + 128) as K and V. Source: DeepSeek-V2 (arXiv
2405.04434) section 2.1.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.arguments import check_number, check_whole
from hdpcomm.attention.backends import choose
from hdpcomm.attention.backends.base import Problem, Score
from hdpcomm.attention.call_check import agree_on_call, agree_on_result, check_alike, check_finite, keep_rows
from hdpcomm.attention.engine import (
    AttentionCosts,
    AttentionOptions,
    Call,
    LatentDims,
    as_saved,
    backward,
    careful_of,
    choose_variant,
    estimate,
    forward,
    options_of,
)
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import CuSeqlens, Kept, Pack, as_pack
from hdpcomm.attention.tiles import Band
from hdpcomm.attention.tree_layout import ONLY_SEQUENCES, chunked
from hdpcomm.comm import Communicator
from hdpcomm.comm.tensors import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import without_second_derivative

__all__ = ["Arguments", "attend", "choose_send", "mla_attention", "plan_call", "ring_attention"]

RING_OPTIONS = ("variant", "cu_seqlens_k", "softcap", "sinks", "chunk", "costs", "check")
"""The fields of :class:`AttentionOptions` that softmax attention has."""


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of :func:`ring_attention` beside q, k, v, the ranks and the lengths; the same on all ranks."""

    causal: bool
    window: int | tuple[int, int] | None
    scale: float | None
    backend: str
    options: AttentionOptions


class RingAttention(torch.autograd.Function):
    """One distributed attention; ``k`` and ``v`` are the two tensors of keys and values (:func:`engine.forward`).
    ``kept``: gives these again for the backward pass; ``None``: they are saved."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = forward(q, (k, v), sinks, call)
        ctx.call, ctx.heads, ctx.kept = call, (q.shape[1], k.shape[1]), kept
        if kept is not None:
            del saved[1:3]
        ctx.save_for_backward(*saved, sinks)
        ctx.mark_non_differentiable(lse)
        return out, lse.clone()

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        if ctx.kept is not None:
            saved[1:1] = as_saved(ctx.kept(), ctx.call, ctx.heads)
        dq, dk, dv, dsinks = backward(dout, saved, sinks, ctx.call, ctx.heads)
        dtype = dout.dtype
        if dsinks is not None:
            dsinks = dsinks.to(sinks.dtype)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks, None, None


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if not isinstance(x, Tensor) and not (name == "sinks" and x is None):
            raise InvalidUsage(f"{name} is {reprlib.repr(x)}, a {type(x).__name__}; expected a tensor")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        raise InvalidUsage(
            "expected q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim], or all with a batch dimension "
            f"in front; got {shapes}"
        )
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        raise InvalidUsage(
            "k and v must have one shape (but for the head_dim of v), and the head_dim of k and the batch those of q; "
            f"got {shapes}"
        )
    if 0 in (*q.shape[-2:], k.shape[-2], v.shape[-1]) or q.shape[-2] % k.shape[-2]:
        raise InvalidUsage(
            f"the heads of q must be a multiple of the heads of k and v, and no dimension may be 0; got {shapes}"
        )
    check_alike({"q": q, "k": k, "v": v})
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_contiguous():
            raise InvalidUsage(
                f"{name} is not contiguous (shape {tuple(x.shape)}, strides {x.stride()}); call .contiguous() first"
            )
    if sinks is not None and (
        sinks.shape != q.shape[-2:-1] or sinks.device != q.device or not sinks.is_floating_point()
    ):
        raise InvalidUsage(
            f"sinks must be one floating-point score per head of q ({q.shape[-2]}) on {q.device}; got shape "
            f"{tuple(sinks.shape)}, {sinks.dtype}, on {sinks.device}"
        )


def check_arguments(arguments: Arguments) -> None:
    """Raises InvalidUsage for numbers that no attention can have."""
    if arguments.scale is not None:
        check_number("attention", "scale (None: head_dim ** -0.5)", arguments.scale)
    check_number("attention", "softcap (0: none)", arguments.options.softcap, least=0)
    check_whole("attention", "chunk (0: none)", arguments.options.chunk, least=0)


def _layouts(pack: Pack, comm: Communicator | None, arguments: Arguments) -> tuple[Layout, Layout]:
    """The layouts of queries and keys, in chunks if there are some. Raises InvalidUsage."""
    options, size = arguments.options, 1 if comm is None else comm.size
    keys = None if options.cu_seqlens_k is None else as_pack(options.cu_seqlens_k, "cu_seqlens_k")
    layouts = pack.layouts(size, keys)
    layouts[0].check_attended()
    if not options.chunk:
        return layouts
    if not arguments.causal or keys is not None:
        given = "other lengths of keys" if arguments.causal else "causal=False"
        raise InvalidUsage(f"chunk={options.chunk} was given with {given}; {ONLY_SEQUENCES}")
    q_layout, kv_layout = pack.token_layouts(size)
    return chunked(q_layout, options.chunk), chunked(kv_layout, options.chunk)


def make_call(
    rows: tuple[int, int],
    problem: Problem,
    comm: Communicator | None,
    layouts: tuple[Layout, Layout],
    arguments: Arguments,
    latent: LatentDims | None = None,
) -> Call:
    """Checks the token counts ``rows`` of q and of k, and chooses variant and backend. Raises InvalidUsage."""
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    for name, given, layout in zip("qk", rows, layouts, strict=True):
        wanted = layout.rows(rank)
        if given != wanted:
            raise InvalidUsage(
                f"{name} has {given} tokens; under cu_seqlens, rank {rank} of {size} holds {wanted} (see shard())"
            )
    band, options = layouts[0].band(arguments.causal, arguments.window), arguments.options
    variant = choose_variant(options.variant, problem, layouts, band, options.costs)
    scale = problem.head_dim**-0.5 if arguments.scale is None else float(arguments.scale)
    return Call(
        q_layout=layouts[0],
        kv_layout=layouts[1],
        band=band,
        comm=comm if size > 1 else None,
        backend=choose(arguments.backend, problem),
        score=Score(scale, float(options.softcap)),
        gather=variant.gather,
        head_group=variant.head_group,
        latent=latent,
    )


def plan_call(q: Tensor, k: Tensor, v: Tensor, comm: Communicator | None, pack: Pack, arguments: Arguments) -> Call:
    """Checks the arguments and returns the :class:`Call` for them; ``q``, ``k``, ``v``: [T_local, heads, head_dim] (the
    batch folded into the heads). Local.

    Raises: InvalidUsage.
    """
    check_arguments(arguments)
    layouts = _layouts(pack, comm, arguments)
    problem = Problem(
        device="cpu" if q.is_meta else q.device.type,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        windowed=layouts[0].windowed(layouts[0].band(arguments.causal, arguments.window)),
        softcap=arguments.options.softcap,
        v_head_dim=v.shape[2],
    )
    return make_call((q.shape[0], k.shape[0]), problem, comm, layouts, arguments)


def _fold(x: Tensor) -> Tensor:
    """[batch, tokens, heads, head_dim] -> [tokens, batch * heads, head_dim]: all rows of the batch have one layout."""
    return x.transpose(0, 1).flatten(1, 2).contiguous() if x.ndim == 4 else x


def _facts(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[str, str]:
    """Text of all that must be the same on all ranks, and a summary of it for messages."""
    packs = call.q_layout.facts, call.kv_layout.facts
    shapes = (
        f"q {(*q.shape[:-3], *q.shape[-2:])} k {(*k.shape[:-3], *k.shape[-2:])} v {v.shape[-1]} {q.dtype} "
        f"{q.device.type}"
    )
    settings = f"{call.band} {call.score} gather={call.gather} head_group={call.head_group} sinks={sinks is not None}"
    facts = f"{packs[0][0]} {packs[1][0]} {shapes} {settings}"
    summary = f"{packs[0][1]}, {shapes}, {settings}"
    return facts, summary


def check_lse(lse: Tensor) -> InvalidUsage | None:
    """The error for a log-sum-exp of NaN or +inf; -inf is valid: it means a query without keys."""
    bad = torch.isnan(lse) | (lse == torch.inf)
    if not bool(bad.any()):
        return None
    token, head = (int(i) for i in bad.nonzero()[0])
    return InvalidUsage(
        f"the log-sum-exp of {int(bad.sum())} of {lse.numel()} rows is not a number (first: local token {token}, head "
        f"{head}): the products of q and k overflow; check the layer's input, or lower the scale"
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    arguments: Callable[[], Arguments],
    careful: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`ring_attention`, always with its lse. ``arguments()`` may raise: that is an error on all ranks, too."""
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")  # prepare() refuses what is no tensor

    def prepare() -> tuple[tuple[tuple[Tensor, ...], Tensor | None, Call, Kept | None], str, str]:
        checked = arguments()
        sinks = checked.options.sinks
        _check_tensors(q, k, v, sinks)
        if careful:
            for name, x in (("q", q), ("k", k), ("v", v)):
                check_finite(name, x)
        pack = as_pack(cu_seqlens)
        (keys, values), kept = keep_rows(pack, comm, _fold(k), _fold(v))
        folded = _fold(q), keys, values
        call = plan_call(*folded, comm, pack, checked)
        facts = _facts(call, q, k, v, sinks) if careful and call.comm is not None else ("", "")
        return (folded, sinks, call, kept), *facts

    folded, sinks, call, kept = agree_on_call(comm, "ring_attention", careful=careful, device=device, prepare=prepare)
    batch = q.shape[0] if q.ndim == 4 else 1
    per_head = None if sinks is None else sinks.repeat(batch)
    out, lse = RingAttention.apply(*folded, per_head, call, kept)  # type: ignore[no-untyped-call]
    if careful:
        agree_on_result(comm, "ring_attention", device=q.device, error=check_lse(lse))
    if q.ndim == 4:
        out = out.view(out.shape[0], batch, q.shape[2], out.shape[2]).transpose(0, 1)
        lse = lse.view(lse.shape[0], batch, q.shape[2]).transpose(0, 1)
    return out, lse


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Queries and a scale above 0 that give the same scores: fused operators multiply hidden scores, which are -inf, by
    the scale, too. What is no number is left to the checks."""
    if not isinstance(q, Tensor) or not isinstance(scale, int | float) or not -math.inf < scale <= 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


@untraced
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    options: AttentionOptions | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention over packed sequences, each rank holding a zigzag shard of every sequence.

    ``q``: [T_local, heads, head_dim], ``k``: [T_local, kv_heads, head_dim], ``v``: [T_local, kv_heads, v_head_dim],
    contiguous: the shard of this rank (:func:`hdpcomm.attention.shard`). Or dense, [batch, T_local, ...], where every
    row of the batch is a pack of the same lengths. ``comm``: the ranks that share the pack; None or a communicator of
    one rank means no communication.

    ``cu_seqlens``: int32 [num_sequences + 1] of the whole pack, the same on all ranks, with no empty sequence (best on
    the CPU: a CUDA tensor has to be waited for). Or a :class:`Tree` (a query sees its ancestors and, causally, its own
    segment), a :class:`SpanPack`, or a slice of a :class:`SlicedSequence` (a query also sees the slices before its own,
    whose keys were kept). ``window``: how many keys a query sees to its left, itself included (without ``causal`` also
    to its right), or (left, right) as in flash-attn, -1 for no limit. ``scale``: default head_dim ** -0.5.
    ``backend``: see :func:`hdpcomm.attention.available_backends`. ``options``: what is rarely given (the variant,
    softcap, sinks, chunks, other lengths of keys, costs, checks), see :class:`hdpcomm.attention.AttentionOptions`.

    Returns the output, [T_local, heads, v_head_dim] in the type of ``q``, and with ``return_lse`` also the log-sum-exp
    [T_local, heads] (dense: [batch, T_local, heads]) in float32 (float64 for float64), not differentiable; a query that
    sees no key gives 0 and -inf. Differentiable in q, k, v and sinks. Results are bitwise the same from run to run.
    Collective over ``comm``, in forward and in backward, in the same order on all ranks.

    Raises: InvalidUsage for bad arguments, Mismatch where ranks disagree, and what the communicator raises.
    """
    q, scale = positive_scale(q, scale)

    def arguments() -> Arguments:
        return Arguments(causal, window, scale, backend, options_of("ring_attention", options, *RING_OPTIONS))

    careful = careful_of(q, options)
    out, lse = attend(q, k, v, comm=comm, cu_seqlens=cu_seqlens, arguments=arguments, careful=careful)
    return (out, lse) if return_lse else out


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
            head_dim=q.shape[2], v_head_dim=v_dim, latent_dim=c_kv.shape[1] + rope_dim,
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
            both = torch.nn.functional.linear(c_all, w_kv).view(c_all.shape[0], heads, w_kv.shape[0] // heads)
            k = torch.cat((both[..., :-v_dim], rope_all[:, None].expand(-1, heads, -1)), dim=-1)
            tensors = (q.contiguous(), k.contiguous(), both[..., -v_dim:].contiguous())
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

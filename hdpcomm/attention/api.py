"""``ring_attention``: exact attention over packed sequences that several ranks share."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hdpcomm.arguments import check_number, check_type
from hdpcomm.attention.backends import choose
from hdpcomm.attention.backends.base import Problem, Score
from hdpcomm.attention.block_mask import MaskLayout
from hdpcomm.attention.call_check import agree_on_call, agree_on_result
from hdpcomm.attention.engine import Call, LatentDims, backward, forward
from hdpcomm.attention.layout import AnyLayout, CuSeqlens, layout_of
from hdpcomm.attention.pieces import Pieces
from hdpcomm.attention.tiles import Band, band_of, window_pair
from hdpcomm.attention.variants import AttentionCosts, choose_variant
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = [
    "Options",
    "RingAttention",
    "attend",
    "band_under",
    "check_finite",
    "check_lse",
    "check_options",
    "layouts_of",
    "make_call",
    "plan_call",
    "ring_attention",
]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of :func:`ring_attention` other than tensors; the same on all ranks."""

    causal: bool = True
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    variant: str = "auto"
    backend: str = "auto"
    costs: AttentionCosts | None = None


class RingAttention(torch.autograd.Function):
    """One distributed attention; ``k`` and ``v`` are the two tensors of keys and values (:func:`engine.forward`)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, saved = forward(q, (k, v), sinks, call)
        ctx.call, ctx.heads = call, (q.shape[1], k.shape[1])
        ctx.save_for_backward(*saved, sinks)
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype, copy=out.dtype == q.dtype), lse.clone()

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        dq, dk, dv, dsinks = backward(dout, saved, sinks, ctx.call, ctx.heads)
        dtype = dout.dtype
        if dsinks is not None:
            dsinks = dsinks.to(sinks.dtype)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks, None


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if not isinstance(x, torch.Tensor) and not (name == "sinks" and x is None):
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
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        raise InvalidUsage(
            f"q, k and v must have one type, float64, float32, bfloat16 or float16; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device or q.device.type not in ("cpu", "cuda"):
        raise InvalidUsage(f"q, k and v must be on one device, cpu or cuda; got {q.device}, {k.device}, {v.device}")
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


def check_options(options: Options) -> None:
    """Raises InvalidUsage for numbers that no attention can have."""
    if options.dropout_p:
        raise InvalidUsage(
            f"dropout_p={options.dropout_p}: attention dropout is not supported, since a distributed mask would differ "
            "from the single-device one; set it to 0 and use dropout elsewhere in the model"
        )
    if options.scale is not None:
        check_number("attention", "scale (None: head_dim ** -0.5)", options.scale)
    check_number("attention", "softcap (0: none)", options.softcap, least=0)
    if options.costs is not None:
        check_type("attention", "costs", options.costs, AttentionCosts)


def layouts_of(
    cu_seqlens: CuSeqlens, cu_seqlens_k: CuSeqlens | None, comm: Communicator | None
) -> tuple[AnyLayout, AnyLayout]:
    """The layouts of queries and keys. Raises InvalidUsage where they cannot belong together."""
    size = 1 if comm is None else comm.size
    q_layout = layout_of(cu_seqlens, size=size)
    kv_layout = q_layout
    if cu_seqlens_k is not None:
        kv_layout = layout_of(cu_seqlens_k, size=size, name="cu_seqlens_k")
        if isinstance(q_layout, Pieces) or isinstance(kv_layout, Pieces):
            raise InvalidUsage(
                "cu_seqlens_k was given with a tree or a mask, where queries and keys are the same tokens; leave it out"
            )
        if len(q_layout.bounds) != len(kv_layout.bounds):
            raise InvalidUsage(
                f"cu_seqlens has {len(q_layout.bounds)} sequences, cu_seqlens_k {len(kv_layout.bounds)}; expected as "
                "many"
            )
    if isinstance(q_layout, Pieces):
        return q_layout, kv_layout
    lengths = q_layout.lengths.tolist()
    if 0 in lengths:
        first = lengths.index(0)
        raise InvalidUsage(
            f"sequence {first} of cu_seqlens is empty ({lengths.count(0)} of {len(lengths)} are): leave it out; a "
            "length of 0 is mostly a mistake in the code that computes cu_seqlens"
        )
    return q_layout, kv_layout


def band_under(layout: AnyLayout, options: Options) -> Band:
    """The mask inside a sequence, or of a position relative to those on its way from the root. Raises InvalidUsage."""
    if isinstance(layout, MaskLayout):
        if options.window is not None and window_pair(options.window) != (-1, -1):
            raise InvalidUsage(f"window={options.window} was given with a mask, which says by itself what is visible")
        return Band(None, None)
    if isinstance(layout, Pieces) and not options.causal:
        raise InvalidUsage("causal=False was given with a tree, whose tokens see only what is before them")
    return band_of(options.causal, options.window)


def make_call(
    rows: tuple[int, int],
    problem: Problem,
    comm: Communicator | None,
    layouts: tuple[AnyLayout, AnyLayout],
    options: Options,
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
    band = band_under(layouts[0], options)
    variant = choose_variant(options.variant, problem, layouts, band, options.costs)
    return Call(
        q_layout=layouts[0],
        kv_layout=layouts[1],
        band=band,
        comm=comm if size > 1 else None,
        backend=choose(options.backend, problem),
        score=Score(problem.head_dim**-0.5 if options.scale is None else float(options.scale), float(options.softcap)),
        gather=variant.gather,
        head_group=variant.head_group,
        latent=latent,
    )


def plan_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None,
    options: Options,
) -> Call:
    """Checks the arguments and returns the :class:`Call` for them; ``q``, ``k``, ``v``: [T_local, heads, head_dim] (the
    batch folded into the heads). Local.

    Raises: InvalidUsage.
    """
    check_options(options)
    layouts = layouts_of(cu_seqlens, cu_seqlens_k, comm)
    problem = Problem(
        device=q.device.type,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        windowed=band_under(layouts[0], options).low is not None,
        softcap=options.softcap,
        masked=isinstance(layouts[0], MaskLayout),
        v_head_dim=v.shape[2],
    )
    return make_call((q.shape[0], k.shape[0]), problem, comm, layouts, options)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] -> [tokens, batch * heads, head_dim]: all rows of the batch have one layout."""
    return x.transpose(0, 1).flatten(1, 2).contiguous() if x.ndim == 4 else x


def _facts(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[str, str]:
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


def check_finite(name: str, x: torch.Tensor) -> None:
    """Raises InvalidUsage for NaN or infinity. A kernel may hide them: torch's CPU operator treats a row of NaN as one
    without keys."""
    total = x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if bool(torch.isfinite(total)) or bool(torch.isfinite(x).all()):
        return
    place = (~torch.isfinite(x)).nonzero()[0].tolist()
    raise InvalidUsage(
        f"{name} holds NaN or infinity (first at local token {place[-3]}, head {place[-2]}); check what computes it, "
        "or pass check=False to allow it"
    )


def check_lse(lse: torch.Tensor) -> InvalidUsage | None:
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None,
    options: Options,
    check: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ring_attention` with its options in one object; always returns (out, lse)."""
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")  # prepare() refuses what is no tensor
    careful = device.type == "cpu" if check is None else check

    def prepare() -> tuple[tuple[tuple[torch.Tensor, ...], Call], str, str]:
        _check_tensors(q, k, v, sinks)
        folded = _fold(q), _fold(k), _fold(v)
        call = plan_call(*folded, comm, cu_seqlens, cu_seqlens_k, options)
        if careful:
            for name, x in (("q", q), ("k", k), ("v", v)):
                check_finite(name, x)
        facts = _facts(call, q, k, v, sinks) if careful and call.comm is not None else ("", "")
        return (folded, call), *facts

    folded, call = agree_on_call(comm, "ring_attention", careful=careful, device=device, prepare=prepare)
    batch = q.shape[0] if q.ndim == 4 else 1
    per_head = None if sinks is None else sinks.repeat(batch)
    out, lse = RingAttention.apply(*folded, per_head, call)  # type: ignore[no-untyped-call]
    if careful:
        agree_on_result(comm, "ring_attention", device=q.device, error=check_lse(lse))
    if q.ndim == 4:
        out = out.view(out.shape[0], batch, q.shape[2], out.shape[2]).transpose(0, 1)
        lse = lse.view(lse.shape[0], batch, q.shape[2]).transpose(0, 1)
    return out, lse


def positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """Queries and a scale above 0 that give the same scores: fused operators multiply hidden scores, which are -inf, by
    the scale, too. What is no number is left to the checks."""
    if not isinstance(q, torch.Tensor) or not isinstance(scale, int | float) or not -math.inf < scale <= 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    variant: str = "auto",
    backend: str = "auto",
    costs: AttentionCosts | None = None,
    check: bool | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact softmax attention over packed sequences, each rank holding a zigzag shard of every sequence.

    ``q``: [T_local, heads, head_dim], ``k``: [T_local, kv_heads, head_dim], ``v``: [T_local, kv_heads, v_head_dim],
    contiguous: the shard of this rank (:func:`hdpcomm.attention.shard`). Or dense, [batch, T_local, ...], where every
    row of the batch is a pack of the same lengths. ``comm``: the ranks that share the pack; None or a communicator of
    one rank means no communication.

    ``cu_seqlens``: int32 [num_sequences + 1] of the whole pack, the same on all ranks, with no empty sequence (best on
    the CPU: a CUDA tensor has to be waited for). Or a :class:`Tree` (a query sees its ancestors and, causally, its own
    segment), or a :class:`BlockMask` (what its function says; ``causal`` is not asked). ``cu_seqlens_k``: the same for
    the keys, where their lengths differ (a sequence may have 0 keys); queries and keys are then aligned at their ends.
    Not with a tree or a mask. ``window``: how many keys a query
    sees to its left, itself included (without ``causal`` also to its right), or (left, right) as in flash-attn, -1 for
    no limit. ``scale``: default head_dim ** -0.5. ``softcap``: scores become softcap * tanh(score / softcap), where the
    backend can. ``sinks``: [heads], one more score per head that takes part in the softmax without a value; each rank
    gets its share of the gradient, to be summed over the ranks like that of any parameter.

    ``variant``: ring, gather, ulysses, hybrid, or auto (the cheapest by ``costs``); all give the same result.
    ``backend``: see :func:`hdpcomm.attention.available_backends`. ``check``: ranks compare their arguments first, and
    the result is searched for NaN, so that bad input is an error on all ranks (default: on the CPU; it costs two
    small all-gathers).

    Returns the output, [T_local, heads, v_head_dim] in the type of ``q``, and with ``return_lse`` also the log-sum-exp
    [T_local, heads] (dense: [batch, T_local, heads]) in float32 (float64 for float64), not differentiable; a query that
    sees no key gives 0 and -inf. Differentiable in q, k, v and sinks. Results are bitwise the same from run to run.
    Collective over ``comm``, in forward and in backward, in the same order on all ranks.

    Raises: InvalidUsage for bad arguments, Mismatch where ranks disagree, and what the communicator raises.
    """
    q, scale = positive_scale(q, scale)
    options = Options(causal, window, scale, softcap, dropout_p, variant, backend, costs)
    out, lse = attend(
        q, k, v, sinks, comm=comm, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, options=options, check=check
    )
    return (out, lse) if return_lse else out

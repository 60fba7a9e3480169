"""``delta_rule`` and ``ssd``: linear recurrences over packed sequences that several ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdpcomm.attention.call_check import (
    agree_on_call,
    agree_on_result,
    check_all_finite,
    check_linear,
    check_states,
    summary_of,
    token_layouts,
)
from hdpcomm.attention.linear.exchange import choose_exchange
from hdpcomm.attention.linear.recurrence import LinearCall, LinearRecurrence
from hdpcomm.attention.linear.state_plan import state_plan
from hdpcomm.attention.options import AttentionOptions, careful_of, options_of
from hdpcomm.attention.packs import CuSeqlens, Pack, as_pack
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["delta_rule", "ssd"]

_OPTIONS = ("exchange", "costs", "check")
"""The fields of :class:`AttentionOptions` that recurrences have."""


def _check_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if not q.ndim == k.ndim == v.ndim == 3 or g.ndim not in (2, 3) or beta.ndim != 2:
        raise InvalidUsage(
            "expected q, k [tokens, key_heads, dk], v [tokens, heads, dv], g [tokens, heads] or [tokens, heads, dk] "
            f"and beta [tokens, heads]; got {shapes}"
        )
    if q.shape[1:] != k.shape[1:] or 0 in (*q.shape[1:], *v.shape[1:]) or v.shape[1] % q.shape[1]:
        raise InvalidUsage(
            "q and k must have one shape, the heads of v must be a multiple of theirs, and no dimension may be 0; got "
            f"{shapes}"
        )
    heads = v.shape[1]
    if g.shape[1:] not in ((heads,), (heads, q.shape[2])) or beta.shape[1:] != (heads,):
        raise InvalidUsage(
            f"g must be [tokens, {heads}] or [tokens, {heads}, {q.shape[2]}] and beta [tokens, {heads}], for the heads "
            f"of v; got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidUsage(f"q, k and v must have one type; got {q.dtype}, {k.dtype}, {v.dtype}")


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeats each head for those of v that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _check_ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> None:
    tensors = {"x": x, "dt": dt, "b": b, "c": c, "a": a}
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
    if [t.ndim for t in (x, dt, a, b, c)] != [3, 2, 1, 3, 3] or b.shape != c.shape:
        raise InvalidUsage(
            "expected x [tokens, heads, head_dim], dt [tokens, heads], a [heads] and b, c [tokens, groups, "
            f"state_dim]; got {shapes}"
        )
    heads = x.shape[1]
    if 0 in (*x.shape[1:], *b.shape[1:]) or heads % b.shape[1] or dt.shape[1] != heads or a.shape != (heads,):
        raise InvalidUsage(
            "dt and a must have the heads of x, which must be a multiple of the groups of b and c, and no "
            f"dimension may be 0; got {shapes}"
        )
    if d is not None and d.shape != (heads,):
        raise InvalidUsage(f"d must be [heads] = ({heads},); got {tuple(d.shape)}")
    if not x.dtype == b.dtype == c.dtype:
        raise InvalidUsage(f"x, b and c must have one type; got {x.dtype}, {b.dtype}, {c.dtype}")


def _layer(
    name: str,
    tensors: dict[str, Tensor],
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    options: AttentionOptions | None,
    check: Callable[[], None],
    make: Callable[[], tuple[Tensor, ...]],
) -> Tensor:
    """The output of a layer called ``name``.

    ``check()`` looks at the shapes of its ``tensors``; ``make()`` gives q, k, v, g and, of delta rules, beta.
    Collective over ``comm``.
    """
    first = next(iter(tensors.values()))
    careful = careful_of(first, options)

    def prepare() -> tuple[tuple[Pack, tuple[Tensor, ...], LinearCall], str, str]:
        known = options_of(name, options, *_OPTIONS)
        check()
        pack = as_pack(cu_seqlens)
        layouts = token_layouts(pack, comm)
        check_linear(tensors, layouts[0], comm)
        if careful:
            check_all_finite(tensors)
        inputs = q, _, v, g, *beta = make()
        plan = state_plan(*layouts)
        chosen = choose_exchange(
            known.exchange, plan, shape=(q.shape[1], q.shape[2], v.shape[2]), delta=bool(beta),
            device=q.device.type, costs=known.costs,
        )  # fmt: skip
        settings = (
            f"q {tuple(q.shape[1:])} v {tuple(v.shape[1:])} g {tuple(g.shape[1:])} {q.dtype} {q.device.type} "
            f"exchange={chosen}"
        )
        return (pack, inputs, LinearCall(plan, comm, chosen)), *summary_of(layouts[0], settings)

    out = _recur(*agree_on_call(comm, name, careful=careful, device=first.device, prepare=prepare))
    if careful:
        agree_on_result(comm, name, device=first.device, error=check_states(out))
    return out


def _recur(pack: Pack, tensors: tuple[Tensor, ...], call: LinearCall) -> Tensor:
    """The output; a slice starts with the states of those before it."""

    def run(
        state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return LinearRecurrence.apply(q, k, v, g, beta[0] if beta else None, state, call)  # type: ignore[no-any-return, no-untyped-call]

    def zero() -> Tensor:
        first, _, values, *_ = tensors
        shape = call.plan.given[0 if call.comm is None else call.comm.rank], *first.shape[1:], values.shape[2]
        return first.new_zeros(shape, dtype=torch.promote_types(first.dtype, torch.float32))

    return pack.carry(run, zero, *tensors)


@untraced
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    options: AttentionOptions | None = None,
) -> Tensor:
    """The gated delta rule, and KDA, over packed sequences that several ranks share.

    With S = 0 before the first token of each sequence:
    ``S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T`` and ``o_t = S_t^T q_t``; no other scale,
    and q and k are taken as they are (normalise them before).

    ``q``, ``k``: [T_local, key_heads, dk]. ``v``: [T_local, heads, dv], where each key head serves heads / key_heads
    neighbours. ``g``: log decay, [T_local, heads] (gated delta rule) or [T_local, heads, dk] (KDA); ``beta``: [T_local,
    heads]. All are the shard of this rank (:func:`hdpcomm.attention.shard`) of the pack ``cu_seqlens`` [sequences + 1],
    as for :func:`hdpcomm.attention.ring_attention`; or of a :class:`hdpcomm.attention.Tree`, where S before the first
    token of a segment is that after the last one of its parent; or of a slice of a
    :class:`hdpcomm.attention.SlicedSequence`, where S is that after the token before it. States and all that is
    computed are float32 (float64 for float64).

    ``options``: ``exchange``, ``costs`` and ``check`` of :class:`hdpcomm.attention.AttentionOptions`. The bytes of an
    exchange do not depend on lengths.

    Returns [T_local, heads, dv] in the type of ``v``. Differentiable in all tensors; exact. Between forward and
    backward only the inputs and the states at the borders of ranks are kept. Collective over ``comm`` (None: one rank),
    in forward and in backward.

    Raises: InvalidUsage for bad arguments and states that overflow, Mismatch where ranks disagree, and what the
    communicator raises. Sources: arXiv 2412.06464 (gated delta rule), 2510.26692 (KDA).
    """
    return _layer(
        "delta_rule",
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        comm=comm,
        cu_seqlens=cu_seqlens,
        options=options,
        check=lambda: _check_delta(q, k, v, g, beta),
        make=lambda: (_spread(q, v.shape[1]), _spread(k, v.shape[1]), v, g, beta),
    )


@untraced
def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    d: Tensor | None = None,
    options: AttentionOptions | None = None,
) -> Tensor:
    """The state-space layer of Mamba-2 (SSD) over packed sequences that several ranks share.

    With S = 0 before the first token of each sequence: ``S_t = exp(a dt_t) S_{t-1} + dt_t b_t x_t^T`` and
    ``y_t = S_t^T c_t + d x_t``.

    ``x``: [T_local, heads, head_dim]. ``dt``: [T_local, heads], the step sizes (after softplus). ``a``: [heads],
    negative. ``b``, ``c``: [T_local, groups, state_dim], each group for heads / groups neighbours. ``d``: [heads] or
    None. The names of the paper in small letters. The rest is that of :func:`delta_rule`; gradients of ``a`` and ``d``
    are this rank's share, to be summed over the ranks.

    Returns [T_local, heads, head_dim] in the type of ``x``. Collective over ``comm``. Source: arXiv 2405.21060 section
    6.
    """

    def make() -> tuple[Tensor, ...]:
        wide, heads = torch.promote_types(x.dtype, torch.float32), x.shape[1]
        values = x.to(wide) * dt.to(wide)[..., None]
        return _spread(c, heads), _spread(b, heads), values, dt.to(wide) * a.to(wide)

    out = _layer(
        "ssd",
        {"x": x, "dt": dt, "b": b, "c": c},
        comm=comm,
        cu_seqlens=cu_seqlens,
        options=options,
        check=lambda: _check_ssd(x, dt, a, b, c, d),
        make=make,
    )
    if d is not None:
        out = out + x.to(out.dtype) * d[:, None].to(out.dtype)
    return out.to(x.dtype)

"""``delta_rule`` and ``ssd``, linear recurrences, and ``short_conv``, causal depthwise convolutions, over packed
sequences that several ranks share.

In a convolution a piece of a sequence needs the last ``width - 1`` tokens before it, on a tree those on its way from
the root; they come directly from the ranks that hold them, as the keys of a sliding window of ``width`` do (short
pieces: from several ranks). Gradients go back the same way, and add up where children share their past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention.call_check import (
    agree_on_call,
    agree_on_result,
    check_all_finite,
    check_finite,
    check_linear,
    check_states,
    summary_of,
    token_layouts,
)
from hdpcomm.attention.engine import AttentionOptions, careful_of, options_of
from hdpcomm.attention.gather import GatherPlan, GradReturn, fetch_rows, gather_plan
from hdpcomm.attention.linear.exchange import Group, Map, choose_exchange, num_groups, travel
from hdpcomm.attention.linear.scan import ForestScan, Inputs, PartRuns, Scan, chunked
from hdpcomm.attention.linear.state_plan import StatePlan, state_plan
from hdpcomm.attention.packs import CuSeqlens, Pack, as_pack
from hdpcomm.attention.ring import find_atoms
from hdpcomm.attention.tiles import Band, Int64
from hdpcomm.attention.tree_layout import TokenLayout, TreeLayout, past_tokens
from hdpcomm.comm import Communicator
from hdpcomm.comm.tensors import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.transfers import autocast_type, to_device, without_second_derivative

__all__ = ["delta_rule", "short_conv", "ssd"]

_CACHE_BYTES = 16 << 20
"""Keys and values of heads that are computed together on a CPU; larger temporary tensors are slower."""


@dataclass(frozen=True, slots=True)
class LinearCall:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    plan: StatePlan
    comm: Communicator | None
    exchange: str

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """See :meth:`StatePlan.ends`."""
        return self.plan.ends(0 if self.comm is None else self.comm.rank)

    def parts(self, dk: int) -> tuple[PartRuns, ...]:
        return _parts_of(self.plan, 0 if self.comm is None else self.comm.rank, dk)

    def groups(self, inputs: Inputs) -> list[slice]:
        """The heads that are computed together. Without an exchange they are as many as fit into a CPU's cache."""
        heads, device, count = inputs.q.shape[1], inputs.q.device.type, 1
        if self.plan.messages:
            count = num_groups(heads, device) if self.exchange == "pipeline" else 1
        elif device == "cpu":
            row = (inputs.q.shape[2] + inputs.v.shape[2]) * inputs.dtype.itemsize
            least = inputs.q.shape[0] * heads * row / _CACHE_BYTES
            count = next((n for n in range(1, heads + 1) if heads % n == 0 and n >= least), heads)
        width = heads // count
        return [slice(i * width, (i + 1) * width) for i in range(count)]


@lru_cache(maxsize=128)
def _parts_of(plan: StatePlan, rank: int, dk: int) -> tuple[PartRuns, ...]:
    """The parts of ``rank``, in chunks that suit states of ``dk`` rows."""
    forest = tuple((chunked(each.starts, each.lengths, dk), each.links) for each in plan.forests[rank])
    return tuple(forest if runs is None else chunked(*runs, dk) for runs in plan.runs[rank])


class _Forward(Group):
    def __init__(self, out: Tensor, *begin: Any) -> None:
        """``out``: receives the output of these heads."""
        super().__init__(*begin)
        self._out = out

    def _run(self, place: int, state: Tensor) -> Tensor:
        self.states[place] = state
        return self._scans[place].run(state)

    def finish(self, place: int) -> None:
        self._scans.pop(place).output(self._out)

    def summary(self, place: int, count: int) -> Map:
        carrier_map = self._carriers(place).summary(self.zeros(count))
        self.transitions[place] = carrier_map[0].contiguous()
        return carrier_map


class _Backward(Group):
    def __init__(self, dout: Tensor, grads: Inputs, *begin: Any) -> None:
        """``dout``: the gradient of the output of these heads; ``grads``: receives those of the inputs."""
        super().__init__(*begin)
        self._dout, self._grads = dout, grads

    def _make(self, place: int) -> Scan | ForestScan:
        scan, state = super()._make(place), self.states[place]
        assert state is not None
        scan.run(state)
        scan.take_grad(self._dout)
        return scan

    def _run(self, place: int, state: Tensor) -> Tensor:
        return self._scans[place].run_backward(state)

    def finish(self, place: int) -> None:
        self._scans.pop(place).gradients(self._grads)

    def summary(self, place: int, count: int) -> Map:
        scan, transition = self._carriers(place), self.transitions[place]
        assert transition is not None
        if transition.shape[-1] > 1:
            transition = transition.mT
        return transition, scan.backward_bias(self.zeros(count))


def _ended(passes: Sequence[Group], initial: Tensor | None) -> Tensor | None:
    """Final states of the groups, [states of the rank, ...]; None of whole sequences."""
    if initial is None:
        return None
    final_states = [group.final for group in passes if group.final is not None]
    return torch.cat(final_states, dim=1) if final_states else initial[:0]


def _run_forward(inputs: Inputs, call: LinearCall, initial: Tensor | None) -> tuple[Tensor, list[_Forward]]:
    """The output, and the passes with the states that their runs began with. Collective over the call's ranks."""
    parts, heads = call.parts(inputs.q.shape[2]), call.groups(inputs)
    out = inputs.v.new_empty(inputs.v.shape)
    passes = [
        _Forward(out[:, each], parts, inputs.heads(each), None if initial is None else initial[:, each], call.ends)
        for each in heads
    ]
    travel(passes, call.comm, call.exchange, call.plan, backward=False)
    return out, passes


def _run_backward(
    dout: Tensor, inputs: Inputs, kept: Sequence[Tensor | None], call: LinearCall, dfinal: Tensor | None
) -> tuple[Inputs, Tensor | None]:
    """The gradients of the inputs and of the initial state; ``kept``: the initial states and the transitions of the
    forward, group by group. Collective over the call's ranks."""
    new, beta = torch.empty_like, inputs.beta
    parts, heads = call.parts(inputs.q.shape[2]), call.groups(inputs)
    grads = Inputs(new(inputs.q), new(inputs.k), new(inputs.v), new(inputs.g), None if beta is None else new(beta))
    passes = []
    for i, chosen in enumerate(heads):
        begin = None if dfinal is None else dfinal[:, chosen]
        group = _Backward(dout[:, chosen], grads.heads(chosen), parts, inputs.heads(chosen), begin, call.ends[::-1])
        own = kept[2 * len(parts) * i : 2 * len(parts) * (i + 1)]
        group.states, group.transitions = list(own[: len(parts)]), list(own[len(parts) :])
        passes.append(group)
    travel(passes, call.comm, call.exchange, call.plan, backward=True)
    return grads, _ended(passes, dfinal)


class LinearRecurrence(torch.autograd.Function):
    """(out, final) = f(q, k, v, g, beta, initial); the local work in float32 (float64), the states that a run starts
    with are kept. ``initial``, ``final``: the states that a slice begins with, and that it keeps for those after it,
    [states of the rank, heads, dk, dv]; None of whole sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        initial: Tensor | None,
        call: LinearCall,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(autocast_type(q), enabled=False):
            out, passes = _run_forward(Inputs(q, k, v, g, beta), call, initial)
        kept = [[*each.states, *each.transitions] for each in passes]
        ctx.call = call
        ctx.save_for_backward(q, k, v, g, beta, *(x for states in kept for x in states))
        return out, _ended(passes, initial)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        q, k, v, g, beta, *kept = ctx.saved_tensors
        with torch.autocast(autocast_type(q), enabled=False):
            grads, dinitial = _run_backward(dout, Inputs(q, k, v, g, beta), kept, call, dfinal)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, dinitial, None


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


@dataclass(frozen=True, slots=True, eq=False)
class _ConvPlan:
    """Where the rows of a convolution come from and go to.

    The rows of each piece follow ``width - 1`` rows of its past in one buffer, so that a tap is a shift of the buffer.
    """

    gather: GatherPlan
    source: Tensor
    """[buffer]: the fetched row of each row of the buffer; past the last one, a row of zeros, before a sequence."""
    place: Tensor
    """[T_local]: the row of the buffer of each local token."""
    recent: Tensor
    """In a slice: which of this rank's rows, those of the past first, are in the past of the next slice."""


@lru_cache(maxsize=128)
def _recent_keys(keys: TokenLayout, count: int) -> TokenLayout:
    """The layout of a pack's own tokens, and in a slice of those before it that :func:`past_tokens` gives."""
    if keys.tree is None or not keys.sliced:
        return keys
    first, end = keys.slice_bounds[keys.number : keys.number + 2]
    past = past_tokens(keys.tree, first, count)
    return cast(TreeLayout, keys).of_tokens(np.append(past, first), np.append(past + 1, end))


@lru_cache(maxsize=128)
def _conv_plan(layout: TokenLayout, keys: TokenLayout, rank: int, width: int, device: torch.device) -> _ConvPlan:
    band = Band(-(width - 1), 0)
    plan = gather_plan(layout, keys, band, rank=rank)
    places = _fetched_places(layout, keys, rank, band)
    source, place, end = [], np.zeros(plan.q_rows, dtype=np.int64), 0
    segments, pasts = _segments(layout, rank), _pasts(layout, rank, width - 1)
    for (row, first, count), past in zip(segments.tolist(), pasts, strict=True):
        if count:
            source.append(np.where(past < 0, plan.buffer_rows, np.searchsorted(places, past)))
            source.append(np.searchsorted(places, first) + np.arange(count))
            place[row : row + count] = end + width - 1 + np.arange(count)
            end += width - 1 + count
    rows = np.concatenate(source) if source else np.zeros(0, dtype=np.int64)
    recent = _recent_rows(keys, rank, width - 1)
    return _ConvPlan(plan, *(to_device(torch.from_numpy(each), device) for each in (rows, place, recent)))


def _recent_rows(keys: TokenLayout, rank: int, count: int) -> Int64:
    """The rows of ``rank`` that are in the past of the next slice."""
    if keys.tree is None or not keys.sliced:
        return np.zeros(0, dtype=np.int64)
    mine = keys.segments(rank)
    tokens = np.repeat(mine[:, 1] - mine[:, 0], mine[:, 2]) + np.arange(mine[:, 2].sum())
    return np.flatnonzero(np.isin(tokens, past_tokens(keys.tree, keys.slice_bounds[keys.number + 1], count)))


def _segments(layout: TokenLayout, rank: int) -> Int64:
    """``layout.segments``, with places in the whole pack or tree."""
    segments = layout.segments(rank)
    segments[:, 1] += layout.first_token
    return segments


def _fetched_places(layout: TokenLayout, keys: TokenLayout, rank: int, band: Band) -> Int64:
    """[buffer_rows]: the place in the whole pack or tree of each fetched row, rising."""
    atoms = find_atoms(layout, keys, band)
    chosen = np.flatnonzero(atoms.needed[:, rank] | (atoms.owner == rank))
    first, rows = (layout.origins[atoms.sequence] + atoms.start)[chosen], atoms.rows[chosen]
    return np.repeat(first - (np.cumsum(rows) - rows), rows) + np.arange(int(rows.sum()))


def _pasts(layout: TokenLayout, rank: int, count: int) -> Int64:
    """[pieces of the rank, count]: the places of the tokens before each piece, -1 for none."""
    first = _segments(layout, rank)[:, 1]
    previous = np.append(layout.previous, -1)  # before the first token there is none
    past = np.empty((len(first), count), dtype=np.int64)
    for column in range(count - 1, -1, -1):
        first = previous[first]
        past[:, column] = first
    return past


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: _ConvPlan, comm: Communicator | None) -> Tensor:
        rows = fetch_rows(plan.gather, comm, x)
        ctx.plan, ctx.comm = plan, comm
        ctx.save_for_backward(rows, weight)
        taps = weight.shape[1]
        buffer, wide = _buffer(rows, plan), weight.to(_wide(x.dtype))
        count = max(buffer.shape[0] - taps + 1, 0)
        out = buffer.new_zeros((count, x.shape[1]))
        for tap in range(taps):
            out.addcmul_(buffer[tap : tap + count], wide[:, tap])
        return out.index_select(0, plan.place - (taps - 1)).to(x.dtype)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        plan: _ConvPlan = ctx.plan
        taps, dtype = weight.shape[1], _wide(rows.dtype)
        buffer, wide = _buffer(rows, plan), weight.to(dtype)
        count = max(buffer.shape[0] - taps + 1, 0)
        grad = buffer.new_zeros((count, rows.shape[1]))
        grad.index_copy_(0, plan.place - (taps - 1), dout.to(dtype))
        dbuffer, dweight = torch.zeros_like(buffer), torch.zeros_like(wide)
        for tap in range(taps):
            dbuffer[tap : tap + count].addcmul_(grad, wide[:, tap])
            dweight[:, tap] = (grad * buffer[tap : tap + count]).sum(0)
        drows = buffer.new_zeros((rows.shape[0] + 1, rows.shape[1]))
        drows.index_add_(0, plan.source, dbuffer)
        dx = GradReturn(plan.gather, ctx.comm, drows[:-1].contiguous()).wait()
        return dx.to(rows.dtype), dweight.to(weight.dtype), None, None


def _buffer(rows: Tensor, plan: _ConvPlan) -> Tensor:
    padded = torch.cat((rows, rows.new_zeros((1, rows.shape[1]))))
    return padded.index_select(0, plan.source).to(_wide(rows.dtype))


@untraced
def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    bias: Tensor | None = None,
    options: AttentionOptions | None = None,
) -> Tensor:
    """A causal depthwise convolution of each sequence of a pack that several ranks share.

    ``y_t = sum_i weight[:, i] x_{t - (width - 1) + i} + bias``, with zeros before the first token of a sequence, as
    ``torch.nn.Conv1d`` with ``groups=channels`` and ``padding=width - 1``.

    ``x``: [T_local, channels], the shard of this rank of the pack ``cu_seqlens``, of a tree, or of a slice.
    ``weight``: [channels, width], ``bias``: [channels], the same on all ranks; their gradients are this rank's share,
    to be summed over the ranks. ``options``: ``check`` of :class:`hdpcomm.attention.AttentionOptions`.

    Returns [T_local, channels] in the type of ``x``; sums are float32 (float64 for float64). Sends each token once to
    each rank whose pieces begin within ``width - 1`` tokens after it. Collective over ``comm``, in forward and in
    backward.

    Raises: InvalidUsage for bad arguments, Mismatch where ranks disagree, and what the communicator raises.
    """
    careful = careful_of(x, options)

    def prepare() -> tuple[tuple[Pack, _ConvPlan], str, str]:
        options_of("short_conv", options, "check")
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[0] or 0 in weight.shape:
            raise InvalidUsage(f"expected x [tokens, channels] and weight [channels, width]; got {shapes}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InvalidUsage(f"bias must be [channels] = ({weight.shape[0]},); got {tuple(bias.shape)}")
        pack = as_pack(cu_seqlens)
        layout, keys = token_layouts(pack, comm)
        keys = _recent_keys(keys, weight.shape[1] - 1)
        check_linear({"x": x}, layout, comm)
        if careful:
            check_finite("x", x[:, None])
        plan = _conv_plan(layout, keys, 0 if comm is None else comm.rank, weight.shape[1], x.device)
        facts, summary = summary_of(layout, f"channels and width {tuple(weight.shape)} {x.dtype} {x.device.type}")
        return (pack, plan), facts, summary

    pack, plan = agree_on_call(comm, "short_conv", careful=careful, device=x.device, prepare=prepare)
    several = comm if comm is not None and comm.size > 1 else None

    def run(past: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = x if past is None else torch.cat((past, x))
        out: Tensor = _ShortConv.apply(rows.contiguous(), weight, plan, several)  # type: ignore[no-untyped-call]
        return out, None if past is None else rows.index_select(0, plan.recent)

    out = pack.carry(run, lambda: x.new_zeros((0, x.shape[1])), x)
    return out if bias is None else out + bias.to(out.dtype)

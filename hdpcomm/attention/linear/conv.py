"""``short_conv``: causal depthwise convolutions over packed sequences that several ranks share.

A piece of a sequence needs the last ``width - 1`` tokens before it, on a tree those on its way from the root; they come
directly from the ranks that hold them, as the keys of a sliding window of ``width`` do (short pieces: from several
ranks). Gradients go back the same way, and add up where children share their past.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from hdpcomm.attention.call_check import agree_on_call, check_finite, check_linear, summary_of, token_layouts
from hdpcomm.attention.gather import GatherPlan, GradReturn, fetch_rows, gather_plan
from hdpcomm.attention.packs import CuSeqlens, Pack, as_pack
from hdpcomm.attention.routes import find_atoms
from hdpcomm.attention.tiles import Band, Int64
from hdpcomm.attention.tree_layout import TokenLayout, TreeLayout, past_tokens
from hdpcomm.attention.variants import AttentionOptions, careful_of, options_of
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative
from hdpcomm.kernels.transfers import to_device

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["short_conv"]


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

"""``short_conv``: causal depthwise convolutions over packed sequences that several ranks share.

A piece of a sequence needs the last ``width - 1`` tokens before it, on a tree those on its way from the root; they come
directly from the ranks that hold them, as the keys of a sliding window of ``width`` do (short pieces: from several
ranks). Gradients go back the same way, and add up where children share their past.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hdpcomm.attention.api import check_finite
from hdpcomm.attention.atoms import Int64
from hdpcomm.attention.call_check import agree_on_call
from hdpcomm.attention.gather import GatherPlan, GradReturn, fetch_rows, gather_plan
from hdpcomm.attention.layout import CuSeqlens
from hdpcomm.attention.linear.carried import begin_slice, end_slice
from hdpcomm.attention.linear.checks import check_linear, layout_of_tokens, summary_of
from hdpcomm.attention.linear.nodes import TokenLayout
from hdpcomm.attention.options import AttentionOptions, careful_of, options_of
from hdpcomm.attention.routes import find_atoms
from hdpcomm.attention.slices import SequenceSlice
from hdpcomm.attention.tiles import Band
from hdpcomm.attention.tree_layout import TreeLayout, is_sliced, past_tokens
from hdpcomm.comm.untraced import untraced
from hdpcomm.errors import InvalidUsage
from hdpcomm.kernels.derivatives import without_second_derivative

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["short_conv"]


@dataclass(frozen=True, slots=True, eq=False)
class _ConvPlan:
    """Where the rows of a convolution come from and go to.

    The rows of each piece follow ``width - 1`` rows of its past in one buffer, so that a tap is a shift of the buffer.
    """

    gather: GatherPlan
    source: torch.Tensor
    """[buffer]: the fetched row of each row of the buffer; past the last one, a row of zeros, before a sequence."""
    place: torch.Tensor
    """[T_local]: the row of the buffer of each local token."""
    recent: torch.Tensor
    """In a slice: which of this rank's rows, those of the past first, are in the past of the next slice."""


def _layouts(cu_seqlens: CuSeqlens, comm: Communicator | None, width: int) -> tuple[TokenLayout, TokenLayout]:
    """The layouts of a call's tokens, and of these and the past that ranks keep of a slice."""
    if not isinstance(cu_seqlens, SequenceSlice):
        layout = layout_of_tokens(cu_seqlens, comm)
        return layout, layout
    queries, keys = cu_seqlens.layouts(1 if comm is None else comm.size)
    return queries, _recent_keys(keys, width - 1)


@lru_cache(maxsize=128)
def _recent_keys(keys: TreeLayout, count: int) -> TreeLayout:
    """The layout of a slice's own tokens, and of those before it that :func:`past_tokens` gives."""
    first, end = keys.bounds[keys.number : keys.number + 2]
    past = past_tokens(keys.tree, first, count)
    return keys.of_tokens(np.append(past, first), np.append(past + 1, end))


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
    recent = _recent_rows(keys, rank, width - 1) if is_sliced(keys) else np.zeros(0, dtype=np.int64)
    return _ConvPlan(plan, *(torch.from_numpy(each).to(device) for each in (rows, place, recent)))


def _recent_rows(keys: TreeLayout, rank: int, count: int) -> Int64:
    """The rows of ``rank`` that are in the past of the next slice."""
    mine = keys.segments(rank)
    tokens = np.repeat(mine[:, 1] - mine[:, 0], mine[:, 2]) + np.arange(mine[:, 2].sum())
    return np.flatnonzero(np.isin(tokens, past_tokens(keys.tree, keys.bounds[keys.number + 1], count)))


def _segments(layout: TokenLayout, rank: int) -> Int64:
    """``layout.segments``, with places in the whole pack or tree."""
    segments = layout.segments(rank)
    if is_sliced(layout):
        segments[:, 1] += layout.first_token
    return segments


def _fetched_places(layout: TokenLayout, keys: TokenLayout, rank: int, band: Band) -> Int64:
    """[buffer_rows]: the place in the whole pack or tree of each fetched row, rising."""
    atoms = find_atoms(layout, keys, band)
    chosen = np.flatnonzero(atoms.needed[:, rank] | (atoms.owner == rank))
    if isinstance(layout, TreeLayout):
        before = layout.tree.rows - layout.tree.starts
    else:
        before = np.cumsum(layout.lengths) - layout.lengths
    first, rows = (before[atoms.sequence] + atoms.start)[chosen], atoms.rows[chosen]
    return np.repeat(first - (np.cumsum(rows) - rows), rows) + np.arange(int(rows.sum()))


def _pasts(layout: TokenLayout, rank: int, count: int) -> Int64:
    """[pieces of the rank, count]: the places of the tokens before each piece, -1 for none."""
    first = _segments(layout, rank)[:, 1]
    if not isinstance(layout, TreeLayout):
        before = np.arange(-count, 0)
        return np.where(layout.first_positions(rank)[:, None] + before < 0, -1, first[:, None] + before)
    previous = np.append(layout.tree.previous, -1)  # before the first token there is none
    past = np.empty((len(first), count), dtype=np.int64)
    for column in range(count - 1, -1, -1):
        first = previous[first]
        past[:, column] = first
    return past


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, plan: _ConvPlan, comm: Communicator | None
    ) -> torch.Tensor:
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
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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


def _buffer(rows: torch.Tensor, plan: _ConvPlan) -> torch.Tensor:
    padded = torch.cat((rows, rows.new_zeros((1, rows.shape[1]))))
    return padded.index_select(0, plan.source).to(_wide(rows.dtype))


@untraced
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    comm: Communicator | None,
    cu_seqlens: CuSeqlens,
    bias: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
) -> torch.Tensor:
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

    def prepare() -> tuple[_ConvPlan, str, str]:
        options_of("short_conv", options, "check")
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[0] or 0 in weight.shape:
            raise InvalidUsage(f"expected x [tokens, channels] and weight [channels, width]; got {shapes}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InvalidUsage(f"bias must be [channels] = ({weight.shape[0]},); got {tuple(bias.shape)}")
        layout, keys = _layouts(cu_seqlens, comm, weight.shape[1])
        check_linear({"x": x}, layout, comm)
        if careful:
            check_finite("x", x[:, None])
        plan = _conv_plan(layout, keys, 0 if comm is None else comm.rank, weight.shape[1], x.device)
        facts, summary = summary_of(layout, f"channels and width {tuple(weight.shape)} {x.dtype} {x.device.type}")
        return plan, facts, summary

    plan = agree_on_call(comm, "short_conv", careful=careful, device=x.device, prepare=prepare)
    several = comm if comm is not None and comm.size > 1 else None
    if isinstance(cu_seqlens, SequenceSlice):
        carried, (past, x) = begin_slice(cu_seqlens, x.new_zeros((0, x.shape[1])), x)
        x = torch.cat((past, x))
    out: torch.Tensor = _ShortConv.apply(x.contiguous(), weight, plan, several)  # type: ignore[no-untyped-call]
    if isinstance(cu_seqlens, SequenceSlice):
        out = end_slice(carried, cu_seqlens, out, x.index_select(0, plan.recent))
    return out if bias is None else out + bias.to(out.dtype)

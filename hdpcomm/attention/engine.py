"""Forward and backward of one distributed attention, which autograd calls; and the choice of its variant: by name, or
the fastest one according to a small cost model. The choice depends only on what is the same on all ranks (lengths,
mask, heads, types, costs), so all choose alike.

With head parallelism (Ulysses) the ranks of a communicator form groups of neighbours. Within a group, rank i takes the
i-th share of the heads of all the group's tokens. Neighbours hold neighbouring pieces of the zigzag, so a group holds
one head and one tail of each sequence, like one rank of a ring. Sources: DeepSpeed-Ulysses, and USP (arXiv 2405.07719)
for the hybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdpcomm.arguments import check_number, check_type, check_whole
from hdpcomm.attention.backends.base import Backend, Problem, Score
from hdpcomm.attention.gather import gather_backward, gather_forward, gather_plan, head_passes
from hdpcomm.attention.layout import Layout
from hdpcomm.attention.packs import CuSeqlens
from hdpcomm.attention.ring import Route, find_atoms, ring_backward, ring_forward, ring_plan
from hdpcomm.attention.rows import Latent, Payload, Rows, copy_rows
from hdpcomm.attention.tiles import Band
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage

__all__ = [
    "AttentionCosts",
    "AttentionOptions",
    "Call",
    "LatentDims",
    "Variant",
    "as_saved",
    "backward",
    "careful_of",
    "choose_variant",
    "estimate",
    "forward",
    "grouped_layout",
    "head_shares",
    "options_of",
    "retrace",
    "token_shares",
]

VARIANTS = ("ring", "gather", "ulysses", "hybrid")


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """The costs by which the variant is chosen; the same on all ranks."""

    flops_per_s: float
    """Attention speed of one rank."""
    bytes_per_s: float
    """Bandwidth of one rank's link, each way."""
    message_s: float
    """Latency of an exchange."""
    call_s: float
    """Fixed cost of a kernel call."""
    ranks_per_node: int = 8
    """Neighbours with fast links; the size of the head groups of a hybrid."""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            check_number("AttentionCosts", name, getattr(self, name), above=0)
        for name in ("message_s", "call_s"):
            check_number("AttentionCosts", name, getattr(self, name), least=0)
        check_whole("AttentionCosts", "ranks_per_node", self.ranks_per_node, least=1)

    @staticmethod
    def default(device: str) -> AttentionCosts:
        """Orders of magnitude: for cpu one core and shared memory, for cuda an H100 and its network interface."""
        if device == "cuda":
            return AttentionCosts(flops_per_s=4e14, bytes_per_s=4e10, message_s=3e-5, call_s=1e-5)
        return AttentionCosts(flops_per_s=5e10, bytes_per_s=4e9, message_s=3e-5, call_s=3e-5, ranks_per_node=1)


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant with its parameters."""

    name: str
    gather: bool = False
    head_group: int = 1


def _head_groups(problem: Problem, size: int) -> list[int]:
    """Sizes of head groups among which the heads can be shared."""
    heads = problem.heads
    kv_heads = 1 if problem.latent_dim else problem.kv_heads  # every head needs the whole latent
    return [
        n for n in range(2, size + 1)
        if size % n == 0 and heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]  # fmt: skip


def _named(name: str, size: int, problem: Problem, ranks_per_node: int) -> Variant:
    if name in ("ring", "gather") or size == 1:
        return Variant(name, gather=name == "gather")
    groups = _head_groups(problem, size)
    if name == "ulysses":
        if size not in groups:
            raise InvalidUsage(
                f"the variant ulysses cannot share {problem.heads} heads with {problem.kv_heads} kv_heads among {size} "
                f"ranks: heads must be a multiple of the ranks, kv_heads a multiple or a divisor; choose ring or gather"
            )
        return Variant(name, head_group=size)
    fitting = [n for n in groups if n <= ranks_per_node and n < size] or [n for n in groups if n < size]
    if not fitting:
        raise InvalidUsage(
            f"the variant hybrid finds no head group for {problem.heads} heads with {problem.kv_heads} kv_heads on "
            f"{size} ranks: it needs a divisor of the ranks that the heads can be shared by; choose ring or gather"
        )
    return Variant(name, head_group=max(fitting) if ranks_per_node > 1 else min(fitting))


def estimate(
    variant: Variant, problem: Problem, layout: tuple[Layout, Layout], band: Band, costs: AttentionCosts
) -> float:
    """Rough seconds of one forward on the busiest rank, good enough to rank the variants."""
    q_layout, kv_layout = layout
    size, group = q_layout.size, variant.head_group
    atoms = find_atoms(q_layout, kv_layout, band)
    dims = problem.head_dim + problem.v_dim
    kv_bytes = (problem.latent_dim or problem.kv_heads * dims) * problem.dtype.itemsize
    q_bytes = problem.heads * dims * problem.dtype.itemsize  # q one way, out the other
    tokens = (float(q_layout.tokens), float(kv_layout.tokens))
    sequences, pairs = q_layout.calls(), q_layout.pairs(kv_layout, band)
    compute = 2 * pairs * problem.heads * dims / size / costs.flops_per_s
    head_exchange = 0.0
    if group > 1:
        shared = group if problem.latent_dim else 1  # each member takes the whole latent
        moved = (tokens[0] * q_bytes + tokens[1] * kv_bytes * shared) / size * (group - 1) / group
        head_exchange = 2 * costs.message_s + moved / costs.bytes_per_s
    rings = size // group
    moved_kv = float((atoms.rows * atoms.needed.sum(axis=1)).sum()) / size * kv_bytes / group
    if rings == 1:
        moved_kv = 0.0
    elif group > 1:
        moved_kv *= (rings - 1) / max(1, size - 1) * group
    wire = moved_kv / costs.bytes_per_s
    if problem.latent_dim:  # what arrives is expanded, to the heads that this rank computes
        compute += 2 * moved_kv / problem.dtype.itemsize * problem.heads / group * dims / costs.flops_per_s
    if variant.gather:
        passes = len(head_passes(problem.heads, problem.kv_heads))
        first, calls = wire / passes, 2 * sequences * passes * costs.call_s
        return head_exchange + costs.message_s + first + max(compute + calls, wire - first)
    calls = rings * sequences * costs.call_s
    steps = max(1, rings - 1)
    compute_step, wire_step = compute / rings, wire / steps + (costs.message_s if rings > 1 else 0.0)
    return head_exchange + calls + compute_step + (rings - 1) * max(compute_step, wire_step)


@lru_cache(maxsize=256)
def choose_variant(
    name: str, problem: Problem, layout: tuple[Layout, Layout], band: Band, costs: AttentionCosts | None
) -> Variant:
    """The variant called ``name``, or with "auto" the one with the lowest estimate. Raises InvalidUsage."""
    costs = AttentionCosts.default(problem.device) if costs is None else costs
    size = layout[0].size
    if name not in ("auto", *VARIANTS):
        raise InvalidUsage(f"there is no variant {name!r}; expected auto or one of {', '.join(VARIANTS)}")
    if name != "auto":
        return _named(name, size, problem, costs.ranks_per_node)
    if size == 1:
        return Variant("ring")
    candidates = [Variant("ring"), Variant("gather", gather=True)]
    groups = _head_groups(problem, size)
    if size in groups:
        candidates.append(Variant("ulysses", head_group=size))
    candidates += [Variant("hybrid", head_group=n) for n in groups if 1 < n < size and n <= costs.ranks_per_node]
    return min(candidates, key=lambda variant: estimate(variant, problem, layout, band, costs))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Rarely given arguments of attention and linear layers; the same on all ranks that share a call.

    A layer refuses each field that it does not have: ``ring_attention`` has ``variant``, ``cu_seqlens_k``, ``softcap``,
    ``sinks`` and ``chunk``; ``mla_attention`` has ``variant`` and ``send``; ``delta_rule`` and ``ssd`` have
    ``exchange``. All of them have ``costs`` and ``check``, ``short_conv`` has only ``check``, and ``packing`` takes
    ``variant``, ``costs`` and ``check``.

    Attributes:
        variant: how attention is divided among ranks: ``ring``, ``gather``, ``ulysses``, ``hybrid``, or ``auto``, the
            lowest estimate by ``costs``; all give the same result.
        cu_seqlens_k: like ``cu_seqlens``, for the keys, where their lengths differ (a sequence may have 0 keys);
            queries and keys are then aligned at their ends. Not with a tree or a mask.
        softcap: scores become softcap * tanh(score / softcap), where the backend can; 0: they stay.
        sinks: [heads], one more score per head that takes part in the softmax without a value; each rank gets its
            share of the gradient, to be summed over the ranks like that of any parameter.
        chunk: tokens of a chunk: a query sees the keys of its own chunk only, causally; chunks begin at the multiples
            of it in each sequence (Llama 4). 0: none. Not with a tree or a mask.
        send: what ranks of ``mla_attention`` send: ``latent``, ``kv``, or ``auto``, the lower estimate by ``costs``.
        exchange: how states of linear layers travel (:mod:`hdpcomm.attention.linear.exchange`): ``gather``, ``scan``,
            ``pipeline``, or ``auto``, the lowest estimate by ``costs``.
        costs: the costs by which ``auto`` chooses; default: those of the device's type.
        check: ranks compare their arguments first, and the result is searched for NaN, so that bad input is an error on
            all ranks. Default: on the CPU; it costs two small all-gathers.
    """

    variant: str = "auto"
    cu_seqlens_k: CuSeqlens | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    send: str = "auto"
    exchange: str = "auto"
    costs: AttentionCosts | None = None
    check: bool | None = None


def options_of(layer: str, given: AttentionOptions | None, *known: str) -> AttentionOptions:
    """The options of a call of ``layer``, which has the fields ``known``. Raises InvalidUsage for any other field."""
    if given is None:
        return AttentionOptions()
    check_type(layer, "options", given, AttentionOptions)
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in known and (value is not None if field.default is None else value != field.default):
            raise InvalidUsage(
                f"{layer} was given options with {field.name}={value!r}, which it does not have; leave it out "
                f"({layer} has {', '.join(known)})"
            )
    if given.costs is not None:
        check_type(layer, "costs", given.costs, AttentionCosts)
    return given


def careful_of(x: object, options: AttentionOptions | None) -> bool:
    """Whether the ranks of a call on ``x`` compare their arguments: by default on the CPU. Takes bad input, too, which
    the comparison then tells to all ranks."""
    check = options.check if isinstance(options, AttentionOptions) else None
    return (not isinstance(x, Tensor) or x.device.type == "cpu") if check is None else check


_Pair = tuple[Tensor, Tensor]


@lru_cache(maxsize=128)
def grouped_layout(layout: Layout, size: int) -> Layout:
    """The layout of groups of ``size`` neighbours."""
    return layout.grouped(size)


@dataclass(frozen=True, slots=True, eq=False)
class TokenShares:
    """Where the tokens of each member are among those of its group."""

    members: tuple[Rows, ...]
    """For each member: copies from its rows to the group's rows."""
    rows: int
    """Rows of the group."""


@lru_cache(maxsize=128)
def token_shares(layout: Layout, size: int, group: int) -> TokenShares:
    """The shares of the tokens of ``group``, one of ``layout.size // size``; pure and local."""
    whole = grouped_layout(layout, size)
    members = tuple(layout.rows_in(whole, group * size + member) for member in range(size))
    return TokenShares(members, whole.rows(group))


def head_shares(heads: int, kv_heads: int, size: int) -> tuple[list[slice], list[slice]]:
    """By member: its heads of q, and those of k and v that they use (shared where there are fewer than members); of
    numbers that the choice of a variant has found to fit."""
    q_share, kv_share = heads // size, max(1, kv_heads // size)
    queries = [slice(i * q_share, (i + 1) * q_share) for i in range(size)]
    keys = [slice(i * kv_heads // size, i * kv_heads // size + kv_share) for i in range(size)]
    return queries, keys


class HeadExchange:
    """The exchanges of a call's tensors in a group of neighbours, between (my tokens, all heads) and (the group's
    tokens, my heads). Every member takes the whole latent of MLA, and its heads of the weight.

    Args:
        layouts: of q, and of k.
        counts: heads of q, and of k.
        latent: whether keys and values are the latent of MLA.

    Attributes:
        outer: the ranks with the same place in the other groups, among which the ring or the gather runs.
    """

    def __init__(
        self, comm: Communicator, size: int, layouts: Sequence[Layout], counts: tuple[int, int], *, latent: bool
    ) -> None:
        self._member, group = comm.rank % size, comm.rank // size
        inner = comm.subset(range(group * size, (group + 1) * size))
        outer = comm.subset(range(self._member, comm.size, size))
        assert inner is not None
        assert outer is not None
        self._inner, self.outer, self._latent = inner, outer, latent
        self._counts = counts[0], 1 if latent else counts[1]
        self._heads = head_shares(*self._counts, size)
        self._tokens = [token_shares(layout, size, group) for layout in layouts]

    @property
    def queries(self) -> slice:
        """This rank's heads of q."""
        return self._heads[0][self._member]

    def collect(self, rows: tuple[Tensor, ...], kv: _Pair) -> tuple[list[Tensor], _Pair]:
        """From (my tokens, all heads) to (the group's tokens, my heads). ``rows`` have the layout of q. Collective over
        the group, as all that follow."""
        if self._latent:
            *collected, latent = self.collect_each(*rows, kv[0], kv=1)
            return collected, (latent, kv[1][self.queries].contiguous())
        *collected, k, v = self.collect_each(*rows, *kv, kv=2)
        return collected, (k, v)

    def give_back(self, *tensors: Tensor, kv: int = 0) -> list[Tensor]:
        """From (the group's tokens, my heads) to (my tokens, all heads); sums heads that several members hold, in the
        order of members. The last ``kv`` tensors have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        outgoing, shapes = [], []
        for x, kind in zip(tensors, kinds, strict=True):
            members, parts = self._tokens[kind].members, []
            for rows in members:
                parts.append(x.new_empty((rows.total, *x.shape[1:])))
                copy_rows(parts[-1], x.contiguous(), rows.inverse())
            outgoing.append(parts)
            mine = members[self._member].total
            shapes.append([(mine, share.stop - share.start, *x.shape[2:]) for share in self._heads[kind]])
        results = []
        for x, kind, parts in zip(tensors, kinds, self._swap(outgoing, shapes), strict=True):
            whole = x.new_zeros((parts[0].shape[0], self._counts[kind], *x.shape[2:]))
            for share, part in zip(self._heads[kind], parts, strict=True):
                whole[:, share] += part
            results.append(whole)
        return results

    def give_back_grads(self, dq: Tensor, pair: _Pair) -> tuple[Tensor, _Pair]:
        """Gradients of q and of the two tensors of keys and values."""
        if not self._latent:
            dq, dk, dv = self.give_back(dq, *pair, kv=2)
            return dq, (dk, dv)
        dq, dlatent = self.give_back(dq, pair[0], kv=1)
        share = pair[1].new_zeros((self._counts[0], *pair[1].shape[1:]))
        share[self.queries] = pair[1]
        return dq, (dlatent, share)

    def collect_each(self, *tensors: Tensor, kv: int = 0) -> list[Tensor]:
        """:meth:`collect` of tensors, of which the last ``kv`` have the layout of k."""
        kinds = [0] * (len(tensors) - kv) + [1] * kv
        outgoing = [[x[:, share] for share in self._heads[kind]] for x, kind in zip(tensors, kinds, strict=True)]
        shapes = [
            [(rows.total, *parts[self._member].shape[1:]) for rows in self._tokens[kind].members]
            for parts, kind in zip(outgoing, kinds, strict=True)
        ]
        results = []
        for kind, parts in zip(kinds, self._swap(outgoing, shapes), strict=True):
            results.append(parts[0].new_empty((self._tokens[kind].rows, *parts[0].shape[1:])))
            for part, rows in zip(parts, self._tokens[kind].members, strict=True):
                copy_rows(results[-1], part, rows)
        return results

    def _swap(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Sends ``outgoing``, and gives the parts of ``shapes`` that arrive: all by tensor, then by member."""
        sends, recvs, arriving = [], [], []
        for parts, wanted in zip(outgoing, shapes, strict=True):
            here = [
                part.contiguous() if peer == self._member else part.new_empty(shape)
                for peer, (part, shape) in enumerate(zip(parts, wanted, strict=True))
            ]
            peers = [peer for peer in range(len(parts)) if peer != self._member]
            sends += [(parts[peer].contiguous(), peer) for peer in peers]
            recvs += [(here[peer], peer) for peer in peers]
            arriving.append(here)
        self._inner.exchange(sends, recvs)
        return arriving


@dataclass(frozen=True, slots=True)
class LatentDims:
    """The dimensions of MLA that its tensors do not tell."""

    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Call:
    """The settings that forward and backward share. ``comm`` is None for a group of one."""

    q_layout: Layout
    kv_layout: Layout
    band: Band
    comm: Communicator | None
    backend: Backend
    score: Score
    gather: bool = False
    """Whether all KV is fetched at once instead of being passed round the ring."""
    head_group: int = 1
    """Number of neighbours that exchange heads (Ulysses); the ring or the gather runs between such groups."""
    latent: LatentDims | None = None
    """Where keys and values travel as the latent of MLA: their two tensors are then the latent and the weight."""


def _route(call: Call, heads: tuple[int, int]) -> tuple[Route[Any], HeadExchange | None]:
    """This rank's part in the ring or the gather of a call, which runs after heads were exchanged, if they are;
    ``heads``: of q and of k."""
    layouts, comm, exchange = (call.q_layout, call.kv_layout), call.comm, None
    if call.head_group > 1:
        assert comm is not None
        exchange = HeadExchange(comm, call.head_group, layouts, heads, latent=call.latent is not None)
        layouts = grouped_layout(layouts[0], call.head_group), grouped_layout(layouts[1], call.head_group)
        comm = exchange.outer
    make = gather_plan if call.gather else ring_plan
    plan = make(*layouts, call.band, rank=0 if comm is None else comm.rank)
    return Route(plan, comm, call.backend, call.score), exchange


def _payload(call: Call, kv: _Pair) -> Payload:
    if call.latent is None:
        return Payload(*kv)
    return Latent(*kv, rope_dim=call.latent.rope_dim, v_dim=call.latent.v_dim)


def forward(q: Tensor, kv: _Pair, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out in the type of ``q``, lse in float32 (float64), what :func:`backward` needs). Collective over the call's
    ranks.

    ``kv``: k and v; or the latent [rows, 1, width] and the weight [heads, nope_dim + v_dim, rank] of MLA.
    """
    route, exchange = _route(call, (q.shape[1], kv[0].shape[1]))
    if exchange is not None:
        (q,), kv = exchange.collect((q,), kv)
        sinks = None if sinks is None else sinks[exchange.queries]
    run = gather_forward if call.gather else ring_forward
    result = run(q, _payload(call, kv), route)
    if sinks is not None:
        with_sink = torch.logaddexp(result.lse, sinks.to(result.lse.dtype))  # one more key per head, of the value 0
        result.widen().mul_(torch.exp(result.lse - with_sink)[..., None])
        result.lse.copy_(with_sink)
    out, lse = result.out.to(q.dtype), result.lse
    saved = [q, *kv, out, lse]
    if exchange is not None:
        out, lse = exchange.give_back(out, lse)
    return out, lse, saved


def as_saved(kv: _Pair, call: Call, shapes: tuple[int, int]) -> _Pair:
    """The tensors of keys and values as :func:`backward` needs them, from the call's inputs. Collective over its ranks
    if they exchange heads; ``shapes``: heads of q and of k."""
    _, exchange = _route(call, shapes)
    return kv if exchange is None else exchange.collect((), kv)[1]


def retrace(q: Tensor, kv: _Pair, out: Tensor, lse: Tensor, call: Call) -> list[Tensor]:
    """The tensors that :func:`backward` needs, from a call's inputs and outputs; for callers that kept only these."""
    _, exchange = _route(call, (q.shape[1], kv[0].shape[1]))
    if exchange is not None:
        (q, out, lse), kv = exchange.collect((q, out, lse), kv)
    return [q, *kv, out, lse]


def backward(
    dout: Tensor, saved: list[Tensor], sinks: Tensor | None, call: Call, shapes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, gradients of the two tensors of ``kv``, dsinks), in float32 (float64) where they are sums; ``shapes``: heads
    of q and of k. Collective over the call's ranks.

    dsinks, and the gradient of the weight of MLA, is the share of this rank; the sum over the ranks is the gradient.
    """
    route, exchange = _route(call, shapes)
    q, first, second, out, lse = saved
    if exchange is not None:
        (dout,) = exchange.collect_each(dout)
    run = gather_backward if call.gather else ring_backward
    dq, *pair = run(dout, q, _payload(call, (first, second)), out, lse, route)
    dsinks = None
    if sinks is not None:
        mine = slice(None) if exchange is None else exchange.queries
        dsinks = torch.zeros_like(sinks, dtype=lse.dtype)
        weight = torch.exp(sinks[mine].to(lse.dtype) - lse)
        dsinks[mine] = -(weight * (dout.to(lse.dtype) * out).sum(-1)).sum(0, dtype=torch.float64).to(lse.dtype)
    dfirst, dsecond = pair
    if exchange is not None:
        dq, (dfirst, dsecond) = exchange.give_back_grads(dq, (dfirst, dsecond))
    return dq, dfirst, dsecond, dsinks

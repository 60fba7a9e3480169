"""Top-k mixtures of experts, of which the ranks of a group hold some each (:class:`ExpertGroup`).

Each token goes to its ``top_k`` experts wherever they are, and no token is dropped: an all-to-all of how many rows go
to each expert, one of the rows, the experts, and one of their results back (GShard, arXiv 2006.16668, section 3.2,
without its limit of tokens to an expert). Backward is the same way with gradients.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from hdpcomm.attention.slices import Again, Recomputation, innermost_checkpoint
from hdpcomm.comm import Communicator
from hdpcomm.kernels.transfers import HostNumbers, to_device, without_second_derivative
from hdpcomm.models.tensor_group import TensorShard

__all__ = [
    *("ExpertGroup", "ExpertLoad", "ExpertPlacement", "Routing", "RunExperts", "chosen_before"),
    *("counts_of", "equal_shares", "kept_routing", "mixture", "place_replicas", "routing_before"),
]


def place_replicas(rows: Sequence[float], ranks: int, replicas: int) -> list[list[int]]:
    """The experts of which each rank gets a copy beside its own, so that the busiest rank has fewer rows. Local.

    One after the other goes to the expert whose copies have the most rows, on the rank with the fewest; the last ones
    are left out where the busiest rank has no fewer rows for them.

    Args:
        rows: for each expert, as expected; rank r of n has the experts from ``r x experts / n`` on. Copies of an expert
            share its rows equally.
        replicas: the most copies on a rank.
    """
    size = len(rows) // ranks
    held = [set(range(rank * size, rank * size + size)) for rank in range(ranks)]
    loads = [float(sum(rows[rank * size : rank * size + size])) for rank in range(ranks)]
    copies = [1] * len(rows)
    heap = [(-float(count), expert) for expert, count in enumerate(rows)]
    heapq.heapify(heap)
    placed: list[tuple[int, int]] = []
    least, kept = max(loads), 0
    while heap and len(placed) < replicas * ranks:
        before, expert = heapq.heappop(heap)
        free = [rank for rank in range(ranks) if len(held[rank]) < size + replicas and expert not in held[rank]]
        if not free:
            continue
        rank = min(free, key=loads.__getitem__)
        copies[expert] += 1
        share = rows[expert] / copies[expert]
        for other in range(ranks):
            if expert in held[other]:
                loads[other] += share + before
        held[rank].add(expert)
        loads[rank] += share
        placed.append((expert, rank))
        heapq.heappush(heap, (-share, expert))
        if max(loads) < least * (1 - 1e-9):  # else by rounding only
            least, kept = max(loads), len(placed)
    return [sorted(expert for expert, place in placed[:kept] if place == rank) for rank in range(ranks)]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """The replicas of a layer's experts on the ranks of a group, as one of them needs them.

    A rank has equally many places as each other: those of its own experts, and then those of replicas, the last of
    which may be empty.

    Attributes:
        expert_of: int64 ``[ranks x places]``, the expert at each place; any at an empty one.
        places_of: int64 ``[experts, most copies]``, the places of an expert's copies.
        copies: int64 ``[experts]``, how many those are.
        sent: which of this rank's own experts others have replicas of, those of rank 0 first.
        sends, gets: replicas for each rank and from each.
    """

    expert_of: Tensor
    places_of: Tensor
    copies: Tensor
    sent: tuple[int, ...]
    sends: tuple[int, ...]
    gets: tuple[int, ...]

    @classmethod
    def of(cls, held: Sequence[Sequence[int]], experts: int, rank: int, device: torch.device) -> ExpertPlacement:
        """From the replicas of each rank, in order, as :func:`place_replicas` gives them, for ``rank``."""
        size = experts // len(held)
        width = size + max(map(len, held))
        at: list[list[int]] = [[] for _ in range(experts)]
        expert_of = torch.zeros(len(held), width, dtype=torch.int64)
        for place, others in enumerate(held):
            here = [*range(place * size, place * size + size), *others]
            expert_of[place, : len(here)] = torch.tensor(here)
            for number, expert in enumerate(here):
                at[expert].append(place * width + number)
        most = max(map(len, at))
        places_of = torch.tensor([(places * most)[:most] for places in at])
        sent = [[expert % size for expert in others if expert // size == rank] for others in held]
        owners = [expert // size for expert in held[rank]]
        return cls(
            to_device(expert_of.flatten(), device),
            to_device(places_of, device),
            to_device(torch.tensor([len(places) for places in at]), device),
            tuple(expert for others in sent for expert in others),
            tuple(map(len, sent)),
            tuple(owners.count(owner) for owner in range(len(held))),
        )

    def spread(self, chosen: Tensor, rank: int) -> Tensor:
        """The places of rows ``[tokens, top_k]`` in place of their experts: rows of an expert go to its copies in turn,
        in the order of tokens. Local."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        in_order = flat[order]
        firsts = torch.searchsorted(in_order, torch.arange(self.copies.shape[0], device=flat.device))
        number = torch.empty_like(order)
        number[order] = torch.arange(order.shape[0], device=flat.device) - firsts[in_order]
        # From another copy on, on each rank: else the first ones would get what is left over of all ranks.
        return self.places_of[flat, (number + rank) % self.copies[flat]].view_as(chosen)


def equal_shares(count: int, parts: int) -> list[int]:
    """How many of ``count`` rows each of the parts gets that are as equal as can be. Local."""
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The rows of one pass through a layer with experts.

    Attributes:
        chosen: ``[tokens, top_k]``, the experts of each token, or with replicas their places; integers of any size.
        experts: of the layer, or places.
        sizes: without a group the rows for each expert. With one, three lists one after the other: rows for each rank,
            rows from each rank, and rows of each expert on this rank.
        received: with a group, int64 ``[ranks x own experts]``: rows from each rank for each expert on this rank.
        placement: of replicas, if there are any.
    """

    chosen: Tensor
    experts: int
    sizes: HostNumbers
    received: Tensor | None = None
    placement: ExpertPlacement | None = None


def kept_routing(routing: Routing) -> Routing:
    """Returns the routing; inside a block that will be recomputed it is kept, with experts as small numbers. Local.

    Recomputation takes it over. So it sends each token to the experts that it was sent to, also where kernels that do
    not repeat their bits would choose other ones, and nobody asks for counts again.
    """
    place = innermost_checkpoint()
    if isinstance(place, Recomputation):
        small = next(t for t in (torch.uint8, torch.int16, torch.int64) if routing.experts <= torch.iinfo(t).max + 1)
        place.notes.append(replace(routing, chosen=routing.chosen.to(small)))
    return routing


def routing_before() -> Routing | None:
    """In recomputation, the routing of the next layer with experts in the block. Local."""
    place = innermost_checkpoint()
    if (found := _next_routing(place)) is not None:
        cast(Again, place).next += 1
    return found


def chosen_before() -> Tensor | None:
    """In recomputation, the experts ``[tokens, top_k]`` int64 that :func:`routing_before` is about to give. Local."""
    found = _next_routing(innermost_checkpoint())
    if found is None or found.placement is None:
        return None if found is None else found.chosen.long()
    return found.placement.expert_of[found.chosen.long()]


def _next_routing(place: Recomputation | Again | None) -> Routing | None:
    if not isinstance(place, Again) or place.next >= len(place.recomputation.notes):
        return None
    found: Routing = place.recomputation.notes[place.next]
    return found


RunExperts = Callable[[Tensor, Tensor, Callable[[], Sequence[int]], Sequence[Tensor]], Tensor]
"""``run(rows, experts, counts, replicas)``: the results ``[rows, width]`` of the experts on this rank for ``rows``,
which are sorted by expert. ``experts``: ``[rows]`` int64, each row's expert among those on this rank; ``counts()``:
rows of each of these, for which the host may wait; ``replicas``: in place of the layer's parameters, if there are any.
"""


class ExpertLoad:
    """Rows that went to the experts of a layer since :meth:`reset`; those of recomputation do not count.

    Attributes:
        routed: int64 ``[experts]``, rows that this rank has sent to each expert.
        computed: int64 ``[experts]``, rows that each expert of this rank has got; 0 for the experts of others.
        counts: whether passes count; not where they will run again.
        group: the ranks that share the experts, whose exchange counts the rows; ``None``: the layer does.
        bias: of the layer's router, moved by these loads; see :func:`hdpcomm.models.balance_routers`.
        placement: of replicas, by the loads of the steps before; ``None``: there are none.
        passes: with a group, for each pass int64 ``[2, ranks]``, rows that this rank would have sent to the ranks
            without replicas, and has sent; ``None`` before the first :meth:`reset`.
    """

    def __init__(self, experts: int) -> None:
        self.counts, self.bias = True, cast(Any, None)
        self.group: ExpertGroup | None = None
        self.placement: ExpertPlacement | None = None
        self.passes: list[Tensor] | None = None
        self._expected = torch.zeros(experts, dtype=torch.int64, device="cpu")
        self.routed = torch.zeros(experts, dtype=torch.int64, device="cpu")  # also of a model on meta
        self.computed = torch.zeros_like(self.routed)

    def reset(self) -> None:
        """Counts from 0 again."""
        self.routed.zero_()
        self.computed.zero_()
        self.passes = []

    def forget(self) -> None:
        """Forgets the loads of the steps before, and the replicas that they have chosen."""
        self.placement = None
        self._expected.zero_()

    @property
    def follows_rows(self) -> bool:
        """Whether steps change the layer's bias or replicas by the rows of its experts."""
        return self.bias is not None or (self.group is not None and self.group.replicas > 0)

    def place(self, rows: Tensor) -> None:
        """Chooses the replicas of the next step, if the group has places for some. Local, the same on all ranks.

        Args:
            rows: int64 ``[experts]`` on the CPU, rows of each expert in this step; earlier ones count half a step each.
        """
        if self.group is None or not self.group.replicas:
            return
        comm, self._expected = self.group.comm, rows + self._expected // 2
        held = place_replicas(self._expected.tolist(), comm.size, self.group.replicas)
        self.placement = ExpertPlacement.of(held, rows.shape[0], comm.rank, self.routed.device) if any(held) else None

    def add(self, routed: Tensor, computed: Tensor, first: int) -> None:
        """``routed``, ``computed``: of experts, or of places with replicas; ``computed``: from number ``first`` on."""
        if not self.counts or torch._C._current_graph_task_id() != -1:  # inside a backward pass: recomputation
            return
        if self.routed.device != routed.device:
            self.routed, self.computed = self.routed.to(routed.device), self.computed.to(routed.device)
        by_expert = routed
        if self.placement is not None:
            expert = self.placement.expert_of
            by_expert = torch.zeros_like(self.routed).index_add_(0, expert, routed)
            self.computed.index_add_(0, expert[first : first + computed.shape[0]], computed)
        else:
            self.computed[first : first + computed.shape[0]] += computed
        self.routed += by_expert
        if self.passes is not None and self.group is not None:
            ranks = self.group.comm.size
            self.passes.append(torch.stack([rows.view(ranks, -1).sum(1) for rows in (by_expert, routed)]))


@dataclass(slots=True, eq=False)
class ExpertGroup:
    """The ranks that hold the experts of each layer together, an equal number of neighbouring ones each.

    Attributes:
        comm: those ranks. Every pass through a layer is collective over it, forward and backward: a rank without tokens
            takes part with none.
        replicas: the most copies of others' experts on each rank and layer.
        shards: by the parameter's name in the model that was given to :func:`hdpcomm.parallel.expert_parallel`.
        listeners: called in a backward pass when a layer's rows have gone to other ranks, and come, for the last time.
    """

    comm: Communicator
    replicas: int = 0
    shards: dict[str, TensorShard] = field(default_factory=dict)
    listeners: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)

    def route(self, chosen: Tensor, counts: Tensor, load: ExpertLoad) -> Routing:
        """Tells the ranks how many rows they will get. Collective over ``comm``; the host does not wait on a GPU.

        Args:
            chosen: int64 ``[tokens, top_k]``: experts, or places where there are replicas.
            counts: int64 ``[experts]``, this rank's rows for each.
            load: counts the rows.
        """
        size, experts = self.comm.size, counts.shape[0]
        local = experts // size
        received = torch.empty_like(counts)
        self.comm.all_to_all(received, counts)
        table = received.view(size, local)  # [source, own expert]
        load.add(counts, table.sum(0), self.comm.rank * local)
        sizes = torch.cat((counts.view(size, local).sum(1), table.sum(1), table.sum(0)))
        to_each = equal_shares(chosen.numel(), size)
        from_each = [to_each[self.comm.rank]] * size
        even = [*to_each, *from_each, *equal_shares(sum(from_each), local)]
        return Routing(chosen, experts, HostNumbers(sizes, even), received, load.placement)

    def run(self, rows: Tensor, routing: Routing, experts: RunExperts, weights: Sequence[Tensor]) -> Tensor:
        """The results ``[rows, width]`` of the experts of all ranks. Collective over ``comm``, forward and backward.

        Args:
            rows: ``[rows, width]``, sorted by expert.
            routing: of :meth:`route`. Its sizes are waited for here, once for all passes that use it.
            weights: the layer's parameters, of which replicas are made.
        """
        size = self.comm.size
        sizes = routing.sizes.get()
        sends, gets, own = sizes[:size], sizes[size : 2 * size], sizes[2 * size :]
        arrived, *replicas = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows, self, sends, gets, True, routing.placement, *(() if routing.placement is None else weights)
        )
        expert = torch.arange(len(own), device=rows.device).repeat(size)
        expert = expert.repeat_interleave(cast(Tensor, routing.received), output_size=arrived.shape[0])
        order = expert.argsort(stable=True)
        made = _run_in_order(arrived.index_select(0, order), expert[order], own, experts, weights, replicas)
        results: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            made.index_select(0, _inverse(order)), self, gets, sends, False, None
        )[0]
        return results


def _run_in_order(
    rows: Tensor,
    expert: Tensor,
    counts: Sequence[int],
    experts: RunExperts,
    weights: Sequence[Tensor],
    replicas: Sequence[Tensor],
) -> Tensor:
    """Results of a rank's own experts, and of its replicas behind them."""
    if not replicas:
        return experts(rows, expert, lambda: counts, ())
    size = weights[0].shape[0]
    own, ends = sum(counts[:size]), size + replicas[0].shape[0]
    made = experts(rows[:own], expert[:own], lambda: counts[:size], ())
    if own == rows.shape[0]:
        return made
    return torch.cat((made, experts(rows[own:], expert[own:] - size, lambda: counts[size:ends], replicas)))


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: RunExperts,
    load: ExpertLoad,
    group: ExpertGroup | None = None,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """The sum of the results of each token's experts, times their weights: ``[tokens, width]``, as ``x``.

    Local without a group; with one, collective over its ranks in forward and in backward. The host waits once for
    counts of the device, without a group only where the experts ask for them: not in backward passes, nor in
    recomputation (:func:`kept_routing`), which takes the experts of the forward pass in place of ``chosen``.

    Args:
        x: ``[tokens, width]``; may be empty.
        chosen: int64 ``[tokens, top_k]``, the numbers of each token's experts.
        weights: ``[tokens, top_k]``.
        load: counts the rows of each expert; its size is the number of experts.
        group: the ranks that share the experts; ``None``: all are on this one.
        parameters: of this rank's experts, ``[experts, ...]`` each.
    """
    routing = routing_before()
    if routing is None:
        routing = kept_routing(_route(chosen, load, group))
    flat = routing.chosen.flatten().long()
    order = flat.argsort(stable=True)
    places = _inverse(order)
    # Issued before the host waits for the counts, so that the device has something to do.
    rows: Tensor = _Spread.apply(x, order, places, chosen.shape[1])  # type: ignore[no-untyped-call]
    if group is None:
        made = experts(rows, flat[order], routing.sizes.get, ())
    else:
        made = group.run(rows, routing, experts, parameters)
    each = made.index_select(0, places).view(*chosen.shape, made.shape[-1])
    return (each * weights[..., None]).sum(1).to(x.dtype)


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """How many rows go to each expert of a layer: int64 ``[experts]``. Local."""
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


def _route(chosen: Tensor, load: ExpertLoad, group: ExpertGroup | None) -> Routing:
    experts = load.routed.shape[0]
    if group is not None and load.placement is not None:
        chosen, experts = load.placement.spread(chosen, group.comm.rank), load.placement.expert_of.shape[0]
    counts = counts_of(chosen, experts)
    if group is not None:
        return group.route(chosen, counts, load)
    load.add(counts, counts, 0)
    return Routing(chosen, counts.shape[0], HostNumbers(counts, equal_shares(chosen.numel(), counts.shape[0])))


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places


class _Spread(torch.autograd.Function):
    """The row of each (token, choice), in an order; backward adds the gradients of a token's choices in theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        gradient = upstream[0].index_select(0, places)
        return gradient.view(-1, ctx.top_k, gradient.shape[-1]).sum(1), None, None, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks and from them; ``sends`` and ``gets`` say how many for each and from each.

    The layer's first exchange, which has its parameters where there are replicas, brings those of the replicas, too. It
    is the last one of the backward pass, and one node, so that all ranks exchange gradients in one order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: ExpertGroup,
        sends: Sequence[int],
        gets: Sequence[int],
        first: bool,
        placement: ExpertPlacement | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sends, ctx.gets, ctx.first, ctx.placement = group, sends, gets, first, placement
        ctx.shapes = [each.shape for each in weights]
        arrived = _exchanged(rows, group.comm, sends, gets)
        if placement is None:
            return (arrived,)
        sent = to_device(torch.tensor(placement.sent, dtype=torch.int64), rows.device)
        replicas = [
            _exchanged(each.index_select(0, sent), group.comm, placement.sends, placement.gets) for each in weights
        ]
        needed = ctx.needs_input_grad[6:]
        ctx.mark_non_differentiable(*(each for each, trained in zip(replicas, needed, strict=True) if not trained))
        return arrived, *replicas

    @staticmethod
    @without_second_derivative
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        comm = ctx.group.comm
        arrived = _exchanged(upstream[0], comm, ctx.gets, ctx.sends)
        own: list[Tensor | None] = [None] * len(ctx.shapes)
        for number, shape in enumerate(ctx.shapes):
            if ctx.needs_input_grad[6 + number]:
                gradients = _exchanged(upstream[1 + number], comm, ctx.placement.gets, ctx.placement.sends)
                if gradients.shape[0]:
                    own[number] = gradients.new_zeros(shape)
                for expert, gradient in zip(ctx.placement.sent, gradients, strict=True):  # one order on any device
                    own[number][expert] += gradient  # type: ignore[index]
        for listener in ctx.group.listeners if ctx.first else ():
            if (method := listener()) is not None:
                method()
        return arrived, None, None, None, None, None, *own


def _exchanged(rows: Tensor, comm: Communicator, sends: Sequence[int], gets: Sequence[int]) -> Tensor:
    """Rows ``[rows, ...]``, or weights of experts."""
    width = rows.shape[1:].numel()
    arrived = rows.new_empty(sum(gets), *rows.shape[1:])
    comm.all_to_all(arrived, rows.contiguous(), [n * width for n in gets], [n * width for n in sends])
    return arrived

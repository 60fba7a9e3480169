"""How states travel from rank to rank, so that each run starts where the run before it ended.

A run of tokens is one affine map of states, final = transition * initial + bias. The runs of a sequence form a chain,
head runs of ranks 0 .. N-1, then tail runs back to rank 0. Three ways to give each run its initial state:

- ``gather``: each rank sums its runs up as maps, one all-gather brings all 2N to every rank, and each folds those
  before its own. Two passes over the chunks, no waiting for others' passes.
- ``scan``: the same maps, but states go from rank to rank along the chain, one product each. The fewest bytes together
  with ``pipeline``, 2N - 2 messages one after the other.
- ``pipeline``: no maps. The states of a few heads go on as soon as their run was computed, while the next heads are.
  Nothing is computed twice.

The backward is the mirror image: the gradients of states travel along the chain reversed, with transposed transitions.
Bytes depend on heads and dimensions, never on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hdpcomm.attention.variants import AttentionCosts
from hdpcomm.errors import InvalidUsage

if TYPE_CHECKING:
    from hdpcomm.comm import Communicator

__all__ = ["EXCHANGES", "Pass", "apply_map", "choose_exchange", "num_groups", "travel"]

EXCHANGES = ("auto", "gather", "scan", "pipeline")
_MAX_GROUPS = 8
"""Most groups of heads of a pipeline."""

Map = tuple[torch.Tensor, torch.Tensor]


class Pass(Protocol):
    """This rank's runs for some heads, in the direction of travel: one run of each sequence in each of ``parts``."""

    transition_shape: tuple[int, int]
    """(dk, dk), or (1, 1) or (dk, 1) for a factor of rows."""

    def zero(self) -> torch.Tensor:
        """States [sequences, heads, dk, dv] of zeros."""

    def prepare(self, part: int) -> None:
        """Does what needs no state; may be left out."""

    def run(self, part: int, state: torch.Tensor) -> torch.Tensor:
        """Takes the runs from ``state``; returns the state after them."""

    def finish(self, part: int) -> None:
        """Does what remains after :meth:`run`, and frees what the part needed."""

    def summary(self, part: int) -> Map:
        """(transition, bias) of the runs; does not need their initial state."""


def apply_map(found: Map, state: torch.Tensor) -> torch.Tensor:
    """transition * state + bias; the transition is a matrix [.., dk, dk], or a factor of rows [.., 1 or dk, 1]."""
    transition, bias = found
    if transition.shape[-1] == state.shape[-2] and transition.shape[-1] > 1:
        return torch.matmul(transition, state) + bias
    return transition * state + bias


def _stops(comm: Communicator) -> list[tuple[int | None, int | None]]:
    """(where the state comes from, where it goes) for each part, in the direction of travel.

    The same forward and backward, since the chain leads from rank 0 to N-1 and back.
    """
    rank, last = comm.rank, comm.size - 1
    before = rank - 1 if rank else None
    if rank == last:
        return [(before, before)]
    return [(before, rank + 1), (rank + 1, before)]


def travel(passes: Sequence[Pass], comm: Communicator | None, exchange: str) -> None:
    """Runs every part of ``passes`` (groups of heads; one unless the exchange is a pipeline) from its initial state.

    Collective over ``comm`` (None: a group of one).
    """
    if comm is None:
        for each in passes:
            each.run(0, each.zero())
            each.finish(0)
    elif exchange == "pipeline":
        _relay(comm, passes, lambda group, part, state: group.run(part, state), whole=True)
    elif exchange == "scan":
        _scan(comm, passes[0])
    else:
        _gather(comm, passes[0])


def _relay(
    comm: Communicator,
    passes: Sequence[Pass],
    hop: Callable[[Pass, int, torch.Tensor], torch.Tensor | None],
    *,
    whole: bool = False,
) -> None:
    """Carries the states of each group of heads along the chain; ``hop`` gives the state after a part.

    ``whole``: also prepares each part, before its state has come, and finishes it, after the next one was sent.
    """
    sent: list[tuple[Any, torch.Tensor]] = []
    for part, (source, target) in enumerate(_stops(comm)):
        states = [group.zero() for group in passes]
        coming = []
        if source is not None:
            coming = [comm.exchange([], [(state, source)], async_op=True) for state in states]
        for i, group in enumerate(passes):
            if whole:
                group.prepare(part)
            if source is not None:
                coming[i].wait()
            state = hop(group, part, states[i])
            if target is not None:
                assert state is not None
                state = state.contiguous()
                sent.append((comm.exchange([(state, target)], [], async_op=True), state))
            if whole:
                group.finish(part)
    for work, _ in sent:
        work.wait()


def _scan(comm: Communicator, group: Pass) -> None:
    """Sums up all parts with both neighbours at once, then passes states on at the price of one product each."""
    stops = _stops(comm)
    maps = {part: group.summary(part) for part, stop in enumerate(stops) if None not in stop}
    initial: dict[int, torch.Tensor] = {}

    def hop(group: Pass, part: int, state: torch.Tensor) -> torch.Tensor | None:
        source, target = stops[part]
        if source is None:  # where the chain begins, the state is known and its run can be computed at once
            return group.run(part, state)
        initial[part] = state
        return None if target is None else apply_map(maps[part], state)

    _relay(comm, [group], hop)
    for part in range(len(stops)):
        if part in initial:
            group.run(part, initial[part])
        group.finish(part)


def _gather(comm: Communicator, group: Pass) -> None:
    """Brings the maps of all parts to all ranks; each folds those before its own."""
    stops, zero = _stops(comm), group.zero()
    sequences, heads, dk, dv = zero.shape
    wide = group.transition_shape[0] * group.transition_shape[1]
    mine = zero.new_zeros((2, sequences, heads, wide + dk * dv))  # a part that nobody needs stays 0
    for part, (source, target) in enumerate(stops):
        if source is None:  # the state before it is 0, whatever its transition
            mine[part, ..., wide:] = group.run(part, zero).flatten(2)
        elif target is not None:
            transition, bias = group.summary(part)
            mine[part, ..., :wide], mine[part, ..., wide:] = transition.flatten(2), bias.flatten(2)
    everyone = zero.new_empty((comm.size, *mine.shape))
    comm.all_gather(everyone, mine)
    state, last = zero, comm.size - 1
    for place in range(2 * comm.size - 1):
        owner, part = (place, 0) if place <= last else (2 * last - place, 1)
        if owner == comm.rank:
            if stops[part][0] is not None:
                group.run(part, state)
            group.finish(part)
        if owner == comm.rank and part == len(stops) - 1:
            break
        found = everyone[owner, part]
        transition = found[..., :wide].unflatten(2, group.transition_shape)  # type: ignore[no-untyped-call]
        state = apply_map((transition, found[..., wide:].view_as(zero)), state)


def choose_exchange(
    name: str, *, size: int, sequences: int, tokens: int, shape: tuple[int, int, int], delta: bool, device: str,
    costs: AttentionCosts | None,
) -> str:  # fmt: skip
    """The exchange called ``name``, or with "auto" the one with the lowest estimate; alike on all ranks.

    ``tokens``: of the whole pack. ``shape``: heads, dk, dv of a state. ``delta``: whether transitions are matrices.
    Raises InvalidUsage.
    """
    if name not in EXCHANGES:
        raise InvalidUsage(f"exchange={name!r}; expected one of {', '.join(EXCHANGES)}")
    if name != "auto" or size == 1:
        return "gather" if name == "auto" else name
    costs = AttentionCosts.default(device) if costs is None else costs
    heads, dk, dv = shape
    scan_s = 4 * tokens / size * heads * dk * dv / costs.flops_per_s  # two products with the state a token
    twice_s = scan_s * (1 + (dk / dv if delta else 0.0))  # what the maps cost more than the scan
    state = sequences * heads * dk * dv * 4 / costs.bytes_per_s
    transition = sequences * heads * (dk * dk if delta else 1) * 4 / costs.bytes_per_s
    hops, groups = 2 * (size - 1), num_groups(heads, device)
    found = {
        "gather": twice_s + costs.message_s + 2 * (size - 1) * (state + transition),
        "scan": twice_s + hops * (costs.message_s + state),
        "pipeline": scan_s * (1 + (size - 1) / groups) + hops * (costs.message_s + state / groups),
    }
    return min(found, key=lambda exchange: found[exchange])


def num_groups(heads: int, device: str) -> int:
    """Groups of heads of a pipeline. One on CUDA, where a device's messages run in the order of its stream: with
    several, two ranks would each wait for the other to receive."""
    if device == "cuda":
        return 1
    return next(n for n in range(min(_MAX_GROUPS, heads), 0, -1) if heads % n == 0)

"""How states travel from rank to rank, so that each run starts where the run before it ended.

A run of tokens is one affine map of states, final = transition * initial + bias. The runs of a sequence form a chain,
head runs of ranks 0 .. N-1, then tail runs back to rank 0; those of a tree a tree
(:mod:`hdpcomm.attention.linear.state_plan`). Three ways to give each run its initial state:

- ``gather``: each rank sums its carriers up as maps, one all-gather brings all of them to every rank, and each folds
  those before its own runs. Two passes over the carriers' chunks, no waiting for others' passes.
- ``scan``: the same maps, but states go from rank to rank, one product each. The fewest bytes together with
  ``pipeline``; of a chain 2N - 2 messages one after the other.
- ``pipeline``: no maps. The states of a few heads go on as soon as their run was computed, while the next heads are.
  Nothing is computed twice.

The backward is the mirror image: the gradients of states travel the other way, with transposed transitions, and add up
where several runs follow one. Bytes depend on heads and dimensions, never on the number of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdpcomm.attention.engine import AttentionCosts
from hdpcomm.attention.linear.scan import ForestScan, Inputs, PartRuns, Runs, Scan
from hdpcomm.attention.linear.state_plan import Part, StatePlan
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage

__all__ = ["EXCHANGES", "Group", "Map", "apply_map", "choose_exchange", "num_groups", "travel"]

EXCHANGES = ("auto", "gather", "scan", "pipeline")
_MAX_GROUPS = 8
"""Most groups of heads of a pipeline."""

Map = tuple[Tensor, Tensor]


class Group(ABC):
    """The parts of a rank for some heads, in one direction; a part's scan lives from :meth:`prepare` to :meth:`finish`.

    States are [count, heads, dk, dv]. ``states[i]``: the initial states of part i in the forward; ``transitions[i]``:
    of the maps that the forward summed up.
    """

    def __init__(
        self, parts: tuple[PartRuns, ...], inputs: Inputs, initial: Tensor | None, ends: tuple[int | None, int | None]
    ) -> None:
        """``initial``: the states that this direction starts with in a slice, [states of the rank, heads, dk, dv];
        ``ends``: the parts that stand for these and for the final ones."""
        self._parts, self._inputs = parts, inputs
        self._initial, self._ends = None if initial is None else initial.contiguous(), ends
        self._scans: dict[int, Scan | ForestScan] = {}
        dk = inputs.q.shape[2]
        self.transition_shape = (dk, dk) if inputs.beta is not None else (1 if inputs.g.ndim == 2 else dk, 1)
        """Rows and columns: of a matrix, or of a factor of rows."""
        self.final: Tensor | None = None
        """Final states."""
        self.states: list[Tensor | None] = [None] * len(parts)
        self.transitions: list[Tensor | None] = [None] * len(parts)

    def zeros(self, count: int) -> Tensor:
        """So many states."""
        q, v = self._inputs.q, self._inputs.v
        return torch.zeros(count, *q.shape[1:], v.shape[2], dtype=self._inputs.dtype, device=q.device)

    def _make(self, place: int) -> Scan | ForestScan:
        runs = self._parts[place]
        return Scan(runs, self._inputs) if isinstance(runs, Runs) else ForestScan(runs, self._inputs)

    def _carriers(self, place: int) -> Scan:
        self.prepare(place)
        scan = self._scans[place]
        assert not isinstance(scan, ForestScan)  # nothing follows a forest, so that nobody needs its maps
        return scan

    def prepare(self, place: int) -> None:
        """Does what needs no state; may be left out."""
        if place not in self._scans:
            self._scans[place] = self._make(place)

    def run(self, place: int, state: Tensor) -> Tensor:
        """Takes a part's runs from ``state``; returns the states after them."""
        self.prepare(place)
        if place == self._ends[0] and self._initial is not None:
            state = self._initial
        after = self._run(place, state)
        if self._initial is not None and place == self._ends[1]:
            self.final = after
        return after

    @abstractmethod
    def _run(self, place: int, state: Tensor) -> Tensor:
        """:meth:`run` of a part that is prepared."""

    @abstractmethod
    def finish(self, place: int) -> None:
        """Does what remains after :meth:`run`, and frees what the part needed."""

    @abstractmethod
    def summary(self, place: int, count: int) -> Map:
        """(transition, bias) of the ``count`` runs of a part; does not need their initial states."""


def apply_map(affine_map: Map, state: Tensor) -> Tensor:
    """transition * state + bias; the transition is a matrix [.., dk, dk], or a factor of rows [.., 1 or dk, 1]."""
    transition, bias = affine_map
    if transition.shape[-1] == state.shape[-2] and transition.shape[-1] > 1:
        return torch.matmul(transition, state) + bias
    return transition * state + bias


def travel(
    passes: Sequence[Group], comm: Communicator | None, exchange: str, plan: StatePlan, *, backward: bool
) -> None:
    """Runs every part of ``passes`` (groups of heads; one where maps are exchanged) from its initial states.

    Collective over ``comm`` (None: a group of one).
    """
    if exchange == "pipeline" or not plan.messages:
        _relay(comm, passes, plan, lambda group, part, state: group.run(part.place, state), backward, whole=True)
    elif exchange == "scan":
        assert comm is not None
        _scan(comm, passes[0], plan, backward)
    else:
        assert comm is not None
        _gather(comm, passes[0], plan, backward)


def _initial(group: Group, part: Part, slots: Tensor) -> Tensor:
    return part.before.add(group.zeros(part.count), slots)


def _relay(
    comm: Communicator | None,
    passes: Sequence[Group],
    plan: StatePlan,
    hop: Callable[[Group, Part, Tensor], Tensor | None],
    backward: bool,
    *,
    whole: bool = False,
) -> None:
    """Carries the states of each group of heads along; ``hop`` gives those after a part.

    ``whole``: also prepares each part, before its states have come, and finishes it, after the next ones were sent.
    """
    rank = 0 if comm is None else comm.rank
    slots = [group.zeros(plan.slots[rank]) for group in passes]
    coming: list[list[Any]] = [[] for _ in passes]
    sent: list[Any] = []
    for stage in plan.stages(backward=backward):
        part, (sends, recvs) = stage.parts.get(rank), stage.exchanges(rank)
        for i, group in enumerate(passes):
            if part is not None:
                if whole:
                    group.prepare(part.place)
                for work in coming[i]:
                    work.wait()
                coming[i].clear()
                state = hop(group, part, _initial(group, part, slots[i]))
                if len(part.after):
                    assert state is not None
                    part.after.add(slots[i], state)
            if sends or recvs:  # in one call: two ranks may each have states for the other
                assert comm is not None
                messages = ([(slots[i][at], peer) for peer, at in each] for each in (sends, recvs))
                (coming[i] if recvs else sent).append(comm.exchange(*messages, async_op=True))
            if part is not None and whole:
                group.finish(part.place)
    for work in (*sent, *(work for works in coming for work in works)):
        work.wait()


def _scan(comm: Communicator, group: Group, plan: StatePlan, backward: bool) -> None:
    """Sums up all parts between others at once, then passes states on at the price of one product each."""
    parts = [stage.parts[comm.rank] for stage in plan.stages(backward=backward) if comm.rank in stage.parts]
    # Where nothing is before a part, the states are known and it runs at once.
    between = [part for part in parts if len(part.before) and len(part.after)]
    maps = {part.place: group.summary(part.place, part.count) for part in between}
    initial: dict[int, Tensor] = {}

    def hop(group: Group, part: Part, state: Tensor) -> Tensor | None:
        if not len(part.before):
            return group.run(part.place, state)
        initial[part.place] = state
        return apply_map(maps[part.place], state) if len(part.after) else None

    _relay(comm, [group], plan, hop, backward)
    for part in parts:
        if part.place in initial:
            group.run(part.place, initial.pop(part.place))
        group.finish(part.place)


def _gather(comm: Communicator, group: Group, plan: StatePlan, backward: bool) -> None:
    """Brings the maps of all parts that others follow to all ranks; each folds those before its own."""
    stages, rank = plan.stages(backward=backward), comm.rank
    rows: dict[tuple[int, int], slice] = {}
    used = [0] * plan.size
    for stage in stages:
        for owner, part in stage.parts.items():
            if len(part.after):
                rows[owner, part.place] = slice(used[owner], used[owner] + part.count)
                used[owner] += part.count
    one = group.zeros(1)
    wide = group.transition_shape[0] * group.transition_shape[1]
    mine = one.new_zeros((max(used), one.shape[1], wide + one[0, 0].numel()))
    own = [stage.parts[rank] for stage in stages if rank in stage.parts]
    for part in own:
        if not len(part.before):  # the states before it are 0, whatever its transition
            bias = group.run(part.place, group.zeros(part.count))
        elif len(part.after):
            transition, bias = group.summary(part.place, part.count)
            mine[rows[rank, part.place], ..., :wide] = transition.flatten(2)
        if len(part.after):
            mine[rows[rank, part.place], ..., wide:] = bias.flatten(2)
    everyone = one.new_empty((comm.size, *mine.shape))
    comm.all_gather(everyone, mine)
    slots = [group.zeros(count) for count in plan.slots]
    remaining = len(own)
    for stage in stages:
        for owner, part in stage.parts.items():
            state = _initial(group, part, slots[owner])
            if owner == rank:
                if len(part.before):
                    group.run(part.place, state)
                group.finish(part.place)
                remaining -= 1
            if len(part.after):
                carrier_map = everyone[owner, rows[owner, part.place]]
                transition = carrier_map[..., :wide].unflatten(2, group.transition_shape)  # type: ignore[no-untyped-call]
                after = apply_map((transition, carrier_map[..., wide:].view_as(state)), state)
                part.after.add(slots[owner], after)
        if not remaining:
            break
        for m in stage.messages:
            sent = slots[m.source][m.source_slot : m.source_slot + m.count]
            slots[m.target][m.target_slot : m.target_slot + m.count] = sent


def choose_exchange(
    name: str, plan: StatePlan, *, shape: tuple[int, int, int], delta: bool, device: str, costs: AttentionCosts | None
) -> str:
    """The exchange called ``name``, or with "auto" the one with the lowest estimate; alike on all ranks.

    ``shape``: heads, dk, dv of a state. ``delta``: whether transitions are matrices. Raises InvalidUsage.
    """
    if name not in EXCHANGES:
        raise InvalidUsage(f"exchange={name!r}; expected one of {', '.join(EXCHANGES)}")
    if name != "auto" or not plan.messages:
        return "gather" if name == "auto" else name
    costs = AttentionCosts.default(device) if costs is None else costs
    heads, dk, dv = shape
    token_s = 4 * heads * dk * dv / costs.flops_per_s  # two products with the state
    twice_s = token_s * (plan.tokens + plan.carried_tokens * (dk / dv if delta else 0.0))  # maps cost more than a scan
    state = heads * dk * dv * 4 / costs.bytes_per_s
    transition = heads * (dk * dk if delta else 1) * 4 / costs.bytes_per_s
    hops, states, groups = len(plan.hops), sum(plan.hops), num_groups(heads, device)
    seconds = {
        "gather": twice_s + costs.message_s + (plan.size - 1) * plan.carriers * (state + transition),
        "scan": twice_s + hops * costs.message_s + states * state,
        "pipeline": token_s * (plan.tokens + plan.waiting_tokens / groups)
        + hops * costs.message_s
        + states * state / groups,
    }
    return min(seconds, key=lambda exchange: seconds[exchange])


def num_groups(heads: int, device: str) -> int:
    """Groups of heads of a pipeline. One on CUDA, where a device's messages run in the order of its stream: with
    several, two ranks would each wait for the other to receive."""
    if device == "cuda":
        return 1
    return next(n for n in range(min(_MAX_GROUPS, heads), 0, -1) if heads % n == 0)

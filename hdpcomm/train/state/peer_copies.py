"""Copies of what each rank holds in the host memory of other ranks: :class:`PeerCopies`.

Every element of the ranks' state is kept by two ranks, on two hosts where there are two, as it was after each of the
last two steps: by an *owner*, which holds it anyway, and by a *keeper*. Who holds the same elements as the owner is
taken for the keeper before others, and copies its own: with plain data parallelism nothing is sent. What is sent goes
beside the next step.

Counts, for a state of S bytes on n ranks: a rank keeps 2 S / n bytes of each of two steps, copies as many a step, and
sends at most S / n. Source of the idea: in-memory checkpoints, Gemini (SOSP 2023).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hdpcomm.comm import Communicator, Work
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import Error
from hdpcomm.train.state.layout import TensorPart
from hdpcomm.train.state.reshard import (
    Box,
    Cell,
    Parts,
    Reshard,
    boxes_of,
    cells,
    cut_cell,
    describe_shards,
    parse_shards,
)

__all__ = ["KeptStep", "PeerCopies"]

_ALIGNMENT = 8
_END = 2  # int64 after a message's cells: its step and checksum


@dataclass(frozen=True, slots=True)
class _Cell(Cell):
    """A box of a tensor that one rank owns and another one keeps, as positions in the communicator.

    Attributes:
        shape: of the whole tensor.
        held: whether the keeper holds the elements itself.
    """

    shape: tuple[int, ...]
    number: int = -1
    owner: int = -1
    keeper: int = -1
    held: bool = False

    @property
    def room(self) -> int:
        """Bytes with what aligns the next one."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class _Segment:
    """Cells one after the other in host memory, then the step that they are of and their checksum."""

    def __init__(self, cells: Sequence[_Cell]) -> None:
        self.cells = list(cells)
        self.bytes = sum(cell.room for cell in self.cells)
        self.memory = torch.zeros(self.bytes + 8 * _END, dtype=torch.uint8)
        self._end = self.memory[self.bytes :].view(torch.int64)
        self._end[0] = -1

    def views(self) -> Iterator[tuple[_Cell, Tensor]]:
        at = 0
        for cell in self.cells:
            yield cell, self.memory[at : at + cell.nbytes].view(cell.dtype).view(cell.sizes)
            at += cell.room

    def fill(self, live: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]], step: int) -> None:
        self._end[0] = -1
        for cell, view in self.views():
            view.copy_(_elements(live[cell.name], cell))
        self._end[1] = self._sum()
        self._end[0] = step

    def holds(self, step: int) -> bool:
        """Whether the cells are whole and of that step."""
        return int(self._end[0]) == step and int(self._end[1]) == self._sum()

    def _sum(self) -> int:
        return int(self.memory[: self.bytes].view(torch.int64).sum())


@dataclass(slots=True)
class _Slot:
    """Copies of one step on a rank.

    Attributes:
        local: what it copies of its own.
        sent, got: by the other rank, what it owns and that one keeps, and the other way round.
        step: that is kept here, or is being written; -1: none.
        came: whose messages have come.
        notes: what was given beside the tensors.
    """

    local: _Segment
    sent: dict[int, _Segment]
    got: dict[int, _Segment]
    step: int = -1
    came: set[int] = field(default_factory=set)
    notes: Any = None

    def whole(self, step: int) -> Iterator[_Segment]:
        """Segments that are whole and of that step."""
        came = (self.got[peer] for peer in sorted(self.came & self.got.keys()))
        yield from (each for each in (self.local, *self.sent.values(), *came) if each.holds(step))


class PeerCopies:
    """The newest two states of a group of ranks, each element in the memory of two of them.

    Making it is collective over ``comm``; no memory but that of the copies is taken, and it is taken now.

    Args:
        live: what this rank holds, by name: whole tensors, or a :class:`~hdpcomm.train.state.layout.TensorPart` of
            some boxes, as ``Trainer.live_state()`` gives them.
        comm: the ranks.

    Attributes:
        nbytes: host memory on this rank.
        bytes_sent: by this rank a step.
        step: whose state was given last; -1: none.

    Example: ``hdpcomm.run.peer_saves``, which a run with ``--elastic`` uses.
    """

    def __init__(self, live: Parts, comm: Communicator) -> None:
        world = nodes_of(comm)
        self._comm = comm
        plan = _plan(gather_json(comm, describe_shards(live)), [world[rank] for rank in comm.ranks])
        self._cells = len(plan)
        rank = comm.rank
        self._slots = [_slot(plan, rank) for _ in range(2)]
        slot = self._slots[0]
        own = (slot.local, *slot.sent.values(), *slot.got.values())
        self.nbytes = 2 * sum(each.memory.numel() for each in own)
        self.bytes_sent = sum(each.memory.numel() for each in slot.sent.values())
        self.step = -1
        self._under_way: list[tuple[int, Work]] = []

    @torch.no_grad()
    def take(self, step: int, live: Parts, notes: Any) -> None:
        """Copies the state after ``step`` steps; its messages go on beside what follows. Collective over ``comm``.

        On return the state that was given before is in the memory of all ranks that keep it.

        Args:
            live: as before, with the values of now.
            notes: JSON that this rank keeps beside the tensors.

        Raises: PeerLost or another error of communication; what was complete before still is.
        """
        failed = self._finish()
        if failed is not None:
            raise failed
        self._comm.barrier()  # the older slot is of no use to anyone from here on
        slot = min(self._slots, key=lambda each: each.step)
        slot.came.clear()
        slot.step, slot.notes = step, notes
        boxes = {name: boxes_of(part) for name, part in live.items()}
        for each in (slot.local, *slot.sent.values()):
            each.fill(boxes, step)
        self.step = step
        for peer in sorted({*slot.sent, *slot.got}):
            sends = [(slot.sent[peer].memory, peer)] if peer in slot.sent else []
            recvs = [(slot.got[peer].memory, peer)] if peer in slot.got else []
            self._under_way.append((peer, self._comm.exchange(sends, recvs, async_op=True)))

    def finish(self) -> None:
        """Waits until the messages of the last state have come. Raises: as :meth:`take`."""
        if (failed := self._finish()) is not None:
            raise failed

    def _finish(self) -> Error | None:
        """Waits for all messages; the first error of those that did not come."""
        failed: Error | None = None
        slot = max(self._slots, key=lambda each: each.step)
        for peer, work in self._under_way:
            try:
                work.wait()
            except Error as error:
                failed = failed or error
            else:
                slot.came.add(peer)
        self._under_way = []
        return failed

    @classmethod
    def newest(cls, copies: PeerCopies | None, living: Communicator) -> KeptStep | None:
        """The newest state of which the ranks that live hold all elements; ``None``: of none.

        Collective over ``living``, which ``shrink()`` gave; ``copies`` is ``None`` on a rank that has none, as it has
        come since.
        """
        steps = []
        if copies is not None:
            copies._finish()
            steps = [slot.step for slot in copies._slots if slot.step >= 0]
        told = gather_json(living, steps)
        for step in sorted({each for own in told for each in own}, reverse=True):
            slots = () if copies is None else copies._slots
            slot = next((each for each in slots if each.step == step), None)
            whole = [] if slot is None else list(slot.whole(step))
            parts = _parts_of(whole)
            numbers = sorted(cell.number for each in whole for cell in each.cells)
            everyone = gather_json(living, [None if copies is None else copies._cells, numbers])
            there = {number for _, found in everyone for number in found}
            if len(there) in {count for count, _ in everyone if count is not None}:
                return KeptStep(step, gather_json(living, None if slot is None else slot.notes), parts)
        return None


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A state that the living ranks hold together.

    Attributes:
        step: steps that had been done.
        notes: of each living rank, by its position; ``None`` of those that had no part in it.
        parts: what this rank has of it, by name.
    """

    step: int
    notes: Sequence[Any]
    parts: Mapping[str, TensorPart]

    @torch.no_grad()
    def load_into(self, target: Parts, living: Communicator) -> None:
        """Writes into tensors, or parts, on any mesh of any of the ranks. Collective over ``living``; a rank that wants
        nothing gives none. Raises: InvalidUsage, on all ranks: it has no such tensor. PeerLost."""
        Reshard(self.parts, target, living).run()


def _parts_of(segments: Iterable[_Segment]) -> dict[str, TensorPart]:
    boxes: dict[str, list[tuple[tuple[int, ...], Tensor]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for segment in segments:
        for cell, view in segment.views():
            boxes[cell.name].append((cell.first, view))
            shapes[cell.name] = cell.shape
    return {name: TensorPart(shapes[name], found) for name, found in boxes.items()}


def _elements(boxes: Sequence[tuple[tuple[int, ...], Tensor]], cell: _Cell) -> Tensor:
    """The cell's elements in the box of this rank that has them."""
    for offsets, tensor in boxes:
        ends = [o + n for o, n in zip(offsets, tensor.shape, strict=True)]
        if all(o <= a and b <= end for o, a, b, end in zip(offsets, cell.first, cell.last, ends, strict=True)):
            return cell.within(offsets, tensor)
    raise AssertionError(f"{cell} is in none of this rank's boxes")


def _slot(plan: Sequence[_Cell], rank: int) -> _Slot:
    local: list[_Cell] = []
    sent: dict[int, list[_Cell]] = defaultdict(list)
    got: dict[int, list[_Cell]] = defaultdict(list)
    for cell in plan:
        if (cell.held and rank in (cell.owner, cell.keeper)) or cell.owner == cell.keeper == rank:
            local.append(cell)
        elif cell.owner == rank:
            sent[cell.keeper].append(cell)
        elif cell.keeper == rank:
            got[cell.owner].append(cell)

    def segments(side: Mapping[int, Sequence[_Cell]]) -> dict[int, _Segment]:
        return {peer: _Segment(each) for peer, each in side.items()}

    return _Slot(_Segment(local), segments(sent), segments(got))


def _plan(told: Sequence[Mapping[str, Any]], hosts: Sequence[int]) -> list[_Cell]:
    """Who owns and who keeps each element, the same on all ranks: the largest first, to who has least so far."""
    found: list[tuple[_Cell, list[int]]] = []
    there: dict[str, list[Box]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, parts in enumerate(told):
        parse_shards(rank, parts, shapes, there)
    total = sum(math.prod(shapes[name]) * boxes[0].dtype.itemsize for name, boxes in there.items() if boxes)
    most = max(1, total // (8 * len(hosts)))
    for name, boxes in sorted(there.items()):
        for first, last in cells(boxes, []) if boxes else ():
            holders = sorted({box.rank for box in boxes if box.holds(first, last)})
            if holders:
                whole = _Cell(name, first, last, boxes[0].dtype, shapes[name])
                found += [(cell, holders) for cell in cut_cell(whole, most)]
    loads = [0] * len(hosts)
    done: list[_Cell] = []
    for cell, holders in sorted(found, key=lambda each: (-each[0].nbytes, each[0].name, each[0].first)):
        owner = min(holders, key=lambda rank: (loads[rank], rank))
        loads[owner] += cell.nbytes

        def cost(rank: int, owner: int = owner, holders: Sequence[int] = holders) -> tuple[bool, bool, int, int]:
            return hosts[rank] == hosts[owner], rank not in holders, loads[rank], rank

        others = [rank for rank in range(len(hosts)) if rank != owner]
        keeper = min(others, key=cost, default=owner)
        loads[keeper] += cell.nbytes
        done.append(replace(cell, number=len(done), owner=owner, keeper=keeper, held=keeper in holders))
    return done

"""Moves tensors from ranks that hold some parts of them to ranks that want others: :class:`Reshard`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hdpcomm.comm import Communicator, Work
from hdpcomm.comm.topology import nodes_of
from hdpcomm.data.agree import gather_json
from hdpcomm.errors import Error, InvalidUsage, PeerLost
from hdpcomm.train.state.layout import TensorPart

__all__ = ["Box", "Reshard", "boxes_of", "Cell", "cells", "cut_cell", "parse_shards", "describe_shards"]

Parts = Mapping[str, "TensorPart | Tensor"]

_MESSAGE_BYTES = 16 << 20
"""Most bytes of a message; two of them for each peer are a rank's memory beside the tensors."""
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``offsets`` to ``offsets + sizes`` of a tensor, number ``place`` of those that a rank has of it."""

    rank: int
    place: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def holds(self, first: Sequence[int], last: Sequence[int]) -> bool:
        return all(a <= b and c <= a + n for a, n, b, c in zip(self.offsets, self.sizes, first, last, strict=True))


@dataclass(frozen=True, slots=True)
class Cell:
    """Elements ``first`` to ``last`` of a tensor, in a type."""

    name: str
    first: tuple[int, ...]
    last: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.first, self.last, strict=True))

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def within(self, offsets: Sequence[int], tensor: Tensor) -> Tensor:
        """These elements, of a box that has them and begins at ``offsets``; a view."""
        places = zip(offsets, self.first, self.last, strict=True)
        return tensor.detach()[tuple(slice(a - o, b - o) for o, a, b in places)]


@dataclass(frozen=True, slots=True)
class _Move(Cell):
    """A cell that goes from a box of one rank to one of another; ``forward``: what the sender has got itself, so after
    all others."""

    source: Box
    target: Box
    forward: bool


_Exchange = tuple[int, list[_Move], list[_Move]]
"""A peer, the moves of a message that this rank sends there, and those of one that it gets."""


@dataclass(frozen=True, slots=True)
class _Message:
    """Message under way with a peer; ``buffer``: for the moves that come."""

    work: Work
    buffer: Tensor
    moves: list[_Move]


@dataclass(frozen=True, slots=True)
class _Started:
    """Work that :meth:`Reshard.start` has begun: messages, values that stay on the rank, and what went wrong
    already."""

    messages: list[_Message]
    kept: list[tuple[_Move, Tensor]]
    failed: list[Error]


class Reshard:
    """A planned exchange between two layouts of the same tensors, as of a trainer's ranks and of ranks that generate.

    Making it is collective: ranks tell each other what they have and what they want, and each makes the same plan;
    nothing is moved. :meth:`run` moves, as often as the values change; :meth:`start` and :meth:`finish` do so while
    ranks go on training and generating. Ranks may be on either side, on both or on none. Each rank receives what it
    wants and does not have, once, and nothing else; what several ranks of a host want and none of them has comes to the
    host once, to one of them, which passes it on. Where several ranks have the same elements, who has sent least does.

    Args:
        source: what this rank has, by name: whole tensors, or a :class:`~hdpcomm.train.state.layout.TensorPart` of
            some boxes, as ``Trainer.checkpoint_state()["model"]`` gives them on any mesh and with any ``zero``.
        target: what this rank wants, likewise; the tensors are written. A tensor that is in both must be the same
            object or have memory of its own. Types may differ: elements travel in the narrower one.
        comm: the ranks of both sides.

    Attributes:
        bytes_sent: by this rank in a run.
        bytes_between_hosts: by all ranks in a run.
        version: runs so far, so which one's values the targets have.

    Raises:
        InvalidUsage: on all ranks: a tensor has another shape elsewhere, sources have several types, or nobody has
            elements that are wanted.
    """

    def __init__(self, source: Parts, target: Parts, comm: Communicator) -> None:
        world = nodes_of(comm)
        self._comm = comm
        self._hosts = [world[rank] for rank in comm.ranks]
        self._source = {name: boxes_of(part) for name, part in source.items()}
        self._target = {name: boxes_of(part) for name, part in target.items()}
        moves = list(self._plan(gather_json(comm, [describe_shards(source), describe_shards(target)])))
        self.version = 0
        self._started: _Started | None = None
        rank = comm.rank
        self._local = [move for move in moves if move.source.rank == move.target.rank == rank]
        sent = [move for move in moves if move.source.rank != move.target.rank]
        self._phases = [
            _rounds([move for move in sent if move.forward == forward], rank, _MESSAGE_BYTES)
            for forward in (False, True)
        ]
        self.bytes_sent = sum(move.nbytes for move in sent if move.source.rank == rank)
        self.bytes_between_hosts = sum(
            move.nbytes for move in sent if self._hosts[move.source.rank] != self._hosts[move.target.rank]
        )

    @torch.no_grad()
    def run(self) -> None:
        """Moves all elements; all ranks have theirs on return. Collective over ``comm``.

        Raises:
            InvalidUsage: what :meth:`start` has begun is not finished.
            PeerLost: on all ranks, another one has died (Aborted, where a living one has told it first). Sources are as
                they were, and who wanted nothing of a dead rank has got its elements, though ``version`` stays:
                ``shrink()``, and make another :class:`Reshard` of those that live.
        """
        self._check_idle()
        for move in self._local:
            _view(self._target, move, move.target).copy_(_view(self._source, move, move.source))
        failed: list[Error] = []
        for phase in self._phases:
            for messages in phase:
                failed += self._end(self._begin(messages, failed))
        if failed:
            with contextlib.suppress(Error):
                self._comm.barrier()
            self._raise(failed)
        self._comm.barrier()
        self.version += 1

    @torch.no_grad()
    def start(self) -> None:
        """Begins a run that goes on by itself. Collective over ``comm``; waits for nobody.

        Sources may change as soon as it returns, as they are copied, so a trainer sends the weights of a step during
        the next one; targets change in :meth:`finish`. Beside the tensors it takes what a rank sends and gets in
        memory, not only two messages for each peer.

        Raises: InvalidUsage: another run is not finished.
        """
        self._check_idle()
        failed: list[Error] = []
        kept = [(move, _view(self._source, move, move.source).to(move.dtype, copy=True)) for move in self._local]
        self._started = _Started(self._begin(itertools.chain(*self._phases[0]), failed), kept, failed)

    def ready(self) -> bool:
        """Whether the messages of :meth:`start` have come, so that :meth:`finish` waits for nobody, or only for those
        who pass on what came from another host. Local."""
        return self._started is not None and all(message.work.done() for message in self._started.messages)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends what :meth:`start` began: all targets have the values of that moment. Each rank of ``comm`` calls it,
        when it likes; ranks of one host wait for nothing but their messages, others for those who pass them on.

        Raises: InvalidUsage: nothing was started. PeerLost or Aborted, on ranks that send to a dead rank or get from
            one, as :meth:`run`; elements of a target may be of either version then.
        """
        if self._started is None:
            raise InvalidUsage("finish() without start(); begin a run first")
        started, self._started = self._started, None
        for move, values in started.kept:
            _view(self._target, move, move.target).copy_(values)
        failed = started.failed + self._end(started.messages)
        failed += self._end(self._begin(itertools.chain(*self._phases[1]), failed))
        if failed:
            self._raise(failed)
        self.version += 1

    def _check_idle(self) -> None:
        if self._started is not None:
            raise InvalidUsage("the run that start() began is not finished; call finish() first")

    def _raise(self, failed: Sequence[Error]) -> NoReturn:
        """The death of a rank before what it led to."""
        own = next((error for error in failed if isinstance(error, PeerLost)), None)
        if own is None and (lost := self._comm.lost()):
            own = PeerLost(
                f"rank {lost[0]} died or left while rank {self._comm.global_rank} moved tensors; call shrink(), and "
                "make another Reshard",
                rank=self._comm.global_rank,
                op="reshard",
                peer=lost[0],
            )
        raise own or failed[0] from failed[0]

    def _begin(self, messages: Iterable[_Exchange], failed: list[Error]) -> list[_Message]:
        """Begins messages; what goes wrong with some, in ``failed``, says nothing of the others."""
        begun = []
        for peer, own, theirs in messages:
            buffer = torch.empty(sum(move.nbytes for move in theirs), dtype=torch.uint8)
            try:
                work = self._comm.exchange(
                    [(self._packed(own), peer)] if own else [], [(buffer, peer)] if theirs else [], async_op=True
                )
            except Error as error:
                failed.append(error)
                continue
            begun.append(_Message(work, buffer, theirs))
        return begun

    def _end(self, begun: Sequence[_Message]) -> list[Error]:
        """Waits for messages and writes what has come; what went wrong."""
        failed: list[Error] = []
        for message in begun:
            try:
                message.work.wait()
            except Error as error:
                failed.append(error)
                continue
            self._unpack(message.buffer, message.moves)
        return failed

    def _packed(self, moves: Sequence[_Move]) -> Tensor:
        buffer = torch.empty(sum(move.nbytes for move in moves), dtype=torch.uint8)
        for move, place in zip(moves, _places(moves), strict=True):
            values = _view(self._target if move.forward else self._source, move, move.source)
            flat = values.to("cpu", move.dtype).contiguous().reshape(-1)
            buffer[place : place + move.nbytes] = flat.view(torch.uint8)
        return buffer

    def _unpack(self, buffer: Tensor, moves: Sequence[_Move]) -> None:
        for move, place in zip(moves, _places(moves), strict=True):
            values = _view(self._target, move, move.target)
            flat = torch.empty(values.numel(), dtype=move.dtype)
            flat.view(torch.uint8).copy_(buffer[place : place + move.nbytes])
            values.copy_(flat.view(values.shape))

    def _plan(self, told: list[Any]) -> Iterator[_Move]:
        """All moves of all ranks, the same on each."""
        shapes: dict[str, tuple[int, ...]] = {}
        has: dict[str, list[Box]] = defaultdict(list)
        wants: dict[str, list[Box]] = defaultdict(list)
        for rank, sides in enumerate(told):
            for found, side in zip((has, wants), sides, strict=True):
                parse_shards(rank, side, shapes, found)
        for name, boxes in has.items():
            if len(kinds := {box.dtype for box in boxes}) > 1:
                raise InvalidUsage(f"{name} is held as {sorted(map(str, kinds))}; give sources of one type")
        loads = [0] * self._comm.size
        for name, targets in sorted(wants.items()):
            for first, last in cells(has[name], targets):
                takers = [box for box in targets if box.holds(first, last)]
                if not takers:
                    continue
                holders = [box for box in has[name] if box.holds(first, last)]
                if not holders:
                    raise InvalidUsage(
                        f"rank {takers[0].rank} wants elements {list(first)} to {list(last)} of {name}, which no rank "
                        "has; give sources that hold all of it"
                    )
                yield from self._moves(name, first, last, holders, takers, loads)

    def _moves(
        self,
        name: str,
        first: tuple[int, ...],
        last: tuple[int, ...],
        holders: Sequence[Box],
        takers: Sequence[Box],
        loads: list[int],
    ) -> Iterator[_Move]:
        """How a cell gets to those that want it; ``loads``: what each rank sends so far."""
        came: dict[tuple[int, torch.dtype], Box] = {}
        """The first one on a host that has got it, in each type."""
        for taker in takers:
            own = [box for box in holders if box.rank == taker.rank]
            near = [box for box in holders if self._hosts[box.rank] == self._hosts[taker.rank]]
            key = self._hosts[taker.rank], taker.dtype
            forward = not near and key in came
            source = came[key] if forward else min(own or near or holders, key=lambda box: (loads[box.rank], box.rank))
            # what is passed on has come in the narrower type, whatever it was written to
            given = holders[0].dtype if forward else source.dtype
            dtype = min(given, taker.dtype, key=lambda kind: kind.itemsize)
            move = _Move(name, first, last, dtype, source, taker, forward)
            if source.rank != taker.rank:
                loads[source.rank] += move.nbytes
            came.setdefault(key, taker)
            yield move


def cells(sources: Sequence[Box], targets: Sequence[Box]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(first, last) of boxes that no box of either side cuts."""
    boxes = [*sources, *targets]
    cuts = [
        sorted({edge for box in boxes for edge in (box.offsets[d], box.offsets[d] + box.sizes[d])})
        for d in range(len(boxes[0].offsets))
    ]
    for cell in itertools.product(*(itertools.pairwise(each) for each in cuts)):
        yield tuple(first for first, _ in cell), tuple(last for _, last in cell)


def boxes_of(part: TensorPart | Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    if isinstance(part, Tensor):
        return [((0,) * part.dim(), part)]
    return [(tuple(offsets), tensor) for offsets, tensor in part.boxes if tensor.numel()]


def describe_shards(parts: Parts) -> dict[str, Any]:
    """By name: the shape of the whole tensor, and the offsets, sizes and type of each box."""
    return {
        name: [
            list(part.size()),
            [[list(at), list(x.shape), str(x.dtype).removeprefix("torch.")] for at, x in boxes_of(part)],
        ]
        for name, part in parts.items()
    }


def parse_shards(
    rank: int, told: Mapping[str, Any], shapes: dict[str, tuple[int, ...]], found: dict[str, list[Box]]
) -> None:
    """Adds the boxes that a rank told by :func:`describe_shards`. Raises: InvalidUsage: of tensors of another shape."""
    for name, (shape, boxes) in told.items():
        if shapes.setdefault(name, tuple(shape)) != tuple(shape):
            raise InvalidUsage(
                f"{name} has the shape {tuple(shape)} on rank {rank} and {shapes[name]} on another; give parts of the "
                "same tensors"
            )
        found[name] += [
            Box(rank, place, tuple(offsets), tuple(sizes), _DTYPES[kind])
            for place, (offsets, sizes, kind) in enumerate(boxes)
        ]


def _rounds(moves: Sequence[_Move], rank: int, most: int) -> list[list[_Exchange]]:
    """The messages of a rank in some moves of all ranks, in one order on both sides; at a time one with each peer."""
    sends: dict[int, list[_Move]] = defaultdict(list)
    gets: dict[int, list[_Move]] = defaultdict(list)
    for move in moves:
        if move.source.rank == rank:
            sends[move.target.rank].append(move)
        elif move.target.rank == rank:
            gets[move.source.rank].append(move)
    by_peer: list[list[_Exchange]] = []
    none: list[_Move] = []
    for peer in sorted({*sends, *gets}):
        both = itertools.zip_longest(_pieces(sends[peer], most), _pieces(gets[peer], most), fillvalue=none)
        by_peer.append([(peer, own, theirs) for own, theirs in both])
    return [[each for each in found if each is not None] for found in itertools.zip_longest(*by_peer)]


def _pieces(moves: Sequence[_Move], most: int) -> list[list[_Move]]:
    """Messages of at most ``most`` bytes, or of one move; moves that are larger are cut along their longest side."""
    found: list[list[_Move]] = []
    size = most + 1
    for move in itertools.chain.from_iterable(cut_cell(move, most) for move in moves):
        if size + move.nbytes > most:
            found.append([])
            size = 0
        found[-1].append(move)
        size += move.nbytes
    return found


_C = TypeVar("_C", bound=Cell)


def cut_cell(cell: _C, most: int) -> Iterator[_C]:
    """Parts of at most ``most`` bytes, or of one element a side, cut along the longest side."""
    sides = cell.sizes
    if cell.nbytes <= most or max(sides, default=1) == 1:
        yield cell
        return
    d = sides.index(max(sides))
    middle = cell.first[d] + sides[d] // 2
    yield from cut_cell(replace(cell, last=(*cell.last[:d], middle, *cell.last[d + 1 :])), most)
    yield from cut_cell(replace(cell, first=(*cell.first[:d], middle, *cell.first[d + 1 :])), most)


def _places(moves: Sequence[_Move]) -> list[int]:
    """Where each begins in their message."""
    return [0, *itertools.accumulate(move.nbytes for move in moves)][:-1]


def _view(side: Mapping[str, list[tuple[tuple[int, ...], Tensor]]], move: _Move, box: Box) -> Tensor:
    """The moved elements in one of this rank's boxes."""
    return move.within(*side[move.name][box.place])

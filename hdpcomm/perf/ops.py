"""The operations that ``hdpcomm perf`` measures: the collectives of a communicator, and what nccl-tests makes of its
point-to-point messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.data import reduced, values
from hdpcomm.perf.operation import Case, Operation, Shape, blocks

__all__ = ["OPERATIONS", "operation", "parts"]


def _own_part(shared: torch.Tensor, case: Case, part: int) -> torch.Tensor:
    return shared[case.comm.rank * part : (case.comm.rank + 1) * part]


class AllGather(Operation):
    """size(B) is the gathered whole, count the part of a rank. In place: the input is the rank's part of the output."""

    name = "all_gather"
    core_name: ClassVar[str | None] = "all_gather"
    moves: ClassVar[int] = 1

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part, part * ranks, part * ranks)

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        return _own_part(shared, case, case.shape.send), shared

    def result(self, case: Case) -> torch.Tensor | None:
        return torch.cat([values(case.kind, rank, case.shape.send) for rank in range(case.comm.size)])


class Gather(AllGather):
    """As all_gather, for the root."""

    name = "gather"
    core_name = "gather"
    rooted = True
    gets_all = False
    moves = 0


class ReduceScatter(Operation):
    """size(B) is the input of a rank, count its part of the result. In place: the output is its part of the input."""

    name = "reduce_scatter"
    core_name = "reduce_scatter"
    moves: ClassVar[int] = 1
    reduces = True

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part * ranks, part, part * ranks)

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        return shared, _own_part(shared, case, case.shape.recv)

    def result(self, case: Case) -> torch.Tensor | None:
        first = case.comm.rank * case.shape.recv
        return reduced(case.kind, case.redop, case.comm.size, case.shape.recv, first=first)


class Scatter(ReduceScatter):
    """size(B) is the root's input, count the part of a rank. In place: the root's output is its part of the input."""

    name = "scatter"
    core_name = "scatter"
    reduces = False
    rooted = True
    gives_all = False
    moves = 0

    def result(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, case.root, case.shape.recv, first=case.comm.rank * case.shape.recv)


class AllReduce(Operation):
    """size(B) is the buffer of a rank. Out of place: the result goes into a second buffer."""

    name = "all_reduce"
    core_name = "all_reduce"
    moves: ClassVar[int] = 2
    reduces = True

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        method = getattr(case.comm, self.name)
        return self._bound(case, method if case.in_place else functools.partial(method, out=out), x)

    def result(self, case: Case) -> torch.Tensor | None:
        return reduced(case.kind, case.redop, case.comm.size, case.shape.recv)


class Reduce(AllReduce):
    """As all_reduce, for the root."""

    name = "reduce"
    core_name = "reduce"
    rooted = True
    gets_all = False
    moves = 0


class Broadcast(Operation):
    """size(B) is the buffer. Out of place: the root copies its input into it, within the measured time."""

    name = "broadcast"
    core_name = "broadcast"
    rooted = True
    gives_all = False
    note = "broadcast works in place; out-of-place includes the root's copy into the buffer"

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        broadcast = self._bound(case, case.comm.broadcast, out)
        if case.in_place or case.comm.rank != case.root:
            return broadcast

        def copy_and_broadcast() -> Any:
            out.copy_(x)
            return broadcast()

        return copy_and_broadcast

    def result(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, case.root, case.shape.recv)


class AllToAll(Operation):
    """size(B) is the buffer of a rank, count the part for one rank. There is no in-place form."""

    name = "alltoall"
    core_name = "all_to_all"
    moves = 1
    in_place = False

    def shape(self, elements: int, ranks: int) -> Shape:
        part = blocks(elements, ranks)
        return Shape(part, part * ranks, part * ranks, part * ranks)

    def result(self, case: Case) -> torch.Tensor | None:
        part, first = case.shape.count, case.comm.rank * case.shape.count
        return torch.cat([values(case.kind, rank, part, first=first) for rank in range(case.comm.size)])


def parts(count: int, ranks: int) -> list[int]:
    """Elements for the rank that is 0, 1, ... ranks further: in proportion to the distance, ``count * ranks`` in total
    (rounded down part by part). Nothing for the rank itself, unless it is alone."""
    if ranks == 1:
        return [count]
    distances = ranks * (ranks - 1) // 2
    return [count * ranks * distance // distances for distance in range(ranks)]


class AllToAllV(Operation):
    """Every rank sends unequal parts, more to ranks that are further away, as nccl-tests does by default. size(B) is
    what a rank sends, and as much what it receives; there is no in-place form."""

    name = "alltoallv"
    core_name = "all_to_all"
    moves = 1  # as nccl-tests counts, although nothing stays on the rank
    in_place = False
    note = "a rank sends d times as much to the rank d further as to the next one, and nothing to itself"

    def shape(self, elements: int, ranks: int) -> Shape:
        count = blocks(elements, ranks)
        total = sum(parts(count, ranks))
        return Shape(count, total, total, total)

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        size, rank = case.comm.size, case.comm.rank
        come = [_sent(case, source)[rank] for source in range(size)]
        return self._bound(case, case.comm.all_to_all, out, x, come, _sent(case, rank))

    def result(self, case: Case) -> torch.Tensor | None:
        size, rank = case.comm.size, case.comm.rank
        sent = [_sent(case, source) for source in range(size)]
        come = [values(case.kind, source, to[rank], first=sum(to[:rank])) for source, to in enumerate(sent)]
        return torch.cat(come)


def _sent(case: Case, source: int) -> list[int]:
    """Elements that a rank sends to each."""
    size = case.comm.size
    sizes = parts(case.shape.count, size)
    return [sizes[(target - source) % size] for target in range(size)]


class SendRecv(Operation):
    """Every rank sends size(B) to the next one while it receives as much from the one before. No in-place form."""

    name = "sendrecv"
    in_place = False

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        after, before = (case.comm.rank + 1) % case.comm.size, (case.comm.rank - 1) % case.comm.size
        return functools.partial(case.comm.exchange, [(x, after)], [(out, before)])

    def result(self, case: Case) -> torch.Tensor | None:
        return values(case.kind, (case.comm.rank - 1) % case.comm.size, case.shape.recv)


class Ring(Operation):
    """Keys and values go once round the ring, as in ring attention: size - 1 neighbour exchanges, each waited for.
    size(B) is K and V of one rank together; two messages a step."""

    name = "ring"
    in_place = False
    note = "time is of one ring step; a rotation is size - 1 of them; size(B) is K and V of one rank"

    def shape(self, elements: int, ranks: int) -> Shape:
        del ranks
        half = blocks(elements, 2)
        return Shape(2 * half, 2 * half, 2 * half, 2 * half)

    def operations_per_call(self, ranks: int) -> int:
        return max(1, ranks - 1)

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        comm, steps, half = case.comm, case.comm.size - 1, case.shape.count // 2
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        spare = torch.empty_like(out)
        # The last step writes to `out`, the one before to `spare`, and so on; `x` is only read.
        written = [out if (steps - step) % 2 else spare for step in range(steps)]
        read = [x, *written[:-1]]
        sends = [[(source[:half], after), (source[half:], after)] for source in read[:steps]]
        recvs = [[(target[:half], before), (target[half:], before)] for target in written]

        def rotate() -> None:
            for outgoing, incoming in zip(sends, recvs, strict=True):
                comm.exchange(outgoing, incoming)

        return rotate

    def result(self, case: Case) -> torch.Tensor | None:
        if case.comm.size == 1:
            return None
        return values(case.kind, (case.comm.rank + 1) % case.comm.size, case.shape.recv)


OPERATIONS: dict[str, Operation] = {
    kind.name: kind()
    for kind in (
        *(AllGather, AllReduce, ReduceScatter, Broadcast, Reduce, Gather, Scatter, AllToAll, AllToAllV),
        *(SendRecv, Ring),
    )
}


def operation(name: str) -> Operation:
    """The operation called ``name``. Raises InvalidUsage for an unknown name."""
    found = OPERATIONS.get(name)
    if found is None:
        raise InvalidUsage(f"operation {name!r} is unknown; give one of: {', '.join(OPERATIONS)}")
    return found

"""The operations that ``hdpcomm perf`` measures: the collectives of a communicator, and what nccl-tests makes of its
point-to-point messages."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hdpcomm import _core
from hdpcomm.comm import Communicator
from hdpcomm.errors import InvalidUsage
from hdpcomm.perf.config import PerfConfig
from hdpcomm.perf.data import ElementType, contribution, reduced, values

__all__ = ["OPERATIONS", "Bound", "Case", "Operation", "Shape", "operation", "parts"]


_GUARD = 64  # bytes before and after a buffer that no operation may write
_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of elements of one row: ``count`` for column count, ``total`` for column size(B), and ``send`` and
    ``recv`` of a rank's buffers."""

    count: int
    send: int
    recv: int
    total: int


@dataclass(frozen=True, slots=True)
class Case:
    """One row. ``comm``: a Communicator, or an object with its methods (benchmarks/gloo.py)."""

    comm: Any
    kind: ElementType
    shape: Shape
    redop: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    unalign: int = 0
    registered: bool = False  # buffers of comm.empty()
    in_place: bool = False

    @property
    def device(self) -> torch.device:
        """The device of the buffers: that of the communicator; other libraries are measured on the CPU."""
        return getattr(self.comm, "device", torch.device("cpu"))


class Storage:
    """A buffer between guards, its first element ``case.unalign`` elements past a multiple of 64 bytes."""

    def __init__(self, case: Case, elements: int) -> None:
        kind = case.kind
        lead = _GUARD + case.unalign * kind.bytes
        size = elements * kind.bytes + lead + 2 * _GUARD
        make = case.comm.empty if case.registered else functools.partial(torch.empty, device=case.device)
        self._bytes = make(size, dtype=torch.uint8).fill_(_POISON)
        lead += -self._bytes.data_ptr() % _GUARD
        self._first, self._last = lead, lead + elements * kind.bytes
        empty = torch.empty(0, dtype=kind.dtype, device=case.device)
        self.data = self._bytes[self._first : self._last].view(kind.dtype) if elements else empty
        self._bytes_per_element = kind.bytes

    def poison(self) -> None:
        """Fills the buffer and its guards with a byte pattern that is not part of the test data."""
        self._bytes.fill_(_POISON)

    def overwritten_guards(self) -> int:
        """Number of elements outside the buffer that were written, rounded up."""
        touched = int((self._bytes[: self._first] != _POISON).sum()) + int((self._bytes[self._last :] != _POISON).sum())
        return -(-touched // self._bytes_per_element)


class Bound:
    """An operation bound to its buffers; ``run`` runs it once, and can be called repeatedly."""

    def __init__(self, operation: Operation, case: Case) -> None:
        self.operation, self.case = operation, case
        shape = case.shape
        if case.in_place:
            shared = Storage(case, max(shape.send, shape.recv))
            self.storages = [shared]
            self.x, self.out = operation.in_place_views(shared.data, case)
        else:
            self.storages = [Storage(case, n) for n in (shape.send, shape.recv)]
            self.x, self.out = (storage.data for storage in self.storages)
        self.run: Callable[[], Any] = operation.call(case, self.x, self.out)

    def synchronize(self) -> None:
        """Waits until the device has finished all that was enqueued."""
        if self.case.device.type == "cuda":
            torch.cuda.synchronize(self.case.device)

    def fill(self) -> None:
        """Writes this rank's input, and fills all other buffers and guards with a byte pattern."""
        for storage in self.storages:
            storage.poison()
        given = self.operation.given(self.case)
        if given is not None:
            self.x.copy_(given)

    def wrong(self) -> int:
        """Number of wrong elements on this rank after one operation on fresh data, including written guards."""
        count = sum(storage.overwritten_guards() for storage in self.storages)
        expected = self.operation.expected(self.case)
        if expected is not None:
            count += _differences(self.out.cpu(), expected)
        given = self.operation.given(self.case)
        if given is not None and not self.case.in_place:
            count += _differences(self.x.cpu(), given)
        return count


def _differences(got: torch.Tensor, expected: torch.Tensor) -> int:
    # NaN counts as different. torch cannot compare uint16..uint64, so they are compared as signed integers.
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(got.dtype)
    if signed is not None:
        got, expected = got.view(signed), expected.view(signed)
    return int((got != expected).sum())


class Operation(ABC):
    """Base class of the operations in ``hdpcomm.perf.ops``."""

    name: ClassVar[str]
    reduces: ClassVar[bool] = False
    rooted: ClassVar[bool] = False
    gives_all: ClassVar[bool] = True  # whether not the root alone has an input
    gets_all: ClassVar[bool] = True  # whether not the root alone has an output
    in_place: ClassVar[bool] = True  # whether there is an in-place form
    core_name: ClassVar[str | None] = None  # in Communicator.algorithms(); None: there is no choice
    moves: ClassVar[int] = 0  # how often each rank moves the parts of all others; 0: each buffer once, as a whole
    note: ClassVar[str] = ""  # printed in the header, if a column has a special meaning

    def shape(self, elements: int, ranks: int) -> Shape:
        """The row for about ``elements`` elements in column size(B)."""
        del ranks
        return Shape(elements, elements, elements, elements)

    def bus_factor(self, ranks: int) -> float:
        """busbw / algbw, as in nccl-tests' PERFORMANCE.md."""
        return self.moves * (ranks - 1) / ranks if self.moves else 1.0

    def operations_per_call(self, ranks: int) -> int:
        """Number of operations in a call, by which its time is divided for column time."""
        del ranks
        return 1

    def in_place_views(self, shared: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` and ``out`` in one buffer."""
        return shared[: case.shape.send], shared[: case.shape.recv]

    def call(self, case: Case, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        """A function that runs the operation once."""
        buffers = out if self._has(self.gets_all, case) else None, x if self._has(self.gives_all, case) else None
        return self._bound(case, getattr(case.comm, str(self.core_name)), *buffers)

    def _bound(self, case: Case, method: Callable[..., Any], *buffers: Any) -> Callable[[], Any]:
        """``method`` as a call without arguments; the default algorithm is not named, since others have none."""
        more = (*([case.root] if self.rooted else []), *([case.redop] if self.reduces else []))
        return functools.partial(
            method, *buffers, *more, **({} if case.algorithm == "auto" else {"algorithm": case.algorithm})
        )

    @staticmethod
    def _has(every_rank: bool, case: Case) -> bool:
        return every_rank or case.comm.rank == case.root

    def given(self, case: Case) -> torch.Tensor | None:
        """The content of this rank's ``x``; ``None``: it has no input."""
        rank, count = case.comm.rank, case.shape.send
        if not self._has(self.gives_all, case):
            return None
        if self.reduces:
            return contribution(case.kind, case.redop, rank, case.comm.size, count)
        return values(case.kind, rank, count)

    def expected(self, case: Case) -> torch.Tensor | None:
        """The content that this rank's ``out`` must have; ``None``: it has no output."""
        return self.result(case) if self._has(self.gets_all, case) else None

    @abstractmethod
    def result(self, case: Case) -> torch.Tensor | None:
        """:meth:`expected` of a rank that has an output."""

    def check(self, config: PerfConfig) -> None:
        """Raises InvalidUsage for an algorithm that the operation does not have."""
        if config.algorithm == "auto":
            return
        if self.core_name is None:
            raise InvalidUsage(
                f"--algorithm {config.algorithm}: {self.name} has no algorithms to choose from; leave it out"
            )
        known = Communicator.algorithms(self.core_name)
        if config.transport in ("cuda", "cuda+nccl", "sim"):
            known += tuple(_core.comm.peer_readers_of(_core.comm.OPS[self.core_name]))
        if config.algorithm not in known:
            raise InvalidUsage(f"--algorithm {config.algorithm}: {self.name} has: auto, {', '.join(known)}")


def blocks(elements: int, ranks: int) -> int:
    """Elements of one rank's part: ``elements / ranks`` rounded down, but at least 1 unless ``elements`` is 0."""
    return max(elements // ranks, 1 if elements else 0)


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
